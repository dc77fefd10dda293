"""A conversation into tokens, by the template of the tokenizer: which of them are the assistant's own is marked.

Each token is `2 * id + counted`: counted ones are learned. A template that has generation marks says them itself. Of
any other they are what the conversation to the end of an assistant's turn has beyond its beginning up to there, which
is held to be true: a template that writes earlier turns otherwise once later ones follow is refused.

No torch, and transformers where rows are encoded alone: that is a process of its own (data/tokenize.py).
"""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwise.data import tokenizer_json
from shardwise.data.coder import BadRow, Tokenizer
from shardwise.errors import DataError

# No id: two times one and one more would not be in 32 bits.
SEPARATOR = 2**32 - 1
ASSISTANT = "assistant"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OWN_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_MEND = "mend the line, or leave it out"


def tokenizer(folder: str, template_file: str, messages_key: str) -> Tokenizer:
    """Of the rows of a file of conversations. Raises: DataError where there is no tokenizer, or no template."""
    if folder == "bytes":
        raise DataError(
            "Conversations need a model's own tokenizer.",
            why="bytes have no template that says whose turn it is",
            fix='data.tokenizer = "auto" beside model.hf, or a folder with tokenizer.json and a chat template',
        )
    coder, digest = tokenizer_json.read(Path(folder))
    template = _template(Path(folder), template_file)
    name = f"chat {xxhash.xxh3_128_hexdigest(template.encode())} {digest}"
    rows = Rows(folder, template, messages_key)
    return Tokenizer(name, tokenizer_json.ids(coder), SEPARATOR, rows.no_text, folder, cuts_anywhere=False, row=rows)


def _template(folder: Path, template_file: str) -> str:
    """The template's text: a file of the user's, else the tokenizer's own. Raises: DataError."""
    if template_file:
        try:
            return Path(template_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"data.chat_template = {template_file!r} cannot be read.", why=str(error), fix="name a Jinja file"
            ) from error
    if (folder / _OWN_FILE).is_file():
        return (folder / _OWN_FILE).read_text(encoding="utf-8")
    try:
        found = msgspec.json.decode((folder / _CONFIG).read_bytes()).get("chat_template")
    except (OSError, msgspec.DecodeError, AttributeError):
        found = None
    if isinstance(found, list):
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    if isinstance(found, str):
        return found
    raise DataError(
        f"The tokenizer of {folder} has no chat template.",
        why=f"neither {_OWN_FILE} nor chat_template in {_CONFIG} is there",
        fix='data.chat_template = "template.jinja", or the folder of a model that was made for conversations',
    )


class Rows:
    """A row of JSON lines -> its tokens with their marks. transformers is imported at the first one."""

    def __init__(self, folder: str, template: str, messages_key: str) -> None:
        self.folder, self.template, self.key = folder, template, messages_key
        self.marks = _MARKS.search(template) is not None
        self._tokenizer: Any = None

    def no_text(self, raw: bytes) -> NDArray[np.uint32]:
        raise DataError("A text is no conversation.", fix="data.text for texts, data.chat for conversations")

    def __call__(self, row: dict[str, Any]) -> NDArray[np.uint32]:
        """Shapes: [tokens]. Raises: BadRow."""
        messages = _messages(row, self.key)
        tools = row.get("tools") or None
        ids, counted = self._marked(messages, tools) if self.marks else self._by_prefixes(messages, tools)
        if not counted[1:].any():
            raise BadRow("no token of it is the assistant's, so there is nothing to learn", _MEND)
        return (2 * ids + counted).astype(np.uint32)

    def _marked(self, messages: list[Any], tools: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = self._apply(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return np.array(found["input_ids"]), np.array(found["assistant_masks"])

    def _by_prefixes(self, messages: list[Any], tools: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        whole = self._apply(messages, tools, tokenize=False)
        turns = [self._turn(messages, at, whole, tools) for at, one in enumerate(messages) if one["role"] == ASSISTANT]
        found = self.loaded()(whole, add_special_tokens=False, return_offsets_mapping=True)
        begins, ends = np.array(found["offset_mapping"]).reshape(-1, 2).T
        counted = np.zeros(len(begins), np.int64)
        for begin, end in turns:
            across = ((begins < begin) & (ends > begin)) | ((begins < end) & (ends > end))
            if across.any():
                raise BadRow(
                    "a token lies across the edge of an assistant's turn: "
                    f"{whole[begins[across][0] : ends[across][0]]!r}",
                    "a template with {% generation %} marks, or mend the line",
                )
            counted[(begins >= begin) & (ends <= end) & (ends > begin)] = 1
        return np.array(found["input_ids"]), counted

    def _turn(self, messages: list[Any], at: int, whole: str, tools: Any) -> tuple[int, int]:
        """Where an assistant's turn begins and ends in the text. Raises: BadRow."""
        if at == 0:
            raise BadRow(
                "it begins with the assistant, and a template without generation marks does not say where its turn is",
                "a template with {% generation %} marks, or a conversation that the user begins",
            )
        before = self._apply(messages[:at], tools, tokenize=False, add_generation_prompt=True)
        after = self._apply(messages[: at + 1], tools, tokenize=False)
        if not (whole.startswith(after) and after.startswith(before)):
            raise BadRow(
                f"the template writes the conversation up to message {at + 1} otherwise once more follows",
                "a template with {% generation %} marks, or conversations of one assistant's turn each",
            )
        return len(before), len(after)

    def _apply(self, messages: list[Any], tools: Any, **more: Any) -> Any:
        """Raises: BadRow for what the template refuses (roles that do not alternate, say)."""
        tokenizer = self.loaded()
        try:
            return tokenizer.apply_chat_template(messages, tools=tools, chat_template=self.template, **more)
        except Exception as error:  # a template's own code
            raise BadRow(f"the template says {type(error).__name__}: {error}", _MEND) from error

    def loaded(self) -> Any:
        """transformers' tokenizer. Raises: DataError."""
        if self._tokenizer is not None:
            return self._tokenizer
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError(
                "Conversations need the extra hf.", why=str(error), fix="pip install 'shardwise[hf]'"
            ) from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        except Exception as error:  # of many kinds
            raise DataError(
                f"{self.folder} holds no tokenizer that transformers loads.",
                why=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
                fix="the folder that save_pretrained of a tokenizer wrote",
            ) from error
        return self._tokenizer


def _messages(row: dict[str, Any], key: str) -> list[Any]:
    """Raises: BadRow where the row is no conversation."""
    messages = row.get(key)
    if not isinstance(messages, list) or not messages:
        said = "missing" if key not in row else "empty" if messages == [] else f"a {type(messages).__name__}"
        raise BadRow(
            f"messages_key = {key!r} is {said}; its keys: {', '.join(sorted(row)[:8]) or 'none'}",
            "set data.messages_key to the key that holds the conversation, or mend the line",
        )
    for number, one in enumerate(messages, start=1):
        role = one.get("role") if isinstance(one, dict) else None
        if not isinstance(role, str):
            raise BadRow(f"message {number} has no role", 'each message is {"role": ..., "content": ...}')
        if not isinstance(one.get("content"), str | list) and not one.get("tool_calls"):
            raise BadRow(f"message {number} ({role}) has no content", 'each message is {"role": ..., "content": ...}')
    if not any(one["role"] == ASSISTANT for one in messages):
        raise BadRow("no message of it is the assistant's, so there is nothing to learn", _MEND)
    return messages
