"""Where a model of Hugging Face lies: a folder on the disk, or out of the hub's own cache. No torch."""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shardwise.errors import ModelError

PREFIX = "hf:"
# What is fetched from the hub: no code, and no file that is a pickle.
DESCRIPTION = ("*.json", "tokenizer.model", "*.txt", "*.jinja")
FETCHED = (*DESCRIPTION, "*.safetensors")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def find(model: str, *, weights: bool = True) -> Path:
    """The folder of "hf:owner/name", "hf:folder", an id or a folder; from the hub through its own cache.

    Without `weights` what describes the model is enough: config, tokenizer, templates.
    Raises: ModelError where there is none, or the hub does not give it.
    """
    name = model.removeprefix(PREFIX)
    if Path(name).is_dir():
        if not Path(name, "config.json").is_file():
            raise ModelError(f"{name} has no config.json.", fix="give the folder that save_pretrained wrote")
        return Path(name)
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"There is no folder {name!r}.", fix='a folder with a config.json, or "hf:owner/name"')
    return _from_hub(name, FETCHED if weights else DESCRIPTION)


def _from_hub(name: str, patterns: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise needs_extra(error) from error
    try:
        # Ranks of one host wait for each other at the cache's own lock, and one of them loads.
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{name} did not come from the hub.",
            why=str(error).strip().splitlines()[0],
            fix="check its name and this host's network (HF_TOKEN for a model that asks for it), or give a folder",
        ) from error


def needs_extra(error: ImportError) -> ModelError:
    return ModelError("Models of Hugging Face need the extra hf.", why=str(error), fix="pip install 'shardwise[hf]'")


def config_of(folder: Path) -> Mapping[str, object]:
    """What config.json says. Raises: ModelError where it is none."""
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(
            f"{folder} has no config.json that can be read.", why=str(error), fix="copy or download it again"
        ) from error


def vocabulary_of(folder: Path) -> int | None:
    """Rows of the model's embedding as config.json has them; None where it does not say."""
    config = config_of(folder)
    inner = config.get("text_config")
    rows = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, Mapping) else None)
    return rows if isinstance(rows, int) else None
