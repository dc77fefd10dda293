"""Tokens a second with each tool's defaults, started as its user starts it, on this machine's CPU cores.

Run: python -m benchmarks.defaults [--blocks 8]

The same decoder, data, global batch and steps, and AdamW as each tool's user writes it. Whole processes take turns; a
figure is the tokens a second from step 6 to the last.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.compare import ratio

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
STEPS, WARM = 24, 6
SHAPE = """
import time, torch
from torch.utils.data import DataLoader
from benchmarks.engine_rank import MICRO_BATCH, SEQUENCE, Tokens
from shardwise.inputs.arch import preset
from shardwise.models.decoder import Decoder, next_token_sums
STEPS, WARM, GLOBAL = {steps}, {warm}, 2 * MICRO_BATCH
torch.manual_seed(0)
data = Tokens(preset("decoder-2m").vocab_size)
model = lambda: Decoder(preset("decoder-2m"))
def told(started):
    print("tokens_per_second", (STEPS - WARM) * GLOBAL * SEQUENCE / (time.perf_counter() - started), flush=True)
"""
SCRIPTS = {
    "shardwise": """
import shardwise as sw
from shardwise.inputs.recipe import OptimizerSpec
from shardwise.optimizer.build import build
trainer = sw.Trainer(model=model, loss=lambda o, b: sw.Loss(*next_token_sums(o, b["labels"])), data=sw.Batches(data),
    optimizer=lambda m: build(OptimizerSpec(), m), global_batch=GLOBAL, run="run", fresh=True)
for step in trainer.run(steps=STEPS + 1):
    if step.number == WARM:
        started = time.perf_counter()
    if step.number == STEPS:
        if step.is_main:
            told(started)
        break
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator()
loader = DataLoader(data, batch_size=GLOBAL // accelerator.num_processes, shuffle=True)
module = model()
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
for number, batch in enumerate(loader, start=1):
    total, count = next_token_sums(module(batch["tokens"]), batch["labels"])
    accelerator.backward(total / count)
    accelerator.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if number == WARM:
        started = time.perf_counter()
    if number == STEPS:
        if accelerator.is_main_process:
            told(started)
        break
""",
    "fabric": """
from lightning_fabric import Fabric
fabric = Fabric()
fabric.launch()
base = model()
module, optimizer = fabric.setup(base, torch.optim.AdamW(base.parameters(), lr=1e-3))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=GLOBAL // fabric.world_size, shuffle=True))
for number, batch in enumerate(loader, start=1):
    total, count = next_token_sums(module(batch["tokens"]), batch["labels"])
    fabric.backward(total / count)
    fabric.clip_gradients(module, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if number == WARM:
        started = time.perf_counter()
    if number == STEPS:
        if fabric.is_global_zero:
            told(started)
        break
""",
}
COMMANDS = {
    "shardwise": [str(BIN / "shardwise"), "run"],
    "accelerate": [str(BIN / "accelerate"), "launch"],
    "fabric": [sys.executable],
}


def tokens_per_second(tool: str, folder: Path) -> float:
    """One start of one tool, from its own script. Raises: RuntimeError with its output where it told nothing."""
    script = folder / f"{tool}_script.py"
    imports = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    script.write_text(imports + SHAPE.format(steps=STEPS, warm=WARM) + SCRIPTS[tool])
    done = subprocess.run([*COMMANDS[tool], str(script)], cwd=folder, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("tokens_per_second"):
            return float(line.split()[1])
    raise RuntimeError(f"{tool} told nothing:\n{done.stdout}\n{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    blocks = parser.parse_args().blocks
    found: dict[str, list[float]] = {tool: [] for tool in SCRIPTS}
    with tempfile.TemporaryDirectory() as folder:
        for block in range(blocks):
            for tool in list(SCRIPTS)[:: 1 if block % 2 == 0 else -1]:
                found[tool].append(tokens_per_second(tool, Path(folder)))
    for tool, rates in found.items():
        print(f"{tool:11} {sorted(rates)[len(rates) // 2]:8,.0f} tokens/s median")
    for peer in ("accelerate", "fabric"):
        print(f"shardwise / {peer}, tokens a second: {ratio(found['shardwise'], found[peer])}")


if __name__ == "__main__":
    main()
