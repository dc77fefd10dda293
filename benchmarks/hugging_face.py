"""A model of Hugging Face: what loading it takes on 4 ranks, and steps of a fine-tuning, beside transformers' own ways.

Run: python -m benchmarks.hugging_face load [--parameters 1.0e9] [--blocks 3]
     python -m benchmarks.hugging_face step [--blocks 8]

load: a Llama of so many parameters in bf16 files. Ours: sw.Trainer under zero 3, until its shards are filled. Theirs:
each rank calls from_pretrained and hands the model to Accelerate, as its user writes it. Seconds are from all ranks'
imports to the slowest rank's end; bytes are the most that all ranks together held of the host's memory at a time, by
PSS (pages of files that are mapped count once). Both in fp32, as they train on CPU.
step: tokens a second with each tool's defaults, on two ranks, or one where a tool's default is one; tools take turns.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.compare import ratio
from shardwise.launch.local import tree_pids
from shardwise.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LOAD = {
    "shardwise": """
import shardwise as sw
trainer = sw.Trainer(model=folder, loss=sw.next_token_loss, data=sw.Batches(Rows(), workers=0), plan={"zero": 3},
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-3), global_batch=world, precision="fp32", run=run,
    hang_seconds=0)
module = trainer.model
""",
    "transformers and accelerate": """
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
accelerator = Accelerator(cpu=True)
module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_kernels=False)
module = accelerator.prepare(module)
""",
}
BEFORE = """
import sys, time, torch, torch.distributed as dist
sys.path.insert(0, {root!r})
folder, run, out = sys.argv[1:4]
import os
world = int(os.environ["WORLD_SIZE"])
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        row = (torch.arange({length} + 1) * (index + 1)) % 250
        return {{"input_ids": row[:-1], "labels": row[1:].clone()}}
import transformers, accelerate, shardwise.train.trainer
began = time.perf_counter()
open(f"{{out}}.begun.{{os.environ['RANK']}}", "w").close()
"""
AFTER = """
with open(f"{out}.{os.environ['RANK']}", "w") as file:
    file.write(str(time.perf_counter() - began))
time.sleep(0.2)  # for whoever looks at the memory
os._exit(0)
"""
STEPS, WARM, LENGTH, BATCH = 16, 4, 256, 8
STEP = {
    "shardwise": """
import shardwise as sw
trainer = sw.Trainer(model=folder, loss=sw.next_token_loss, data=sw.Batches(Rows()), global_batch=BATCH, run="run",
    optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4), fresh=True)
for step in trainer.run(steps=STEPS + 1):
    if step.number == WARM:
        started = time.perf_counter()
    if step.number == STEPS:
        told(started, step.is_main)
        break
""",
    "transformers.Trainer": """
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
class Clock(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == WARM:
            self.started = time.perf_counter()
        if state.global_step == STEPS:
            told(self.started, state.is_world_process_zero)
class Whole(Rows):
    def __getitem__(self, index):  # it shifts labels itself
        row = super().__getitem__(index)
        return {"input_ids": row["input_ids"], "labels": row["input_ids"]}
transformers.Trainer(model=model, train_dataset=Whole(), callbacks=[Clock()], args=transformers.TrainingArguments(
    output_dir="out", max_steps=STEPS, per_device_train_batch_size=BATCH // world, learning_rate=1e-4, report_to=[],
    save_strategy="no", disable_tqdm=True)).train()
""",
    "accelerate": """
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
number = 0
while number < STEPS:
    for batch in loader:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if number == WARM:
            started = time.perf_counter()
        if number == STEPS:
            told(started, accelerator.is_main_process)
            break
""",
}
STEP_BEFORE = """
import os, sys, time, torch
sys.path.insert(0, {root!r})
folder = sys.argv[1]
STEPS, WARM, LENGTH, BATCH = {steps}, {warm}, {length}, {batch}
world = int(os.environ.get("WORLD_SIZE", 1))
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1024
    def __getitem__(self, index):
        row = (torch.arange(LENGTH + 1) * (index + 1)) % 250
        return {{"input_ids": row[:-1], "labels": row[1:].clone()}}
def told(started, main):
    if main:
        print("tokens_per_second", (STEPS - WARM) * BATCH * LENGTH / (time.perf_counter() - started), flush=True)
"""
COMMANDS = {
    "shardwise": [str(BIN / "shardwise"), "run", "--devices", "2"],
    "transformers.Trainer": [*TORCHRUN, "--nproc-per-node=2"],
    "accelerate": [str(BIN / "accelerate"), "launch", "--num_processes", "2", "--cpu"],
}


def write(folder: Path, parameters: float) -> Path:
    """A Llama of about so many parameters, of numbers that training has not made. Files in bf16."""
    import torch
    import transformers

    width = 1024 if parameters > 2e8 else 256
    block = 4 * width * width + 3 * width * 4 * width
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=4 * width, num_attention_heads=width // 64,
        num_hidden_layers=max(2, round(parameters / block)), max_position_embeddings=1024,
    )  # fmt: skip
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module.save_pretrained(folder, max_shard_size="500MB")
    return folder


def load(parameters: float, blocks: int) -> None:
    """Prints seconds and bytes of both, and their ratios."""
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        folder = write(here / "model", parameters)
        found: dict[str, list[tuple[float, float]]] = {tool: [] for tool in LOAD}
        for block in range(blocks):
            for tool in list(LOAD)[:: 1 if block % 2 == 0 else -1]:
                found[tool].append(_loaded(tool, folder, here, block))
                print(f"{tool}: {found[tool][-1][0]:.2f} s, {format_bytes(found[tool][-1][1])}", flush=True)
    medians = {
        tool: [sorted(column)[len(column) // 2] for column in zip(*rows, strict=True)] for tool, rows in found.items()
    }
    ours, theirs = medians["shardwise"], medians["transformers and accelerate"]
    print(f"medians: seconds {ours[0]:.2f} and {theirs[0]:.2f}, ours / theirs {ours[0] / theirs[0]:.3f}")
    print(f"host memory {format_bytes(ours[1])} and {format_bytes(theirs[1])}, ours / theirs {ours[1] / theirs[1]:.3f}")


def _loaded(tool: str, folder: Path, here: Path, block: int) -> tuple[float, float]:
    script, out = here / "load.py", here / f"{tool.split()[0]}-{block}"
    script.write_text(BEFORE.format(root=str(ROOT), length=LENGTH) + LOAD[tool] + AFTER)
    command = [*TORCHRUN, "--nproc-per-node=4", str(script), str(folder), str(here / f"run-{block}"), str(out)]
    with (here / "said").open("wb") as said:
        process = subprocess.Popen(
            command, cwd=here, stdout=said, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    memory = _Memory(process, out)
    memory.start()
    process.wait()
    memory.join()
    times = [here / f"{out.name}.{rank}" for rank in range(4)]
    if not all(path.exists() for path in times):
        raise RuntimeError(f"{tool} did not load:\n{(here / 'said').read_text()[-3000:]}")
    return max(float(path.read_text()) for path in times), memory.most


class _Memory(threading.Thread):
    """The most that a tree of processes holds, beyond what it held when all ranks had imported."""

    def __init__(self, process: "subprocess.Popen[bytes]", out: Path) -> None:
        super().__init__(daemon=True)
        self.process, self.out, self.most, self.base = process, out, 0.0, 0.0

    def run(self) -> None:
        while self.process.poll() is None:
            held = sum(_proportional(pid) for pid in tree_pids(self.process.pid))
            if not all(Path(f"{self.out}.begun.{rank}").exists() for rank in range(4)):
                self.base = held
            else:
                self.most = max(self.most, held - self.base)
            time.sleep(0.05)


def _proportional(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return sum(1024.0 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


def step(blocks: int) -> None:
    """Prints each tool's rate, and ours over each of the others."""
    found: dict[str, list[float]] = {tool: [] for tool in STEP}
    with tempfile.TemporaryDirectory() as place:
        folder = write(Path(place) / "model", 8e6)
        for block in range(blocks):
            for tool in list(STEP)[:: 1 if block % 2 == 0 else -1]:
                found[tool].append(_rate(tool, folder, Path(place)))
    for tool, rates in found.items():
        print(f"{tool:22} {sorted(rates)[len(rates) // 2]:8,.0f} tokens/s median")
    for peer in ("transformers.Trainer", "accelerate"):
        print(f"shardwise / {peer}, tokens a second: {ratio(found['shardwise'], found[peer])}")
    print(json.dumps(found))


def _rate(tool: str, folder: Path, here: Path) -> float:
    script = here / "step.py"
    numbers = {"steps": STEPS, "warm": WARM, "length": LENGTH, "batch": BATCH}
    script.write_text(STEP_BEFORE.format(root=str(ROOT), **numbers) + STEP[tool])
    done = subprocess.run(
        [*COMMANDS[tool], str(script), str(folder)], cwd=here, capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("tokens_per_second"):
            return float(line.split()[1])
    raise RuntimeError(f"{tool} told nothing:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["load", "step"])
    parser.add_argument("--parameters", type=float, default=1.0e9)
    parser.add_argument("--blocks", type=int, default=0)
    asked = parser.parse_args()
    if asked.what == "load":
        load(asked.parameters, asked.blocks or 3)
    else:
        step(asked.blocks or 8)


if __name__ == "__main__":
    main()
