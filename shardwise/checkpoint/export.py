"""A checkpoint's weights out again: a folder of a Hugging Face model, as from_pretrained loads it; of one with
adapters, those alone as peft loads them, or merged into the weights. No torch.

The checkpoint may come from any split: its tensors are logical ones. They are read one by one, each against its digest,
and host memory holds the largest of them twice at most.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.adapters import Adapter, adapters_of, alone, config_of, is_adapter, merged_bits, without
from shardwise.checkpoint.compare import values_of
from shardwise.checkpoint.files import ITEM_BYTES, Content, file_order, header
from shardwise.checkpoint.manifest import Manifest, TensorEntry, read_manifest
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from shardwise.regions import whole

Dtype = Literal["saved", "fp32", "bf16", "fp16"]
FILE_BYTES = 2 * 2**30
# What makes the folder a model beside its weights; weights of the folder that it was trained from are never taken.
COPIED = ("*.json", "*.model", "*.txt", "*.jinja")
_NOT_COPIED = ("model.safetensors.index.json",)
_MODEL = "model/"
_STORED = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
# As config.json spells them.
_SPELLED = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Exported(NamedTuple):
    """What was written: files, tensors, bytes, and the dtype of the floating-point ones."""

    folder: Path
    files: int
    tensors: int
    bytes: int
    dtype: str


class Piece(NamedTuple):
    """A tensor that is written: what is stored of it, and what is added."""

    entry: TensorEntry
    adapter: Adapter | None = None


def export(
    store: Store,
    folder: str,
    out: Path,
    like: Path,
    *,
    dtype: Dtype = "saved",
    file_bytes: int = FILE_BYTES,
    merged: bool = False,
) -> Exported:
    """Write the weights of one checkpoint into `out`, with config, tokenizer and templates of the folder `like`.

    Of a model that was trained with adapters, the adapters alone, or `merged`: all weights with them added. `out`
    appears whole or not at all. Raises: CheckpointError, Damaged, OSError.
    """
    _require_new(out)
    config = _config(like)
    manifest = read_manifest(store, folder)
    weights = _weights(manifest)
    adapters = adapters_of(manifest, weights, config)
    if merged and not adapters:
        raise CheckpointError(f"{folder} has no adapters to merge.", fix="leave --merged out")
    if adapters and not merged:
        pieces = {alone(name): Piece(entry) for name, entry in weights.items() if is_adapter(name)}
    else:
        pieces = {
            without(name): Piece(entry, adapters.get(name)) for name, entry in weights.items() if not is_adapter(name)
        }
    stem = "adapter_model" if adapters and not merged else "model"
    beside = out.with_name(f".{out.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        files = list(_written(store, folder, pieces, beside, dtype, file_bytes, stem))
        spelled = _spelled(pieces, dtype)
        if stem == "adapter_model":
            body = msgspec.json.encode(config_of(manifest, weights, str(like), config))
            (beside / "adapter_config.json").write_bytes(msgspec.json.format(body, indent=2))
        else:
            _beside_weights(like, beside, config, spelled)
        beside.rename(out)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return Exported(out, len(files), len(pieces), sum(files), spelled)


def _require_new(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            f"{out} is there already.", why="an export never writes over anything", fix="name a new folder"
        )
    if out.exists():
        out.rmdir()


def _config(like: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = msgspec.json.decode((like / "config.json").read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{like} has no config.json that can be read.",
            why=str(error),
            fix="--like FOLDER: the folder of the model that was trained",
        ) from error
    return config


def _weights(manifest: Manifest) -> dict[str, TensorEntry]:
    """Parameters and buffers of the module, each once: a tied weight under the name that it was stored by."""
    found = {
        entry.name.removeprefix(_MODEL): entry for entry in manifest.tensors if entry.name.startswith(_MODEL)
    }  # fmt: skip
    if not found:
        raise CheckpointError("The checkpoint holds no model.", fix="name a checkpoint of sw.Trainer")
    return found


def _written(
    store: Store, folder: str, pieces: Mapping[str, Piece], out: Path, dtype: Dtype, most: int, stem: str
) -> Iterator[int]:
    """Write file after file, in the order of names, and their index; yields the bytes of each."""
    # peft reads adapters from one file.
    groups = list(_in_files(pieces, dtype, most)) if stem == "model" else [sorted(pieces)]
    names = (
        [f"{stem}.safetensors"]
        if len(groups) == 1
        else [f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    )
    total = 0
    for name, group in zip(names, groups, strict=True):
        contents = file_order([_content(store, folder, one, pieces[one], dtype) for one in group])
        with (out / name).open("wb") as file:
            # transformers asks which framework wrote a file.
            file.write(header(contents, {"format": "pt"}))
            for content in contents:
                file.write(content.load())
        size = sum(content.bytes for content in contents)
        total += size
        yield size
    if len(groups) > 1:
        where = {one: name for name, group in zip(names, groups, strict=True) for one in group}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (out / "model.safetensors.index.json").write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2))


def _in_files(pieces: Mapping[str, Piece], dtype: Dtype, most: int) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name in sorted(pieces):
        entry = pieces[name].entry
        more = ITEM_BYTES[_stored_as(entry, dtype)] * int(np.prod(entry.shape, dtype=np.int64))
        if group and size + more > most:
            yield group
            group, size = [], 0
        group.append(name)
        size += more
    yield group


def _content(store: Store, folder: str, name: str, piece: Piece, dtype: Dtype) -> Content:
    entry, wanted = piece.entry, _stored_as(piece.entry, dtype)

    def load() -> memoryview:
        bits, held = values_of(store, folder, entry), entry.dtype
        if piece.adapter is not None:
            both = (values_of(store, folder, one) for one in (piece.adapter.a, piece.adapter.b))
            bits, held = merged_bits(piece.adapter, bits, held, *both)
        made = converted(bits, held, wanted)
        if made is not bits:
            _require_in_range(name, bits, held, made, wanted)
        return memoryview(np.ascontiguousarray(made).reshape(-1).view(np.uint8))

    return Content(name, wanted, entry.shape, whole(entry.shape), load)


def _stored_as(entry: TensorEntry, dtype: Dtype) -> str:
    return entry.dtype if dtype == "saved" or entry.dtype not in _SPELLED else _STORED[dtype]


def converted(bits: npt.NDArray[Any], held: str, wanted: str) -> npt.NDArray[Any]:
    """Bits of one floating-point dtype as those of another, rounded to the nearest, ties to even."""
    if held == wanted:
        return bits
    values = _values(bits, held)
    with np.errstate(over="ignore", invalid="ignore"):
        if wanted != "BF16":
            return values.astype(_NUMPY[wanted])
        wide = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32)
    rounded = (wide + np.uint32(0x7FFF) + ((wide >> 16) & 1)) >> 16
    # What is no number stays one: rounding might carry it into another sign.
    return np.where((wide & 0x7FFFFFFF) > 0x7F800000, (wide >> 16) | 0x40, rounded).astype(np.uint16)


def _values(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else bits.view(_NUMPY[dtype])


def _require_in_range(name: str, bits: npt.NDArray[Any], held: str, made: npt.NDArray[Any], wanted: str) -> None:
    """Raises: CheckpointError where a number became infinite."""
    before, after = _values(bits, held), _values(made, wanted)
    lost = int((np.isfinite(before) & ~np.isfinite(after)).sum())
    if lost:
        raise CheckpointError(
            f"{lost} values of {name} are too large for {_SPELLED[wanted]}.",
            why=f"the largest is {float(np.abs(before[np.isfinite(before)]).max()):.3g}",
            fix="--dtype bf16 or fp32",
        )


_NUMPY: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def _spelled(pieces: Mapping[str, Piece], dtype: Dtype) -> str:
    floats = [kind for piece in pieces.values() if (kind := _stored_as(piece.entry, dtype)) in _SPELLED]
    return _SPELLED[max(floats, key=lambda one: ITEM_BYTES[one], default="F32")]


def _beside_weights(like: Path, out: Path, config: dict[str, Any], dtype: str) -> None:
    for pattern in COPIED:
        for file in like.glob(pattern):
            if file.name not in _NOT_COPIED and file.name != "config.json":
                shutil.copyfile(file, out / file.name)
    kept = {key: value for key, value in config.items() if key != "torch_dtype"}
    body = msgspec.json.encode({**kept, "dtype": dtype})
    (out / "config.json").write_bytes(msgspec.json.format(body, indent=2))
