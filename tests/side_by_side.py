"""The tests as two pytest processes at once: those of the pool's ranks, and all others.

    python -m tests.side_by_side [arguments for both, as -m "not nightly"]

Either half leaves cores idle (ranks wait for each other, the other tests have one thread), so that on two cores both
take little longer than the longer one. Lines of progress come as they are made, a half's other output whole once it has
ended; the last lines are pytest's own closing lines, those of a half that failed after the other's. Exit code: 0 where
both passed, else that of one that did not. Ctrl-C reaches both, being of one process group; a second one kills them.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

# Of tests/distributed, files that start whole commands and use none of the pool's ranks: with the others, so that both
# halves take about as long.
COMMANDS = ("test_command.py", "test_hangs.py")
FOLDERS = sorted(path.parent for path in Path("tests").glob("*/__init__.py"))
HALVES = {
    "tests/distributed": ["tests/distributed", *(f"--ignore=tests/distributed/{name}" for name in COMMANDS)],
    "the others": [
        *(str(folder) for folder in FOLDERS if folder.name != "distributed"),
        *(f"tests/distributed/{name}" for name in COMMANDS),
    ],
}
# Of pytest: no test was selected. A marker may leave a half without any.
NOTHING = 5


class Half(NamedTuple):
    """One pytest process, and what it has written that is no progress."""

    name: str
    process: "subprocess.Popen[str]"
    kept: list[str]

    def read(self) -> None:
        """Until its end: progress goes to our output at once, the rest after the last line of it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.rstrip().endswith("%]"):
                print(f"{line.rstrip()} {self.name}", flush=True)
            else:
                self.kept.append(line)
        # One call, so that no line of the other half comes between.
        print(f"\n{self.name}\n{''.join(self.kept)}", end="", flush=True)

    @property
    def closing(self) -> str:
        return self.kept[-1].rstrip() if self.kept else f"no output, exit code {self.process.returncode}"

    @property
    def failed(self) -> bool:
        return self.process.returncode not in (0, NOTHING)


def start(name: str, arguments: list[str]) -> Half:
    """One thread for torch: several of them spin while they wait, and the other half needs that core."""
    command = [sys.executable, "-u", "-m", "pytest", "-o", f"cache_dir=.pytest_cache/{name.replace('/', '-')}"]
    process = subprocess.Popen(
        [*command, *HALVES[name], *arguments], env={"OMP_NUM_THREADS": "1", **os.environ}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return Half(name, process, [])


def wait(halves: list[Half]) -> None:
    """For the end of both. What ends us ends them: a first SIGINT reached them with us, a second one kills them."""
    interrupted = False
    while any(half.process.poll() is None for half in halves):
        try:
            for half in halves:
                half.process.wait()
        except KeyboardInterrupt:
            for half in halves if interrupted else ():
                half.process.kill()
            interrupted = True


def main() -> int:
    halves = [start(name, sys.argv[1:]) for name in HALVES]

    def end(number: int, _frame: object) -> None:
        for half in halves:
            half.process.send_signal(number)

    signal.signal(signal.SIGTERM, end)
    readers = [threading.Thread(target=half.read) for half in halves]
    for reader in readers:
        reader.start()
    wait(halves)
    for reader in readers:
        reader.join()
    print()
    for half in sorted(halves, key=lambda half: half.failed):
        print(f"{half.name}:\n{half.closing}", flush=True)
    return next((half.process.returncode for half in halves if half.failed), 0)


if __name__ == "__main__":
    sys.exit(main())
