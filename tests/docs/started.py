"""Scripts in processes of their own, forked from one that has imported torch already: an import costs seconds."""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Ended(NamedTuple):
    code: int
    output: str


class Starter:
    """`run` starts `python script` in a folder and waits for its end."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.docs.started"],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, script: Path, folder: Path) -> Ended:
        assert self.process.stdin is not None and self.process.stdout is not None
        with tempfile.NamedTemporaryFile(suffix=".log") as log:
            self.process.stdin.write(json.dumps([str(script), str(folder), log.name]) + "\n")
            self.process.stdin.flush()
            code = int(self.process.stdout.readline())
            return Ended(code, Path(log.name).read_text(encoding="utf-8", errors="replace"))

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve() -> None:
    import sklearn.datasets  # noqa: F401 (imported for the children)

    import shardwise.train.trainer  # noqa: F401

    for line in sys.stdin:
        script, folder, log = json.loads(line)
        child = os.fork()
        if child == 0:
            become(script, folder, log)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def become(script: str, folder: str, log: str) -> None:
    """What `python script` does, in this process, and then its end."""
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv, sys.path[0] = [script], str(Path(script).parent)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        code = 1
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except Exception:
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
