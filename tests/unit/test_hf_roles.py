"""What tensor parallel splits of a family of Hugging Face: tried on a small model, as weights are on meta."""

from pathlib import Path

import pytest

from shardwise.models import inspect
from shardwise.models.hf import build
from shardwise.parallel import roles
from tests.distributed import hf_work

BOTH, FEED_FORWARD = {"self_attn", "mlp"}, {"mlp"}
SPLIT = {
    "llama": BOTH, "qwen3": BOTH, "mistral": BOTH, "gemma3_text": BOTH, "gpt_neox": FEED_FORWARD,
    "olmo2": FEED_FORWARD, "gpt2": set(), "phi3": set(),
}  # fmt: skip


@pytest.mark.parametrize("family", SPLIT)
def test_a_familys_regions_are_split_where_a_small_model_shows_that_they_can_be(family: str, tmp_path: Path) -> None:
    module = build.on_meta(hf_work.write(family, tmp_path))
    blocks = inspect.find_blocks(module)
    found = roles.of(module, blocks.blocks)
    names = {region.path.rpartition(".")[2] for region in found.regions}
    assert names == SPLIT[family]
    assert len(found.regions) == len(names) * len(blocks.blocks)
    for region in found.regions:
        assert region.head_dim == (8 if region.path.endswith("self_attn") else 1), "its own sizes, not the small one's"


def test_every_family_is_looked_at_here() -> None:
    """But those with experts, which train under data parallel alone."""
    assert set(SPLIT) == set(hf_work.FAMILIES) - set(hf_work.SPARSE)
