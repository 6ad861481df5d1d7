"""Transactions that hold the horizon back, prepared ones among them, and numbers of transactions that wrap around."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StructField, StructType

from durable.errors import DurableError, InvalidSetting
from durable.pipeline import archive as archiving
from durable.pipeline import purge as purge_module
from durable.pipeline.beginning import Wish
from durable.pipeline.copying import connection
from durable.pipeline.lake_tables import SOURCES, Whose
from durable.pipeline.purge import Retention, purge
from durable.pipeline.read_options import ReadOptions
from durable.pipeline.source import register
from durable.pipeline.status import Status, read_status
from durable.pipeline.stream import EnvelopeStreamReader
from durable.storage import archives, horizons, migrator, purging
from tests.support.archiving import Archiver, origin_of
from tests.support.clusters import Cluster, Clusters, clusters
from tests.support.history import add_history, add_letters, add_old_day
from tests.support.roles import runtime_role
from tests.support.streams import Stream

MONTH = Retention(timedelta(days=30), timedelta(days=30))

_numbers = count(1)


@pytest.fixture(scope="module")
def made() -> Iterator[Clusters]:
    with clusters() as found:
        yield found


@pytest.fixture(scope="module")
def shared(made: Clusters) -> Cluster:
    """A server that lets transactions be prepared."""
    return made.new()


def new_service(cluster: Cluster, name: str) -> str:
    cluster.execute(f"CREATE DATABASE {name}")
    migrator.upgrade(cluster.uri(name).replace("postgresql://", "postgresql+psycopg://"), "durable")
    return cluster.uri(name)


@pytest.fixture
def database_url(shared: Cluster) -> Iterator[str]:
    """A service on that server; no transaction is left prepared there."""
    name = f"shop{next(_numbers)}"
    yield new_service(shared, name)
    with psycopg.connect(shared.uri(name), autocommit=True) as conn:
        for (gid,) in conn.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()").fetchall():
            conn.execute(f"ROLLBACK PREPARED '{gid}'".encode())


@contextlib.contextmanager
def preparing(url: str, name: str) -> Iterator[psycopg.Connection[Any]]:
    """A transaction that is prepared at the end, and waits for its COMMIT PREPARED."""
    with contextlib.closing(psycopg.connect(url)) as conn:
        yield conn
        conn.execute(f"PREPARE TRANSACTION '{name}'".encode())


def status(archiver: Archiver) -> Status:
    return read_status(archiver.origin.url, "durable", archiver.lake)


# ---------------------------------------------------------------- prepared transactions


def test_prepared_transaction_is_archived_when_committed(
    archiver: Archiver, conn: psycopg.Connection[Any], database_url: str
) -> None:
    add_history(conn, 5)
    with preparing(database_url, "kept") as other:
        add_history(other, 3, first=101)
        add_letters(other, 2)
    with preparing(database_url, "given up") as other:
        add_history(other, 3, first=201)
    add_history(conn, 5, first=6)
    for table in SOURCES:
        archiver.run(table)
    assert archiver.ids() == [*range(1, 6)]
    assert [each.lag_rows for each in status(archiver).tables] == [5, 0]
    with connection(database_url) as of:
        whose = Whose("shop", archives.database(of, "durable"))
    until = archiver.lake.span("history", whose).until

    conn.execute("COMMIT PREPARED 'kept'")
    archiver.run()
    assert archiver.ids() == [*range(1, 6), *range(101, 104)], "the other one is still held"
    conn.execute("ROLLBACK PREPARED 'given up'")
    for table in SOURCES:
        archiver.run(table)
    assert archiver.ids() == [*range(1, 11), *range(101, 104)]
    assert archiver.ids("dead_letters") == [1, 2]
    assert archiver.verify().is_whole
    later = archiver.lake.span("history", whose).until
    assert later is not None
    assert until is None or until < later


@contextlib.contextmanager
def holding(url: str, kind: str, name: str = "holder") -> Iterator[None]:
    """A transaction of this kind with a number."""
    with contextlib.closing(psycopg.connect(url, autocommit=kind == "prepared")) as conn:
        conn.execute("BEGIN" if kind == "prepared" else "SELECT 1")
        conn.execute("SELECT pg_current_xact_id()")
        if kind == "prepared":
            conn.execute(f"PREPARE TRANSACTION '{name}'".encode())
        yield
        if kind == "prepared":
            conn.execute(f"ROLLBACK PREPARED '{name}'".encode())


@pytest.mark.parametrize("had_archived", [False, True], ids=["first archive", "later archive"])
@pytest.mark.parametrize("kind", ["running", "hidden", "prepared"])
@pytest.mark.parametrize("place", ["its database", "another database"])
def test_lake_is_whole_up_to_the_holder_of_the_horizon(
    shared: Cluster, archiver: Archiver, conn: psycopg.Connection[Any], place: str, kind: str, had_archived: bool
) -> None:
    """Rows of after its number are not archived, whichever database of the cluster it is of."""
    url = archiver.origin.url
    with connection(url) as of:
        whose = Whose("shop", archives.database(of, "durable"))
    with runtime_role(url) as role:
        archiver.origin = origin_of(role if kind == "hidden" else url)
        add_history(conn, 1)
        if had_archived:
            archiver.run()
        before = archiver.lake.span("history", whose).until
        with holding(url if place == "its database" else shared.uri("postgres"), kind):
            add_history(conn, 1, first=2)
            [(written,)] = conn.execute("SELECT max(finished_at) FROM durable.envelope_history").fetchall()
            archiver.run()
            span = archiver.lake.span("history", whose)
        assert archiver.ids() == [1]
    assert span.begin is not None
    assert span.until == before if kind != "running" else span.until is not None and span.until < written


def test_idle_archive_moves_the_end_of_the_lake_when_a_minute_is_over(
    archiver: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle runs do not make a lake grow."""
    with connection(archiver.origin.url) as of:
        whose = Whose("shop", archives.database(of, "durable"))
    add_history(conn, 1)

    def ended(minutes: int) -> tuple[datetime | None, int]:
        monkeypatch.setattr(archiving, "_QUIET", timedelta(minutes=1 - minutes))
        archiver.run(local_rows=10)
        return archiver.lake.span("history", whose).until, len(archiver.lake.opened("history").history())

    first, commits = ended(0)
    assert first is not None
    assert [ended(0) for _ in range(3)] == [(first, commits)] * 3
    later, more = ended(1)
    assert (later is not None and later > first, more) == (True, commits + 1)


@pytest.mark.parametrize("kind", ["running", "hidden", "prepared"])
def test_rows_are_whole_up_to_a_moment_when_its_transactions_have_ended(
    shared: Cluster, database_url: str, kind: str
) -> None:
    def horizon() -> int:
        with connection(database_url) as conn:
            return horizons.horizon(conn, "durable")

    with holding(shared.uri("postgres"), kind), runtime_role(database_url) as role:
        with connection(role if kind == "hidden" else database_url) as conn:
            seen = horizons.running(conn, "durable")
        bound = seen.complete_until(horizon())
        assert bound is None if kind != "running" else bound is not None and bound < seen.moment
    with holding(shared.uri("postgres"), kind):
        assert seen.complete_until(horizon()) == seen.moment


@pytest.mark.parametrize("kind", ["hidden", "prepared"])
def test_end_of_the_lake_rises_while_some_transaction_always_hides_its_beginning(
    shared: Cluster, archiver: Archiver, conn: psycopg.Connection[Any], kind: str
) -> None:
    """An end that stood still would leave every later message to be judged for ever, without a word."""
    url = archiver.origin.url
    with connection(url) as of:
        whose = Whose("shop", archives.database(of, "durable"))

    def archived(first: int) -> tuple[datetime, datetime, datetime | None]:
        """The moments before and after a run over another row, and the end of the lake."""
        add_history(conn, 1, first=first)
        moments: list[datetime] = []
        for run in (lambda: None, archiver.run):
            run()
            moments += conn.execute("SELECT clock_timestamp()").fetchone() or ()
        return moments[0], moments[1], archiver.lake.span("history", whose).until

    with runtime_role(url) as role, ExitStack() as first, ExitStack() as second:
        archiver.origin = origin_of(role if kind == "hidden" else url)
        first.enter_context(holding(shared.uri("postgres"), kind, "first"))
        before, after, until = archived(1)
        assert until is None
        assert archived(2)[-1] is None, "all that ran at the first look still runs"
        second.enter_context(holding(shared.uri("postgres"), kind, "second"))
        first.close()
        *_, until = archived(3)
        assert until is not None
        assert before < until < after, "the first look"
        second.close()
        with holding(shared.uri("postgres"), kind, "third"):
            assert (archived(4)[-1] or until) > until
        archiver.run()
    assert archiver.ids() == [1, 2, 3, 4]


def test_status_names_the_transaction_with_the_oldest_number(
    archiver: Archiver, conn: psycopg.Connection[Any], database_url: str
) -> None:
    """Whoever runs for the longest time may have a younger number."""
    with psycopg.connect(database_url, application_name="elder") as elder:
        elder.execute("SELECT 1")
        with preparing(database_url, "oldest number") as other:
            add_history(other, 1)
        elder.execute("SELECT pg_current_xact_id()")
        held = status(archiver).holder
        assert held is not None
        assert held.who == "prepared transaction oldest number"
        conn.execute("COMMIT PREPARED 'oldest number'")
        held = status(archiver).holder
        assert held is not None
        assert "elder" in held.who


def test_status_names_a_transaction_hidden_from_its_role(
    shared: Cluster, conn: psycopg.Connection[Any], database_url: str
) -> None:
    role = f"reader{next(_numbers)}"
    shared.execute(f"CREATE ROLE {role} LOGIN")
    conn.execute(f"GRANT USAGE ON SCHEMA durable TO {role}".encode())
    conn.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA durable TO {role}".encode())
    with psycopg.connect(database_url) as hidden:
        hidden.execute("SELECT pg_current_xact_id()")
        held = read_status(database_url.replace("postgres@", f"{role}@"), "durable", None).holder
        assert held is not None
        assert f"process {hidden.info.backend_pid} " in held.who


def test_purge_names_the_transaction_using_the_history(
    archiver: Archiver, conn: psycopg.Connection[Any], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_old_day(conn, 41, 4)
    add_old_day(conn, 40, 4, first=11)
    archiver.run()
    archiver.run("dead_letters")
    with preparing(database_url, "long") as other:
        add_history(other, 1, first=101)
    monkeypatch.setattr(purge_module, "_patiently", lambda drop, *given: drop(*given))

    def purged() -> int:
        return len(purge(lambda: archiver.spark, archiver.lake, archiver.origin, MONTH).days)

    with pytest.raises(DurableError, match=r"0 days were dropped, .*in use by prepared transaction long;"):
        purged()
    conn.execute("COMMIT PREPARED 'long'")
    assert purged() == 2


def test_purge_waits_for_a_short_transaction(
    archiver: Archiver, conn: psycopg.Connection[Any], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_old_day(conn, 41, 4)
    archiver.run()
    archiver.run("dead_letters")
    drop, tried = purging.drop_day, []
    with contextlib.closing(psycopg.connect(database_url)) as other:
        add_history(other, 1, first=101)

        def drop_later(*given: Any) -> str:
            tried.append(given)
            if len(tried) == 3:
                other.commit()
            return drop(*given)

        monkeypatch.setattr(purging, "drop_day", drop_later)
        done = purge(lambda: archiver.spark, archiver.lake, archiver.origin, MONTH)
    assert (len(done.days), len(tried)) == (1, 3)


def test_successor_with_a_prepared_transaction_is_archived_after_its_commit(
    made: Clusters, spark: SparkSession, tmp_path: Path
) -> None:
    primary = made.new()
    archiver = Archiver(spark, new_service(primary, "shop"), tmp_path)
    with psycopg.connect(archiver.origin.url, autocommit=True) as conn:
        add_history(conn, 5)
        archiver.run()
        with preparing(archiver.origin.url, "from before") as other:
            add_history(other, 3, first=101)
    standby = made.empty()
    primary.back_up(standby, "-R")
    primary.stop("immediate")
    standby.start()
    standby.promote()

    archiver.origin = origin_of(standby.uri("shop"))
    with pytest.raises(DurableError, match="is in use by prepared transaction from before; run this again"):
        archiver.run(wish=Wish(is_successor=True))
    with psycopg.connect(standby.uri("shop"), autocommit=True) as conn:
        conn.execute("COMMIT PREPARED 'from before'")
        add_history(conn, 2, first=6)
    assert archiver.run(wish=Wish(is_successor=True)).rows == 5
    assert archiver.ids() == [*range(1, 8), *range(101, 104)]
    assert archiver.verify().is_whole


# ---------------------------------------------------------------- numbers far ahead


def test_rows_are_archived_and_streamed_once_across_a_wraparound_of_transaction_numbers(
    made: Clusters, spark: SparkSession, tmp_path: Path
) -> None:
    cluster = made.new()
    archiver = Archiver(spark, new_service(cluster, "shop"), tmp_path)
    url = archiver.origin.url
    register(spark)
    stream = Stream(spark, url, tmp_path / "stream")
    with psycopg.connect(url, autocommit=True) as conn:
        add_history(conn, 5)
    assert archiver.run().rows == 5
    assert stream.run() == [*range(1, 6)]

    cluster.wind_on(epoch=7)
    with psycopg.connect(url, autocommit=True) as conn, psycopg.connect(url) as late:
        add_history(conn, 5, first=6)
        add_old_day(conn, 40, 5, first=11)
        add_history(late, 1, first=101)  # before the end of the numbers, and committed after it
        with preparing(url, "before the end") as other:
            add_history(other, 1, first=102)
        add_history(conn, 1, first=103)
        cluster.use_up(1 << 15)
        add_history(conn, 5, first=16)
        oldest, newest = conn.execute("SELECT min(xid), max(xid) FROM durable.envelope_history").fetchone() or (0, 0)
        assert oldest < 1 << 31
        assert newest >= 8 << 32, "epoch 8 has begun"

        assert archiver.run().rows == 10
        assert stream.run() == [*range(1, 16)]
        held = status(archiver).holder
        assert held is not None
        assert f"process {late.info.backend_pid} " in held.who
        late.commit()
        assert archiver.run().rows == 1
        held = status(archiver).holder
        assert held is not None
        assert held.who == "prepared transaction before the end"
        conn.execute("COMMIT PREPARED 'before the end'")
        assert archiver.run().rows == 7

        everything = [*range(1, 21), 101, 102, 103]
        assert archiver.ids() == everything
        assert stream.run() == everything
        assert archiver.verify().is_whole
        history = status(archiver).tables[0]
        assert (history.problem, history.lag_rows) == (None, 0)
        archiver.run("dead_letters")
        assert len(purge(lambda: spark, archiver.lake, archiver.origin, MONTH).days) == 1
        assert archiver.run().rows == 0


def reader_of(url: str, table: str, start: str) -> EnvelopeStreamReader:
    options = ReadOptions.parse({"url": url, "columns": "xid", "table": table, "start": start})
    return EnvelopeStreamReader(options, StructType([StructField("xid", LongType(), False)]))


def read_by(reader: EnvelopeStreamReader) -> list[int]:
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, reader.getDefaultReadLimit())
    parts = reader.partitions(begin, end)
    return sorted(xid for part in parts for each in reader.read(part) for xid in each.column("xid").to_pylist())


def test_stream_begins_at_the_first_rows(conn: psycopg.Connection[Any], shared: Cluster, database_url: str) -> None:
    """Its tasks share the numbers of a batch among them: from 0 on, all rows would be in the last one's."""
    shared.use_up(1_000)
    for first in range(1, 41):
        add_history(conn, 1, first=first)
    reader = reader_of(database_url, "envelope_history", "earliest")
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, reader.getDefaultReadLimit())
    rows = [sum(each.num_rows for each in reader.read(part)) for part in reader.partitions(begin, end)]
    assert sum(rows) == 40
    assert min(rows) >= 5, rows


@pytest.mark.parametrize("start", ["earliest", "latest"])
@pytest.mark.parametrize("source", SOURCES.values())
def test_stream_begins_on_a_restored_dump_after_an_archive(
    archiver: Archiver, conn: psycopg.Connection[Any], database_url: str, source: str, start: str
) -> None:
    """Its rows have numbers to which the transactions of its cluster come later; none of them is left out."""
    add_history(conn, 3)
    add_letters(conn, 3)
    for each in SOURCES.values():
        conn.execute(f"UPDATE durable.{each} SET xid = xid + 1000 + CAST(right(id::text, 4) AS integer)".encode())
    restored = [xid for (xid,) in conn.execute(f"SELECT xid FROM durable.{source} ORDER BY xid".encode()).fetchall()]
    add_history(conn, 1, first=4)
    add_letters(conn, 1, first=4)
    refused = reader_of(database_url, source, start)
    with pytest.raises(InvalidSetting, match=f"url: {source} has rows of another cluster.* pipeline archive"):
        refused.initialOffset()
    for table in SOURCES:
        archiver.run(table)
    reader = reader_of(database_url, source, start)
    if start == "latest":
        reader.initialOffset()
    else:
        assert set(restored) < set(read_by(reader))


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_stream_begins_before_its_target_with_transactions_under_way(
    shared: Cluster, database_url: str, start: str
) -> None:
    reader = reader_of(database_url, "envelope_history", start)
    reader.prepareForTriggerAvailableNow()
    shared.use_up(10)
    begin = reader.initialOffset()
    assert reader.latestOffset(begin, reader.getDefaultReadLimit()) == begin
