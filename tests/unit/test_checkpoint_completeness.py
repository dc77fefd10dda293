"""State that nobody registered is found where it hangs; what only looks like it is left alone."""

import copy
import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import Checkpointer
from shardwise.checkpoint.completeness import Completeness, NotKept, refuse, split_declared
from shardwise.errors import CheckpointError
from shardwise.events import Events, Fallback


class Counter:
    """State as people write it."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        raise AssertionError("no code of the user's is run")

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("no code of the user's is run")


class Holder:
    """Anything with attributes, one of which would run code."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    @property
    def trap(self) -> Any:
        raise AssertionError("no code of the user's is run")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("no code of the user's is run")


class Slotted:
    __slots__ = ("inner", "unset")

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def closure(value: Any) -> Any:
    def loss(outputs: Any, batch: Any) -> Any:
        return value, outputs, batch

    return loss


def bound(value: Any) -> Any:
    class Loss:
        def __init__(self) -> None:
            self.inner = value

        def compute(self, outputs: Any, batch: Any) -> Any:
            return self.inner

    return Loss().compute


WAYS = {
    "closure": (closure, "loss.value"),
    "closure of a closure": (lambda value: closure(closure(value)), "loss.value.value"),
    "partial": (lambda value: functools.partial(print, value), "loss[0]"),
    "partial's keyword": (lambda value: functools.partial(print, of=value), "loss['of']"),
    "bound method": (bound, "loss.inner"),
    "default": (lambda value: lambda outputs, batch, held=value: held, "loss"),
    "attribute": (lambda value: Holder(inner=[{"deep": value}]), "loss.inner[0]['deep']"),
    "slot": (Slotted, "loss.inner"),
    "itself": (lambda value: value, "loss"),
}
MODEL = nn.Linear(2, 2)
KINDS: dict[str, Any] = {
    "an object": Counter,
    "a module": lambda: nn.Linear(2, 1),
    "a parameter": lambda: nn.Parameter(torch.ones(1)),
    "an optimizer": lambda: torch.optim.SGD([torch.ones(1, requires_grad=True)]),
    "a scheduler": lambda: torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1, requires_grad=True)])),
    "a scaler": lambda: torch.amp.GradScaler("cpu"),
}


def paths(look: Completeness) -> list[str]:
    return [one.path for one in look.found()]


@pytest.mark.parametrize("way", WAYS)
def test_state_is_found_however_it_hangs(way: str) -> None:
    wrapped, path = WAYS[way]
    assert paths(Completeness({"loss": wrapped(Counter())}, [MODEL], [])) == [path]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_state_is_found_once_and_left_alone_where_it_is_registered(kind: str) -> None:
    value = KINDS[kind]()
    arguments = {"loss": closure(value), "schedule": closure(value)}
    look = Completeness(arguments, [MODEL], [])
    assert paths(look) == ["loss.value"]
    assert paths(look) == []
    assert paths(Completeness(arguments, [MODEL], [value])) == []
    assert paths(Completeness(arguments, [MODEL], [Holder(average=[value])])) == []


@pytest.mark.parametrize(
    ("draw", "made"),
    [
        (lambda g: torch.rand(3, generator=g), torch.Generator),
        (lambda g: g.random(3), lambda: np.random.default_rng(0)),
        (lambda g: g.random_sample(3), lambda: np.random.RandomState(0)),
        (lambda g: g.random(), lambda: random.Random(0)),
    ],
)
def test_a_generator_is_state_once_it_has_been_drawn_from(draw: Any, made: Any) -> None:
    generator, idle = made(), made()
    look = Completeness({"loss": Holder(noise=generator, idle=idle)}, [MODEL], [])
    assert paths(look) == []
    draw(generator)
    assert paths(look) == ["loss.noise"]


def test_a_generator_that_is_sown_for_each_sample_is_none() -> None:
    class Keyed(torch.utils.data.Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.generator, self.rng = torch.Generator(), np.random.default_rng(0)

        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> torch.Tensor:
            self.rng = np.random.default_rng([7, index])
            return torch.rand(2, generator=self.generator.manual_seed(index)) + self.rng.random()

    data = sw.Batches(Keyed(), workers=0)
    look = Completeness({"data": data}, [MODEL], [])
    for index in (3, 1):
        data.dataset[index]
    assert paths(look) == []


def test_a_module_without_anything_to_train_is_state_only_if_it_changes() -> None:
    teacher = copy.deepcopy(MODEL).requires_grad_(False)
    average = copy.deepcopy(MODEL).requires_grad_(False)
    weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
    plain = nn.CrossEntropyLoss()
    look = Completeness({"loss": Holder(t=teacher, a=average, w=weighted, p=plain)}, [MODEL], [])
    assert paths(look) == []
    for parameter in average.parameters():
        parameter.data.lerp_(torch.ones_like(parameter), 0.1)  # .data: torch itself does not notice
    assert paths(look) == ["loss.a"]


def test_what_is_kept_and_what_is_no_state_is_left_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.config = nn.Linear(2, 2), {"width": 2, "names": ("a", "b")}
            self.alias = [self.inner]
            self.register_buffer("passing", torch.ones(2), persistent=False)

    class Places(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    model, places = Net(), Places()
    optimizer = torch.optim.AdamW(model.parameters())
    arguments = {
        "model": model,
        "optimizer": optimizer,
        "data": sw.Stream(lambda shard, shards: places),
        "schedule": sw.cosine(warmup_steps=2),
        "loss": closure(model.inner.weight),
        "inputs": lambda batch: (model, np, torch, batch),
    }
    assert paths(Completeness(arguments, [model], [optimizer])) == []
    model.extra = Counter()  # Beside its parameters a module keeps nothing.
    assert paths(Completeness(arguments, [model], [optimizer])) == ["model.extra"]


def test_a_walk_ends_in_circles_and_in_what_is_large() -> None:
    circle: list[Any] = [list(range(10**6)), {index: str(index) for index in range(10**5)}]
    circle.append(circle)
    deep: Any = Counter()
    for _ in range(50):
        deep = [deep]
    assert paths(Completeness({"loss": Holder(circle=circle, deep=deep)}, [MODEL], [])) == []


def test_an_error_names_the_place_and_both_ways_out() -> None:
    with pytest.raises(CheckpointError) as caught:
        refuse([("loss.ema", "__main__.Average"), ("loss.ema", "__main__.Average"), ("model.noise", "torch.Generator")])
    assert "loss.ema is a __main__.Average; model.noise is a torch.Generator" in caught.value.what
    assert 'state={"ema": obj}' in caught.value.fix and 'state={"ema": sw.not_kept(obj)}' in caught.value.fix
    refuse([])


def test_what_is_said_not_to_be_kept_is_neither_saved_nor_missed() -> None:
    teacher = Counter()
    kept, spared = split_declared({"best": 1, "teacher": sw.not_kept(teacher)})
    assert kept == {"best": 1} and spared == [teacher]
    assert isinstance(sw.not_kept(teacher), NotKept)
    assert paths(Completeness({"loss": closure(teacher)}, [MODEL], spared)) == []


class Kept:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)


def test_the_first_save_refuses_what_it_would_not_hold_and_later_ones_tell(tmp_path: Path) -> None:
    module, kept = nn.Linear(2, 2), Kept()

    def checkpointer(**held: Any) -> Checkpointer:
        look = Completeness({"loss": Holder(**held)}, [module], [])
        return Checkpointer(tmp_path, module, completeness=look, events=Events([kept]))

    generator = torch.Generator()
    first = checkpointer(noise=generator)
    torch.rand(1, generator=generator)
    with pytest.raises(CheckpointError, match=r"step 3 was not saved: rank 0: .* loss.noise is a torch._C.Generator"):
        first.save(3)
    assert first.committed() == []
    later = checkpointer(noise=generator)
    later.save(3)
    torch.rand(1, generator=generator)
    later.save(4)
    later.save(5)
    assert [item.manifest.step for item in later.committed()] == [5, 4, 3]
    (told,) = [event for event in kept.events if isinstance(event, Fallback)]
    assert "loss.noise" in told.why
