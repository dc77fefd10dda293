"""A model's safetensors files: which there are, and what is in them. Headers are read, no weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from safetensors import safe_open

from shardwise.errors import ModelError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Stored(NamedTuple):
    """A tensor in a file: where, its shape, and its dtype as the file spells it (F32, BF16)."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class Together(NamedTuple):
    """What lies in files expert by expert, and in the module as one tensor: `parts` one below another, each of them the
    experts in order.

    Shapes: of each stored one [rows, columns] -> [experts, rows of all parts, columns].
    """

    parts: tuple[tuple[Stored, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(part[0].shape[0] for part in self.parts)
        return (len(self.parts[0]), rows, *self.parts[0][0].shape[1:])

    @property
    def dtype(self) -> str:
        return self.parts[0][0].dtype

    @property
    def file(self) -> Path:
        return self.parts[0][0].file


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
                part = opened.get_slice(name)
                yield Stored(file, name, tuple(part.get_shape()), part.get_dtype())
    except Exception as error:  # the library raises its own kind, which it does not document
        raise ModelError(f"{file} is no whole safetensors file.", why=str(error), fix="copy it again") from error
