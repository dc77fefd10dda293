"""A save that is written while training goes on: what save time saw is what is written, and how it ends is told."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint import Checkpointer, background
from shardwise.checkpoint.files import Content
from shardwise.checkpoint.regions import DTYPES
from shardwise.checkpoint.snapshot import Part
from shardwise.checkpoint.staging import HostBuffer
from shardwise.checkpoint.store import Piece
from shardwise.errors import CheckpointError
from shardwise.events import Events, Saved, SaveFailed
from shardwise.inputs.recipe import CheckpointPolicy
from shardwise.regions import whole
from tests.unit.test_checkpoint_store import FaultyStore, MemoryStore, disk_full

REPOSITORY = Path(__file__).parents[2]


class Gate(MemoryStore):
    """Writes nothing until it is opened, so that a save is under way for as long as a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.reached = threading.Event(), threading.Event()

    def write(self, key: str, pieces: Iterable[Piece]) -> None:
        self.reached.set()
        self.opened.wait()
        super().write(key, pieces)


class Failing(MemoryStore):
    """The first `times` writes of a file raise."""

    def __init__(self, error: Callable[[], Exception], times: int) -> None:
        super().__init__()
        self.error, self.left, self.writes = error, times, 0

    def write(self, key: str, pieces: Iterable[Piece]) -> None:
        self.writes += key.endswith(".safetensors")
        if self.left:
            self.left -= 1
            raise self.error()
        super().write(key, pieces)


class Kept:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)


def training(store: Any, value: float = 1.0, **policy: Any) -> tuple[Checkpointer, nn.Module, Kept]:
    """A training whose every weight, moment and given tensor is `value`."""
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(module.parameters())
    given = {"average": torch.zeros(4), "table": [1, torch.zeros(())]}
    fill(module, optimizer, given, value)
    kept = Kept()
    made = Checkpointer(
        "unused", module, optimizer, state=given, store=store, events=Events([kept]),
        policy=CheckpointPolicy(every_steps=1, **policy),
    )  # fmt: skip
    return made, module, kept


def fill(module: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Any], value: float) -> None:
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(value)
        for parameter in module.parameters():
            moments = optimizer.state.setdefault(parameter, {k: torch.empty_like(parameter) for k in ("exp_avg",)})
            moments["exp_avg"].fill_(value)
        given["average"].fill_(value)
        given["table"][1].fill_(value)


def change(checkpointer: Checkpointer, value: float) -> None:
    subject = checkpointer._shared.subject
    fill(subject.modules[""], subject.optimizers[""], dict(checkpointer.state), value)


def everything(checkpointer: Checkpointer) -> torch.Tensor:
    subject = checkpointer._shared.subject
    moments = [state["exp_avg"] for state in subject.optimizers[""].state.values()]
    tensors = [*subject.modules[""].state_dict().values(), *moments, checkpointer.state["average"]]
    return torch.cat([tensor.reshape(-1).float() for tensor in (*tensors, checkpointer.state["table"][1])])


def test_what_changes_after_begin_returned_is_not_written() -> None:
    store = Gate()
    checkpointer, _, _ = training(store)
    checkpointer.begin(1)
    store.reached.wait()
    change(checkpointer, 2.0)
    checkpointer.state["table"][0] = 99
    assert checkpointer.pending
    store.opened.set()
    saved = checkpointer.settle()
    assert saved is not None and saved.step == 1 and not checkpointer.pending
    again, _, _ = training(store, 7.0)
    assert again.resume() == 1
    assert bool((everything(again) == 1.0).all())
    assert again.state["table"][0] == 1


def test_one_save_is_in_flight_and_the_next_waits_for_it() -> None:
    store = Gate()
    checkpointer, _, kept = training(store)
    checkpointer.begin(1)
    store.reached.wait()
    threading.Timer(0.0, store.opened.set).start()  # The main thread waits in begin, so another opens the gate.
    change(checkpointer, 2.0)
    checkpointer.begin(2)
    assert [event.step for event in kept.events] == [1]
    assert checkpointer.settle() is not None
    assert [(type(event), event.step) for event in kept.events] == [(Saved, 1), (Saved, 2)]
    again, _, _ = training(store, 7.0)
    assert again.resume() == 2 and bool((everything(again) == 2.0).all())


def test_host_memory_is_flat_over_a_hundred_saves_and_stated() -> None:
    checkpointer, _, kept = training(MemoryStore(), keep=1)
    for step in range(1, 101):
        checkpointer.begin(step)
    checkpointer.settle()
    held = {event.host_bytes for event in kept.events}
    share = sum(content.bytes for content in _contents(checkpointer))
    assert len(kept.events) == 100 and len(held) == 1
    # Each tensor begins at 64 bytes.
    (bytes_held,) = held
    assert share <= bytes_held < share + 64 * len(_contents(checkpointer))
    addresses = {checkpointer._shared.buffer.take(_parts(checkpointer))[0].values.data_ptr() for _ in range(3)}
    assert len(addresses) == 1


def _parts(checkpointer: Checkpointer) -> list[Part]:
    from shardwise.checkpoint.saving import prepare
    from shardwise.checkpoint.snapshot import snapshot

    return prepare(checkpointer.store, 1, lambda: snapshot(checkpointer._shared.subject)).parts


def _contents(checkpointer: Checkpointer) -> list[Content]:
    return [part.content for part in _parts(checkpointer)]


def test_a_buffer_grows_only_where_a_save_needs_more_and_holds_every_dtype() -> None:
    buffer = HostBuffer()

    def take(dtype: str, shape: tuple[int, ...]) -> int:
        values = torch.arange(24, dtype=torch.uint8).remainder(2).to(DTYPES[dtype])[: int(torch.Size(shape).numel())]
        values = values.reshape(shape)
        content = Content("t", dtype, shape, whole(shape), lambda: memoryview(b""))
        (taken,) = buffer.take([Part(content, values)])
        expected = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert bytes(taken.content.load()) == expected
        return buffer.bytes

    sizes = [take(dtype, shape) for dtype in DTYPES for shape in ((), (2, 3), (0, 4), (24,))]
    assert sizes == sorted(sizes) and sizes[-1] == max(sizes) == 192


def test_a_strided_tensor_is_copied_row_by_row() -> None:
    values = torch.arange(12.0).view(3, 4).t()
    (taken,) = HostBuffer().take([Part(Content("t", "F32", (4, 3), whole((4, 3)), lambda: memoryview(b"")), values)])
    assert bytes(taken.content.load()) == values.contiguous().numpy().tobytes()


# ---------------------------------------------------------------- what fails


def stale() -> Exception:
    return OSError(116, "Stale file handle")


def test_what_may_pass_is_tried_again_in_the_thread_and_told() -> None:
    store = Failing(stale, times=2)
    checkpointer, _, kept = training(store, retries=2)
    _without_pauses(checkpointer)
    checkpointer.begin(1)
    assert checkpointer.settle() is not None
    assert store.writes == 3  # Twice in vain, then the file.
    assert [type(event).__name__ for event in kept.events] == ["Saved", "Fallback"]
    assert "try 2" in kept.events[1].why and "Stale file handle" in kept.events[1].why


def _without_pauses(checkpointer: Checkpointer) -> None:
    checkpointer._shared.backoff_seconds = 0.0


def test_a_save_that_fails_is_an_event_and_training_goes_on_until_the_policy_says_stop() -> None:
    store = Failing(stale, times=9)
    checkpointer, _, kept = training(store, retries=1, abort_after=4)
    _without_pauses(checkpointer)
    for step in (1, 2, 3):
        checkpointer.begin(step)
        assert checkpointer.settle() is None
    assert [(event.step, event.in_a_row) for event in kept.events] == [(1, 1), (2, 2), (3, 3)]
    assert all(isinstance(event, SaveFailed) and "Stale" in event.error for event in kept.events)
    assert store.values == {}
    checkpointer.begin(4)
    with pytest.raises(CheckpointError, match="4 saves in a row failed"):
        checkpointer.settle()
    checkpointer.begin(5)  # The ninth failure, then it is written.
    assert checkpointer.settle() is not None
    assert checkpointer.failures == 0 and checkpointer.saved_step == 5


def test_a_full_disk_is_not_tried_again_and_leaves_what_was() -> None:
    store = MemoryStore()
    checkpointer, _, kept = training(store, retries=5)
    checkpointer.begin(1)
    checkpointer.settle()
    before = dict(store.values)
    faulty = FaultyStore(store, at=6, fault=disk_full)
    checkpointer._shared.store = faulty
    checkpointer.begin(2)
    assert checkpointer.settle() is None
    assert "the disk is full" in kept.events[-1].error
    assert store.values == before


def test_state_that_cannot_be_kept_is_raised_at_once() -> None:
    checkpointer, _, _ = training(MemoryStore())
    checkpointer.state["odd"] = object()
    with pytest.raises(CheckpointError, match="state/odd"):
        checkpointer.begin(1)


def test_what_no_other_try_would_mend_ends_the_run() -> None:
    checkpointer, _, _ = training(Failing(lambda: CheckpointError("Two parts overlap."), times=1), retries=3)
    checkpointer.begin(1)
    with pytest.raises(CheckpointError, match=r"step 1 was not saved: rank 0: Two parts overlap\."):
        checkpointer.settle()


class Small(MemoryStore):
    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    def free_bytes(self) -> int:
        return self.free - sum(map(len, self.values.values()))


def test_room_is_looked_at_before_anything_is_written_and_told_with_numbers() -> None:
    size = training(MemoryStore())[0].save(1).bytes
    store = Small(int(1.5 * size))
    checkpointer, _, kept = training(store)
    checkpointer.begin(1)
    assert checkpointer.settle() is not None
    assert "are free under" in kept.events[0].why and "may not fit" in kept.events[0].why
    before = dict(store.values)
    checkpointer.begin(2)
    assert isinstance(kept.events[-1], SaveFailed) and "does not fit" in kept.events[-1].error
    assert store.values == before and not checkpointer.pending
    with pytest.raises(CheckpointError, match="does not fit"):
        checkpointer.save(3)


def test_the_state_of_a_step_is_committed_once_however_often_it_is_asked_for() -> None:
    store = Gate()
    store.opened.set()
    checkpointer, _, kept = training(store)
    checkpointer.begin(4)
    saved = checkpointer.finish(4, "finished")
    assert saved is not None and saved.step == 4
    assert checkpointer.finish(4, "finished") is None
    assert checkpointer.finish(5, "finished") is not None
    assert [event.step for event in kept.events] == [4, 5]


def test_with_asynchronous_off_the_commit_is_waited_for_and_no_copy_is_held() -> None:
    store = MemoryStore()
    checkpointer, _, kept = training(store, asynchronous=False)
    checkpointer.begin(1)
    assert not checkpointer.pending and checkpointer.saved_step == 1
    assert kept.events[0].host_bytes == 0 and kept.events[0].stall_seconds >= kept.events[0].seconds


# ---------------------------------------------------------------- the end of the process


def test_a_fork_does_not_inherit_a_save() -> None:
    store = Gate()
    checkpointer, _, _ = training(store)
    checkpointer.begin(1)
    store.reached.wait()
    child = os.fork()
    if child == 0:
        # Waiting for a thread that is not here would last for ever.
        idle = checkpointer.settle() is None and background.leave(60.0)
        os._exit(0 if idle and not checkpointer.pending else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.opened.set()
    assert checkpointer.settle() is not None


SCRIPT = """
import sys, os, threading, torch
from torch import nn
from shardwise.checkpoint import Checkpointer, LocalStore, background
from shardwise.inputs.recipe import CheckpointPolicy

begun = threading.Event()
class Slow(LocalStore):
    def write(self, key, pieces):
        begun.set()
        if sys.argv[2] == "stuck":
            threading.Event().wait()
        super().write(key, pieces)

background.EXIT_SECONDS = 0.2 if sys.argv[2] == "stuck" else 120.0
checkpointer = Checkpointer(sys.argv[1], nn.Linear(2, 2), store=Slow(sys.argv[1] + "/checkpoints"))
checkpointer.begin(1)
begun.wait()
if sys.argv[2] == "raises":
    raise ValueError("planted")
sys.exit(5)
"""


@pytest.mark.parametrize(("how", "code", "kept"), [("exits", 5, 1), ("raises", 1, 1), ("stuck", 5, 0)])
def test_a_process_that_ends_waits_for_its_save_within_a_bound(how: str, code: int, kept: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path), how], cwd=REPOSITORY, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert len(list(tmp_path.glob("checkpoints/*/manifest.json"))) == kept


def test_a_signal_is_handled_while_a_commit_is_waited_for() -> None:
    store = Gate()
    checkpointer, _, _ = training(store)
    seen: list[int] = []

    def handler(number: int, _frame: Any) -> None:
        seen.append(number)
        store.opened.set()

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        main = threading.main_thread().ident
        assert main is not None
        waiting = threading.Thread(target=lambda: (store.reached.wait(), signal.pthread_kill(main, signal.SIGUSR2)))
        waiting.start()
        assert checkpointer.save(1).step == 1
        waiting.join()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert seen == [signal.SIGUSR2]
