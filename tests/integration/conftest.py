"""One migrated database for each module that asks for `shared`, or for `tables`, which is that database emptied.

Nodes leave at once, in all modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from durable.embedded import Embedded
from durable.recovery import membership
from tests.support.tables import Tables, shared_tables


@pytest.fixture(autouse=True)
def leaving_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's thread listens for 0.2 s before it sees that it is to leave: much of the time that a test takes."""
    monkeypatch.setattr(membership, "_LISTEN_SECONDS", 0.02)


@pytest.fixture(scope="module")
def shared(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(shared: Tables) -> Tables:
    shared.clear()
    return shared
