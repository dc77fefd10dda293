"""transformers.Trainer with sealed checkpoints, signals, a watchdog and events; nothing else of the script changes.

Run: python examples/transformers_trainer.py   (again goes on; Ctrl-C or TERM saves first)
"""

import torch
import transformers

import shardwise as sw

STEPS = 6
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)
torch.manual_seed(0)
rows = [{"input_ids": (torch.arange(16) * step) % 64} for step in range(1, 65)]
data = [{**row, "labels": row["input_ids"]} for row in rows]

trainer = transformers.Trainer(
    model=transformers.LlamaForCausalLM(config),
    args=transformers.TrainingArguments(
        output_dir="out", max_steps=STEPS, save_steps=2, save_total_limit=3, logging_steps=1, report_to=[],
        per_device_train_batch_size=4, learning_rate=1e-3, use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
    ),
    train_dataset=data,
    callbacks=[sw.TransformersCallback("runs/trainer")],
)  # fmt: skip
trainer.train(resume_from_checkpoint=sw.newest_whole("out"))
print(f"step {trainer.state.global_step}")
