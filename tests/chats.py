"""A tiny model's folder with a tokenizer that is trained here, and conversations of a real text: this Python's own."""

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

MODULES = ("argparse", "bisect", "calendar", "configparser", "difflib", "fractions", "json", "shutil", "textwrap")
VOCABULARY = 320
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


def rows() -> list[dict[str, object]]:
    """A conversation for each function that says what it does; some ask twice."""
    found: list[dict[str, object]] = []
    told = list(_told())
    for at, (name, says) in enumerate(told):
        messages = [{"role": "user", "content": f"What does {name} do?"}, {"role": "assistant", "content": says}]
        if at % 3 == 0:
            other, more = told[(at + 1) % len(told)]
            messages += [{"role": "user", "content": f"And {other}?"}, {"role": "assistant", "content": more}]
        found.append({"messages": messages})
    return found


def _told() -> Iterator[tuple[str, str]]:
    for module in MODULES:
        for name, value in sorted(vars(importlib.import_module(module)).items()):
            says = (inspect.getdoc(value) or "").partition("\n")[0] if inspect.isfunction(value) else ""
            if says:
                yield f"{module}.{name}", says


def write_rows(path: Path, count: int | None = None) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()[:count]))
    return path


def write_tokenizer(folder: Path, template: str | None = PLAIN) -> Path:
    """As save_pretrained writes it: byte-level BPE with a few merges, and tokens of its own for turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    coder = Tokenizer(models.BPE())
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    coder.train_from_iterator([says for _, says in _told()], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=coder, eos_token="<|end|>", chat_template=template)
    made.save_pretrained(folder)
    return folder
