"""Folders of Hugging Face models: what is wrong with one is said before any rank starts, with what to do."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from shardwise.errors import ModelError
from shardwise.inputs import hub
from shardwise.inputs.recipe import LoraSpec, TrainableSpec
from shardwise.models.hf import build, folder
from tests.distributed import hf_work


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_work.write("llama", tmp_path_factory.mktemp("hf") / "llama")


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "llama"))


def raised(model: Path | str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        build.causal_lm(str(model))
    assert caught.value.fix
    return caught.value


def test_a_whole_folder_gives_a_module_without_memory(llama: Path) -> None:
    module, _ = build.causal_lm(f"hf:{llama}")
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def test_a_part_that_is_missing_is_named(copied: Path) -> None:
    gone = sorted(copied.glob("model-*.safetensors"))[1]
    gone.unlink()
    assert gone.name in raised(copied).what


def test_a_part_that_is_cut_short_is_named(copied: Path) -> None:
    cut = sorted(copied.glob("model-*.safetensors"))[0]
    cut.write_bytes(cut.read_bytes()[:-8])
    assert str(cut) in raised(copied).what


def test_a_config_without_weights_is_told_and_pickles_are_not_read(copied: Path) -> None:
    for file in copied.glob("*.safetensors*"):
        file.unlink()
    assert "no weights" in raised(copied).what
    (copied / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert "is a pickle" in raised(copied).why


def test_names_are_compared_in_both_directions(copied: Path) -> None:
    index = copied / folder.INDEX
    file = copied / json.loads(index.read_text())["weight_map"]["model.norm.weight"]
    tensors = load_file(file)
    tensors["model.other.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, file)
    why = raised(copied).why
    assert "in the model and no file: model.norm.weight" in why
    assert "in a file and not in the model: model.other.weight" in why


def test_another_shape_is_told_with_both(copied: Path) -> None:
    file = copied / json.loads((copied / folder.INDEX).read_text())["weight_map"]["model.norm.weight"]
    save_file({**load_file(file), "model.norm.weight": np.ones(7, np.float32)}, file)
    error = raised(copied)
    assert "model.norm.weight is [7]" in error.what and "[32] in the model" in error.what


def test_an_index_that_leads_elsewhere_is_not_followed(copied: Path) -> None:
    index = copied / folder.INDEX
    told = json.loads(index.read_text())
    told["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    index.write_text(json.dumps(told))
    assert "names a file elsewhere" in raised(copied).what


def test_an_expert_that_is_missing_and_a_balancing_loss_are_told(tmp_path: Path) -> None:
    folder = hf_work.write("mixtral", tmp_path / "mixtral")
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    gone = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    file = folder / told["weight_map"].pop(gone)
    held = load_file(file)
    held.pop(gone)
    save_file(held, file, {"format": "pt"})
    index.write_text(json.dumps(told))
    assert "Expert 2 of model.layers.1.mlp.experts.gate_up_proj is in no file" in raised(folder).what
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "output_router_logits": True}))
    told_of = raised(folder)
    assert "balancing loss" in told_of.what and "output_router_logits = false" in told_of.fix


def test_unknown_kinds_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text('{"model_type": "my_own", "auto_map": {"AutoConfig": "code.Config"}}')
    (tmp_path / "own" / "code.py").write_text("raise SystemExit('code of the folder was run')")
    assert "never run" in raised(tmp_path / "own").fix


def test_what_is_no_folder_and_no_id_is_told() -> None:
    assert "There is no folder" in raised("hf:no-such-folder").what


def test_a_model_comes_out_of_the_hubs_cache(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub as it leaves a snapshot on the disk; nothing is asked of the network."""
    snapshot = tmp_path / "models--owner--tiny" / "snapshots" / "abc"
    shutil.copytree(llama, snapshot)
    refs = tmp_path / "models--owner--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.find("hf:owner/tiny").resolve() == snapshot.resolve()
    error = raised("hf:owner/another")
    assert "did not come from the hub" in error.what and "folder" in error.fix


def test_forward_gets_what_is_meant_for_it() -> None:
    ids = torch.zeros(1, 2, dtype=torch.int64)
    _, given = build.inputs({"tokens": ids, "labels": ids, "attention_mask": ids})
    assert set(given) == {"input_ids", "attention_mask", "use_cache"}
    with pytest.raises(ModelError, match="no input_ids"):
        build.inputs({"labels": ids})


@pytest.mark.parametrize(
    ("trainable", "says", "fix"),
    [
        (TrainableSpec(lora=LoraSpec(4, ("q_porj",))), "has no layer 'q_porj'", "targets = "),
        (TrainableSpec(lora=LoraSpec(4, base_bits=4)), "not quantised yet", "base_bits = 16"),
        (TrainableSpec(frozen=("model.layer.0.*",)), "is the name of no parameter", "model.layers.0"),
        (TrainableSpec(frozen=("*",)), "leaves nothing to train", "fewer"),
    ],
)
def test_what_cannot_be_trained_of_a_model_is_told(llama: Path, trainable: TrainableSpec, says: str, fix: str) -> None:
    with pytest.raises(ModelError) as caught:
        build.causal_lm(str(llama), trainable)
    assert says in caught.value.what and fix in caught.value.fix


def test_what_a_pattern_names_is_frozen_and_adapters_begin_with_the_model_as_it_is(llama: Path) -> None:
    module, _ = build.causal_lm(str(llama), TrainableSpec(frozen=("model.layers.0.*", "model.embed_tokens.*")))
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in module.named_parameters() if n.startswith(("model.layers.0.", "model.embed_"))}
    tokens = torch.arange(12).reshape(1, 12)
    found = []
    for trainable in ("full", TrainableSpec(lora=LoraSpec(4, ("q_proj", "down_proj")))):
        module, fill = build.causal_lm(str(llama), trainable, seed=3)
        module.to_empty(device="cpu")
        fill(module)
        found.append(module(input_ids=tokens, use_cache=False).logits)
    assert torch.equal(*found)
    a = [p for name, p in module.named_parameters() if "lora_A" in name]
    # Uniform in +-1/sqrt(inputs): between a half and all of it is met by one of hundreds of draws.
    assert all(0.5 < float(p.detach().abs().max()) * p.shape[1] ** 0.5 <= 1.0 for p in a)
