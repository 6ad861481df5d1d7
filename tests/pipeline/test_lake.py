"""The lake: files and offset are one commit, and Spark reads what was committed and nothing else."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from unittest.mock import patch
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from durable.errors import ArchiveConflict, InvalidSetting
from durable.pipeline import places
from durable.pipeline.compaction import compact, vacuum
from durable.pipeline.files import TaskFiles
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import DataFile, Whose, arrow_schema, file_schema

DAY = date(2026, 11, 20)
WHOSE = Whose("shop", "shop-1")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"))
    lake.create("history")
    return lake


@pytest.fixture(params=["folder", "object store"])
def any_lake(request: pytest.FixtureRequest) -> Lake:
    if request.param == "folder":
        lake: Lake = request.getfixturevalue("lake")
        return lake
    lake = Lake(f"{request.getfixturevalue('store_url')}/lake")
    lake.create("history")
    return lake


def data_file(lake: Lake, day: date = DAY, rows: int = 3) -> DataFile:
    """A file of history, which lies in the lake and is no part of it yet."""
    path = f"day={day}/part-{uuid4().hex}.parquet"
    schema = pa.schema([field for field in arrow_schema("history") if field.name != "day"])
    moment = datetime.combine(day, datetime.min.time(), UTC)
    values = {
        pa.binary(): uuid4().bytes, pa.string(): "x", pa.int32(): 1, pa.int64(): 700, pa.timestamp("us", "UTC"): moment
    }  # fmt: skip
    table = pa.table({field.name: [values[field.type]] * rows for field in schema}, schema=schema)
    with places.created(lake.table_url("history"), path) as file:
        pq.write_table(table, file)
        size = file.tell()
    return DataFile(path, day, rows, size, f'{{"numRecords": {rows}}}')


def test_an_empty_lake_is_read_as_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    empty = Lake(str(tmp_path / "nothing"))
    assert empty.read(spark, "history").count() == 0
    assert empty.offset("shop", "history") == 0


def test_committed_files_are_read_by_day(spark: SparkSession, lake: Lake) -> None:
    files = [data_file(lake, date(2026, 11, day), rows=day) for day in (19, 20, 21)]
    lake.commit("history", files, app_id="shop", low=0, high=900)
    data_file(lake)  # of an attempt that died

    assert lake.offset("shop", "history") == 900
    assert lake.read(spark, "history").count() == 60
    assert lake.read(spark, "history", date(2026, 11, 20), date(2026, 11, 21)).count() == 20
    row = lake.read(spark, "history").where("day = DATE '2026-11-21'").first()
    assert row is not None
    assert (row.service, row.finished_at, len(row.id)) == ("x", datetime(2026, 11, 21), 16)


def test_second_of_two_commits_from_one_offset_is_refused(any_lake: Lake) -> None:
    any_lake.commit("history", [data_file(any_lake)], app_id="shop", low=0, high=900)
    with pytest.raises(ArchiveConflict, match="Run the command again"):
        any_lake.commit("history", [data_file(any_lake)], app_id="shop", low=0, high=950)
    assert any_lake.offset("shop", "history") == 900
    assert len(any_lake.files("history")) == 1


def test_second_of_two_concurrent_commits_is_refused(any_lake: Lake) -> None:
    """Both have read the log before either wrote to it."""
    before = any_lake.opened("history")
    any_lake.commit("history", [data_file(any_lake)], app_id="shop", low=0, high=900)
    with patch.object(any_lake, "opened", lambda table: before):
        with pytest.raises(ArchiveConflict):
            any_lake.commit("history", [data_file(any_lake)], app_id="shop", low=0, high=900)
        any_lake.commit("history", [data_file(any_lake)], app_id="billing", low=0, high=17)
    assert (any_lake.offset("shop", "history"), any_lake.offset("billing", "history")) == (900, 17)
    assert len(any_lake.files("history")) == 2


def test_each_service_has_an_offset_of_its_own(any_lake: Lake) -> None:
    any_lake.commit("history", [data_file(any_lake)], app_id="shop", low=0, high=900)
    any_lake.commit("history", [data_file(any_lake)], app_id="billing", low=0, high=17)
    assert (any_lake.offset("shop", "history"), any_lake.offset("billing", "history")) == (900, 17)


def test_a_table_is_made_once_and_keeps_its_id(any_lake: Lake) -> None:
    assert any_lake.create("history") == any_lake.create("history")


def test_files_named_by_no_commit_are_listed_and_removed(any_lake: Lake) -> None:
    part, left_behind = data_file(any_lake), data_file(any_lake)
    any_lake.commit("history", [part], app_id="shop", low=0, high=900)
    assert any_lake.unlisted("history", DAY) == [left_behind.path]
    any_lake.remove("history", left_behind.path)
    any_lake.remove("history", left_behind.path)  # once more, as by another archiver
    assert any_lake.unlisted("history", DAY) == any_lake.unlisted("history", DAY + timedelta(days=1)) == []


MOMENTS = [
    datetime(2026, 11, 20, 12, 0, 0, micros, tzinfo=UTC)
    for micros in (0, 1, 999, 1_000, 123_456, 999_999)
]  # fmt: skip


@pytest.mark.parametrize("is_compacted", [False, True], ids=["archived", "compacted"])
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: str(moment.microsecond))
def test_times_of_files_enclose_those_of_their_rows(lake: Lake, moment: datetime, *, is_compacted: bool) -> None:
    """The log of a compacted table has the times in milliseconds."""
    moments = [moment - timedelta(seconds=5), moment]
    for number, each in enumerate(moments):
        lake.commit("history", written(lake, each, f"a-{number}-b-0"), app_id="x", low=number, high=number + 1)
    if is_compacted:
        compact(lake, "history", above=1)
    found = [*lake.rows_from("history", WHOSE, 0).values()]
    bounds = [file.statistics["finished_at"] for file in lake.logged("history")]
    assert len(found) == len(bounds) == (1 if is_compacted else 2)
    assert min(each.first_at for each in found) <= moments[0]
    assert moment <= max(each.last_at for each in found) < moment + timedelta(milliseconds=1)
    assert min(each.low for each in bounds) <= micros(moments[0])
    assert micros(moment) <= max(each.high for each in bounds)


@pytest.mark.parametrize(
    ("keep", "age", "is_kept"),
    [(60, 59, True), (61, 60.5, True), (119, 70, True), (119, 118.9, True), (60, 61, False), (119, 121, False)],
)
def test_vacuum_keeps_files_replaced_within_its_time(lake: Lake, keep: float, age: float, *, is_kept: bool) -> None:
    replaced = written(lake, MOMENTS[0], "a-0-b-0")
    lake.commit("history", replaced, app_id="x", low=0, high=9)
    with patch("durable.pipeline.lake.time.time", lambda: (datetime.now(UTC) - timedelta(minutes=age)).timestamp()):
        others = written(lake, MOMENTS[0], "a-0-c-0")
        lake.replace("history", [(file.day, file.path) for file in replaced], others, {"x": 9})
    assert vacuum(lake, "history", timedelta(minutes=keep)) == (0 if is_kept else 1)


def written(lake: Lake, moment: datetime, name: str) -> list[DataFile]:
    """A file of one row that ended at this time, which is no part of the lake yet."""
    schema = file_schema("history")
    values = {"service": WHOSE.service, "database": WHOSE.database, "side": "outgoing", "xid": 700, "seq": 1}
    times = dict.fromkeys(("sent_at", "finished_at"), moment)
    ids = dict.fromkeys(("id", "correlation_id"), uuid4().bytes)
    row = dict.fromkeys(schema.names) | values | times | ids
    with TaskFiles(lake.table_url("history"), "history", None, name) as files:
        files.add_whole(pa.RecordBatch.from_pylist([row], schema))
    return [*files.files]


def micros(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


@pytest.mark.parametrize("place", ["gopher://lake", "/proc/nowhere"])
def test_unusable_place_is_named_in_the_error(place: str) -> None:
    with pytest.raises(InvalidSetting, match=place):
        Lake(place).create("history")
