"""Every example runs as plain Python, one with two modules on two ranks too, and every recipe for a few steps."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import chats
from tests.distributed import hf_work
from tests.docs.blocks import ROOT
from tests.docs.started import Starter

SHARDWISE = str(Path(sys.executable).with_name("shardwise"))
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.toml"))
LIMIT_SECONDS = 120
SMALL = {
    "quickstart.toml": {
        "train.steps": "3",
        "train.evaluate_every_steps": "2",
        "train.devices": "1",
        "batch.tokens_per_step": "1024",
        "data.text": '["stdlib:json/*.py"]',
        "data.valid_fraction": "0.05",
        "run": "run",
    },
    # On a tiny model with a tokenizer of its own, and conversations about this Python's functions.
    "finetune-chat.toml": {
        "model.hf": "model",
        "data.chat": '["chat.jsonl"]',
        "data.sequence_length": "256",
        "data.valid_fraction": "0.1",
        "batch.global_batch": "4",
        "optimizer.lr": "1e-2",
        "optimizer.schedule.warmup_steps": "0",
        "train.epochs": "3",
        "train.devices": "2",
        "train.evaluate_every_steps": "100",
        "run": "run",
    },
    "lora.toml": {
        "model.hf": "model",
        "data.chat": '["chat.jsonl"]',
        "data.sequence_length": "256",
        "data.valid_fraction": "0.1",
        "batch.global_batch": "4",
        "optimizer.lr": "3e-2",
        "optimizer.schedule.warmup_steps": "0",
        "train.epochs": "2",
        "train.devices": "1",
        "run": "lora-run",
    },
}


Commands = dict[str, "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    hf_work.write("llama", folder / "model", vocab_size=chats.VOCABULARY, max_position_embeddings=256)
    chats.write_tokenizer(folder / "model")
    chats.write_rows(folder / "chat.jsonl")
    return folder


@pytest.fixture(scope="module", autouse=True)
def commands(own_cache: Path, chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """What goes through the command, started at once: each spends seconds on imports, and the tests go on meanwhile."""
    asked = {"gan.py": ["run", "--devices", "2", str(ROOT / "examples" / "gan.py")]}
    for name in RECIPES:
        overrides = [word for key, value in SMALL[name].items() for word in ("--set", f"{key}={value}")]
        asked[name] = ["train", str(ROOT / "recipes" / name), *overrides]
    folders = dict.fromkeys(("finetune-chat.toml", "lora.toml"), chat_folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = {
        name: subprocess.Popen(
            [SHARDWISE, *arguments], cwd=folders.get(name) or tmp_path_factory.mktemp("command"), env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name, arguments in asked.items()
    }  # fmt: skip
    yield started
    for process in started.values():
        process.terminate()
        process.communicate()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_plain_python(name: str, tmp_path: Path, starter: Starter) -> None:
    ended = starter.run(ROOT / "examples" / name, tmp_path)
    assert ended.code == 0, ended.output
    assert "Warning" not in ended.output


def test_an_own_loop_with_two_modules_runs_on_two_ranks(commands: Commands) -> None:
    stdout, stderr = commands["gan.py"].communicate(timeout=LIMIT_SECONDS)
    assert commands["gan.py"].returncode == 0, stderr
    assert "generator loss" in stdout


def last_line(name: str, commands: Commands) -> dict[str, Any]:
    stdout, stderr = commands[name].communicate(timeout=LIMIT_SECONDS)
    assert commands[name].returncode == 0, stderr
    last: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    assert last["finished"]
    return last


def test_every_recipe_is_run_here() -> None:
    assert sorted(SMALL) == RECIPES


def test_the_quickstart_runs_for_a_few_steps(commands: Commands) -> None:
    last = last_line("quickstart.toml", commands)
    assert last["step"] == 3 and last["valid_loss"] is not None


def test_a_chat_model_is_fine_tuned_by_its_recipe_and_comes_out_again(commands: Commands, chat_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shardwise.cli.checkpoints import exported

    last = last_line("finetune-chat.toml", commands)
    assert last["valid_loss"] < 0.9 * math.log(chats.VOCABULARY), "no better than a guess"
    os.chdir(chat_folder)
    assert exported("run", "out", None, "saved", merged=False, as_json=True) == 0
    module, loading = AutoModelForCausalLM.from_pretrained("out", use_kernels=False, output_loading_info=True)
    assert not any(loading.values()) and AutoTokenizer.from_pretrained("out").chat_template == chats.PLAIN
    begun = AutoModelForCausalLM.from_pretrained("model", use_kernels=False)
    assert not torch.equal(module.lm_head.weight, begun.lm_head.weight)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_trained_by_their_recipe_and_come_out_as_peft_loads_them(
    commands: Commands, chat_folder: Path
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    from shardwise.cli.checkpoints import exported

    last = last_line("lora.toml", commands)
    os.chdir(chat_folder)
    assert exported("lora-run", "adapter", None, "saved", merged=False, as_json=True) == 0
    assert exported("lora-run", "merged", None, "saved", merged=True, as_json=True) == 0
    begun = AutoModelForCausalLM.from_pretrained("model", use_kernels=False)
    weights = {name: p.clone() for name, p in begun.named_parameters()}
    adapted = peft.PeftModel.from_pretrained(begun, "adapter").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained("merged", use_kernels=False)
    changed = set()
    for (name, ours), theirs in zip(merged.named_parameters(), adapted.parameters(), strict=True):
        # Both add the same product to the same weight in fp32.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        changed |= {name.rpartition(".weight")[0].rpartition(".")[2]} if not torch.equal(ours, weights[name]) else set()
    assert changed == {"q_proj", "v_proj"}
    assert last["valid_loss"] is not None
