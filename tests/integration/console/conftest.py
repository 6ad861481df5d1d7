"""One migrated database for the tests of a module, emptied before each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from durable.embedded import Embedded
from tests.support.tables import Tables, shared_tables


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    return database
