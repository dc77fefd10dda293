"""Stages by holes: the chain of all ranks' stages is the whole module, and what cannot be cut is an error."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.models.decoder import initialize_decoder
from shardwise.parallel import parallelize, staging
from shardwise.plan.schedules import stages_of_rank
from tests.distributed.pipeline_work import HIDDEN, batch, build, decoder


def cut(module: nn.Module, path: str, pp: int, schedule: str = "1f1b", stages: int = 1) -> list[staging.Stage]:
    """All ranks' stages in their order, each rank's from a copy of its own."""
    found: dict[int, staging.Stage] = {}
    for rank in range(pp):
        mine = copy.deepcopy(module)
        own = stages_of_rank(schedule, rank, pp, stages)
        parts = staging.split(mine, list(mine.get_submodule(path)), pp * stages, own)
        found.update({part.index: part for part in parts})
    return [found[index] for index in range(pp * stages)]


def chained(stages: list[staging.Stage], *args: Any, **kwargs: Any) -> Any:
    hidden = None
    for stage in stages:
        hidden = stage(hidden, args, kwargs)
    return hidden


@pytest.mark.parametrize("kind", ["decoder", "mlp", "positions", "split"])
@pytest.mark.parametrize(("pp", "schedule", "stages"), [(1, "1f1b", 1), (3, "1f1b", 1), (2, "interleaved-1f1b", 2),
                                                        (2, "zbv", 2), (5, "1f1b", 1)])  # fmt: skip
def test_the_stages_in_a_chain_are_the_whole_module(kind: str, pp: int, schedule: str, stages: int) -> None:
    module, path = build(kind, 5, tied=kind == "decoder")
    inputs = batch(kind, 1)["inputs"]
    expected = module(inputs)
    parts = cut(module, path, pp, schedule, stages)
    for _ in range(2):
        assert torch.equal(chained(parts, inputs), expected)


def test_a_rank_keeps_its_own_names_and_the_buffers() -> None:
    module, _ = build("decoder", 3, tied=False)
    everything = {name for name, _ in module.named_parameters()}
    held = []
    for rank in range(3):
        mine = copy.deepcopy(module)
        (stage,) = staging.split(mine, list(mine.blocks), 3, (rank,))
        before = [name for name, _ in mine.named_parameters()]
        assert {id(p) for p in stage.parameters()} == {id(p) for p in mine.parameters()}
        assert mine.rotary.cos.shape == module.rotary.cos.shape
        if rank == 0:
            stage(None, (batch("decoder", 0)["inputs"],))
        assert [name for name, _ in mine.named_parameters()] == before, "a forward leaves the module as it was"
        held += before
    assert sorted(held) == sorted(everything)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_module_on_meta_is_cut_and_then_initialised_by_name(rank: int) -> None:
    whole = decoder(3, tied=True)
    initialize_decoder(whole, 5)
    with torch.device("meta"):
        mine = decoder(3, tied=True)
    staging.split(mine, list(mine.blocks), 3, (rank,))
    parallelize.empty_on(mine, torch.device("cpu"))
    initialize_decoder(mine, 5)
    expected = dict(whole.named_parameters())
    for name, parameter in mine.named_parameters():
        if name != "lm_head.weight":  # the second name of a tie: Ties.start copies it
            assert torch.equal(parameter, expected[name])


def test_a_pass_that_wraps_a_block_later_is_respected() -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.inner(*args, **kwargs) * 2

    module, _ = build("mlp", 2, tied=False)
    inputs = batch("mlp", 0)["inputs"]
    parts = cut(module, "layers", 2)
    root = parts[1].passage.root[0]
    root.layers[1] = Doubled(root.layers[1])
    module.layers[1] = Doubled(module.layers[1])
    assert torch.equal(chained(parts, inputs), module(inputs))


class Odd(nn.Module):
    """A model with one oddity, or none."""

    def __init__(self, oddity: str) -> None:
        super().__init__()
        self.oddity = oddity
        if oddity == "late":
            self.norm = nn.LayerNorm(HIDDEN)
        if oddity == "parameter":
            self.scale = nn.Parameter(torch.ones(HIDDEN))
        if oddity != "early":
            self.embed = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(3))
        if oddity == "early":
            self.embed = nn.Linear(HIDDEN, HIDDEN)
        if oddity != "late":
            self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = hidden = self.embed(x)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, start if self.oddity == "argument" else None)
            if self.oddity == "between":
                hidden = hidden * 1.5
            if self.oddity == "skip" and index == 1:
                hidden = hidden + start
        if self.oddity == "twice":
            for block in self.blocks:
                hidden = block(hidden)
        hidden = self.norm(hidden)
        if self.oddity == "functional":
            hidden = nn.functional.linear(hidden, self.embed.weight)
        return hidden + start if self.oddity == "output" else hidden


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return hidden + self.linear(hidden if other is None else other)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, where warnings are no errors
@pytest.mark.parametrize(
    ("oddity", "says"),
    [
        ("between", "something lies between"), ("skip", "something lies between"), ("argument", "another stage"),
        ("twice", "cut into stages"), ("output", "another stage"), ("late", "runs after the blocks"),
        ("early", "runs before the blocks"), ("functional", "used outside"), ("parameter", "parameter of a module"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_an_error_with_a_fix(oddity: str, says: str) -> None:
    torch.manual_seed(0)
    module, x = Odd(oddity), torch.randn(2, HIDDEN)
    with pytest.raises(ModelError, match=says) as caught:
        chained(cut(module, "blocks", 3), x)
    assert caught.value.fix


def test_what_is_odd_in_one_stage_alone_needs_no_error() -> None:
    torch.manual_seed(0)
    module, x = Odd("between"), torch.randn(2, HIDDEN)
    assert torch.equal(chained(cut(module, "blocks", 1), x), module(x))


@pytest.mark.parametrize("oddity", ["between", "argument", "output", "functional"])
def test_the_fix_is_a_split_in_three(oddity: str) -> None:
    """sw.Split of what the odd module means, where one tensor can carry it."""
    torch.manual_seed(0)
    module, x = Odd("between"), torch.randn(2, HIDDEN)

    class Scaled(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.block(hidden) * 1.5

    described = staging.Split(module.embed, [Scaled(block) for block in module.blocks], module.norm)
    assert torch.equal(described(x), module(x))
    assert torch.equal(chained(cut(described, "blocks", 3), x), module(x))


def test_the_whole_module_cannot_be_called_any_more() -> None:
    module, _ = build("decoder", 2, tied=False)
    staging.split(module, list(module.blocks), 2, (0,))
    with pytest.raises(ModelError, match="called as a whole") as caught:
        module(batch("decoder", 0)["inputs"])
    assert "forward_backward" in caught.value.fix


@pytest.mark.parametrize(
    ("blocks", "stages", "sizes", "says"),
    [
        (lambda m: list(m.blocks), 4, "even", "3 blocks, and the pipeline 4 stages"),
        (lambda m: [], 2, "even", "0 blocks"),
        (lambda m: list(m.blocks), 2, (1, 1), "do not share 3 blocks"),
        (lambda m: [m.blocks[1], m.blocks[0], m.blocks[2]], 2, "even", "children of one container"),
    ],
)
def test_bad_blocks_are_refused_before_anything_changes(
    blocks: Callable[[Any], list[nn.Module]], stages: int, sizes: Any, says: str
) -> None:
    module = Odd("")
    names = [name for name, _ in module.named_parameters()]
    with pytest.raises(ModelError, match=says):
        staging.split(module, blocks(module), stages, (0,), sizes)
    assert [name for name, _ in module.named_parameters()] == names


def test_ties_are_found_across_stages_only() -> None:
    module, _ = build("decoder", 4, tied=True)
    module.blocks[1].ffn_norm.weight = module.blocks[0].ffn_norm.weight
    module.blocks[3].attention_norm.weight = module.blocks[2].attention_norm.weight
    found = staging.ties_across(module, list(module.blocks), 2)
    assert [(tie.names, tie.stages) for tie in found] == [(("embed_tokens.weight", "lm_head.weight"), (0, 1))]
    module.blocks[3].ffn_norm.weight = module.blocks[0].ffn_norm.weight
    assert len(staging.ties_across(module, list(module.blocks), 2)) == 2


def test_dropout_before_the_blocks_and_eval_mode_work_on_every_stage() -> None:
    module, path = build("positions", 3, tied=False)
    module.transformer["drop"].p = 0.5
    module.eval()
    tokens = batch("positions", 0)["inputs"]
    assert torch.equal(chained(cut(module, path, 3), tokens), module(tokens))
