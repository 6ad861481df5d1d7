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
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import DataFile, arrow_schema

DAY = date(2026, 11, 20)


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


@pytest.mark.parametrize("place", ["gopher://lake", "/proc/nowhere"])
def test_unusable_place_is_named_in_the_error(place: str) -> None:
    with pytest.raises(InvalidSetting, match=place):
        Lake(place).create("history")
