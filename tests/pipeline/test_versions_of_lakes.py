"""Lakes of other versions: one of an earlier version is read, archived into and erased; of a newer one what can be."""

from __future__ import annotations

import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest
from deltalake import Field
from deltalake.schema import PrimitiveType
from pyspark.sql import SparkSession

from durable.errors import InvalidSetting
from durable.pipeline import erasing
from durable.pipeline.audit import Question, audit
from durable.pipeline.beginning import Wish
from durable.pipeline.columns import COLUMNS
from durable.pipeline.compaction import compact
from durable.pipeline.describing import FORMAT, comments
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, LakeTable
from durable.pipeline.report import report
from durable.pipeline.status import read_status
from durable.storage.erasures import Chosen
from tests.support.archiving import Archiver
from tests.support.command import Agent
from tests.support.history import add_history

EARLIER: Final = Path(__file__).parent / "fixtures" / "lake-of-version-0.1.0.tar.xz"
DATABASE: Final = "app_e8c11faddb15-873ccd51"
ARCHIVES: Final = {  # of the database that was archived there: the table's id in the lake, and how far it came
    "envelope_history": ("afd18a43-4c0b-4b6e-8d38-6ec9c85ddaa9", 767),
    "dead_letters": ("ae32501e-0a4a-4c2f-abef-3e5aba1f57ca", 777),
}
MIDNIGHT: Final = datetime(2026, 11, 20, tzinfo=UTC)


@pytest.fixture
def earlier(archiver: Archiver, conn: psycopg.Connection[Any]) -> Archiver:
    """The lake, and the database that was archived there, as it was then."""
    with tarfile.open(EARLIER) as packed:
        packed.extractall(archiver.lake.url, filter="data")
    conn.execute("INSERT INTO durable.generations (generation, database) VALUES (0, %s)", (DATABASE,))
    for table, (lake_id, high) in ARCHIVES.items():
        conn.execute(
            "INSERT INTO durable.archives (table_name, service, app_id, lake, lake_id, claimed_below, archived_below) "
            "VALUES (%s, 'shop', %s, %s, %s, %s, %s)",
            (table, f"shop:{DATABASE}.durable.{table}", archiver.lake.table_url("history"), lake_id, high, high),
        )
    while transaction(conn) <= 777:
        pass  # the numbers of then are taken
    add_history(conn, 6, finished_at=MIDNIGHT)
    add_history(conn, 3, first=7, side="outgoing", outcome="sent", finished_at=MIDNIGHT + timedelta(days=1))
    for first, last, xid in ((1, 4, 755), (5, 6, 762), (7, 9, 766)):
        ids = [UUID(int=number) for number in range(first, last + 1)]
        conn.execute("UPDATE durable.envelope_history SET xid = %s WHERE id = ANY (%s)", (xid, ids))
    conn.execute(
        "UPDATE durable.envelope_history SET partition_key = 'customer-0', body = '{}', content_type = "
        "'application/json', headers = '{\"tenant\": \"a\"}' WHERE xid = 755"
    )
    return archiver


def transaction(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute("SELECT CAST(CAST(pg_current_xact_id() AS text) AS bigint)").fetchone()
    assert row is not None
    return int(row[0])


def is_whole(archiver: Archiver) -> bool:
    return archiver.verify("history").is_whole and archiver.verify("dead_letters").is_whole


# ---------------------------------------------------------------- an earlier version


def test_lake_of_an_earlier_version_is_read(earlier: Archiver) -> None:
    rows = earlier.lake.read(earlier.spark, "history")
    assert earlier.ids() == [*range(1, 10)]
    assert rows.where("partition_key = 'customer-0' AND headers LIKE '%tenant%'").count() == 4
    assert rows.where("erasure_id IS NULL").count() == 9
    assert sorted(row.letter_id for row in earlier.lake.read(earlier.spark, "dead_letters").collect()) == [1, 1, 2]


def test_lake_of_an_earlier_version_is_archived_from_its_last_offset(
    earlier: Archiver, conn: psycopg.Connection[Any]
) -> None:
    add_history(conn, 2, first=10, finished_at=MIDNIGHT)
    done = earlier.run(local_rows=1_000)
    assert (done.low, done.rows) == (767, 2)
    assert earlier.ids() == [*range(1, 12)]
    assert is_whole(earlier)
    compact(earlier.lake, "history", above=1)
    assert earlier.ids() == [*range(1, 12)]
    assert is_whole(earlier)
    assert earlier.run(local_rows=1_000).rows == 0


def test_lake_of_an_earlier_version_is_recognised_by_its_successor(
    earlier: Archiver, conn: psycopg.Connection[Any]
) -> None:
    conn.execute("UPDATE durable.archives SET identity = 'another cluster'")
    add_history(conn, 2, first=10, finished_at=MIDNIGHT)
    done = earlier.run(wish=Wish(is_successor=True), local_rows=1_000)
    assert (done.known, done.rows) == (9, 2)
    assert earlier.ids() == [*range(1, 12)]


def test_lake_of_an_earlier_version_is_audited_and_reported_on(earlier: Archiver) -> None:
    verdict = audit(earlier.spark, [earlier.lake], [earlier.lake], Question(archived_until=MIDNIGHT))
    assert (verdict.failed, sum(row["count"] for row in verdict.totals)) == (False, 9)
    assert report(earlier.spark, earlier.lake).totals["total"] == 9


def test_lake_of_an_earlier_version_is_erased(earlier: Archiver) -> None:
    done = erasing.erase(earlier.origin, earlier.lake, Chosen(keys=["customer-0"]), actor="a test", reason="4711")
    assert (done.history_rows, done.lake_history_rows) == (4, 4)
    erasing.scrub(earlier.origin, earlier.lake, Chosen(keys=["customer-0"]))
    assert earlier.ids() == [*range(1, 10)]
    assert is_whole(earlier)


def test_table_of_an_earlier_version_gets_columns_comments_and_properties_once(earlier: Archiver) -> None:
    for table in SOURCES:
        earlier.lake.create(table)
        version = earlier.lake.opened(table).version()
        assert_described(earlier.lake, table)
        earlier.lake.create(table)
        assert earlier.lake.opened(table).version() == version


# ---------------------------------------------------------------- this one


def assert_described(lake: Lake, table: LakeTable) -> None:
    opened = lake.opened(table)
    assert {field.name: field.metadata.get("comment") for field in opened.schema().fields} == comments(table)
    assert set(comments(table)) == {column.name for column in COLUMNS[SOURCES[table]]} | {"service", "database", "day"}
    assert opened.metadata().configuration["durable.format"] == str(FORMAT)
    assert "archived from Postgres by durable" in (opened.metadata().description or "")
    collected = opened.metadata().configuration["delta.dataSkippingStatsColumns"].split(",")
    content = {"partition_key", "headers", "body", "error", "reason", "traceback", "edited_body", "resolution_reason"}
    assert not content & set(collected)


@pytest.mark.parametrize("table", ["history", "dead_letters"])
def test_new_table_describes_its_columns_in_one_commit(tmp_path: Path, table: LakeTable) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.create(table)
    assert_described(lake, table)
    assert lake.opened(table).version() == 0


# ---------------------------------------------------------------- a newer version


@pytest.fixture
def newer(archiver: Archiver, conn: psycopg.Connection[Any]) -> Archiver:
    """A lake to which a newer version has added a column, and in which a row has a value of it."""
    add_history(conn, 3, finished_at=MIDNIGHT)
    archiver.run(local_rows=1_000)
    opened = archiver.lake.opened("history")
    opened.alter.add_columns([Field("mood", PrimitiveType("string"), nullable=True)])
    opened = archiver.lake.opened("history")
    opened.update(new_values={"mood": "merry"}, predicate="xid > 0")
    return archiver


def moods(archiver: Archiver) -> list[Any]:
    import pyarrow as pa

    found: list[Any] = pa.table(archiver.lake.opened("history").scan())["mood"].to_pylist()
    return sorted(found, key=str)


def test_lake_with_a_newer_column_is_read_and_archived_into(newer: Archiver, conn: psycopg.Connection[Any]) -> None:
    assert "mood" not in newer.lake.read(newer.spark, "history").columns
    add_history(conn, 2, first=4, finished_at=MIDNIGHT)
    assert newer.run(local_rows=1_000).rows == 2
    assert newer.ids() == [*range(1, 6)]
    compact(newer.lake, "history", above=1)
    assert newer.ids() == [*range(1, 6)]
    assert moods(newer) == [None, None, "merry", "merry", "merry"]


def test_erasure_refuses_a_table_with_unknown_columns(newer: Archiver, conn: psycopg.Connection[Any]) -> None:
    with pytest.raises(InvalidSetting, match=r"columns that this version of durable does not know \(mood\)"):
        erasing.erase(newer.origin, newer.lake, Chosen(ids=[UUID(int=1)]), actor="a test", reason="4711")
    assert moods(newer) == ["merry"] * 3
    assert conn.execute("SELECT count(*) FROM durable.envelope_history WHERE erasure_id IS NOT NULL").fetchone() == (0,)


@pytest.mark.parametrize("given", ["2", "two"])
def test_newer_format_of_a_lake_is_refused_by_every_operation(
    newer: Archiver, spark: SparkSession, conn: psycopg.Connection[Any], given: str
) -> None:
    lake = newer.lake
    lake.opened("history").alter.set_table_properties({"durable.format": given}, raise_if_not_exists=False)
    add_history(conn, 1, first=4, finished_at=MIDNIGHT)
    said = f"format {given} is unknown, and this version of durable knows formats up to 1; upgrade durable"
    for attempt in (
        lambda: lake.read(spark, "history"),
        lambda: newer.run(local_rows=1_000),
        lambda: is_whole(newer),
        lambda: compact(lake, "history"),
        lambda: audit(spark, [lake], [lake], Question()),
        lambda: report(spark, lake),
        lambda: read_status(newer.origin.url, "durable", lake),
        lambda: erasing.survey(newer.origin, lake, Chosen(ids=[UUID(int=1)])),
    ):
        with pytest.raises(InvalidSetting, match=said):
            attempt()


def test_commands_tell_of_a_newer_format_in_one_line(
    newer: Archiver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    newer.lake.opened("history").alter.set_table_properties({"durable.format": "2"}, raise_if_not_exists=False)
    agent = Agent(tmp_path, monkeypatch, capsys)
    place = ("--lake", newer.lake.url)
    ended = agent("pipeline", "archive", "--database", newer.origin.url, "--service", "shop", *place)
    assert (ended.code, ended.err.count("\n"), "upgrade durable" in ended.err) == (2, 1, True), ended
