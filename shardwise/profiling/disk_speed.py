"""What the disk under a folder writes and reads, with the cache of the operating system out of the way. No torch."""

import os
import secrets
import time
from pathlib import Path

CHUNK_BYTES = 2**23


def measure(folder: Path, budget: float, most_bytes: int = 2**29) -> tuple[float, float]:
    """(bytes written, bytes read) a second, of one file as large as the budget allows, which is removed again.

    Written is what fsync has confirmed; read is after the kernel was asked to forget the file.
    Raises: OSError where the folder cannot be written.
    """
    path = folder / f".shardwise-disk-{secrets.token_hex(4)}"
    chunk = os.urandom(CHUNK_BYTES)
    try:
        written, seconds = _write(path, chunk, budget / 2, most_bytes)
        return written / seconds, written / _read(path)
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, chunk: bytes, budget: float, most_bytes: int) -> tuple[int, float]:
    started, written = time.perf_counter(), 0
    with path.open("wb", buffering=0) as file:
        while written < most_bytes and (not written or time.perf_counter() - started < budget):
            written += file.write(chunk)
            os.fdatasync(file.fileno())
        os.fsync(file.fileno())
        return written, time.perf_counter() - started


def _read(path: Path) -> float:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        while file.read(CHUNK_BYTES):
            pass
        return time.perf_counter() - started
