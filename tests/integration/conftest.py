"""One migrated database for each module that asks for `shared`, or for `tables`, which is that database emptied."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from durable.embedded import Embedded
from tests.support.tables import Tables, shared_tables


@pytest.fixture(scope="module")
def shared(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(shared: Tables) -> Tables:
    shared.clear()
    return shared
