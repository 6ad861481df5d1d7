"""The data source `durable`: what it reads, at which moment, and what it refuses."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, DecimalType, StringType, StructType

from durable.errors import InvalidSetting
from durable.pipeline.read_options import ReadOptions, checked
from durable.pipeline.source import EnvelopeSource, consistent, register
from durable.storage import migrator
from tests.support.clusters import Cluster, Clusters, clusters
from tests.support.history import add_history, add_letters, numbers
from tests.support.streams import Stream


@pytest.fixture
def source(spark: SparkSession) -> SparkSession:
    register(spark)
    return spark


def read(spark: SparkSession, url: str, **options: object) -> DataFrame:
    return spark.read.format("durable").options(url=url, **{key: str(value) for key, value in options.items()}).load()


def ids(frame: DataFrame) -> list[int]:
    return numbers([row.id for row in frame.select("id").collect()])


# ---------------------------------------------------------------- tables and columns


def test_history_is_read_with_every_column_unchanged(
    source: SparkSession, conn: psycopg.Connection[Any], database_url: str
) -> None:
    moment = datetime(2026, 11, 20, 23, 59, 59, 999_999, UTC)
    add_history(conn, 1, first=17, finished_at=moment)
    row = read(source, database_url).first()

    assert row is not None
    assert bytes(row.id) == (17).to_bytes(16)
    assert (row.side, row.outcome, row.address, row.node_id) == ("incoming", "handled", "shop", 7)
    assert (row.causation_id, row.error, row.body) == (None, None, None)
    assert row.finished_at.astimezone(UTC) == moment
    written = conn.execute("SELECT xid FROM durable.envelope_history").fetchone()
    assert written == (row.xid,)


@pytest.mark.parametrize("table", ["envelope_history", "dead_letters", "outgoing_envelopes", "incoming_envelopes"])
def test_an_empty_table_is_no_rows(source: SparkSession, database_url: str, table: str) -> None:
    frame = read(source, database_url, table=table)
    assert frame.count() == 0
    assert "id" in frame.columns


def test_dead_letters_are_read_with_their_headers_as_json(
    source: SparkSession, conn: psycopg.Connection[Any], database_url: str
) -> None:
    add_letters(conn, 3)
    with consistent(database_url) as options:
        letters = source.read.format("durable").options(**options).option("table", "dead_letters").load()
        rows = letters.orderBy("letter_id").collect()
    assert [(row.letter_id, row.headers, bytes(row.body)) for row in rows] == [
        (letter, '{"tenant": "a"}', b"{}") for letter in (1, 2, 3)
    ]


def test_source_reads_only_the_chosen_columns(
    source: SparkSession, conn: psycopg.Connection[Any], database_url: str
) -> None:
    add_history(conn, 3)
    frame = read(source, database_url, columns="outcome, id")
    assert frame.columns == ["outcome", "id"]
    assert ids(frame) == [1, 2, 3]


# ---------------------------------------------------------------- filters


TWO = "X'00000000000000000000000000000002'"
FILTERS = {
    "equal id": (f"id = {TWO}", [2]),
    "text by its bytes": ("address < 'a'", [3]),
    "number in": ("node_id IN (7, 8)", [1, 2, 3]),
    "time": ("finished_at >= TIMESTAMP '2026-11-20 12:00:00Z'", [2]),
    "null": ("error IS NULL", [1, 2, 3]),
    "not null": ("error IS NOT NULL", []),
    "quoted": (r"address = 'it\'s \\a'", [2]),
    "with what Spark must do": ("node_id = 7 AND address LIKE '%hop%'", [1]),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filter_chooses_the_same_rows_in_spark_and_in_postgres(
    source: SparkSession, conn: psycopg.Connection[Any], database_url: str, name: str
) -> None:
    noon = datetime(2026, 11, 20, 12, tzinfo=UTC)
    add_history(conn, 1, first=1, address="shop", finished_at=noon - timedelta(microseconds=1))
    add_history(conn, 1, first=2, address="it's \\a", finished_at=noon)
    add_history(conn, 1, first=3, address="Zoo", finished_at=noon - timedelta(days=1))
    asked, expected = FILTERS[name]
    frame = read(source, database_url, columns="id,address,finished_at,node_id,error")
    assert ids(frame.where(asked)) == expected


def test_filters_are_answered_by_postgres(
    source: SparkSession, conn: psycopg.Connection[Any], database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    add_history(conn, 100)
    frame = read(source, database_url).where(f"id = {TWO} AND outcome = 'handled'")
    assert frame.count() == 1
    frame.explain()
    plan = capsys.readouterr().out
    assert "BatchScan" in plan
    assert not re.search(r"\bFilter\b", plan), plan


# ---------------------------------------------------------------- one state of a changing table


def test_tasks_of_one_snapshot_read_one_state_of_a_changing_table(
    source: SparkSession, conn: psycopg.Connection[Any], database_url: str
) -> None:
    """Rows are moved all the time, of which there are always as many."""
    add_history(conn, 5_000)
    move = """WITH gone AS (DELETE FROM durable.envelope_history WHERE id IN (
        SELECT id FROM durable.envelope_history ORDER BY random() LIMIT 1000) RETURNING *)
        INSERT INTO durable.envelope_history SELECT * FROM gone"""
    stopping = Event()

    def churn() -> None:
        with psycopg.connect(database_url, autocommit=True) as other:
            while not stopping.is_set():
                other.execute(move)

    mover = Thread(target=churn, name="churn")
    mover.start()
    try:
        with consistent(database_url) as options:
            frame = source.read.format("durable").options(**options).option("columns", "id").load()
            counted = frame.agg(F.count("id"), F.count_distinct("id")).collect()[0]
            again = frame.count()
    finally:
        stopping.set()
        mover.join()
    assert (tuple(counted), again) == ((5_000, 5_000), 5_000)
    assert frame.rdd.getNumPartitions() >= 8


def test_table_is_read_by_one_statement_without_a_snapshot(
    source: SparkSession, conn: psycopg.Connection[Any], database_url: str
) -> None:
    add_history(conn, 10)
    assert read(source, database_url).rdd.getNumPartitions() == 1


def test_expired_snapshot_is_named_in_the_error(source: SparkSession, database_url: str) -> None:
    with consistent(database_url) as options:
        pass
    with pytest.raises(PySparkException, match=r"snapshot .*: is over, or never was in this database; take a new one"):
        source.read.format("durable").options(**options).load().count()


# ---------------------------------------------------------------- bad input


BAD_OPTIONS: dict[str, dict[str, str]] = {
    "'nodes' is not one of envelope_history, dead_letters": {"table": "nodes"},
    "no column 'outcom'; did you mean 'outcome'": {"columns": "id,outcom"},
    "name each column once": {"columns": "id,id"},
    "name each column once, such as": {"columns": " "},
    "option partitions: must be a whole number above 0": {"partitions": "0"},
    "option max_rows: must be a whole number": {"max_rows": "x"},
    "option start: must be earliest or latest": {"start": "noon"},
    "option tabel: unknown; did you mean 'table'": {"tabel": "dead_letters"},
    "db_schema": {"schema": 'a";drop'},
    "not a Postgres URL": {"url": "mysql://localhost/x"},
}


@pytest.mark.parametrize("said", BAD_OPTIONS)
def test_bad_options_are_named(said: str) -> None:
    with pytest.raises(InvalidSetting, match=re.escape(said)):
        ReadOptions.parse({"url": "postgresql://localhost/x"} | BAD_OPTIONS[said])


def test_a_read_without_a_database_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURABLE_DATABASE_URL", raising=False)
    with pytest.raises(InvalidSetting, match="option url: missing"):
        ReadOptions.parse({})


BAD_SCHEMAS = {
    "envelope_history has no column 'total'": StructType().add("total", DecimalType()),
    "column id: envelope_history has it as binary, the schema that was given as string": StructType().add(
        "id", StringType()
    ),
    "column causation_id: may be NULL in envelope_history": StructType().add("causation_id", BinaryType(), False),
}


@pytest.mark.parametrize("said", BAD_SCHEMAS)
def test_unfit_schema_is_refused(said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        checked(BAD_SCHEMAS[said], "envelope_history")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_rows": "3"}, "option max_rows: only of a stream"),
        ({"START": "earliest"}, "option START: only of a stream"),
        ({"snapshot": "00000003-1"}, "option snapshot: only of a batch"),
    ],
    ids=str,
)
def test_option_of_the_other_kind_of_read_is_refused(given: dict[str, str], said: str) -> None:
    """It would be ignored."""
    source = EnvelopeSource({"url": "postgresql://localhost/x"} | given)
    with pytest.raises(InvalidSetting, match=said):
        (source.streamReader if "snapshot" in given else source.reader)(StructType())


REFUSED_BY_SPARK: dict[str, dict[str, str]] = {
    "several tasks see one state of a table only within one snapshot": {"partitions": "4"},
    "has no durable tables": {"schema": "elsewhere"},
    "the database cannot be used": {"url": "postgresql://nobody@127.0.0.1:1/none"},
}


@pytest.mark.parametrize("said", REFUSED_BY_SPARK)
def test_error_of_planning_reaches_the_caller(source: SparkSession, database_url: str, said: str) -> None:
    with pytest.raises(PySparkException) as refused:
        read(source, **({"url": database_url} | REFUSED_BY_SPARK[said])).count()
    assert said in str(refused.value)


# ---------------------------------------------------------------- streams


@pytest.fixture
def stream(source: SparkSession, database_url: str, tmp_path: Path) -> Stream:
    return Stream(source, database_url, tmp_path)


def test_a_stream_goes_on_from_its_checkpoint(stream: Stream, conn: psycopg.Connection[Any]) -> None:
    for first in (1, 11, 21):
        add_history(conn, 10, first=first)
    assert stream.run(max_rows=10) == [*range(1, 31)]
    assert stream.batches == 3
    add_history(conn, 5, first=31)
    assert stream.run() == [*range(1, 36)]
    assert stream.run() == [*range(1, 36)]
    assert stream.batches == 0, "writes elsewhere make no empty batches"


def test_stream_waits_for_a_transaction_committed_late(
    stream: Stream, conn: psycopg.Connection[Any], database_url: str
) -> None:
    with psycopg.connect(database_url) as late:
        add_history(late, 1, first=1)
        add_history(conn, 10, first=2)
        assert stream.run() == [], "below the oldest transaction that runs there is nothing yet"
    assert stream.run() == [*range(1, 12)]


def test_stream_starting_at_the_latest_reads_only_new_rows(stream: Stream, conn: psycopg.Connection[Any]) -> None:
    add_history(conn, 3)
    assert stream.run(start="latest") == []
    add_history(conn, 2, first=4)
    assert stream.run(start="latest") == [4, 5]


def test_a_table_without_transactions_is_no_stream(source: SparkSession, database_url: str) -> None:
    frame = source.readStream.format("durable").options(url=database_url, table="outgoing_envelopes").load()
    with pytest.raises(PySparkException, match="cannot be read as a stream"):
        frame.writeStream.format("memory").queryName("none").trigger(availableNow=True).start().processAllAvailable()


def shop_and_place(made: Clusters) -> tuple[Cluster, Cluster]:
    """A cluster with a new service, and a place for an earlier state of its files."""
    first = made.new()
    first.execute("CREATE DATABASE shop")
    migrator.upgrade(first.uri("shop").replace("postgresql://", "postgresql+psycopg://"), "durable")
    return first, made.empty()


@pytest.mark.parametrize("is_read_again", [False, True], ids=["new rows", "a batch that was planned"])
def test_stream_of_files_put_back_is_refused(source: SparkSession, tmp_path: Path, is_read_again: bool) -> None:
    """Identity and numbers are those of before: only the rows tell."""
    with clusters() as made:
        first, second = shop_and_place(made)
        url = first.uri("shop")
        with psycopg.connect(url, autocommit=True) as conn:
            add_history(conn, 10)
            first.back_up(second)
            for number in range(30):
                add_history(conn, 1, first=101 + number)
        stream = Stream(source, url, tmp_path)
        assert len(stream.run()) == 40
        if is_read_again:
            shutil.rmtree(tmp_path / "rows")
            [last] = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))[-1:]
            last.unlink()
        first.stop("immediate")
        second.start()
        again = Stream(source, second.uri("shop"), tmp_path)
        with psycopg.connect(second.uri("shop"), autocommit=True) as conn:
            for number in range(60):
                add_history(conn, 1, first=201 + number)
        with pytest.raises(PySparkException, match="checkpoint is of another state of the database"):
            again.run()
        second.stop("immediate")


def test_stream_of_letters_put_back_is_refused(source: SparkSession, tmp_path: Path) -> None:
    with clusters() as made:
        first, second = shop_and_place(made)
        url = first.uri("shop")
        with psycopg.connect(url, autocommit=True) as conn:
            add_letters(conn, 1)
            first.back_up(second)
            add_letters(conn, 4, first=2)
        stream = Stream(source, url, tmp_path)
        assert len(stream.run(table="dead_letters")) == 5
        first.stop("immediate")
        second.start()
        again = Stream(source, second.uri("shop"), tmp_path)
        for added in (1, 7):  # below the number of the last one that was read, and beyond it
            with psycopg.connect(second.uri("shop"), autocommit=True) as conn:
                for number in range(added):
                    add_letters(conn, 1, first=101 + number)
            with pytest.raises(PySparkException, match="checkpoint is of another state of the database"):
                again.run(table="dead_letters")
        second.stop("immediate")


def test_stream_of_letters_goes_on_when_its_last_one_was_resolved(
    stream: Stream, conn: psycopg.Connection[Any]
) -> None:
    add_letters(conn, 3)
    assert stream.run(table="dead_letters") == [1, 2, 3]
    conn.execute(
        "UPDATE durable.dead_letters SET resolution = 'discarded', resolved_at = now(), xid = DEFAULT "
        "WHERE letter_id = (SELECT max(letter_id) FROM durable.dead_letters)"
    )
    assert stream.run(table="dead_letters") == [1, 2, 3, 3]
    add_letters(conn, 1, first=4)
    assert stream.run(table="dead_letters") == [1, 2, 3, 3, 4]
