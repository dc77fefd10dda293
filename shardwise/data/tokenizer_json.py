"""A model's own tokenizer, as the `tokenizers` library reads it from tokenizer.json. No torch."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from shardwise.data.coder import Tokenizer
from shardwise.errors import DataError

FILE = "tokenizer.json"
# Where the name of the token that ends a text stands, and where its id does.
_NAMED, _NUMBERED = ("tokenizer_config.json", "special_tokens_map.json"), ("generation_config.json", "config.json")


def of_folder(folder: str) -> Tokenizer:
    """The tokenizer of a folder; documents begin as it begins them, and end with its end-of-text token.

    Raises: DataError where there is none, or nothing says how a text ends.
    """
    path = Path(folder)
    coder, digest = read(path)
    ends = _end_of_text(path, coder)

    def encode(raw: bytes) -> np.ndarray[Any, np.dtype[np.uint32]]:
        found = np.array(coder.encode(raw.decode("utf-8")).ids, dtype=np.uint32)
        # The separator comes behind every document: where the tokenizer ends texts itself, it stands there once.
        return found[:-1] if len(found) and found[-1] == ends else found

    return Tokenizer(f"{FILE} {digest} {ends}", ids(coder), ends, encode, folder, cuts_anywhere=False)


def ids(coder: Any) -> int:
    """One more than the largest id: ids may have holes."""
    return 1 + int(max(coder.get_vocab(with_added_tokens=True).values()))


def _content(folder: Path) -> bytes:
    try:
        return (folder / FILE).read_bytes()
    except OSError as error:
        slow = (folder / "tokenizer.model").is_file()
        raise DataError(
            f"{folder} has no {FILE}.",
            why="tokenizer.model alone is not read" if slow else error.strerror or str(error),
            fix="AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes it"
            if slow
            else 'data.tokenizer = a folder that has one, or "bytes"',
        ) from error


def read(folder: Path) -> tuple[Any, str]:
    """The tokenizer of the library, and a digest of its file. Raises: DataError."""
    raw = _content(folder)
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            "A model's own tokenizer needs the extra hf.", why=str(error), fix="pip install 'shardwise[hf]'"
        ) from error
    try:
        coder = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
    except Exception as error:  # the library raises bare Exceptions
        raise DataError(f"{folder / FILE} is no tokenizer.", why=str(error), fix="copy or download it again") from error
    # What a tokenizer was saved with to make batches of one length.
    coder.no_truncation()
    coder.no_padding()
    return coder, xxhash.xxh3_128_hexdigest(raw)


def _end_of_text(folder: Path, coder: Any) -> int:
    for name in _NAMED:
        token = _json(folder / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found = coder.token_to_id(text)
            if found is None:
                raise DataError(
                    f"{folder / name} says that texts end with {text!r}, which {FILE} has not.",
                    fix="give the files that belong together",
                )
            return int(found)
    for name in _NUMBERED:
        number = _json(folder / name).get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int):
            return number
    raise DataError(
        f"Nothing in {folder} says how a text ends.",
        why=f"an end-of-text token stands between documents; {' and '.join(_NAMED)} name none",
        fix='"eos_token": "..." in tokenizer_config.json',
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return found if isinstance(found, dict) else {}
