"""A slow disk for one command and all below it, without root: the kernel asks this process before each call that waits
for a disk, and is answered late. Nothing in the command knows of it.

Source: seccomp_unotify(2), seccomp(2); linux/seccomp.h, linux/audit.h, linux/filter.h.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import platform
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple


class Machine(NamedTuple):
    """What an architecture calls itself, and the numbers of its system calls."""

    audit: int
    seccomp: int
    pwrite64: int
    fsync: int
    fdatasync: int


# Source: asm/unistd_64.h; asm-generic/unistd.h
MACHINES = {
    "x86_64": Machine(0xC000003E, 317, 18, 74, 75),
    "aarch64": Machine(0xC00000B7, 277, 68, 82, 83),
}
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_ALLOW, _ASK = 0x7FFF0000, 0x7FC00000  # SECCOMP_RET_ALLOW, SECCOMP_RET_USER_NOTIF
_SET_FILTER, _GET_SIZES, _NEW_LISTENER, _NO_NEW_PRIVILEGES = 1, 3, 8, 38
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
# id, pid, flags; then nr, arch, instruction pointer, six arguments. And id, value, error, flags.
_ASKED, _ANSWER = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")

# As of a shared disk on a bad day: some files a second, and a few MB.
SYNC_SECONDS = 0.2
BYTES_PER_SECOND = 8 * 2**20


def program(machine: Machine) -> bytes:
    """The filter: what waits for a disk is asked for, all else goes on. Source: linux/bpf_common.h."""
    asked = (machine.pwrite64, machine.fsync, machine.fdatasync)
    last = len(asked)
    lines = [(_LOAD, 0, 0, 4), (_JUMP_IF_EQUAL, 0, last + 1, machine.audit), (_LOAD, 0, 0, 0)]
    lines += [(_JUMP_IF_EQUAL, last - at, 0, number) for at, number in enumerate(asked)]
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ASK)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def seconds_of(machine: Machine, number: int, arguments: Sequence[int]) -> float:
    """How long a slow disk takes for a call."""
    return arguments[2] / BYTES_PER_SECOND if number == machine.pwrite64 else SYNC_SECONDS


def why_not() -> str:
    """What keeps this machine from it; empty where nothing does."""
    machine = MACHINES.get(platform.machine())
    if machine is None:
        return f"the system calls of {platform.machine()} are not known here"
    sizes = ctypes.create_string_buffer(6)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(machine.seccomp, _GET_SIZES, 0, sizes) != 0:
        return f"the kernel or the container offers no seccomp_unotify: {os.strerror(ctypes.get_errno())}"
    asked, answer, _ = struct.unpack("=HHH", sizes.raw)
    return "" if (asked, answer) == (_ASKED.size, _ANSWER.size) else "this kernel asks in another form"


class SlowDisk:
    """Stands between commands and their disk, for as long as the block lasts. `begin` is a command's preexec_fn.

    A call that is asked for goes on at once, and in the seconds after `slow` as late as `seconds_of` says.
    Raises: OSError, from `begin` through Popen, where there is a reason against it (`why_not`).
    """

    def __init__(self) -> None:
        self._machine = MACHINES[platform.machine()]
        self._code = ctypes.create_string_buffer(program(self._machine))
        self._program = struct.pack("=HxxxxxxQ", len(self._code.raw) // 8, ctypes.addressof(self._code))
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._ours, self._theirs = socket.socketpair()
        self._until = 0.0
        self._due: list[tuple[float, int, int]] = []  # when, by which listener, which call
        self._thread = threading.Thread(target=self._serve, name="shardwise-slow-disk", daemon=True)
        self.delayed = 0

    def __enter__(self) -> "SlowDisk":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """To be left when nothing of a command runs any more: what is not answered then fails with ENOSYS."""
        self._ours.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._ours.close()
        self._theirs.close()

    def slow(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def begin(self) -> None:
        """In the child, before the command: the filter is there from now on, and for all that it starts."""
        self._libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        listener = self._libc.syscall(self._machine.seccomp, _SET_FILTER, _NEW_LISTENER, self._program)
        if listener < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        socket.send_fds(self._theirs, [b"!"], [listener])

    def _serve(self) -> None:
        polled, ours = select.poll(), self._ours.fileno()
        polled.register(ours, select.POLLIN)
        listeners = set[int]()
        while True:
            wait = max(0.0, self._due[0][0] - time.monotonic()) * 1000 + 1 if self._due else None
            for handle, event in polled.poll(wait):
                if handle != ours:
                    if event & select.POLLIN:
                        self._receive(handle)
                    else:  # nothing is left that could ask
                        polled.unregister(handle)
                        listeners.remove(handle)
                        os.close(handle)
                    continue
                _, new, _, _ = socket.recv_fds(self._ours, 1, 1)
                for one in new:
                    polled.register(one, select.POLLIN)
                    listeners.add(one)
                if not new:
                    for one in listeners:
                        os.close(one)
                    return
            while self._due and self._due[0][0] <= time.monotonic():
                _, listener, call = heapq.heappop(self._due)
                _go_on(listener, call)

    def _receive(self, listener: int) -> None:
        asked = bytearray(_ASKED.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, asked, True)
        except OSError:
            return  # who asked was killed meanwhile
        call, _, _, number, _, _, *arguments = _ASKED.unpack(asked)
        now = time.monotonic()
        if now >= self._until:
            _go_on(listener, call)
            return
        self.delayed += 1
        heapq.heappush(self._due, (now + seconds_of(self._machine, number, arguments), listener, call))


def _go_on(listener: int, call: int) -> None:
    with contextlib.suppress(OSError):  # who asked was killed, or asks anew after a signal
        fcntl.ioctl(listener, _SEND, _ANSWER.pack(call, 0, 0, _CONTINUE))
