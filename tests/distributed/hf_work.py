"""What the pool's ranks run for Hugging Face models: tiny ones of each family, from a folder on the disk."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import shardwise as sw
from shardwise.data.chat_data import ChatData
from shardwise.parallel.parallelize import parallel_of
from shardwise.train.setup import next_token_loss
from tests.distributed.work import VOCABULARY, UnevenTokens, whole

SAMPLES, GLOBAL_BATCH, LR, CLIP = 30, 12, 0.1, 0.5
PACKED_LENGTH, PACKED_BATCH = 160, 4
_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 5},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {},
    "phi3": {"num_key_value_heads": 4},
    "olmo2": {},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
}
SPARSE = ("mixtral", "qwen3_moe")


def write(family: str, folder: Path, **more: Any) -> Path:
    """A tiny model of a family with numbers that training has not made: norms and biases are no ones and zeros."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_SHAPE, **FAMILIES.get(family, {}), **more})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    module.save_pretrained(folder, max_shard_size="40KB")
    return folder


def by_hand(folder: Path, steps: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """transformers' own loading and forward in one process, the whole batch at once."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_kernels=False).to(dtype).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    data, losses, norms = UnevenTokens(SAMPLES), [], []
    start = {name: p.detach().clone().numpy() for name, p in module.named_parameters()}
    for step in range(steps):
        rows = [data[i] for i in range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)]
        tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
        logits = module(input_ids=tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP).detach()))
        optimizer.step()
        losses.append(float(loss.detach()))
    end = {name: p.detach().numpy() for name, p in module.named_parameters()}
    return {"losses": losses, "norms": norms, "start": start, "end": end}


def packed_by_hand(folder: Path, data: ChatData, steps: int) -> dict[str, Any]:
    """Each document by itself through transformers' forward, in fp64; the step's loss is their sum over their count."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, use_kernels=False).train()
    optimizer, losses, norms = torch.optim.SGD(module.parameters(), lr=LR), [], []
    for step in range(steps):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for sample in range(step * PACKED_BATCH, (step + 1) * PACKED_BATCH):
            row = data[sample]
            begins = [int(at) for at in torch.nonzero(row["position_ids"] == 0)]
            for begin, end in zip(begins, [*begins[1:], len(row["tokens"])], strict=True):
                tokens, labels = row["tokens"][begin:end], row["labels"][begin:end]
                logits = module(input_ids=tokens[None], use_cache=False).logits[0]
                total = total + nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
                count += int((labels != -100).sum())
        optimizer.zero_grad()
        (total / count).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP).detach()))
        optimizer.step()
        losses.append(float(total.detach()) / count)
    return {"losses": losses, "norms": norms}


def chat_data(folder: str, chat: str) -> ChatData:
    return ChatData(chat, tokenizer=folder, sequence_length=PACKED_LENGTH, valid_fraction=0, shuffle=False)


def train_packed(folder: str, chat: str, run: str, plan: dict[str, Any], steps: int) -> list[tuple[float, float]]:
    """A Trainer on packed conversations: its losses and norms."""
    trainer = sw.Trainer(
        model=folder, loss=next_token_loss, data=chat_data(folder, chat),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=LR), global_batch=PACKED_BATCH, micro_batch=1,
        precision="fp64", clip_norm=CLIP, plan=plan, run=run,
    )  # fmt: skip
    return [(step.loss, step.grad_norm) for step in trainer.run(steps=steps)]


def train(folder: str, run: str, plan: dict[str, Any], steps: int, precision: str = "fp64") -> dict[str, Any]:
    """A Trainer on the folder: its losses and norms, and the weights that it began with, as this rank's whole ones."""
    trainer = sw.Trainer(
        model=folder, loss=next_token_loss, data=sw.Batches(UnevenTokens(SAMPLES), workers=0, shuffle=False),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=LR), global_batch=GLOBAL_BATCH, micro_batch=2,
        precision=precision, clip_norm=CLIP, plan=plan, run=run, sequence_parallel=False,
    )  # fmt: skip
    start = {name: whole(p).tolist() for name, p in trainer.model.named_parameters()}
    steps_ = [(step.loss, step.grad_norm) for step in trainer.run(steps=steps)]
    held = sum(p.numel() for p in trainer.model.parameters())
    return {"steps": steps_, "start": start, "held": held, "split": parallel_of(trainer.model).tensor is not None}


def adapters_by_hand(folder: Path, steps: int, spec: dict[str, Any], start: dict[str, Any]) -> dict[str, Any]:
    """peft's own model in one process, from the adapters `start`, the whole batch at once, in fp64."""
    import peft
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_kernels=False).to(torch.float64)
    adapted = peft.get_peft_model(module, peft.LoraConfig(task_type="CAUSAL_LM", **spec)).to(torch.float64).train()
    prefix = "base_model.model."
    names = {name.removeprefix(prefix): p for name, p in adapted.named_parameters() if p.requires_grad}
    assert set(names) == set(start), "peft puts its adapters where ours are"
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(torch.tensor(start[name]))
    optimizer = torch.optim.SGD(names.values(), lr=LR)
    data, losses, norms = UnevenTokens(SAMPLES), [], []
    for step in range(steps):
        rows = [data[i] for i in range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)]
        tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
        logits = adapted(input_ids=tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(names.values(), CLIP).detach()))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "end": {name: p.detach().numpy() for name, p in names.items()}}


def train_adapters(folder: str, run: str, plan: dict[str, Any], steps: int, lora: dict[str, Any]) -> dict[str, Any]:
    """A Trainer with adapters: losses and norms, the adapters that it began and ended with, and what else changed."""
    trainer = sw.Trainer(
        model=folder, loss=next_token_loss, data=sw.Batches(UnevenTokens(SAMPLES), workers=0, shuffle=False),
        optimizer=lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=LR),
        global_batch=GLOBAL_BATCH, micro_batch=2, precision="fp64", clip_norm=CLIP, plan=plan, run=run,
        trainable={"lora": lora},
    )  # fmt: skip
    before = {name: np.copy(whole(p)) for name, p in trainer.model.named_parameters()}
    told = [(step.loss, step.grad_norm) for step in trainer.run(steps=steps)]
    after = {name: whole(p) for name, p in trainer.model.named_parameters()}
    adapters = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    return {
        "steps": told,
        "start": {name: before[name].tolist() for name in adapters},
        "end": {name: after[name].tolist() for name in adapters},
        "moved": [name for name in before if name not in adapters and not np.array_equal(before[name], after[name])],
    }


def held_in(folder: str, run: str, plan: dict[str, Any], lora: dict[str, Any]) -> dict[str, Any]:
    """Under bf16: the dtypes of what is trained and of what is not, and a first loss with each kept in fp32 instead."""
    told: dict[str, Any] = {}
    for name, kept in (("bf16", ()), ("fp32", ("model.layers.0",))):
        trainer = sw.Trainer(
            model=folder, loss=next_token_loss, data=sw.Batches(UnevenTokens(SAMPLES), workers=0, shuffle=False),
            optimizer=lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=LR),
            global_batch=GLOBAL_BATCH, precision="bf16", plan=plan, run=f"{run}-{name}", trainable={"lora": lora},
            fp32_modules=kept,
        )  # fmt: skip
        told[name] = {n: str(p.dtype).removeprefix("torch.") for n, p in trainer.model.named_parameters()}
        steps = [step.loss for step in trainer.run(steps=2)]
        told[f"{name} loss"] = steps
    return told
