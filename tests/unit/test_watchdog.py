"""Who is stuck: the judgement over all that ranks may look like, the watcher's clock, other nodes, and what is said."""

import itertools
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardwise.errors import RecipeError
from shardwise.launch import dump, hang, processes
from shardwise.launch.hang import Hang, Seen, conclude, hangs, stuck_ones
from shardwise.launch.heartbeat import AFTER, BEFORE, ENDED, Heart, record_path
from shardwise.launch.views import Views
from shardwise.launch.watcher import Watched, Watcher
from shardwise.resilience import watchdog
from shardwise.torch_private import around_compiling

BOUND = 60.0


def seen(rank: int, **more: Any) -> Seen:
    usual: dict[str, Any] = {
        "rank": rank, "pid": 100 + rank, "host": "a", "phase": "forward", "step": 9, "micro": 0, "steps": 9,
        "quiet_seconds": 0.0, "waits": False, "collective": "", "collectives": 5, "state": "sleeping",
    }  # fmt: skip
    return Seen(**{**usual, **more})


def waiting(rank: int, quiet: float, **more: Any) -> Seen:
    return seen(rank, quiet_seconds=quiet, waits=True, collective="gather", **more)


def judged(*ranks: Seen) -> bool:
    return hangs(ranks, BOUND, {})


def test_whoever_is_within_its_bound_is_left_alone_in_every_phase() -> None:
    for phase, factor in (("forward", 1), ("evaluate", 1), ("data", 1), ("loop body", 10), ("save", 30), ("setup", 30)):
        limit = hang.PATIENCE * factor * BOUND
        assert not judged(seen(0, phase=phase, quiet_seconds=limit - 1))
        assert judged(seen(0, phase=phase, quiet_seconds=limit + 1))
    assert hang.PATIENCE * BOUND < BOUND  # it is named within the bound that is promised


def test_the_first_steps_may_compile_and_what_took_long_before_may_again() -> None:
    silent = seen(0, quiet_seconds=BOUND)
    assert judged(silent)
    assert not judged(msgspec.structs.replace(silent, steps=hang.FIRST_STEPS))
    assert not hangs([silent], BOUND, {"step": BOUND / 2})
    assert hangs([silent], BOUND, {"long": 1000.0})  # a long compilation is no excuse for a step


@pytest.mark.parametrize("phase", ["compile", "save", "loop body", "setup", "forward"])
def test_who_waits_for_one_that_is_busy_is_not_stuck_and_nor_is_that_one(phase: str) -> None:
    """The others have waited for an hour, told or not."""
    busy = seen(0, phase=phase, quiet_seconds=1.0)
    assert not judged(busy, waiting(1, 3600.0), seen(2, quiet_seconds=3600.0))


def test_a_stuck_rank_is_found_while_the_others_wait_for_it() -> None:
    ranks = (waiting(0, 30.0), seen(1, quiet_seconds=BOUND), waiting(2, 10.0))
    assert judged(*ranks)
    assert [one.rank for one in stuck_ones(ranks)[0]] == [1]


def test_who_is_two_steps_ahead_needs_nobody() -> None:
    behind = seen(0, step=3, quiet_seconds=BOUND)
    assert judged(behind, seen(1, step=5))
    assert not judged(behind, seen(1, step=4))


@pytest.mark.parametrize("phase", [BEFORE, AFTER, ENDED])
def test_nobody_is_watched_in_his_own_time(phase: str) -> None:
    assert not judged(seen(0, phase=phase, quiet_seconds=1e6), seen(1, phase=phase, quiet_seconds=1e6))


@pytest.mark.parametrize("state", ["stopped", "lost", "gone"])
def test_no_phase_excuses_one_that_cannot_move(state: str) -> None:
    ranks = (seen(0, phase="compile", quiet_seconds=BOUND, state=state), seen(1))
    assert judged(*ranks)
    assert [one.rank for one in stuck_ones(ranks)[0]] == [0]


def test_a_rank_that_is_gone_is_its_launchers_first() -> None:
    """torchrun ends the others within ten seconds, which is no hang, however small the bound."""
    gone = seen(0, state="gone", quiet_seconds=10.0)
    assert not hangs([gone, waiting(1, 0.5)], 1.0, {})


def test_the_verdict_does_not_depend_on_the_order_and_grows_with_silence() -> None:
    draw = random.Random(0)
    for _ in range(300):
        ranks = [
            seen(
                rank, phase=draw.choice(["forward", "save", "compile", "loop body", AFTER]), step=draw.randint(7, 9),
                quiet_seconds=draw.choice([0.0, 55.0, 700.0, 3000.0]), waits=draw.random() < 0.5,
                state=draw.choice(["sleeping", "running", "stopped"]),
            )
            for rank in range(3)
        ]  # fmt: skip
        verdicts = {judged(*order) for order in itertools.permutations(ranks)}
        assert len(verdicts) == 1
        stuck = {tuple(sorted(one.rank for one in stuck_ones(order)[0])) for order in itertools.permutations(ranks)}
        assert len(stuck) == 1
        if verdicts == {True}:
            silent = [msgspec.structs.replace(one, quiet_seconds=one.quiet_seconds + 100) for one in ranks]
            assert judged(*silent)


def test_ranks_that_wait_in_different_calls_are_told_so() -> None:
    ranks = [waiting(0, BOUND), seen(1, quiet_seconds=BOUND, waits=True, collective="all-reduce")]
    assert judged(*ranks)
    found = conclude(ranks, attempt=1, folder="f", hang_seconds=BOUND)
    assert found.why == "the ranks wait in different calls: all-reduce; gather"
    half = conclude(ranks, attempt=1, folder="f", hang_seconds=BOUND, world=4)
    assert half.why == "nothing was ever heard of ranks 2, 3"


def test_who_holds_the_gil_is_known_by_its_silence_and_stacks_tell_who_waits() -> None:
    alike = [seen(rank, phase="backward", quiet_seconds=BOUND) for rank in range(3)]
    mute = [msgspec.structs.replace(one, mute=one.rank == 2) for one in alike]
    assert "holds the GIL" in conclude(mute, attempt=1, folder="", hang_seconds=BOUND).why
    assert [one.rank for one in stuck_ones(mute)[0]] == [2]
    by_stack = [msgspec.structs.replace(one, waits_by_stack=one.rank != 1) for one in alike]
    assert [one.rank for one in stuck_ones(by_stack)[0]] == [1]


def test_a_hang_is_a_screen_at_most_and_comes_back_from_its_file(tmp_path: Path) -> None:
    ranks = [waiting(rank, 60.0) for rank in range(500)]
    ranks[400] = seen(400, quiet_seconds=60.0, at="train.py:3 in f")
    found = conclude(ranks, attempt=3, folder="run/hangs/attempt-003", hang_seconds=BOUND)
    assert found.what == "Rank 400 on a has made no progress for 60 s, at step 9 (forward)."
    assert "train.py:3 in f, while 499 of the 499 others wait" in found.why
    lines = hang.text(found).splitlines()
    assert len(lines) < 24 and lines[3].startswith("  rank 400")
    hang.write(tmp_path / "hang-node-00000.json", found)
    assert hang.found(tmp_path) == found
    assert hang.found(tmp_path / "none") is None
    assert msgspec.json.decode(msgspec.json.encode(found), type=Hang) == found


STACKS = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 22 in main
"""


def test_the_main_threads_place_is_read_from_its_stack() -> None:
    at = dump.where(STACKS)
    assert at.place == "distributed_c10d.py:3252 in all_reduce, called by train.py:22 in main" and at.waits
    assert dump.where("") == ("", False)


def watched(folder: Path, **more: Any) -> Watched:
    usual: dict[str, Any] = {
        "folder": str(folder), "run": str(folder / "run"), "first": 0, "local": 1, "world": 1, "hang_seconds": BOUND,
    }  # fmt: skip
    return Watched(**{**usual, **more})


def test_a_watcher_that_stood_still_itself_accuses_nobody(tmp_path: Path) -> None:
    heart, now = Heart(), [0.0]
    heart.open(record_path(tmp_path, 0), rank=0, world=1)
    for step in range(1, 10):
        heart.step(step)
    heart.phase("forward")
    watcher = Watcher(watched(tmp_path), None, clock=lambda: now[0])
    watcher.look()
    now[0] += 10_000  # the whole machine was suspended
    assert not watcher.hangs(watcher.look())
    for _ in range(60):
        now[0] += watcher.poll_seconds
        looked = watcher.look()
    assert watcher.hangs(looked)  # this process is silent
    assert looked[0].pid == os.getpid() and looked[0].state != "gone"
    heart.beat()
    assert not watcher.hangs(watcher.look())
    assert watcher.longest["step"] >= 60 * watcher.poll_seconds
    heart.close()


def test_a_node_that_is_not_heard_of_is_lost_and_one_that_is_heard_of_is_not(tmp_path: Path) -> None:
    here, there = (Views(tmp_path, first, host, BOUND) for first, host in ((0, "a"), (2, "b")))
    mine, theirs = [waiting(0, 0.0), waiting(1, 0.0)], [seen(2, host="b"), seen(3, host="b")]

    def exchange(silent: bool, elapsed: float) -> list[Seen]:
        if not silent:
            there.others(theirs, elapsed)
            there.exchange()
        found = here.others(mine, elapsed)
        here.exchange()
        return found

    for _ in range(4):
        heard = exchange(silent=False, elapsed=5.0)
    assert [one.rank for one in heard] == [2, 3] and {one.state for one in heard} == {"sleeping"}
    assert not judged(*mine, *heard)
    for _ in range(12):
        heard = exchange(silent=True, elapsed=5.0)
    assert {one.state for one in heard} == {"lost"}
    assert judged(*mine, *heard)
    found = conclude([*mine, *heard], attempt=1, folder="", hang_seconds=BOUND)
    assert found.stuck == (2, 3) and "b has not been heard of" in found.why
    there.raised = True
    exchange(silent=False, elapsed=5.0)
    exchange(silent=False, elapsed=5.0)
    assert here.alarm()


def test_half_of_one_view_and_half_of_the_next_is_not_heard(tmp_path: Path) -> None:
    """Both ends of the file are of one view, and a rank between them of another."""
    here, there = (Views(tmp_path, first, host, BOUND) for first, host in ((0, "a"), (2, "b")))
    path = tmp_path / "node-00002.json"

    def heard(torn: bool) -> list[Seen]:
        there.others([seen(2, host="b")], 5.0)
        there.exchange()
        if torn:
            text = path.read_text()
            assert text.count('"rank":2') == 1
            path.write_text(text.replace('"rank":2', '"rank":7'))
        here.exchange()
        return here.others([], 5.0)

    assert [one.rank for _ in range(3) for one in heard(torn=True)] == []
    assert [one.rank for one in [heard(torn=False) for _ in range(3)][-1]] == [2]


def test_what_an_earlier_attempt_left_is_nobodys_voice(tmp_path: Path) -> None:
    old = Views(tmp_path, 2, "b", BOUND, began=0.0)
    old.raised = True
    old.exchange()
    recent = Views(tmp_path, 4, "c", BOUND)
    recent.exchange()  # and never again
    here = Views(tmp_path, 0, "a", BOUND)
    for _ in range(5):
        here.exchange()
        assert here.others([], 100.0) == []
    assert not here.alarm()


def test_what_ignores_a_term_is_killed_and_what_is_named_is_gone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the child's from its first moment
    child = os.fork()
    while child == 0:
        signal.pause()
    signal.signal(signal.SIGTERM, before)
    assert processes.stat(child) is not None and child in processes.tree([os.getpid()])
    # Found once is enough: what is ending soon shows nothing any more by which it would be found again.
    found = iter([[child]])
    left = processes.end_all(lambda: next(found, []), grace_seconds=0.05, limit_seconds=30)
    assert left == [] and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9


def test_a_compilation_is_told_from_its_begin_to_its_end() -> None:
    import torch
    import torch._dynamo  # what torch.compile imports

    told: list[str] = []
    assert around_compiling(lambda: told.append("begin"), lambda: told.append("end"))
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))
    assert told == ["begin", "end"]
    compiled(torch.ones(2))
    assert told == ["begin", "end"]


def test_a_bound_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="hang_seconds"):
        watchdog.begin(tmp_path, 0.0)
    assert "hang_seconds = 0" in watchdog.why_not(0.0)
    assert watchdog.why_not(60.0) == ""


def test_a_watcher_of_ranks_that_ended_before_it_could_look_ends_too(tmp_path: Path) -> None:
    """A run of a few steps is over sooner than its watcher has started."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    heart = Heart()
    heart.open(record_path(tmp_path, 0), rank=0, world=1)
    raw = bytearray(record_path(tmp_path, 0).read_bytes())
    watcher = Watcher(watched(tmp_path), None)
    assert not watcher.ended()
    watcher.look()
    assert not watcher.ended()  # this process lives
    own, other = os.getpid().to_bytes(4, "little"), gone.pid.to_bytes(4, "little")
    assert own in raw
    heart.close()
    record_path(tmp_path, 0).write_bytes(bytes(raw.replace(own, other)))
    late = Watcher(watched(tmp_path), None)
    late.look()
    assert late.ended()
