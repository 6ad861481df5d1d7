"""Maintenance on Postgres: a step that fails skips no other; a long reader stops neither maintenance nor traffic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from durable.embedded import Embedded
from durable.envelope import LeasedEnvelope, NodeId
from durable.recovery.maintenance import maintain
from durable.settings import Settings, load_settings
from durable.storage import inbox
from durable.storage.database import Database
from durable.storage.inbox import Arrival
from durable.testing import eventually
from tests.conftest import fresh_databases
from tests.failure.leftovers import envelope
from tests.support.history import add_old_day
from tests.support.tables import Tables

NODE = NodeId(7)
OLD = "now() - interval '400 days'"
# Something in each table that one step of maintenance lets go, all of it under a known id.
OLD_ROWS = {
    "undated_ids": "INSERT INTO durable.undated_ids (id, endpoint, message_digest, received_at, sent_at) "
    f"VALUES (gen_random_uuid(), 'a', 0, {OLD}, now())",
    "received_ids_default": "INSERT INTO durable.received_ids (id, endpoint, message_digest, received_at) "
    f"VALUES ('00000000-0000-7000-8000-000000000001', 'a', 0, {OLD})",
    "envelope_history_default": "INSERT INTO durable.envelope_history (id, side, outcome, address, message_type, "
    "source, correlation_id, sent_at, attempts, interruptions, node_id, finished_at) VALUES (gen_random_uuid(), "
    f"'incoming', 'handled', 'a', 'b', 'c', gen_random_uuid(), now(), 0, 0, 1, {OLD})",
    "circuits": f"INSERT INTO durable.circuits (kind, key, reason, until, actor) VALUES ('key', 'a', 'b', {OLD}, 'c')",
    "dead_letters": "INSERT INTO durable.dead_letters (side, address, body, exception_type, reason, fingerprint, "
    f"node_id, resolution, resolved_at) VALUES ('incoming', 'a', '', 'b', 'c', 'd', 1, 'discarded', {OLD})",
    "failed_attempts": "INSERT INTO durable.failed_attempts (id, endpoint, number, failed_at, node_id, "
    f"exception_type, reason, traceback) VALUES (gen_random_uuid(), 'a', 1, {OLD}, 1, 'b', 'c', 'd')",
    "published_batches": "INSERT INTO durable.published_batches (batch, job, published_at) "
    f"VALUES ('a', gen_random_uuid(), {OLD})",
}
FAIL = """
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'no function for that' USING ERRCODE = 'undefined_function'; END $$;
"""


@pytest.fixture
def tables(server: Embedded) -> Iterator[Tables]:
    with fresh_databases(server) as make:
        url = make("maintenance")
        with psycopg.connect(url, autocommit=True) as conn:
            yield Tables(url, conn)


@pytest.fixture
def settings(tables: Tables) -> Settings:
    return load_settings(database_url=tables.url, partitions_ahead=9)


@pytest.fixture
async def database(settings: Settings) -> AsyncIterator[Database]:
    database = Database(settings)
    yield database
    await database.close()


def left(tables: Tables) -> set[str]:
    """The tables that still hold their old row."""
    return {table for table in OLD_ROWS if tables.count(table)}


def days(tables: Tables, parent: str) -> set[int]:
    """The days that there are of this table, counted from today."""
    return set(
        tables.rows(
            "SELECT to_date(right(relname, 8), 'YYYYMMDD') - CAST(now() AT TIME ZONE 'UTC' AS date) FROM pg_class "
            "WHERE relispartition AND relkind = 'r' AND relname ~ %s",
            f"^{parent}_[0-9]{{8}}$",
        )
    )


ALL_DAYS = set(range(-1, 10))


@pytest.mark.parametrize("failing", OLD_ROWS)
async def test_failing_step_skips_no_other(
    tables: Tables, database: Database, settings: Settings, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    tables.execute(FAIL)
    for statement in OLD_ROWS.values():
        tables.execute(statement)
    tables.execute(f"CREATE TRIGGER fail BEFORE DELETE ON durable.{failing} FOR EACH ROW EXECUTE FUNCTION fail()")

    await maintain(database, settings)

    assert left(tables) == {failing}
    assert days(tables, "received_ids") == days(tables, "envelope_history") == ALL_DAYS
    assert "the next run tries again" in caplog.text


async def test_failing_day_skips_no_other(
    tables: Tables, database: Database, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """A table of its name is in the way of one day."""
    for statement in OLD_ROWS.values():
        tables.execute(statement)
    name = f"received_ids_{datetime.now(UTC) + timedelta(days=8):%Y%m%d}"
    tables.execute(f"CREATE TABLE durable.{name} (x integer)")

    await maintain(database, settings)

    assert left(tables) == set()
    assert days(tables, "received_ids") == ALL_DAYS - {8}
    assert days(tables, "envelope_history") == ALL_DAYS


class Traffic:
    """Messages that come in and are handled, one after another; none waits for a lock for more than a second."""

    def __init__(self, url: str) -> None:
        self._database = Database(load_settings(database_url=url))
        self.handled = 0
        self._ends = asyncio.Event()

    async def run(self) -> None:
        def one(conn: Any, schema: str, number: int) -> None:
            conn.exec_driver_sql("SET LOCAL lock_timeout = '1s'")
            given = envelope(number)
            inbox.store(conn, schema, [Arrival("billing", given, NODE)])
            claimed = LeasedEnvelope(given, endpoint="billing")
            assert inbox.finish_handled(conn, schema, NODE, [claimed]) == 1

        try:
            while not self._ends.is_set():
                await self._database.transaction(one, self.handled)
                self.handled += 1
        finally:
            await self._database.close()

    def end(self) -> None:
        self._ends.set()


@pytest.mark.parametrize("reads", ["durable.received_ids", "durable.envelope_history", "both"])
async def test_long_reader_stops_neither_maintenance_nor_traffic(
    tables: Tables, database: Database, settings: Settings, reads: str
) -> None:
    for statement in OLD_ROWS.values():
        tables.execute(statement)
    for parent in ("received_ids", "envelope_history"):
        for past in (-400, -399):
            tables.execute("SELECT durable.make_partition(%s, current_date + %s)", parent, past)
    for table, statement in OLD_ROWS.items():
        if table.endswith("_default") and not tables.count(table):
            tables.execute(statement)
    read = ["durable.received_ids", "durable.envelope_history"] if reads == "both" else [reads]
    traffic = Traffic(tables.url)
    running = asyncio.create_task(traffic.run())
    await eventually(lambda: traffic.handled > 5, within=30)
    with psycopg.connect(tables.url) as reader:
        for table in read:
            reader.execute(f"SELECT count(*) FROM {table}".encode())  # and its transaction stays open

        await maintain(database, settings)

        assert not running.done(), "an insert waited behind a partition that maintenance could not lock"
        handled = traffic.handled
        await eventually(lambda: traffic.handled > handled, within=30)
        assert left(tables) <= {"received_ids_default", "envelope_history_default"}
        for parent in ("received_ids", "envelope_history"):
            if f"durable.{parent}" not in read:
                assert days(tables, parent) == ALL_DAYS
    await eventually(lambda: traffic.handled > handled + 1, within=30)
    await maintain(database, settings)
    for parent in ("received_ids", "envelope_history"):
        assert days(tables, parent) == ALL_DAYS
    traffic.end()
    await running


@pytest.mark.parametrize("newest_at", [0, 4_000, 9_999])
@pytest.mark.parametrize("kept", [0, 9_900, 10_000])
def test_drop_of_a_day_before_the_first_archive_notes_its_newest_transaction(
    tables: Tables, newest_at: int, kept: int
) -> None:
    """`kept`: so many of the rows from the first on, so that the last blocks are empty, or all of them."""
    with psycopg.connect(tables.url, autocommit=True) as conn:
        part = add_old_day(conn, 30, 1)
    day = "CAST(now() - interval '30 days' AS date)"
    tables.execute(f"DELETE FROM durable.{part}")
    tables.execute(
        "INSERT INTO durable.envelope_history (id, side, outcome, address, message_type, source, correlation_id, "
        "sent_at, attempts, interruptions, node_id, finished_at, xid) SELECT gen_random_uuid(), 'incoming', 'handled', "
        f"'a', 'b', 'c', gen_random_uuid(), now(), 0, 0, 1, {day} + interval '1 hour', "
        "CASE WHEN n = %s THEN 1000000 ELSE n END FROM generate_series(0, 9999) AS n",
        newest_at,
    )
    tables.execute(f"DELETE FROM durable.{part} WHERE xid >= %s AND xid < 1000000", kept)
    left = tables.one(f"SELECT max(xid) FROM durable.{part}")
    tables.execute(f"SELECT durable.drop_partition('envelope_history', {day}, interval '7 days')")
    assert tables.rows("SELECT kind, row_count, below FROM durable.absent_rows") == [("early", 1, left + 1)]
    assert tables.rows("SELECT to_regclass(%s)", f"durable.{part}") == [None]
