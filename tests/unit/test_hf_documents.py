"""Documents packed into one row: a family that keeps them apart is told from one that does not, before it trains."""

from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.models.hf import build, documents
from tests.distributed import hf_work

# transformers computes the norms of these in fp32 whatever the weights are: a rounding of one in a few of the outputs.
FP32_NORMS = 1e-7


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.mark.parametrize("family", hf_work.FAMILIES)
def test_the_loss_of_a_packed_row_is_the_sum_over_its_documents_alone(family: str, root: Path) -> None:
    """In fp64: 1e-10 where all is computed in it. Experts one by one, as torch's grouped product takes no fp64."""
    folder = hf_work.write(family, root / family)
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, use_kernels=False, experts_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    rows = [[3, 8, 1, 7, 5], [12, 2, 10]]
    texts = [[torch.randint(0, hf_work.VOCABULARY, (n + 1,), generator=generator) for n in row] for row in rows]
    tokens, labels = (torch.stack([torch.cat([cut(t) for t in row]) for row in texts]) for cut in (head, tail))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    together = summed(module, tokens, labels, position_ids=positions)
    alone = sum(summed(module, head(t)[None], tail(t)[None]) for row in texts for t in row)
    bound = 1e-10 if family in ("gpt2", "gpt_neox") else FP32_NORMS
    assert abs(together / alone - 1) < bound
    leaking = summed(module, tokens, labels)
    assert abs(leaking / alone - 1) > 1e-3, "without positions it is another number, or this proves nothing"


def test_padding_behind_a_document_changes_nothing(root: Path) -> None:
    """Rows of a batch that is not packed: no mask is given, as no token looks ahead."""
    folder = hf_work.write("gpt_neox", root / "padded")
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, use_kernels=False).eval()
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, hf_work.VOCABULARY, (n + 1,), generator=generator) for n in (3, 8, 5)]
    tokens, labels = torch.zeros(3, 8, dtype=torch.int64), torch.full((3, 8), -100)
    for at, text in enumerate(texts):
        tokens[at, : len(text) - 1], labels[at, : len(text) - 1] = head(text), tail(text)
    alone = sum(summed(module, head(text)[None], tail(text)[None]) for text in texts)
    assert abs(summed(module, tokens, labels) / alone - 1) < 1e-10


def head(tokens: torch.Tensor) -> torch.Tensor:
    return tokens[:-1]


def tail(tokens: torch.Tensor) -> torch.Tensor:
    return tokens[1:]


@torch.no_grad()
def summed(module: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, **more: torch.Tensor) -> float:
    args, kwargs = build.inputs({"tokens": tokens, **more})
    logits = module(*args, **kwargs).logits
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "phi3"])
def test_a_small_model_of_a_folders_make_shows_that_documents_stay_apart(family: str, root: Path) -> None:
    folder = hf_work.write(family, root / f"{family}-folder", num_hidden_layers=7)
    documents.require_apart(str(folder))


def test_a_model_that_does_not_go_by_positions_is_refused_with_its_fix(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As masks were made before transformers looked at positions: causal over the whole row."""
    folder = hf_work.write("llama", root / "leaks")
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(ModelError, match="see each other") as caught:
        documents.require_apart(str(folder))
    assert "packing = false" in caught.value.fix
