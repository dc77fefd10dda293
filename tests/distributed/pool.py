"""One pool of persistent ranks for all tests: processes start once, process groups are made anew for each call.

`pool.run(world, "tests.distributed.work:function", key=value)` calls the function on ranks 0..world-1, each in its own
process with gloo, and returns their JSON results in rank order. A rank that raises ends the call for all: it leaves the
group, which ends what its peers wait for in a collective, and the first traceback is raised here. Where one of them
gives no answer all the same, the pool is thrown away.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MOST_RANKS = 4
LIMIT_SECONDS = 300  # of a call that hangs; on a busy machine the start of the processes alone takes a minute
# For the other ranks to answer once one has raised: a start of new processes costs about as much.
GRACE_SECONDS = 10


class RankRaised(AssertionError):
    """A rank of the pool raised; `kind` is the exception's class name."""

    def __init__(self, rank: int, kind: str, text: str) -> None:
        super().__init__(f"rank {rank} raised {kind}\n{text}")
        self.rank, self.kind, self.text = rank, kind, text


class Rank:
    """One process that calls functions by name; JSON lines over two pipes of its own, so that prints do no harm."""

    def __init__(self, rank: int) -> None:
        read_call, self.call_fd = os.pipe()
        self.result_fd, write_result = os.pipe()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning:shardwise"}
        for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.pool", str(rank), str(read_call), str(write_result)],
            cwd=ROOT, env=env, pass_fds=(read_call, write_result),
        )  # fmt: skip
        os.close(read_call)
        os.close(write_result)
        self.results = os.fdopen(self.result_fd, "r")

    def send(self, call: dict[str, Any]) -> None:
        os.write(self.call_fd, json.dumps(call).encode() + b"\n")

    def end(self) -> None:
        os.close(self.call_fd)
        self.process.kill()
        self.process.wait()
        self.results.close()


class Pool:
    def __init__(self) -> None:
        self.ranks: list[Rank] = []

    def run(self, world: int, function: str, /, **arguments: Any) -> list[Any]:
        if any(rank.process.poll() is not None for rank in self.ranks):
            self.close()  # One ended after its last answer: others must not fail for that.
        while len(self.ranks) < world:
            self.ranks.append(Rank(len(self.ranks)))
        with tempfile.TemporaryDirectory() as folder:
            call = {"function": function, "world": world, "store": f"{folder}/store", "arguments": arguments}
            for rank in self.ranks[:world]:
                rank.send(call)
            return self._collect(world)

    def _collect(self, world: int) -> list[Any]:
        results: dict[int, Any] = {}
        raised: RankRaised | None = None
        deadline = time.monotonic() + LIMIT_SECONDS
        with selectors.DefaultSelector() as selector:
            for index, rank in enumerate(self.ranks[:world]):
                selector.register(rank.results, selectors.EVENT_READ, index)
            while len(results) < world:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    self.close()
                    raise raised or TimeoutError(f"ranks {sorted(set(range(world)) - set(results))} gave no answer")
                for key, _ in ready:
                    line = self.ranks[key.data].results.readline()
                    answer = json.loads(line) if line else {"error": ["Died", "the process ended"]}
                    if "error" in answer and raised is None:
                        raised = RankRaised(key.data, *answer["error"])
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    if not line:
                        self.close()
                        raise raised
                    results[key.data] = answer.get("value")
                    selector.unregister(key.fileobj)
        if raised is not None:
            raise raised
        return [results[index] for index in range(world)]

    def close(self) -> None:
        for rank in self.ranks:
            rank.end()
        self.ranks.clear()


def serve(rank: int, call_fd: int, result_fd: int) -> None:
    """The other end: one call a line until the pipe closes."""
    import datetime
    import gc
    import importlib
    import traceback

    import torch
    import torch.distributed as dist

    from shardwise.torch_private import forget_layouts

    torch.set_num_threads(1)
    with os.fdopen(call_fd, "r") as calls, os.fdopen(result_fd, "w") as results:
        for line in calls:
            call = json.loads(line)
            try:
                if call["world"] > 1:
                    dist.init_process_group(
                        "gloo", store=dist.FileStore(call["store"], call["world"]), rank=rank,
                        world_size=call["world"], timeout=datetime.timedelta(seconds=60),
                    )  # fmt: skip
                    dist.barrier()  # a rank that is done at once must not close while others still connect
                module, _, name = call["function"].partition(":")
                value = getattr(importlib.import_module(module), name)(**call["arguments"])
                answer: dict[str, Any] = {"value": value}
            except BaseException as error:
                answer = {"error": [type(error).__name__, traceback.format_exc()]}
            if "error" in answer:
                gc.collect()  # what the call left behind holds groups, and with them connections to the peers
            if dist.is_initialized():
                dist.destroy_process_group()
                forget_layouts()  # DTensor remembers meshes of a shape, and with them groups that are gone
            results.write(json.dumps(answer) + "\n")
            results.flush()


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
