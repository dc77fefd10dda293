"""A model's folder: its config and its safetensors files, from disk or from the hub. Headers are read, no weights."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from safetensors import safe_open

from shardwise.errors import ModelError

PREFIX = "hf:"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# What is fetched from the hub: no code, and no file that is a pickle.
FETCHED = ("*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Stored(NamedTuple):
    """A tensor in a file: where, and its shape."""

    file: Path
    name: str
    shape: tuple[int, ...]


def find(model: str) -> Path:
    """The folder of "hf:owner/name", "hf:folder" or a folder; from the hub through its own cache.

    Raises: ModelError where there is none, or the hub does not give it.
    """
    name = model.removeprefix(PREFIX)
    if Path(name).is_dir():
        if not Path(name, "config.json").is_file():
            raise ModelError(f"{name} has no config.json.", fix="give the folder that save_pretrained wrote")
        return Path(name)
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"There is no folder {name!r}.", fix='a folder with a config.json, or "hf:owner/name"')
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise needs_extra(error) from error
    try:
        # Ranks of one host wait for each other at the cache's own lock, and one of them loads.
        return Path(snapshot_download(name, allow_patterns=list(FETCHED)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{name} did not come from the hub.",
            why=str(error).strip().splitlines()[0],
            fix="check its name and this host's network (HF_TOKEN for a model that asks for it), or give a folder",
        ) from error


def needs_extra(error: ImportError) -> ModelError:
    return ModelError("Models of Hugging Face need the extra hf.", why=str(error), fix="pip install 'shardwise[hf]'")


def stored(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's safetensors files, by name. Raises: ModelError for none, or a file that is missing."""
    found: dict[str, Stored] = {}
    for file in _files(folder):
        if not file.is_file():
            raise ModelError(
                f"{file.name} is missing in {folder}.",
                why=f"{INDEX} names it",
                fix="copy or download it again; a model with a part left out is never trained",
            )
        found.update({one.name: one for one in _of_file(file)})
    return found


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        index = msgspec.json.decode((folder / INDEX).read_bytes())
        names = sorted(set(index["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{INDEX} of {folder} names a file elsewhere.", fix="give a folder that holds its files")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    raise ModelError(
        f"{folder} has a config and no weights in safetensors files.",
        why=f"{pickled[0]} is a pickle, which may run any code when it is read" if pickled else "",
        fix="save it again with save_pretrained, which writes safetensors"
        if pickled
        else "give a folder with model.safetensors or its index",
    )


def _of_file(file: Path) -> Iterator[Stored]:
    try:
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                yield Stored(file, name, tuple(opened.get_slice(name).get_shape()))
    except Exception as error:  # the library raises its own kind, which it does not document
        raise ModelError(f"{file} is no whole safetensors file.", why=str(error), fix="copy it again") from error
