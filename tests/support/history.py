"""History and dead letters as the agents leave them, made by one statement for any number of rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

_HISTORY = """
INSERT INTO durable.envelope_history (id, side, outcome, address, message_type, source, correlation_id, sent_at,
    received_at, finished_at, attempts, interruptions, node_id, error)
SELECT CAST(lpad(to_hex(n), 32, '0') AS uuid), %(side)s, %(outcome)s, %(address)s, 'orders.order-placed', 'orders',
    CAST(lpad(to_hex(n), 32, '0') AS uuid), %(finished_at)s - %(took)s, %(finished_at)s - interval '2 s',
    %(finished_at)s, 0, 0, 7, NULL
FROM generate_series(CAST(%(first)s AS bigint), CAST(%(first)s AS bigint) + CAST(%(count)s AS bigint) - 1) AS n
"""
_LETTERS = """
INSERT INTO durable.dead_letters (side, address, id, message_type, source, correlation_id, content_type, headers, body,
    sent_at, exception_type, reason, fingerprint, node_id, replayable)
SELECT 'incoming', 'shop', CAST(lpad(to_hex(n), 32, '0') AS uuid), 'orders.order-placed', 'orders',
    CAST(lpad(to_hex(n), 32, '0') AS uuid), 'application/json', '{"tenant": "a"}', CAST('{}' AS bytea), now(),
    'ValueError', 'a test', 'aa', 7, true
FROM generate_series(CAST(%(first)s AS bigint), CAST(%(first)s AS bigint) + CAST(%(count)s AS bigint) - 1) AS n
"""
_MAKE_DAY = "SELECT durable.make_partition('envelope_history', %s)"


def add_history(
    conn: psycopg.Connection[Any],
    count: int,
    *,
    first: int = 1,
    side: str = "incoming",
    outcome: str = "handled",
    address: str = "shop",
    finished_at: datetime | None = None,
    age: timedelta = timedelta(0),
    took: timedelta = timedelta(seconds=3),
) -> None:
    """`count` rows, which took so long from their sending, with the ids `first`, `first` + 1, ... as UUIDs."""
    if finished_at is None:
        row = conn.execute("SELECT clock_timestamp() - %s", (age,)).fetchone()
        assert row is not None
        (finished_at,) = row
    params = {"side": side, "outcome": outcome, "address": address, "first": first, "count": count, "took": took}
    conn.execute(_HISTORY, params | {"finished_at": finished_at})


def add_old_day(conn: psycopg.Connection[Any], days: int, count: int, first: int = 1) -> str:
    """A day in the past with its partition and these rows; returns the partition's name."""
    low = (datetime.now(UTC) - timedelta(days=days)).replace(hour=0, minute=0, second=0, microsecond=0)
    name = f"envelope_history_{low:%Y%m%d}"
    conn.execute(_MAKE_DAY, (low.date(),))
    add_history(conn, count, first=first, finished_at=low + timedelta(hours=1))
    return name


def add_letters(conn: psycopg.Connection[Any], count: int, *, first: int = 1) -> None:
    conn.execute(_LETTERS, {"count": count, "first": first})


def numbers(ids: list[Any]) -> list[int]:
    """The numbers that these ids were made of, in order."""
    return sorted(int.from_bytes(bytes(each)) for each in ids)
