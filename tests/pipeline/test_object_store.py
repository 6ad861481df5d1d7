"""A lake in an object store: archived as into a folder, and what is said when it cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
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
from tests.support.root import ROOT


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
    assert not {"\n", "\x1b", "<"} & set(str(raised.value)), raised.value


def test_store_without_credentials_is_told_in_one_line() -> None:
    """Though its library warns of each place that it looks for them in."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RUST_"))}
    environment |= {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1", "HOME": "/nowhere"}
    command = [sys.executable, "-m", "durable.cli", "pipeline", "compact", "--lake", "s3://bucket/lake"]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: lake s3://bucket/lake: ")
    assert ended.stderr.count("\n") == 1
