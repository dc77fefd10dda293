"""What a scratch run's files say: its steps, which moment it is in, and what its checkpoints hold."""

import contextlib
import time
from pathlib import Path

from shardwise.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify_file
from shardwise.checkpoint.store import LocalStore
from shardwise.data.ledger import Proof, kept_in, prove
from shardwise.errors import CheckpointError, RunFolderError
from shardwise.events.reader import Tail
from shardwise.events.values import Step
from shardwise.launch import run_folder


class Watch:
    """What the run's files say: its newest attempt and step, and which moment it is in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempt = self.step = 0
        self.began = self.changed = time.monotonic()
        self.stepped = False
        self._tail: Tail | None = None

    def started(self) -> None:
        """The command is started (again)."""
        self.stepped, self.began, self.changed = False, time.monotonic(), time.monotonic()

    def look(self) -> list[Step]:
        """Read on in the newest attempt's events: the steps that are new."""
        newest = self._newest()
        if newest > self.attempt:
            self.attempt, self.stepped = newest, False
            self._tail = Tail(run_folder.events_path(self.folder, newest))
        found = self._tail.new() if self._tail is not None else []
        if found:
            self.changed = time.monotonic()
        steps = [event for event in found if isinstance(event, Step)]
        if steps:
            self.step, self.stepped = steps[-1].step, True
        return steps

    def _newest(self) -> int:
        paths = (self.folder / "events").glob("attempt-*.jsonl")
        return max((int(path.stem.split("-")[1]) for path in paths), default=0)

    def moment(self, moment: str, world: int) -> bool:
        """Whether the run is in this moment now."""
        if moment == "training":
            return self.stepped
        if moment in ("opening", "resuming"):
            return not self.stepped and (moment == "opening" or bool(committed(self.folder)))
        for folder in self._folders():
            with contextlib.suppress(OSError):
                names = [path.name for path in folder.iterdir()]
                whole = sum(name.endswith(".safetensors") for name in names)
                if MANIFEST not in names and (whole >= world if moment == "committing" else len(names) > 0):
                    return True
        return False

    def _folders(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted(run_folder.checkpoints_folder(self.folder).iterdir())
        return []


def committed(folder: Path) -> list[Path]:
    """Folders with a manifest, oldest step first."""
    root = run_folder.checkpoints_folder(folder)
    with contextlib.suppress(OSError):
        found = [path for path in root.iterdir() if (path / MANIFEST).exists()]
        return sorted(found, key=lambda path: (path.name.split("-")[1], path.stat().st_mtime))
    return []


def newest_manifest(folder: Path) -> Manifest:
    """Of the newest checkpoint, after every byte of it was verified. Raises: CheckpointError, RunFolderError."""
    found = committed(folder)
    if not found:
        raise RunFolderError(f"There is no checkpoint in {folder}.", fix="start the run")
    store = LocalStore(run_folder.checkpoints_folder(folder))
    manifest = read_manifest(store, found[-1].name)
    for file in manifest.files:
        verify_file(store, found[-1].name, file)
    return manifest


def weights_of(folder: Path) -> dict[tuple[str, tuple[int, ...]], str]:
    """The digest of every region of every tensor in the newest checkpoint."""
    return {
        (entry.name, chunk.offsets): chunk.digest for entry in newest_manifest(folder).tensors for chunk in entry.chunks
    }


def ledger_of(folder: Path) -> Proof:
    """What the ledger in the newest checkpoint proves. Raises: CheckpointError where there is none."""
    segments = kept_in(newest_manifest(folder).state)
    if segments is None:
        raise CheckpointError(f"The newest checkpoint in {folder} has no ledger.", fix="train with this version")
    return prove(segments)
