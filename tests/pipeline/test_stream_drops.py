"""A stream and the rows that were dropped: those that it has read are no matter, and others end it with an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import BinaryType, StructType
from sqlalchemy import Connection

from durable.errors import InvalidSetting
from durable.pipeline.copying import connection
from durable.pipeline.read_options import ReadOptions
from durable.pipeline.source import register
from durable.pipeline.stream import EnvelopeStreamReader, Offset
from durable.storage import maintenance, purging
from durable.storage.maintenance import HISTORY, Day
from durable.storage.sql.dead_letters import PURGE_LETTERS
from durable.storage.sql.housekeeping import PURGE_DEFAULT_HISTORY
from tests.support.history import add_history, add_letters, add_old_day, numbers
from tests.support.streams import Stream

SCHEMA: Final = "durable"
KEEP: Final = timedelta(days=30)
AGE: Final = 40
ALL: Final = 2**40

Add = Callable[[psycopg.Connection[Any], int], None]
"""Make an old row of this number, in a transaction of its own."""
Drop = Callable[[Connection], object]


_OF_NUMBER: Final = "WHERE id = CAST(lpad(to_hex(CAST(%s AS bigint)), 32, '0') AS uuid)"
_LET_BE_FINISHED: Final = f"UPDATE durable.envelope_history SET finished_at = CAST(%s AS date) {_OF_NUMBER}"
_LET_BE_RESOLVED: Final = (
    "UPDATE durable.dead_letters SET (failed_at, resolved_at, resolution) = (old, old, 'discarded') "
    f"FROM (SELECT CAST(%s AS timestamptz)) AS moment (old) {_OF_NUMBER}"
)


def old_day() -> date:
    """The day of the rows that are dropped."""
    return (datetime.now(UTC) - timedelta(days=AGE)).date()


def in_a_day(conn: psycopg.Connection[Any], number: int) -> None:
    add_old_day(conn, AGE, 1, first=number)


def in_no_day(conn: psycopg.Connection[Any], number: int) -> None:
    add_history(conn, 1, first=number, finished_at=datetime.combine(old_day(), datetime.min.time(), UTC))


def resolved(conn: psycopg.Connection[Any], number: int) -> None:
    with conn.transaction():
        add_letters(conn, 1, first=number)
        conn.execute(_LET_BE_RESOLVED.encode(), (old_day(), number))


def archived(conn: Connection, ended: str = "NULL") -> None:
    for table in ("envelope_history", "dead_letters"):
        conn.exec_driver_sql(
            "INSERT INTO durable.archives (table_name, service, app_id, lake, lake_id, claimed_below, archived_below, "
            f"identity, ended_at) VALUES (%s, 'shop', 'a', 'lake', 'a', %s, %s, durable.cluster_identity(), {ended}) "
            "ON CONFLICT DO NOTHING",
            (table, ALL, ALL),
        )


def purge_day(conn: Connection) -> None:
    archived(conn)
    purging.drop_day(conn, SCHEMA, old_day())


def drop_old_day(conn: Connection) -> None:
    assert maintenance.drop_day(conn, SCHEMA, Day(HISTORY, old_day()), KEEP)


def drop_day_after_archive(conn: Connection) -> None:
    archived(conn, ended="now()")
    drop_old_day(conn)


def purge_strays(conn: Connection) -> None:
    archived(conn)
    assert purging.drop_stray_rows(conn, SCHEMA, ALL, old_day() + timedelta(days=1))


def forget_strays(conn: Connection) -> None:
    assert maintenance.purge(conn, SCHEMA, PURGE_DEFAULT_HISTORY, keep=KEEP)


def forget_strays_after_archive(conn: Connection) -> None:
    archived(conn, ended="now()")
    forget_strays(conn)


def purge_letters(conn: Connection) -> None:
    archived(conn)
    assert purging.drop_resolved_letters(conn, SCHEMA, ALL, KEEP)


def forget_letters(conn: Connection) -> None:
    assert maintenance.purge(conn, SCHEMA, PURGE_LETTERS, keep=KEEP)


DROPS: Final[Mapping[str, tuple[Add, Drop]]] = {
    "a purge of a day": (in_a_day, purge_day),
    "a day before the first archive": (in_a_day, drop_old_day),
    "a day after the last archive": (in_a_day, drop_day_after_archive),
    "a purge of rows in no day": (in_no_day, purge_strays),
    "rows in no day before the first archive": (in_no_day, forget_strays),
    "rows in no day after the last archive": (in_no_day, forget_strays_after_archive),
    "a purge of letters": (resolved, purge_letters),
    "letters before the first archive": (resolved, forget_letters),
}


class Query:
    """A stream without Spark: its reader, and the offset that its checkpoint has."""

    def __init__(self, url: str, table: str, start: str = "earliest") -> None:
        options = ReadOptions.parse({"url": url, "table": table, "columns": "id", "start": start})
        self.reader = EnvelopeStreamReader(options, StructType().add("id", BinaryType()))
        self.offset: Offset | None = None

    def planned(self, limit: ReadLimit) -> tuple[Offset, Offset]:
        start = self.offset or self.reader.initialOffset()
        return start, self.reader.latestOffset(start, limit)

    def read(self, start: Offset, end: Offset) -> list[int]:
        parts = self.reader.partitions(start, end)
        rows = [row for part in parts for batch in self.reader.read(part) for row in batch.column("id").to_pylist()]
        self.offset = end
        return numbers(rows)

    def next(self, most: int | None = None) -> list[int]:
        start, end = self.planned(ReadAllAvailable() if most is None else ReadMaxRows(most))
        return self.read(start, end) if start != end else []


@pytest.fixture
def database_url(emptied_url: str) -> str:
    return emptied_url


class Case:
    """A table with old rows, a query that reads it, and a drop."""

    def __init__(self, conn: psycopg.Connection[Any], url: str, drop: str) -> None:
        self._conn, self._url, (self._add, self._drop) = conn, url, DROPS[drop]
        self.is_of_letters = self._add is resolved
        self.remove_day()
        self.query = self.other_query()

    def other_query(self, start: str = "earliest") -> Query:
        return Query(self._url, "dead_letters" if self.is_of_letters else "envelope_history", start)

    def add_old(self, *given: int) -> None:
        for number in given:
            self._add(self._conn, number)

    def add_new(self, number: int) -> None:
        (add_letters if self.is_of_letters else add_history)(self._conn, 1, first=number)

    def make_old(self, number: int) -> None:
        """Let a row be old that is here, without another transaction number."""
        if self._add is in_a_day:
            add_old_day(self._conn, AGE, 0)
        self._conn.execute((_LET_BE_RESOLVED if self.is_of_letters else _LET_BE_FINISHED).encode(), (old_day(), number))

    def remove_day(self) -> None:
        """By hand, without a note."""
        self._conn.execute(f"DROP TABLE IF EXISTS durable.envelope_history_{old_day():%Y%m%d}".encode())

    def make_day(self) -> None:
        add_old_day(self._conn, AGE, 0)

    def lose(self, number: int) -> None:
        """Let a row be gone without a note, as one of after the state that was put back."""
        table = "dead_letters" if self.is_of_letters else "envelope_history"
        self._conn.execute(f"DELETE FROM durable.{table} {_OF_NUMBER}".encode(), (number,))

    def take_back(self, number: int) -> None:
        """Let a letter be one that was never given a number; a row of history goes alone."""
        self.lose(number)
        if self.is_of_letters:
            self._conn.execute("SELECT setval(pg_get_serial_sequence('durable.dead_letters', 'letter_id'), 1)")

    def drop(self) -> None:
        with connection(self._url) as conn:
            self._drop(conn)


@pytest.fixture(params=DROPS)
def case(request: pytest.FixtureRequest, conn: psycopg.Connection[Any], database_url: str) -> Case:
    return Case(conn, database_url, request.param)


def of_the_drop() -> str:
    """The pattern of the error about its rows."""
    return rf"rows of {old_day()} to {old_day()} were dropped.* and may be missing; .*begin with a new checkpoint"


def test_stream_goes_on_after_a_drop_of_read_rows(case: Case) -> None:
    case.add_old(1, 2, 3)
    assert case.query.next() == [1, 2, 3]
    case.drop()
    assert case.query.next() == []
    case.add_new(4)
    assert case.query.next() == [4]


def test_stream_goes_on_after_a_drop_of_read_rows_when_their_day_is_made_again(case: Case) -> None:
    """As nodes make yesterday."""
    case.add_old(1, 2, 3)
    assert case.query.next() == [1, 2, 3]
    case.drop()
    case.make_day()
    assert case.query.next() == []
    case.add_old(4)
    case.add_new(5)
    assert case.query.next() == [4, 5]


def test_stream_ends_without_its_last_row_when_its_day_has_lost_older_ones_alone(case: Case) -> None:
    """As in a state of the database that was put back, of after a drop and before the row."""
    case.add_old(1, 2)
    assert case.query.next() == [1, 2]
    case.drop()
    case.make_day()
    case.add_old(3)
    assert case.query.next() == [3]
    case.take_back(3)
    with pytest.raises(InvalidSetting, match="another state of the database"):
        case.query.next()


@pytest.mark.parametrize("is_made_again", [False, True], ids=["no day", "a day"])
@pytest.mark.parametrize("older", [[], [1]], ids=["nothing dropped", "older rows dropped"])
def test_stream_ends_without_its_last_row_when_its_drop_is_not_noted(
    case: Case, older: list[int], is_made_again: bool
) -> None:
    """As where an older state of the database was put back, whatever became of the day since."""
    case.add_old(*older, 2)
    assert case.query.next() == [*older, 2]
    case.lose(2)
    if older:
        case.drop()
    else:
        case.remove_day()
    if is_made_again:
        case.make_day()
    case.add_new(3)
    with pytest.raises(InvalidSetting, match="another state of the database"):
        case.query.next()


@pytest.mark.parametrize("is_newer", [False, True], ids=["nothing else", "a newer row"])
@pytest.mark.parametrize("read", [1, 2])
def test_stream_ends_after_a_drop_of_unread_rows(case: Case, read: int, is_newer: bool) -> None:
    case.add_old(1, 2, 3)
    for number in range(read):
        assert case.query.next(most=1) == [number + 1]
    if is_newer:
        case.add_new(4)
    case.drop()
    for _ in range(2):
        with pytest.raises(InvalidSetting, match=of_the_drop()):
            case.query.next()


def test_new_query_begins_with_the_rows_left_by_a_drop(case: Case) -> None:
    """Also where a row with a lower number than the dropped ones is left."""
    case.add_new(1)
    assert case.query.next() == [1]
    case.add_old(2, 3)
    case.drop()
    for number in (4, 5):
        case.add_new(number)
    with pytest.raises(InvalidSetting, match=of_the_drop()):
        case.query.next()
    query = case.other_query()
    assert [query.next(most=1) for _ in range(4)] == [[1], [4], [5], []]


def test_drop_between_the_plan_and_the_read_of_a_batch_is_noticed(case: Case) -> None:
    """Also where the batch is read once more, after a restart."""
    case.add_new(1)
    case.add_old(2, 3)
    start, end = case.query.planned(ReadAllAvailable())
    case.drop()
    for _ in range(2):
        with pytest.raises(InvalidSetting, match=of_the_drop()):
            case.query.read(start, end)


def test_checkpoint_without_the_number_of_a_drop_is_judged_by_its_number(case: Case) -> None:
    """As those were that earlier versions have written."""
    case.add_old(1, 2)
    query = case.other_query()
    for each, rows in ((case.query, [1]), (query, [1, 2])):
        assert each.next(most=len(rows)) == rows
        assert each.offset is not None
        del each.offset["drop"], each.offset["begin"]
    case.drop()
    assert query.next() == []
    with pytest.raises(InvalidSetting, match=of_the_drop()):
        case.query.next()


def test_stream_goes_on_after_a_drop_of_read_rows_when_their_day_has_lost_newer_ones(case: Case) -> None:
    case.add_new(1)
    case.add_new(2)
    case.add_old(3)
    case.drop()
    case.add_new(4)
    assert case.query.next(most=2) == [1, 2]
    case.make_old(1)
    case.drop()
    assert case.query.next() == [4]


def test_drop_of_older_rows_hides_no_earlier_drop(case: Case) -> None:
    case.add_new(1)
    case.add_new(2)
    assert case.query.next() == [1, 2]
    case.add_old(3)
    case.drop()
    case.make_old(1)
    case.drop()
    with pytest.raises(InvalidSetting, match=of_the_drop()):
        case.query.next()


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_first_batch_read_again_begins_at_its_own_start(case: Case, start: str) -> None:
    """Its checkpoint has its end alone, and Spark asks for another start."""
    query = case.other_query(start)
    if start == "earliest":
        case.add_old(1)
    begin = query.reader.initialOffset()
    case.add_old(2)
    end = query.reader.latestOffset(begin, ReadAllAvailable())
    case.add_new(3)
    again = case.other_query(start)
    assert again.read(again.reader.initialOffset(), end) == ([1, 2] if start == "earliest" else [2])


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_first_batch_read_again_ends_after_a_drop_of_its_rows(case: Case, start: str) -> None:
    query = case.other_query(start)
    begin = query.reader.initialOffset()
    case.add_old(1, 2)
    case.add_new(3)
    end = query.reader.latestOffset(begin, ReadAllAvailable())
    case.drop()
    for again in (case.other_query(start), case.other_query(start)):
        with pytest.raises(InvalidSetting, match=of_the_drop()):
            again.read(again.reader.initialOffset(), end)


def test_restored_rows_of_another_lake_are_no_drop(conn: psycopg.Connection[Any], database_url: str) -> None:
    query = Query(database_url, "envelope_history")
    add_history(conn, 1)
    assert query.next() == [1]
    conn.execute(
        "INSERT INTO durable.absent_rows (table_name, day, kind, row_count, below) VALUES "
        "('envelope_history', current_date, 'foreign', 5, %s), ('envelope_history', current_date, 'gap', 0, %s)",
        (ALL, ALL),
    )
    add_history(conn, 1, first=2)
    assert query.next() == [2]


def test_rows_lost_in_a_restore_excuse_no_missing_last_row(conn: psycopg.Connection[Any], database_url: str) -> None:
    query = Query(database_url, "envelope_history")
    add_history(conn, 1)
    assert query.next() == [1]
    conn.execute(
        "INSERT INTO durable.absent_rows (table_name, day, kind, row_count, below) SELECT 'envelope_history', "
        "CAST(finished_at AT TIME ZONE 'UTC' AS date), kind, rows, %s FROM durable.envelope_history, "
        "(VALUES ('foreign', 5), ('gap', 0)) AS lost (kind, rows)",
        (ALL,),
    )
    conn.execute("DELETE FROM durable.envelope_history")
    with pytest.raises(InvalidSetting, match="another state of the database"):
        query.next()


def test_error_of_a_drop_reaches_the_caller(
    spark: SparkSession, conn: psycopg.Connection[Any], database_url: str, tmp_path: Path
) -> None:
    register(spark)
    case = Case(conn, database_url, "a day before the first archive")
    case.add_old(1)
    stream = Stream(spark, database_url, tmp_path)
    assert stream.run() == [1]
    case.add_old(2)
    case.drop()
    with pytest.raises(PySparkException, match=of_the_drop()):
        stream.run()


@pytest.mark.parametrize("is_dropped", [False, True], ids=["whole", "dropped"])
def test_first_batch_is_read_again_whole_or_not_at_all_when_its_sink_failed(
    spark: SparkSession, conn: psycopg.Connection[Any], database_url: str, tmp_path: Path, is_dropped: bool
) -> None:
    register(spark)
    case = Case(conn, database_url, "a day before the first archive")
    case.add_old(1, 2)
    case.add_new(3)
    read: list[list[int]] = []

    def fail_first(frame: DataFrame, _: int) -> None:
        read.append(numbers([row.id for row in frame.collect()]))
        if len(read) == 1:
            raise RuntimeError("the sink is away")

    def run() -> None:
        frame = spark.readStream.format("durable").options(url=database_url, columns="id").load()
        writing = frame.writeStream.foreachBatch(fail_first).option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert writing.trigger(availableNow=True).start().awaitTermination(60)

    with pytest.raises(PySparkException, match="the sink is away"):
        run()
    if is_dropped:
        case.drop()
    case.add_new(4)
    with pytest.raises(PySparkException, match=of_the_drop()) if is_dropped else nullcontext():
        run()
    assert read == ([[1, 2, 3]] if is_dropped else [[1, 2, 3], [1, 2, 3], [4]])
