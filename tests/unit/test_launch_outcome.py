"""Who failed first, and the exit code of the whole."""

import signal

import pytest

from shardwise.events.values import Failed, Stopped
from shardwise.launch.outcome import (
    RankExit,
    RankLog,
    came_after_stop,
    cause_of,
    error_line,
    exit_code,
    first_failure,
    last_traceback,
    rank_exits,
    same_error,
    unprefixed,
)

# What torchrun of torch 2.13 writes when rank 1 of two is killed, shortened.
LAUNCHER_LOG = """\
W1202 03:41:13.483000 6096 api.py:1028] Sending process 6100 closing signal SIGTERM
E1202 03:41:13.515000 6096 api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 6101) of binary: python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
======================================================
train.py FAILED
------------------------------------------------------
Failures:
[1]:
  time      : 2026-12-02_03:41:13
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6100)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 6100
------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-12-02_03:41:13
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 6101)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 6101
======================================================
"""


def failed(rank: int, time: float, error: str = "ValueError: planted", kind: str = "ValueError") -> Failed:
    trace = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{kind}: planted\n'
    return Failed(time=time, rank=rank, step=3, phase="forward", error=error, traceback=trace)


def stopped(code: int) -> Stopped:
    return Stopped(step=3, reason="signal" if code else "finished", exit_code=code)


def test_the_launchers_list_is_read_with_its_root_cause_first() -> None:
    assert rank_exits(LAUNCHER_LOG) == (
        RankExit(1, -9, 6101),
        RankExit(0, -15, 6100, ended_by_launcher=True),
    )
    assert rank_exits("nothing went wrong") == ()


def test_the_earliest_record_is_the_first_failure() -> None:
    first = first_failure([failed(2, 5.0), failed(1, 4.0), failed(0, 6.0)], [], {})
    assert first is not None
    assert (first.rank, first.step, first.phase, first.expected) == (1, 3, "forward", False)
    assert first.text.endswith("ValueError: planted")


def test_an_error_of_ours_is_told_without_its_traceback() -> None:
    error = "The loss is a scalar.\n  fix: return sw.Loss(total, count)"
    first = first_failure([failed(0, 1.0, error, "shardwise.errors.LossError")], [], {})
    assert first is not None
    assert first.expected
    assert first.text == error


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS])
def test_a_native_death_comes_before_what_its_peers_raised(number: int) -> None:
    exits = [RankExit(0, 1, 10), RankExit(1, -number, 11)]
    first = first_failure([failed(0, 1.0, "RuntimeError: Connection closed by peer")], exits, {})
    assert first is not None
    assert first.rank == 1
    assert signal.Signals(number).name in first.text
    assert first.step == 3, "its peers knew how far they were"


def test_the_tail_of_a_dead_ranks_log_is_shown() -> None:
    log = RankLog("".join(f"line {number}\n" for number in range(100)), 1.0)
    first = first_failure([], [RankExit(1, -signal.SIGSEGV, 11)], {1: log})
    assert first is not None
    assert first.text.endswith("line 99")
    assert "line 79" not in first.text


def test_a_rank_that_the_launcher_ended_is_not_the_cause() -> None:
    exits = [RankExit(0, -signal.SIGKILL, 10, ended_by_launcher=True), RankExit(1, 1, 11)]
    first = first_failure([], exits, {})
    assert first is not None
    assert first.rank == 1


def test_an_abort_after_a_recorded_error_does_not_hide_it() -> None:
    first = first_failure([failed(1, 1.0)], [RankExit(1, -signal.SIGABRT, 11)], {})
    assert first is not None
    assert "planted" in first.text


def test_without_records_the_log_that_stood_still_first_is_the_cause() -> None:
    logs = {
        0: RankLog("[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: closed by peer\n", 2.0),
        1: RankLog("noise\n[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: planted\n", 1.0),
    }
    first = first_failure([], [RankExit(0, 1, 10), RankExit(1, 1, 11)], logs)
    assert first is not None
    assert first.rank == 1
    assert first.text == "Traceback (most recent call last):\nValueError: planted"


def test_a_stop_that_was_asked_for_is_no_failure() -> None:
    assert first_failure([], [RankExit(0, 130, 10), RankExit(1, 75, 11)], {}) is None
    assert first_failure([], [RankExit(0, 1, 10)], {}, interrupted=True) is None


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL])
def test_a_death_after_the_run_had_stopped_as_told_is_no_failure(number: int) -> None:
    death = first_failure([], [RankExit(1, -number, 11)], {})
    error = first_failure([failed(0, 1.0)], [], {})
    assert death is not None
    assert error is not None
    told = Stopped(step=4, reason="signal", exit_code=75)
    assert came_after_stop(death, [told])
    assert exit_code(1, [told], None, [], None) == 75
    assert not came_after_stop(death, []), "it died before it could save"
    # Behind a loop that was left, the user's own program goes on.
    assert not came_after_stop(death, [stopped(0)])
    assert not came_after_stop(error, [told])


def test_a_chain_of_tracebacks_is_kept_together_and_an_older_one_is_not() -> None:
    chain = (
        "Traceback (most recent call last):\nKeyError: 1\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\nValueError: 2"
    )
    assert last_traceback("Traceback (most recent call last):\nOld: 0\nwork\n" + chain) == chain
    assert last_traceback("no trace") == ""
    assert unprefixed("[rank12]: a\nb\n[rank0]:") == "a\nb\n"


@pytest.mark.parametrize("code", [0, 75, 130])
def test_what_the_run_said_last_is_the_exit_code(code: int) -> None:
    assert exit_code(1 if code else 0, [stopped(0), stopped(code)], None, [], None) == code


def test_a_failure_gives_its_own_code() -> None:
    first = first_failure([failed(0, 1.0)], [], {})
    assert exit_code(1, [], first, [], None) == 1


@pytest.mark.parametrize(
    ("returned", "codes", "interrupted", "expected"),
    [
        (0, [], None, 0),
        (1, [], None, 1),
        (1, [130, -15], None, 130),
        (1, [75], None, 75),
        (1, [2], None, 2),
        (1, [-2], signal.SIGINT, 130),
        (1, [], signal.SIGTERM, 75),
        (1, [], signal.SIGHUP, 75),
        (-9, [], None, 1),
    ],
)
def test_without_its_word_the_processes_decide(
    returned: int, codes: list[int], interrupted: int | None, expected: int
) -> None:
    exits = [RankExit(rank, code, 10 + rank) for rank, code in enumerate(codes)]
    assert exit_code(returned, [], None, exits, interrupted) == expected


def test_the_last_error_of_a_traceback_is_named_by_kind_and_message() -> None:
    trace = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n    ^^^\n'
        "shardwise.errors.OutOfMemory: Rank 1 ran out.\n  why: 4 GiB\n  fix: less\n"
    )
    assert error_line(trace) == "OutOfMemory: Rank 1 ran out."
    assert error_line("Traceback (most recent call last):\nKeyboardInterrupt\n") == "KeyboardInterrupt"
    assert error_line("") == ""


def test_the_same_error_is_known_by_its_words_and_not_by_its_numbers() -> None:
    assert same_error("E: row 3 in /tmp/a/b.txt, 0xff1, 2.5") == same_error("E: row 77 in /var/c.txt, 0x0, 1")
    assert same_error("E: rows") != same_error("E: columns")


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("shardwise.errors.OutOfMemory", "out_of_memory"),
        ("torch.OutOfMemoryError", "out_of_memory"),
        ("shardwise.errors.NonFinite", "diverged"),
        ("shardwise.errors.RanksDiverged", "diverged"),
        ("ValueError", "crash"),
    ],
)
def test_the_cause_follows_from_the_kind_of_error(kind: str, cause: str) -> None:
    failure = first_failure([failed(1, 1.0, kind=kind)], [], {})
    assert cause_of(1, failure) == cause


def test_a_kill_is_a_loss_unless_the_kernel_killed_for_memory() -> None:
    killed = first_failure([], [RankExit(1, -9, 7)], {})
    assert cause_of(1, killed) == "lost"
    assert cause_of(1, killed, kernel_kills=1) == "out_of_memory"
    fault = first_failure([], [RankExit(1, -11, 7)], {})
    assert cause_of(1, fault, kernel_kills=1) == "crash"


@pytest.mark.parametrize(("code", "cause"), [(0, "done"), (2, "bad_input"), (75, "preempted"), (130, "interrupted")])
def test_without_a_failure_the_code_is_the_cause(code: int, cause: str) -> None:
    assert cause_of(code, None) == cause
    assert cause_of(code, None, stuck=True) == "hang"
