"""Save: the ranks agree in the main thread that all can; in a thread each writes its file, and rank 0 the manifest.

Writing the manifest is the commit.
"""

import errno
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec

from shardwise import ranks
from shardwise.checkpoint.assembly import Copy, Header, Share, assemble, check_copies, check_whole
from shardwise.checkpoint.exchange import Exchange
from shardwise.checkpoint.files import write_file
from shardwise.checkpoint.layout import Alike, disagreeing
from shardwise.checkpoint.manifest import MANIFEST, Record, digest_of, seal
from shardwise.checkpoint.retention import delete_folder
from shardwise.checkpoint.snapshot import Layout, Part, Snapshot, parts
from shardwise.checkpoint.staging import HostBuffer
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.store_errors import StoreError, told
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.units import format_bytes

Result = TypeVar("Result")

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_ACCESS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# Before the first new try of an operation; doubled for each further one.
FIRST_BACKOFF_SECONDS = 1.0
# A rank that has not written its file by then is taken for lost: 180 GB at the 100 MB/s of a slow shared disk.
LIMIT_SECONDS = 1800.0
# The room that should be free: this checkpoint and, before an old one may go, the next.
ROOM_CHECKPOINTS = 2


@runtime_checkable
class Roomy(Protocol):
    """A Store that knows how much still fits into it."""

    def free_bytes(self) -> int | None: ...


class NoRoom(CheckpointError):
    """The checkpoint does not fit into its store; nothing was written."""


class Lasting(CheckpointError):
    """A save failed for a reason that no other try would mend."""


class Trouble(Record, frozen=True):
    """Why a rank could not do its part. `lasting`: another try would end the same."""

    rank: int
    what: str
    why: str
    fix: str
    lasting: bool = True


class Ready(Record, frozen=True):
    """What a rank tells before a save: what it takes others to hold too, digests of what may differ, its bytes."""

    alike: tuple[Alike, ...] = ()
    digests: dict[str, str] = msgspec.field(default_factory=dict)
    bytes: float = 0.0
    free: int | None = None
    trouble: Trouble | None = None


class Report(Record, frozen=True):
    """How writing went on one rank. `tried`: why an operation was done again, "" where none was."""

    share: Share | None = None
    trouble: Trouble | None = None
    tried: str = ""


class Outcome(Record, frozen=True):
    """How a save ended, the same on every rank: `bytes` over all ranks, or the first trouble."""

    bytes: int = 0
    trouble: Trouble | None = None
    notes: tuple[str, ...] = ()


class Prepared(NamedTuple):
    """What this rank is to write, and of what others write the copies that it holds. `low`: said where little room is
    left.
    """

    kept: Snapshot
    parts: list[Part]
    copies: list[Part]
    low: str = ""


def prepare(store: Store, step: int, take: Callable[[], Snapshot]) -> Prepared:
    """What each rank writes, worked out by itself, once all can; nothing is written or copied yet.

    Collective: one gather of JSON. Raises: CheckpointError, the same on every rank, naming the first in trouble;
    NoRoom.
    """
    kept, layout = Snapshot(), Layout({}, {})

    def look() -> Ready:
        nonlocal kept, layout
        kept = take()
        layout = kept.layout()
        free = store.free_bytes() if ranks.is_main() and isinstance(store, Roomy) else None
        digests = kept.digests() if ranks.world() > 1 else dict.fromkeys(kept.apart, "")
        return Ready(layout.alike(), digests, _bytes_of(kept, layout), free)

    try:
        mine = look()
    except Exception as error:
        mine = Ready(trouble=trouble_of(error, store))
    everyone = [msgspec.convert(each, Ready) for each in ranks.gather_json(msgspec.to_builtins(mine))]
    for each in everyone:
        if each.trouble is not None:
            raise failed(step, each.trouble)
    low = _room(store, step, sum(each.bytes for each in everyone), everyone[0].free)
    _refuse_disagreement(everyone)
    return Prepared(kept, *parts(kept, layout, [each.digests for each in everyone], rank=ranks.rank()), low)


@dataclass
class Task:
    """A save that all ranks have agreed on, for this rank's thread. `retries`: how often what fails is tried again."""

    store: Store
    folder: str
    header: Header
    prepared: Prepared
    exchange: Exchange
    retries: int = 0
    backoff_seconds: float = FIRST_BACKOFF_SECONDS
    trouble: Trouble | None = None

    def carry_out(self, given_up: threading.Event) -> Outcome:
        """Write, report, and on rank 0 commit or take back; never raises. No collective, no wait without a limit."""
        try:
            self.exchange.report(self._write(given_up))
            if self.exchange.rank:
                heard: Outcome = self.exchange.outcome(Outcome, given_up)
                return heard
            outcome = self._finish(given_up)
            self.exchange.publish(outcome)
            return outcome
        except Exception as error:
            # Without rank 0 or the store the ranks cannot agree on how it ended, and must not go on apart.
            return Outcome(trouble=msgspec.structs.replace(trouble_of(error, self.store), lasting=True))

    def _write(self, given_up: threading.Event) -> Report:
        if self.trouble is not None:
            return Report(trouble=self.trouble)
        return self._attempt(lambda: write_share(self.store, self.folder, self.prepared), given_up)

    def _finish(self, given_up: threading.Event) -> Outcome:
        """On rank 0: the manifest, or the removal of what was written."""
        try:
            reports: list[Report] = self.exchange.reports(Report, given_up)
        except Exception as error:
            # Who did not report may be writing still: what is there is torn, and goes after the next commit.
            return Outcome(trouble=trouble_of(error, self.store))
        troubles = [report.trouble for report in reports if report.trouble]
        shares = [report.share for report in reports if report.share]
        end = Report(trouble=troubles[0]) if troubles else self._attempt(lambda: self._commit(shares), given_up)
        notes = tuple(note for note in dict.fromkeys([report.tried for report in reports] + [end.tried]) if note)
        if end.trouble is None:
            return Outcome(sum(share.file.bytes for share in shares), notes=notes)
        try:
            delete_folder(self.store, self.folder)
        except Exception as error:
            # The cause stands in the outcome; what cannot be removed now is torn, and goes after the next commit.
            notes += (f"{self.folder} was not removed: {type(error).__name__}: {error}",)
        return Outcome(trouble=end.trouble, notes=notes)

    def _commit(self, shares: list[Share]) -> None:
        manifest = assemble(self.header, shares)
        check_whole(manifest)
        check_copies(manifest, [share.copies for share in shares])
        self.store.create(f"{self.folder}/{MANIFEST}", seal(manifest))

    def _attempt(self, act: Callable[[], Share | None], given_up: threading.Event) -> Report:
        """Once, and again where what failed may pass; the waiting is this thread's, and training's goes on."""
        tried = ""
        for attempt in range(self.retries + 1):
            try:
                return Report(share=act(), tried=tried)
            except Exception as error:
                trouble = trouble_of(error, self.store)
                tried = f"rank {trouble.rank}, try {attempt + 1}: {trouble.what} {trouble.why}"
                if not may_pass(error) or given_up.wait(self.backoff_seconds * 2**attempt):
                    break
        return Report(trouble=trouble)


def staged(task: Task, buffer: HostBuffer) -> None:
    """The task's values copied into the buffer. A rank that cannot must report it: the others count on that."""
    prepared = task.prepared
    try:
        taken = buffer.take([*prepared.parts, *prepared.copies])
    except Exception as error:
        task.trouble = trouble_of(error, task.store)
        return
    count = len(prepared.parts)
    task.prepared = prepared._replace(parts=taken[:count], copies=taken[count:])


def write_share(store: Store, folder: str, prepared: Prepared) -> Share:
    """Writes this rank's file, and takes the digests of its copies of what others write. Raises: OSError."""
    kept = prepared.kept
    written = write_file(
        store, folder, f"rank-{ranks.rank():05d}.safetensors", [part.content for part in prepared.parts]
    )
    return Share(
        file=written.file,
        tensors=written.tensors,
        aliases=kept.aliases,
        state=kept.state,
        copies=tuple(_copy(part) for part in prepared.copies),
    )


def new_session() -> str:
    """A name that no other attempt has, the same on all ranks. Collective."""
    return str(ranks.broadcast_json(secrets.token_hex(4)))


def failed(step: int, trouble: Trouble) -> CheckpointError:
    what = f"The checkpoint of step {step} was not saved: rank {trouble.rank}: {trouble.what}"
    return (Lasting if trouble.lasting else CheckpointError)(what, why=trouble.why, fix=trouble.fix)


def trouble_of(error: Exception, store: Store, act: str = "written") -> Trouble:
    """An error as a value that crosses ranks, with the fix that its cause suggests. `act`: "written" or "read"."""
    lasting = not isinstance(error, OSError | MemoryError | NoRoom)
    if isinstance(error, OSError):
        error = told(error, act, store)
    if isinstance(error, ShardwiseError | StoreError):
        return Trouble(ranks.rank(), error.what, error.why, error.fix, lasting)
    fix = "what was committed before is kept: start again to go on from there"
    return Trouble(ranks.rank(), f"{type(error).__name__} while it was {act}.", str(error), fix, lasting)


def may_pass(error: Exception) -> bool:
    """Whether trying again within seconds makes sense: a full disk and a refused access stay as they are."""
    return isinstance(error, OSError) and error.errno not in _NO_SPACE | _NO_ACCESS


def _copy(part: Part) -> Copy:
    region = part.content.region
    return Copy(part.content.name, region.offsets, region.shape, digest_of(part.content.load()))


def _bytes_of(kept: Snapshot, layout: Layout) -> float:
    """This rank's even part of what is to be written."""
    items = {name: kept.shared[name].element_size() for name in layout.regions}
    alike = sum(region.numel * items[name] / len(layout.holders[name]) for name, region in layout.regions.items())
    own = sum(tensor.nbytes for tensor in kept.own.values())
    return alike + own + sum(kept.shared[name].nbytes for name in kept.apart) / ranks.world()


def _room(store: Store, step: int, needed: float, free: int | None) -> str:
    """What there is to say where room is short. Raises: NoRoom."""
    if free is None or free >= ROOM_CHECKPOINTS * needed:
        return ""
    numbers = f"it needs {format_bytes(needed)}, and {format_bytes(free)} are free under {store}"
    fix = "free space there, keep fewer with checkpoint.keep, or choose another run folder"
    if free < needed:
        raise NoRoom(f"The checkpoint of step {step} was not saved: it does not fit.", why=numbers, fix=fix)
    return f"{numbers}: the next one may not fit beside it"


def _refuse_disagreement(everyone: list[Ready]) -> None:
    pair = disagreeing([each.alike for each in everyone])
    if pair is not None:
        raise CheckpointError(
            f"Rank {pair[0]} and rank {pair[1]} do not hold the same, and nothing says so.",
            why="each rank works out by itself what it writes, from meshes and from which ranks hold a module alike",
            fix="give the Checkpointer holders=, the ranks that hold the same part of the model as this one",
        )
