"""One pool of ranks for the whole session, and a cache folder that is the tests' own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.distributed.pool import Pool

# How long an example takes depends on what else the machine does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CACHE", str(folder))
        yield folder


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first compilation, in an empty cache on a busy machine, takes minutes."""
    monkeypatch.setattr("tests.distributed.pool.LIMIT_SECONDS", 600)
