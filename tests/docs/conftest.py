"""One starter for every page and example."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.started import Starter


@pytest.fixture(scope="session")
def starter(own_cache: Path) -> Iterator[Starter]:
    starter = Starter()
    yield starter
    starter.close()
