"""Save and resume in one process: the bits of a run that was never stopped, or a clear refusal."""

import copy
import errno
import math
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwise.checkpoint import Checkpointer, LocalStore, marks
from shardwise.checkpoint.loads import LoadFailed
from shardwise.checkpoint.retention import look
from shardwise.errors import CheckpointError, DataError, RecipeError
from shardwise.events import Events, Fallback, Resumed, Saved
from shardwise.inputs.recipe import CheckpointPolicy
from shardwise.names import canonical
from tests.unit.test_checkpoint_store import FaultyStore, MemoryStore, disk_full


class Tied(nn.Module):
    """Ties, a persistent and a passing buffer, a frozen parameter, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.embed(tokens) + self.frozen)))


class Average:
    """An average of weights, as users write it."""

    def __init__(self, module: nn.Module) -> None:
        self.copy = {name: value.detach().clone() for name, value in module.named_parameters()}
        self.updates = 0

    def update(self, module: nn.Module) -> None:
        for name, value in module.named_parameters():
            self.copy[name].lerp_(value.detach(), 0.1)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"copy": self.copy, "updates": self.updates, "shape": (1, 2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["shape"] == (1, 2)
        self.copy, self.updates = state["copy"], state["updates"]


class Position:
    """A data object that counts samples."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95)),
    "amsgrad, tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "radam": lambda p: torch.optim.RAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
}


class Run:
    """A small training that uses every part of a checkpoint."""

    def __init__(self, kind: str = "adamw", schedule: Any = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.module = Tied()
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[kind]([{"params": trained[:1]}, {"params": trained[1:], "lr": 0.05}])
        self.schedule = schedule(self.optimizer) if schedule else None
        self.average, self.data = Average(self.module), Position()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.noise = torch.ones(3)

    def state(self) -> dict[str, Any]:
        state = {
            "ema": self.average,
            "scaler": self.scaler,
            "noise": self.noise,
            "note": {"best": math.inf},
            "n": 0,
        }
        return state | ({"schedule": self.schedule} if self.schedule else {})

    def checkpointer(self, run: Path, **more: Any) -> Checkpointer:
        return Checkpointer(run, self.module, self.optimizer, data=self.data, state=self.state(), **more)

    def step(self) -> float:
        self.optimizer.zero_grad()
        tokens = torch.randint(6, (5,)) + int(np.random.randint(1)) + random.randrange(1)
        loss = self.module(tokens).square().mean() * random.random() * np.random.random()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.schedule:
            self.schedule.step()
        self.average.update(self.module)
        self.noise.mul_(torch.randn(3))
        self.data.samples += 5
        return float(loss.detach())

    def bits(self) -> dict[str, Any]:
        return {
            "module": {name: value.clone() for name, value in self.module.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "schedule": self.schedule and copy.deepcopy(self.schedule.state_dict()),
            "ema": copy.deepcopy(self.average.state_dict()),
            "scaler": self.scaler.state_dict(),
            "noise": self.noise.clone(),
            "samples": self.data.samples,
            "draws": (torch.rand(3), np.random.random(), random.random(), random.gauss(0, 1)),
        }


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right) and type(left) is type(right)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(kind: str, tmp_path: Path) -> None:
    run = Run(kind)
    run.step()
    run.checkpointer(tmp_path).save(1)
    losses, bits = [run.step() for _ in range(3)], run.bits()
    again = Run(kind, seed=1)
    assert again.checkpointer(tmp_path).resume() == 1
    assert [again.step() for _ in range(3)] == losses
    assert equal(again.bits(), bits)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 2, 2]),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[2],
        ),
    ],
)
def test_schedules_of_torch_go_on_through_state(schedule: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The epoch parameter in `scheduler.step")
        run = Run(schedule=schedule)
        run.step()
        run.checkpointer(tmp_path).save(1)
        losses, bits = [run.step() for _ in range(4)], run.bits()
        again = Run(schedule=schedule, seed=1)
        again.checkpointer(tmp_path).resume()
        assert [again.step() for _ in range(4)] == losses
        assert equal(again.bits(), bits)


def test_a_resume_twice_and_into_a_run_that_has_gone_on_gives_the_same_bits(tmp_path: Path) -> None:
    run = Run()
    run.step()
    checkpointer = run.checkpointer(tmp_path)
    checkpointer.save(1)
    expected = [run.step() for _ in range(2)]
    pointers = [p.data_ptr() for p in run.module.parameters()]
    for _ in range(2):
        assert checkpointer.resume() == 1
        assert [run.step() for _ in range(2)] == expected
    assert [p.data_ptr() for p in run.module.parameters()] == pointers


def test_tensors_and_json_given_directly_come_back(tmp_path: Path) -> None:
    table, notes, shared = torch.arange(3.0), {"best": 1.5, "seen": (1, 2)}, [1, [2]]
    module = nn.Linear(1, 1)
    state = {"table": table, "notes": notes, "shared": shared, "epoch": 7}
    Checkpointer(tmp_path, module, state=state).save(1)
    table.zero_(), notes.clear(), shared.clear()
    state["epoch"] = 0
    checkpointer = Checkpointer(tmp_path, module, state=state)
    checkpointer.resume()
    assert table.tolist() == [0.0, 1.0, 2.0]
    assert notes == {"best": 1.5, "seen": (1, 2)}
    assert shared == [1, [2]]
    assert checkpointer.state["epoch"] == 7


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    run = Run()
    checkpointer = run.checkpointer(tmp_path)
    checkpointer.save(1)
    manifest = checkpointer.committed()[0].manifest
    assert manifest.aliases == {"model/head.weight": "model/embed.weight"}
    assert "model/head.weight" not in {entry.name for entry in manifest.tensors}
    again = Run(seed=1)
    again.checkpointer(tmp_path).resume()
    assert again.module.head.weight is again.module.embed.weight
    assert torch.equal(again.module.head.weight, run.module.head.weight)


def test_a_buffer_that_is_not_persistent_is_not_stored(tmp_path: Path) -> None:
    run = Run()
    run.step()
    checkpointer = run.checkpointer(tmp_path)
    checkpointer.save(1)
    names = {entry.name for entry in checkpointer.committed()[0].manifest.tensors}
    assert "model/passing" not in names
    assert {"model/frozen", "model/norm.running_mean", "optimizer/state/embed.weight/exp_avg"} <= names


def test_names_do_not_change_with_wrappers() -> None:
    assert canonical("module._orig_mod.blocks.0._checkpoint_wrapped_module.weight") == "blocks.0.weight"


def test_a_wrapped_module_resumes_what_a_plain_one_saved(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    Checkpointer(tmp_path, plain).save(4)
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert Checkpointer(tmp_path, torch.compile(wrapped, backend="eager")).resume() == 4
    for left, right in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(left, right)


def test_several_modules_and_optimizers_go_by_name(tmp_path: Path) -> None:
    def gan() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
        modules: dict[str, nn.Module] = {"generator": nn.Linear(2, 3), "critic": nn.Linear(3, 1)}
        return modules, {name: torch.optim.Adam(module.parameters()) for name, module in modules.items()}

    def train(modules: Any, optimizers: Any) -> None:
        modules["critic"](modules["generator"](torch.ones(1, 2))).sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()

    modules, optimizers = gan()
    train(modules, optimizers)
    checkpointer = Checkpointer(tmp_path, modules, optimizers)
    checkpointer.save(1)
    names = {entry.name for entry in checkpointer.committed()[0].manifest.tensors}
    assert {"model/critic/weight", "optimizer/critic/state/critic/weight/exp_avg"} <= names
    others, other_optimizers = gan()
    assert Checkpointer(tmp_path, others, other_optimizers).resume() == 1
    for name in modules:
        assert equal(dict(modules[name].state_dict()), dict(others[name].state_dict()))
        assert equal(optimizers[name].state_dict(), other_optimizers[name].state_dict())


# ---------------------------------------------------------------- what does not fit is refused, by name


def refusal(run: Path, module: nn.Module, optimizer: Any = None, **more: Any) -> str:
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(run, module, optimizer, **more).resume()
    assert equal(dict(module.state_dict()), before)
    assert caught.value.fix
    return str(caught.value)


def test_a_model_optimizer_or_state_that_differs_is_refused_by_name_and_nothing_changes(
    tmp_path: Path,
) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    adam = torch.optim.Adam(module.parameters())
    Checkpointer(tmp_path, module, adam, state={"ema": 1}).save(1)

    def of(module: nn.Module, kind: Any = torch.optim.Adam) -> Any:
        return module, kind(module.parameters())

    same: dict[str, Any] = {"state": {"ema": 1}}
    bigger = of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)))
    assert "not in the checkpoint: model/2.bias, model/2.weight" in refusal(tmp_path, *bigger, **same)
    smaller = of(nn.Sequential(nn.Linear(2, 2)))
    assert "only in the checkpoint: model/1.bias, model/1.weight" in refusal(tmp_path, *smaller, **same)
    wider = of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    assert "'model/0.weight' is F32 [3, 2], and F32 [2, 2] was saved" in refusal(tmp_path, *wider, **same)
    half = of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(torch.bfloat16))
    assert "is BF16 [2, 2], and F32 [2, 2] was saved" in refusal(tmp_path, *half, **same)
    fresh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert "a SGD, and a Adam was saved" in refusal(tmp_path, *of(fresh, lambda p: torch.optim.SGD(p)), **same)
    assert "only in the checkpoint: optimizer" in refusal(tmp_path, fresh, **same)
    assert "only in the checkpoint: state/ema" in refusal(tmp_path, *of(fresh))
    assert "not in the checkpoint: state/other" in refusal(tmp_path, *of(fresh), state={"ema": 1, "other": 2})
    assert "not in the checkpoint: data" in refusal(tmp_path, *of(fresh), data=Position(), **same)
    groups = torch.optim.Adam([{"params": fresh[0].parameters()}, {"params": fresh[1].parameters()}])
    assert "has 2 groups, and 1 were saved" in refusal(tmp_path, fresh, groups, **same)


@pytest.mark.parametrize("value", [object(), {"a": [lambda: 0]}, nn.functional.relu])
def test_state_that_cannot_be_kept_is_found_when_the_checkpointer_is_made(value: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="state/odd"):
        Checkpointer(tmp_path, nn.Linear(1, 1), state={"odd": value})


def test_a_parameter_without_a_module_is_refused_at_save(tmp_path: Path) -> None:
    module, other = nn.Linear(1, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*module.parameters(), *other.parameters()])
    with pytest.raises(CheckpointError, match=r"shape \(1, 3\) in group 0") as caught:
        Checkpointer(tmp_path, module, optimizer).save(1)
    assert "module={" in caught.value.fix
    Checkpointer(tmp_path, {"a": module, "b": other}, optimizer).save(1)


def test_two_weights_are_not_loaded_into_one(tmp_path: Path) -> None:
    apart = Tied()
    apart.head.weight = nn.Parameter(apart.embed.weight.detach() + 1)
    Checkpointer(tmp_path, apart).save(1)
    module = Tied()
    before = module.embed.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"'model/head.weight' and 'model/embed.weight' are one weight here"):
        Checkpointer(tmp_path, module).resume()
    assert torch.equal(module.embed.weight, before)


def test_a_checkpoint_of_another_world_is_refused_unless_asked(tmp_path: Path) -> None:
    store = MemoryStore()
    module = nn.Linear(2, 2)
    Checkpointer(tmp_path, module, store=store).save(5)
    with_two_ranks(store)
    with pytest.raises(CheckpointError, match="saved by 2 ranks, and 1 would resume") as caught:
        Checkpointer(tmp_path, nn.Linear(2, 2), store=store).resume()
    assert "start 2 ranks" in caught.value.fix
    other = nn.Linear(2, 2)
    assert Checkpointer(tmp_path, other, store=store).resume(strict_world=False) == 5
    assert torch.equal(other.weight, module.weight)


def with_two_ranks(store: MemoryStore) -> None:
    from msgspec.structs import replace

    from shardwise.checkpoint.manifest import seal, unseal

    (key,) = [key for key in store.values if key.endswith("manifest.json")]
    store.values[key] = seal(replace(unseal(store.values[key], key), world=2))


# ---------------------------------------------------------------- damage, retention, policy, signals


class Kept:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_taken(tmp_path: Path) -> None:
    run = Run()
    checkpointer = run.checkpointer(tmp_path)
    folders = []
    for step in (1, 2):
        run.step()
        folders.append(Path(checkpointer.save(step).path))
    for name in ("rank-00000.safetensors", "manifest.json"):
        path = folders[1] / name
        whole = path.read_bytes()
        for damaged in (
            None,
            b"",
            whole[:-1],
            whole[: len(whole) // 2],
            flipped(whole, 9),
            flipped(whole, -9),
        ):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            kept = Kept()
            again = Run(seed=1).checkpointer(tmp_path, events=Events([kept]))
            assert again.resume() == 1
            if not (name == "manifest.json" and damaged is None):  # never committed, so nothing to say
                assert [item.folder for item in again.skipped] == [folders[1].name]
                assert [type(event) for event in kept.events] == [Fallback, Resumed]
        path.write_bytes(whole)
    assert Run(seed=1).checkpointer(tmp_path).resume() == 2


def with_two(folder: Path) -> tuple[Run, Path]:
    """A run with checkpoints of steps 1 and 2, and where the newer one lies."""
    run = Run()
    checkpointer = run.checkpointer(folder)
    for step in (1, 2):
        run.step()
        newest = Path(checkpointer.save(step).path)
    return run, newest


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json"])
def test_what_cannot_be_read_is_passed_over_and_the_one_before_is_taken(tmp_path: Path, name: str) -> None:
    """A link to itself cannot be opened by anybody, root too."""
    _, newest = with_two(tmp_path)
    (newest / name).unlink()
    (newest / name).symlink_to(name)
    kept = Kept()
    again = Run(seed=1).checkpointer(tmp_path, events=Events([kept]), policy=CheckpointPolicy(retries=0))
    assert again.resume() == 1
    assert [item.folder for item in again.skipped] == [newest.name] and "symbolic links" in again.skipped[0].why
    assert [type(event) for event in kept.events] == [Fallback, Resumed]


def test_a_file_that_cannot_be_read_for_a_moment_costs_no_step(tmp_path: Path) -> None:
    with_two(tmp_path)

    def stale(operation: str) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    reads = FaultyStore(LocalStore(tmp_path / "checkpoints"), at=0, fault=stale)
    counting = Run(seed=1).checkpointer(tmp_path, store=reads, policy=CheckpointPolicy(retries=0))
    assert counting.resume() == 2
    last = max(at for at, said in enumerate(reads.operations, start=1) if said.startswith("read step"))
    kept = Kept()
    reads = FaultyStore(LocalStore(tmp_path / "checkpoints"), at=last, fault=stale)
    again = Run(seed=1).checkpointer(tmp_path, store=reads, events=Events([kept]), policy=CheckpointPolicy(retries=1))
    again._shared.backoff_seconds = 0.0
    assert again.resume() == 2 and again.skipped == ()
    assert [type(event) for event in kept.events] == [Fallback, Resumed] and "tried again" in kept.events[0].what


def test_a_load_that_fails_counts_against_its_checkpoint_and_one_that_does_not_fit_counts_nothing(
    tmp_path: Path,
) -> None:
    _, newest = with_two(tmp_path)
    store = LocalStore(tmp_path / "checkpoints")
    for count in (1, 2):
        again = Run(seed=1)
        again.average.load_state_dict = lambda state: state["not there"]  # type: ignore[method-assign]
        with pytest.raises(LoadFailed, match=f"{newest.name} could not be loaded: rank 0: KeyError while it was read"):
            again.checkpointer(tmp_path).resume()
        assert marks.failures(store) == {newest.name: count}
    with pytest.raises(CheckpointError, match="parts differ"):
        Checkpointer(tmp_path, nn.Linear(1, 1), state=Run().state(), data=Position()).resume()
    again = Run(seed=1)
    again.average.load_state_dict = refuse  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="the data cannot go on there") as caught:
        again.checkpointer(tmp_path).resume()
    assert not isinstance(caught.value, LoadFailed) and caught.value.fix == "two ranks"
    assert marks.failures(store) == {newest.name: 2}


def refuse(state: object) -> None:
    raise DataError("the data cannot go on there", why="it was another number of ranks", fix="two ranks")


def flipped(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)


def test_without_events_a_skipped_checkpoint_is_said_on_stderr(tmp_path: Path, capsys: Any) -> None:
    run = Run()
    for step in (1, 2):
        path = Path(run.checkpointer(tmp_path).save(step).path)
    (path / "rank-00000.safetensors").write_bytes(b"")
    assert run.checkpointer(tmp_path).resume() == 1
    assert path.name in capsys.readouterr().err


def test_where_none_of_several_is_whole_it_does_not_begin_again_in_silence(tmp_path: Path) -> None:
    run = Run()
    for step in (1, 2):
        path = Path(run.checkpointer(tmp_path).save(step).path)
        (path / "rank-00000.safetensors").write_bytes(b"")
    before = run.bits()["module"]
    with pytest.raises(CheckpointError, match="None of the 2 checkpoints"):
        run.checkpointer(tmp_path, events=Events()).resume()
    # Nor where each is marked as one to pass over, so that none is tried.
    store = LocalStore(tmp_path / "checkpoints")
    for item in look(store, "").committed:
        marks.pass_over(store, item.folder, "the loss rose from here")
    with pytest.raises(CheckpointError, match=r"None of the 2 .* can be resumed from.*\n.*the loss rose from here"):
        run.checkpointer(tmp_path, events=Events()).resume()
    assert equal(run.bits()["module"], before)


def test_an_empty_run_resumes_at_zero_and_changes_nothing(tmp_path: Path) -> None:
    run = Run()
    before = [p.clone() for p in run.module.parameters()]
    checkpointer = run.checkpointer(tmp_path)
    assert checkpointer.resume() == 0
    assert checkpointer.latest() is None
    assert equal([p.clone() for p in run.module.parameters()], before)


def test_the_newest_are_kept_by_policy_and_other_runs_are_left_alone(tmp_path: Path) -> None:
    module = nn.Linear(1, 1)
    stranger = Checkpointer(tmp_path, module, lineage="another")
    stranger.save(900)
    foreign = tmp_path / "checkpoints" / "my-notes" / "a.txt"
    foreign.parent.mkdir()
    foreign.write_text("mine")
    checkpointer = Checkpointer(tmp_path, module, policy=CheckpointPolicy(every_steps=2, keep=2))
    saved = [step for step in range(1, 11) if checkpointer.step(step)]
    assert saved == [2, 4, 6, 8, 10]
    assert [item.manifest.step for item in checkpointer.committed()] == [10, 8]
    assert checkpointer.resume() == 10
    assert [item.manifest.step for item in stranger.committed()] == [900]
    assert foreign.read_text() == "mine"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4


def test_what_a_dead_attempt_left_torn_goes_after_the_next_commit(tmp_path: Path) -> None:
    module = nn.Linear(1, 1)
    first = Path(Checkpointer(tmp_path, module).save(1).path)
    torn = Path(Checkpointer(tmp_path, module).save(2).path)
    (torn / "manifest.json").unlink()
    (torn / ".rank-00001.safetensors.00aa11bb.tmp").write_bytes(b"half")
    checkpointer = Checkpointer(tmp_path, module)
    assert checkpointer.resume() == 1
    assert torn.exists()
    checkpointer.save(3)
    assert not torn.exists()
    assert first.exists()


def test_a_full_disk_commits_nothing_keeps_what_was_and_says_why(tmp_path: Path) -> None:
    inner = MemoryStore()
    module = nn.Linear(1, 1)
    Checkpointer(tmp_path, module, store=inner).save(1)
    before = dict(inner.values)
    store = FaultyStore(inner, at=4, fault=disk_full)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path, module, store=store).save(2)
    assert "step 2 was not saved: rank 0" in caught.value.what
    assert "No space left" in caught.value.what and "the disk is full" in caught.value.why
    assert "checkpoint.keep" in caught.value.fix
    assert inner.values == before


def test_a_deletion_that_fails_never_fails_the_run(tmp_path: Path) -> None:
    class Undeletable(MemoryStore):
        def delete(self, key: str) -> None:
            raise OSError("stale file handle")

    kept = Kept()
    policy = CheckpointPolicy(every_steps=1, keep=1)
    checkpointer = Checkpointer(
        tmp_path,
        nn.Linear(1, 1),
        store=Undeletable(),
        policy=policy,
        events=Events([kept], clock=lambda: 1.0),
    )
    for step in (1, 2):
        checkpointer.save(step)
    assert [type(event) for event in kept.events] == [Saved, Saved, Fallback]
    assert "stale" in kept.events[-1].why


class Asked:
    """A process that was sent a signal."""

    def __init__(self, received: int | None = None) -> None:
        self.received = received


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_saves_at_the_next_step_and_leaves_with_its_code(number: int, code: int, tmp_path: Path) -> None:
    asked = Asked()
    checkpointer = Checkpointer(tmp_path, nn.Linear(1, 1), signals=asked)
    assert not checkpointer.step(1)
    asked.received = number
    with pytest.raises(SystemExit) as left:
        checkpointer.step(2)
    assert left.value.code == code
    assert Checkpointer(tmp_path, nn.Linear(1, 1)).resume() == 2
    assert checkpointer.committed()[0].manifest.why == signal.Signals(number).name


def test_the_manifest_says_what_the_bits_depend_on(tmp_path: Path) -> None:
    checkpointer = Checkpointer(
        tmp_path, nn.Linear(1, 1), lineage="run", plan_digest="abc", decision={"zero": 0}, clock=lambda: 5.0
    )
    checkpointer.save(3, "asked", samples=48)
    manifest = checkpointer.committed()[0].manifest
    assert (manifest.step, manifest.samples, manifest.created, manifest.world) == (3, 48, 5.0, 1)
    assert (manifest.lineage, manifest.plan_digest, manifest.decision) == ("run", "abc", {"zero": 0})
    assert manifest.machine.torch_threads == torch.get_num_threads()
    assert manifest.machine.versions["torch"] == torch.__version__


def test_the_weights_of_a_meta_module_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="meta device"):
        Checkpointer(tmp_path, nn.Linear(1, 1, device="meta"), store=LocalStore(tmp_path)).save(1)
