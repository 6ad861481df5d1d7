"""A lake in an object store: archived as into a folder, and what is said when it cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from durable.errors import DurableError, InvalidSetting
from durable.pipeline import checksums, places
from durable.pipeline.archive import archive
from durable.pipeline.compaction import compact
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import file_schema
from durable.pipeline.session import spark_errors
from tests.support.archiving import origin_of
from tests.support.history import add_history, numbers


@pytest.fixture
def lake(spark: SparkSession, store_url: str, bucket: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Lake:
    for name, value in bucket.items():  # the session's workers have begun already
        monkeypatch.setitem(spark.sparkContext.environment, name, value)
    return Lake(f"{store_url}/lake")


def ids(lake: Lake) -> list[int]:
    history = places.ParquetFiles(lake.table_url("history"), [*lake.sizes("history")], file_schema("history"))
    return numbers(history.to_table(["id"])["id"].to_pylist())


def test_each_row_is_archived_once(
    spark: SparkSession, lake: Lake, conn: psycopg.Connection[Any], database_url: str
) -> None:
    add_history(conn, 200)
    origin = origin_of(database_url)
    assert archive(lambda: spark, lake, "history", origin, local_rows=0).rows == 200
    assert archive(lambda: spark, lake, "history", origin, local_rows=0).rows == 0
    add_history(conn, 100, first=201)
    assert archive(lambda: spark, lake, "history", origin, local_rows=0).rows == 100
    assert ids(lake) == [*range(1, 301)]


def test_missing_connector_of_spark_is_named(
    spark: SparkSession, lake: Lake, conn: psycopg.Connection[Any], database_url: str
) -> None:
    add_history(conn, 1)
    archive(lambda: spark, lake, "history", origin_of(database_url), local_rows=0)
    with pytest.raises(InvalidSetting, match="no connector for this object store"), spark_errors():
        lake.read(spark, "history")


def test_files_have_checksums_and_are_named_when_gone(
    spark: SparkSession, lake: Lake, conn: psycopg.Connection[Any], database_url: str
) -> None:
    for number in range(3):
        add_history(conn, 10, first=1 + 100 * number)
        archive(lambda: spark, lake, "history", origin_of(database_url), local_rows=1_000)
    table_url, names = lake.table_url("history"), [*lake.sizes("history")]
    checksums.check(table_url, names)
    assert None not in [checksums.noted(table_url, name) for name in names]
    compact(lake, "history")
    (large,) = lake.sizes("history")
    checksums.check(table_url, [large])
    lake.remove("history", large)
    assert checksums.noted(table_url, large) is None
    with pytest.raises(DurableError, match=f"{large} cannot be read: it is not there"):
        lake.read(spark, "history")
    lake.remove("history", large)


def test_missing_bucket_raises_an_error_of_one_line(store_url: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^lake s3://nowhere/lake: .*NoSuchBucket") as raised:
        Lake("s3://nowhere/lake").create("history")
    assert "\n" not in str(raised.value)
    assert "\x1b" not in str(raised.value)
