"""Stop signals, sent to real processes; what is agreed goes through pipes, and nothing sleeps."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shardwise.errors import BadInput
from shardwise.resilience.signals import StopSignals

# The main thread waits in C and never returns to Python, as in a collective; a thread answers for it.
BLOCKED = """
import ctypes, sys, threading, os
from shardwise.resilience.signals import StopSignals

libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
libc.pthread_mutex_lock(mutex)
with StopSignals() as signals:
    def answer():
        print("ready", flush=True)
        for _ in sys.stdin:
            print(int(signals.received or 0), flush=True)
    threading.Thread(target=answer, daemon=True).start()
    libc.pthread_mutex_lock(mutex)
"""

FORKED = """
import os, signal, sys
from shardwise.resilience.signals import StopSignals

with StopSignals() as signals:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"x")
        while True:
            signal.pause()
    os.read(read, 1)
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, signals.received)
"""

AFTERWARDS = """
import os, signal
from shardwise.resilience.signals import StopSignals

with StopSignals():
    signal.raise_signal(signal.SIGTERM)
print("left", flush=True)
signal.raise_signal(signal.SIGTERM)
print("not reached", flush=True)
"""


@contextmanager
def blocked_process() -> Iterator[tuple[subprocess.Popen[str], Callable[[], int]]]:
    """A process whose main thread is stuck, and a question to it: which signal did it receive?"""
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    with process:
        assert stdout.readline() == "ready\n"

        def received() -> int:
            stdin.write("?\n")
            return int(stdout.readline())

        try:
            yield process, received
        finally:
            process.kill()


def first_answer(received: Callable[[], int]) -> int:
    """The kernel delivers a signal soon, not at once: ask until it has."""
    return next(number for number in iter(received, None) if number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_seen_while_the_main_thread_is_stuck(number: int) -> None:
    with blocked_process() as (process, received):
        assert received() == 0
        process.send_signal(number)
        assert first_answer(received) == number
        assert process.poll() is None


def test_a_second_interrupt_ends_the_process_at_once_with_130() -> None:
    with blocked_process() as (process, received):
        process.send_signal(signal.SIGINT)
        assert first_answer(received) == signal.SIGINT
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130


def test_the_first_signal_stays_the_answer() -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert signals.received == signal.SIGTERM


def test_it_can_be_entered_again_and_begins_anew() -> None:
    signals = StopSignals()
    with signals:
        signal.raise_signal(signal.SIGINT)
    assert signals.received == signal.SIGINT
    with signals:
        assert signals.received is None
        signal.raise_signal(signal.SIGTERM)
    assert signals.received == signal.SIGTERM


def test_an_outer_one_sees_what_an_inner_one_receives() -> None:
    with StopSignals() as outer, StopSignals() as inner:
        signal.raise_signal(signal.SIGTERM)
    assert (outer.received, inner.received) == (signal.SIGTERM, signal.SIGTERM)


def test_entering_twice_is_an_error() -> None:
    with StopSignals() as signals, pytest.raises(BadInput, match="already entered"):
        signals.__enter__()


def test_handlers_and_wakeup_descriptor_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    read, write = os.pipe()
    os.set_blocking(write, False)
    outer = signal.set_wakeup_fd(write)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        assert os.read(read, 8) == bytes([signal.SIGTERM])
        assert signal.set_wakeup_fd(write) == write
    finally:
        signal.set_wakeup_fd(outer)
        os.close(read)
        os.close(write)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_it_is_an_error_that_says_so() -> None:
    caught: list[BadInput] = []

    def enter() -> None:
        try:
            StopSignals().__enter__()
        except BadInput as error:
            caught.append(error)

    thread = threading.Thread(target=enter, name="loader")
    thread.start()
    thread.join()
    assert "'loader'" in caught[0].what
    assert "main thread" in caught[0].fix


def test_after_it_was_left_a_signal_does_what_it_did_before() -> None:
    done = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True)
    assert done.stdout == "left\n"
    assert done.returncode == -signal.SIGTERM


def test_a_forked_child_keeps_its_signals_to_itself_and_can_be_terminated() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True)
    assert done.stdout.split() == [str(-signal.SIGTERM), "None"], done.stderr
