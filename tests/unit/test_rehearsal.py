"""A module is held against its plan by one process alone: what cannot be cut is refused, and each fix lifts it."""

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.inputs.recipe import ModelSpec
from shardwise.parallel import rehearsal
from shardwise.parallel.rehearsal import Call, rehearse
from shardwise.plan.plan import Decision
from tests.distributed import work
from tests.unit import user_modules
from tests.unit.user_modules import Model

TOKENS = Call((torch.zeros((2, 6), dtype=torch.int64),), {})


def decision(**degrees: int) -> Decision:
    stages = degrees.pop("stages_per_rank", 1)
    world = degrees.get("pp", 1) * degrees.get("tp", 1)
    schedule = "none" if degrees.get("pp", 1) == 1 else "1f1b" if stages == 1 else "interleaved-1f1b"
    made = work.plan(world, zero=0, global_batch=8, mesh=degrees, schedule=schedule, stages_per_rank=stages)
    return made.decision


def refused(module: nn.Module, plan: Decision, call: Call | None = TOKENS, **spec: Any) -> ModelError:
    names, values = [n for n, _ in module.named_parameters()], [p.clone() for p in module.parameters()]
    with pytest.raises(ModelError) as caught:
        rehearse(module, plan, ModelSpec(given="test", **spec), call)
    assert caught.value.fix and caught.value.why
    assert [n for n, _ in module.named_parameters()] == names, "the module is as it was"
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), values, strict=True))
    return caught.value


def accepted(module: nn.Module, plan: Decision, **spec: Any) -> None:
    state = torch.get_rng_state()
    assert rehearse(module, plan, ModelSpec(given="test", **spec), TOKENS) == ""
    assert torch.equal(torch.get_rng_state(), state)
    assert module(*TOKENS.args).shape == (2, 6, user_modules.ROWS), "the module runs as before"


@pytest.mark.parametrize(
    "degrees", [{"pp": 2}, {"pp": 4}, {"pp": 2, "stages_per_rank": 2}, {"tp": 3}, {"pp": 2, "tp": 3}]
)
@pytest.mark.parametrize("module", [user_modules.sound, user_modules.tied, user_modules.looks_at_numbers])
def test_a_sound_module_passes(degrees: dict[str, int], module: Any) -> None:
    accepted(module(), decision(**degrees))


@pytest.mark.parametrize(
    ("fault", "says", "fix", "mended"),
    [
        ("between", "something lies between", "sw.Split(before, blocks, after)", user_modules.as_split),
        ("argument", "another stage computes", "sw.Split(before, blocks, after)", user_modules.as_split),
        ("output", "another stage computes", "sw.Split(before, blocks, after)", user_modules.as_split),
        ("late", "norm runs after the blocks, and is registered", "in __init__ in the order", user_modules.sound),
        ("parameter", "scale is a parameter of a module", "a module of its own", user_modules.scaled_by_a_module),
        ("scattered", "0 blocks, and the pipeline 2 stages", 'model.blocks = "the.path"', user_modules.sound),
        ("functional", "embed.weight is used outside", "head.weight = embedding.weight", user_modules.tied),
    ],
)  # fmt: skip
def test_what_no_pipeline_can_cut_is_refused_and_the_fix_lifts_it(fault: str, says: str, fix: str, mended: Any) -> None:
    error = refused(Model(fault), decision(pp=2))
    assert says in str(error) and fix in error.fix
    accepted(mended(), decision(pp=2))
    assert rehearse(Model(fault), decision(pp=1), ModelSpec(given="test"), TOKENS) == "", "one rank runs it"


def test_fewer_blocks_than_stages_and_the_fix_that_the_error_names() -> None:
    error = refused(user_modules.short(), decision(pp=2, stages_per_rank=2))
    assert "3 blocks, and the pipeline 4 stages" in error.what
    assert error.fix == "train.plan.pp x train.plan.stages_per_rank of at most 3"
    accepted(user_modules.short(), decision(pp=3))


def test_blocks_that_are_not_there_are_refused_by_the_nearest_path() -> None:
    error = refused(user_modules.sound(), decision(pp=2), blocks="bloks")
    assert error.fix == 'blocks = "blocks"'
    accepted(user_modules.sound(), decision(pp=2), blocks="blocks")


@pytest.mark.parametrize("schedule", ["interleaved-zb", "zbv", "dualpipev"])
def test_a_norm_in_two_places_of_a_block_is_refused_under_zero_bubble_and_both_fixes_lift_it(schedule: str) -> None:
    split = msgspec.structs.replace(decision(pp=2, stages_per_rank=2), schedule=schedule)
    error = refused(user_modules.one_norm_twice(), split)
    assert error.what.startswith("blocks.1.norm.bias, blocks.1.norm.weight: used in two places of stage 1")
    assert error.fix == 'train.plan.schedule = "1f1b", or a module of its own in each place'
    accepted(user_modules.a_norm_each(), split)
    accepted(user_modules.one_norm_twice(), decision(pp=2))
    accepted(user_modules.sound(), split)


def test_structure_is_refused_without_any_sample() -> None:
    assert "0 blocks" in refused(user_modules.scattered(), decision(pp=2), call=None).what
    said = rehearse(user_modules.sound(), decision(pp=2), ModelSpec(given="test"), None)
    assert said == "no sample of the data is at hand before training"


def test_heads_that_tp_does_not_divide_are_refused_and_both_fixes_lift_it() -> None:
    error = refused(user_modules.sound(), decision(tp=2))
    assert "tp = 2 does not divide the heads of blocks.0.attention.q_proj: 3" in error.what
    accepted(user_modules.sound(), decision(tp=3))
    accepted(user_modules.sound(), decision(tp=2), roles={"blocks.*.attention.*": "replicated"})


def test_a_weight_that_another_module_computes_with_is_named_with_its_reader() -> None:
    error = refused(user_modules.functional(), decision(tp=3))
    assert error.what == "The forward of the model computes with embed.weight, a weight of another module."
    assert "tie the two" in error.fix
    accepted(user_modules.tied(), decision(tp=3))
    accepted(user_modules.functional(), decision(pp=1))


class Transposed(nn.Module):
    """Reads the embedding's weight through a view of it, deep inside; or only its shape and its size."""

    def __init__(self, embedding: nn.Embedding, way: str) -> None:
        super().__init__()
        self.held, self.way = (embedding,), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.held[0].weight
        if self.way == "view":
            return x @ weight.t().reshape(user_modules.WIDTH, -1)
        if self.way == "norm":
            return x * weight.square().sum()
        return x * weight.shape[0]


@pytest.mark.parametrize(("way", "caught"), [("view", True), ("norm", True), ("shape", False)])
def test_what_is_made_of_a_foreign_weight_counts_and_its_shape_does_not(way: str, caught: bool) -> None:
    """A DTensor of one number goes with a plain tensor no more than any other."""
    module = user_modules.Model()
    module.norm = nn.Sequential(nn.LayerNorm(user_modules.WIDTH), Transposed(module.embed, way))
    if way == "view":
        module.head = nn.Linear(user_modules.ROWS, user_modules.ROWS)
    if caught:
        assert "The forward of norm.1 computes with embed.weight" in refused(module, decision(tp=3)).what
    else:
        accepted(module, decision(tp=3))


def test_attention_of_torch_reads_its_own_parts() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(user_modules.ROWS, 12)
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(12, 3, 16, batch_first=True) for _ in range(2))
            self.head = nn.Linear(12, user_modules.ROWS)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    accepted(Mixed(), decision(tp=3))


def test_a_large_model_costs_no_numbers_and_what_could_not_be_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "MOST_PARAMETERS", 10)
    said = rehearse(user_modules.looks_at_numbers(), decision(pp=2), ModelSpec(given="test"), TOKENS)
    assert said.startswith("its forward could not be tried before training: RuntimeError: Tensor.item()")
    refused(Model("argument"), decision(pp=2))
