"""What one GPU shows, in a few minutes: make gpu. Skipped with a reason where there is none.

What only several GPUs with NCCL can show is not here: it is "not proved" until it ran.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.inputs.arch import preset
from shardwise.models.decoder import Decoder, next_token_sums
from tests.distributed.runs import digest
from tests.distributed.work import UnevenTokens, arch, loss, optimizer_of, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def trainer_of(folder: Path, **settings: Any) -> sw.Trainer:
    return sw.Trainer(
        **{
            "model": lambda: Decoder(arch()),
            "loss": loss,
            "optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
            "data": sw.Batches(UnevenTokens(30)),
            "global_batch": 12,
            "run": str(folder),
            "plan": {"compile": "off"},
            **settings,
        }
    )


def losses(trainer: sw.Trainer, steps: int, leave_at: int = 0) -> list[float]:
    found = []
    for step in trainer.run(steps=steps):
        found.append(step.loss)
        if step.number == leave_at:
            break
    return found


def test_fp64_on_a_gpu_gives_the_same_run_as_the_hand_written_loop_on_cpu(tmp_path: Path) -> None:
    """Logic tier: another device's fp64 rounding, and nothing else."""

    def build() -> Decoder:
        module = Decoder(arch())
        module.to(torch.float64).init_weights(0)
        return module

    trainer = trainer_of(tmp_path / "run", model=build, precision="fp64", clip_norm=0.5, optimizer=adamw)
    assert losses(trainer, 4) == pytest.approx(reference(steps=4)["losses"], rel=1e-10)


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return optimizer_of("adamw", module)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_the_loss_falls_in_every_precision(tmp_path: Path, precision: str) -> None:
    found = losses(trainer_of(tmp_path / "run", precision=precision), 60)
    assert found[-1] < 0.8 * found[0]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_resumed_run_gives_the_bits_of_an_unbroken_one(tmp_path: Path, precision: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        whole = trainer_of(tmp_path / "a", precision=precision)
        losses(whole, 9)
        losses(trainer_of(tmp_path / "b", precision=precision), 9, leave_at=4)
        again = trainer_of(tmp_path / "b", precision=precision)
        losses(again, 9)
    finally:
        torch.use_deterministic_algorithms(False)
    assert digest(again.model) == digest(whole.model)


def test_compiled_blocks_give_the_eager_losses(tmp_path: Path) -> None:
    """bf16: one rounding of 2^-8 in the logits moves a mean loss by less than that."""
    eager = losses(trainer_of(tmp_path / "a"), 5)
    compiled = losses(trainer_of(tmp_path / "b", plan={"compile": "blocks"}), 5)
    assert compiled == pytest.approx(eager, rel=2.0**-8)


def test_memory_at_rest_is_sixteen_bytes_a_parameter(tmp_path: Path) -> None:
    """fp32 masters, two moments: 12 between steps, 16 with gradients; the allocator rounds each tensor to 512 bytes."""
    before = torch.cuda.memory_allocated()
    trainer = trainer_of(
        tmp_path / "run", model=lambda: Decoder(preset("decoder-8m")), data=sw.Batches(UnevenTokens(30))
    )
    losses(trainer, 2)
    held = torch.cuda.memory_allocated() - before
    parameters = sum(p.numel() for p in trainer.model.parameters())
    tensors = len(list(trainer.model.parameters()))
    assert 12 * parameters <= held <= 16 * parameters + 5 * 512 * tensors + 2**22


def test_throughput_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No threshold: a figure for benchmarks/RESULTS.md."""
    shape = preset("decoder-8m")
    tokens = torch.randint(0, shape.vocab_size, (512, 257))
    data = sw.Batches([{"tokens": row[:-1], "labels": row[1:]} for row in tokens])
    trainer = trainer_of(
        tmp_path / "run",
        model=lambda: Decoder(shape),
        loss=lambda o, b: sw.Loss(*next_token_sums(o, b["labels"])),
        data=data,
        global_batch=64,
        plan={"compile": "blocks"},
    )
    started, number = time.perf_counter(), 0
    for step in trainer.run(steps=60):
        if step.number == 20:
            started = time.perf_counter()
        number = step.number
    rate = 40 * 64 * 256 / (time.perf_counter() - started)
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}: {rate:,.0f} tokens/s with decoder-8m, bf16, compiled blocks")
    assert number == 60
