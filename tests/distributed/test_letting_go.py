"""A module that nobody holds any more goes, with its process groups' threads, whatever split it had."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import work
from tests.distributed.pool import Pool
from tests.distributed.test_matrix import SHAPE, TIED

SPLITS: dict[str, dict[str, Any]] = {
    "zero 0": {"mesh": {"dp_replicate": 2}, "zero": 0},
    "zero 1": {"mesh": {"dp_shard": 2}, "zero": 1, "accumulation": 2},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": 3},
    "tensor": {"mesh": {"tp": 2}, "zero": 0},
    "pipeline": {"mesh": {"pp": 2}, "zero": 0, "schedule": "1f1b", "accumulation": 2},
    "recompute": {"mesh": {"dp_shard": 2}, "zero": 3, "recompute": "full"},
}
_held: list[weakref.ref[torch.nn.Module]] = []


def trained(out: str, world: int, **more: Any) -> None:
    parallelize = work.sw.parallelize

    def noted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        _held.append(weakref.ref(module))
        return parallelize(module, *args, **kwargs)

    work.sw.parallelize = noted
    try:
        work.train(out=out, world=world, steps=2, **more)
    finally:
        work.sw.parallelize = parallelize


def what_is_left() -> dict[str, int]:
    gc.collect()
    alive = sum(module() is not None for module in _held)
    _held.clear()
    return {"modules": alive, "threads": len(list(Path("/proc/self/task").iterdir()))}


@pytest.mark.parametrize("name", SPLITS)
def test_what_a_module_held_goes_with_it(pool: Pool, tmp_path: Path, name: str) -> None:
    threads = []
    for shape in (TIED, SHAPE, TIED):
        pool.run(
            2, "tests.distributed.test_letting_go:trained", out=str(tmp_path / "out"), world=2, shape=shape,
            **SPLITS[name],
        )  # fmt: skip
        left = pool.run(2, "tests.distributed.test_letting_go:what_is_left")
        assert [found["modules"] for found in left] == [0, 0]
        threads.append([found["threads"] for found in left])
    assert threads[1] == threads[2], "each process group that stays keeps three threads"
