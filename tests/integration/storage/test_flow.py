"""The flow of messages, read from the newest pages of the history of a real Postgres."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine

from durable.embedded import Embedded
from durable.storage import flow
from tests.support.tables import Tables, shared_tables

HISTORY = """
INSERT INTO durable.envelope_history (id, side, outcome, address, message_type, source, correlation_id, sent_at,
    finished_at, attempts, interruptions, node_id)
SELECT gen_random_uuid(), %s, %s, 'shop', %s, 'shop', gen_random_uuid(),
    now() - CAST(%s AS interval) - CAST(%s AS interval), now() - CAST(%s AS interval), 1, 0, 7
FROM generate_series(1, %s)
"""


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    return database


def end(tables: Tables, count: int, *, ago: str = "30 s", took: str = "2 s", **given: str) -> None:
    """Write the history of messages that came to an end, so long ago, so long after they were sent."""
    side, outcome = given.get("side", "incoming"), given.get("outcome", "handled")
    tables.execute(HISTORY, side, outcome, given.get("name", "shop.ordered"), ago, took, ago, count)


def read(tables: Tables, *, statement_timeout: timedelta | None = None) -> Any:
    engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as conn:
        found = flow.read(conn, "durable")
    engine.dispose()
    return found


def test_database_without_history_has_no_flow(tables: Tables) -> None:
    assert read(tables) is None


def test_counts_and_times_are_those_of_the_history(tables: Tables) -> None:
    end(tables, 98)
    end(tables, 2, took="60 s")
    end(tables, 40, side="outgoing", outcome="sent", took="9 s")
    end(tables, 3, outcome="dead-lettered", took="9 s")
    end(tables, 5, side="outgoing", outcome="dead-lettered")
    end(tables, 7, outcome="expired")
    end(tables, 11, name="shop.paid", took="4 s")
    found = read(tables)
    totals = [sum(getattr(each, name) for each in found.slices) for name in ("handled", "sent", "failed")]
    assert totals == [111, 40, 8]
    assert set(found.types) == {"shop.ordered", "shop.paid"}
    ordered, paid = found.types["shop.ordered"], found.types["shop.paid"]
    assert (ordered.handled, ordered.failed, ordered.p50, ordered.p99) == (100, 3, 2.0, 60.0)
    assert (paid.handled, paid.failed, paid.p50, paid.p99) == (11, 0, 4.0, 4.0)


def test_slices_follow_each_other_in_time(tables: Tables) -> None:
    for minutes, count in ((50, 5), (30, 3), (10, 1)):
        end(tables, count, ago=f"{minutes} min")
    end(tables, 1, ago="2 h")
    found = read(tables)
    assert [each.handled for each in found.slices if each.handled] == [5, 3, 1]
    assert abs(found.length - timedelta(hours=1)) < timedelta(seconds=5)


def test_row_of_this_moment_is_in_the_last_slice(tables: Tables) -> None:
    end(tables, 1, ago="40 min")
    end(tables, 2, ago="0 s")
    assert read(tables).slices[-1].handled == 2


def test_only_the_newest_pages_are_read(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "_MOST_PAGES", 10)
    end(tables, 5_000, ago="50 min", name="shop.old")
    end(tables, 1_000, ago="5 min", name="shop.new")
    found = read(tables)
    assert set(found.types) == {"shop.new"}
    assert timedelta(minutes=4) < found.length < timedelta(minutes=6)


def test_flow_goes_on_over_midnight(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hour is of two days when the newest day has few rows; its rows are of yesterday's partition here."""
    monkeypatch.setattr(flow, "LONGEST", timedelta(days=2))
    end(tables, 3, ago="24 h")
    end(tables, 2, ago="0 s")
    assert read(tables).types["shop.ordered"].handled == 5
