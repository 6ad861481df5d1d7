"""The pipeline through a pooler in transaction mode: transactions work, and locks ask for a direct connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import SecretStr
from pyspark.sql import SparkSession

from durable.pipeline import publish
from durable.pipeline.copying import arrow_connection, connection
from durable.pipeline.source import consistent, register
from durable.settings import Settings
from tests.support.command import Agent
from tests.support.history import add_history, add_old_day, numbers
from tests.support.pooler import pooler
from tests.support.streams import Stream


@pytest.fixture
def odd_formats(conn: psycopg.Connection[Any]) -> None:
    conn.execute(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET DateStyle = ''SQL, DMY''', current_database()); END $$"
    )


@pytest.fixture
def pooled(database_url: str) -> Iterator[str]:
    with pooler(database_url, server_connections=6) as url:
        yield url


@pytest.mark.usefixtures("odd_formats")
@pytest.mark.parametrize("mode", ["atomic", "fast"])
def test_messages_are_published_through_a_pooler(
    spark: SparkSession, conn: psycopg.Connection[Any], pooled: str, mode: str
) -> None:
    orders = spark.range(0, 2_000, numPartitions=4).withColumnRenamed("id", "order_id")
    messages = publish.envelopes(
        orders, key="order_id", message_type="orders.order-placed", source="shop", destination="tcp://billing:2301"
    )
    for added in (2_000, 0):
        published = publish.publish(
            messages, Settings(database_url=SecretStr(pooled)), mode=mode, batch=f"first of {added}"
        )
        assert published is not None
        assert (published.rows, published.added) == (2_000, added)
    assert conn.execute("SELECT count(*) FROM durable.outgoing_envelopes").fetchone() == (2_000,)


@pytest.mark.usefixtures("odd_formats")
def test_history_is_read_through_a_pooler(spark: SparkSession, conn: psycopg.Connection[Any], pooled: str) -> None:
    register(spark)
    add_history(conn, 1_000)
    rows = spark.read.format("durable").options(url=pooled).load()
    assert rows.count() == 1_000
    with consistent(pooled) as options:
        add_history(conn, 1, first=5_000)
        rows = spark.read.format("durable").options(**options).option("partitions", 4).load()
        assert numbers([row.id for row in rows.select("id").collect()]) == [*range(1, 1_001)]


@pytest.mark.usefixtures("odd_formats")
def test_stream_reads_through_a_pooler(
    spark: SparkSession, conn: psycopg.Connection[Any], pooled: str, tmp_path: Path
) -> None:
    register(spark)
    stream = Stream(spark, pooled, tmp_path)
    for first in (1, 101):
        add_history(conn, 100, first=first)
        assert stream.run() == [*range(1, first + 100)]


@pytest.mark.usefixtures("odd_formats")
def test_transaction_through_a_pooler_has_formats_of_its_own(pooled: str) -> None:
    """They are gone with it: the server connection is another client's after it."""
    with connection(pooled) as conn:
        assert conn.exec_driver_sql("SHOW DateStyle").scalar() == "ISO, YMD"
    with arrow_connection(pooled) as arrow, arrow.cursor() as cursor:
        cursor.execute("SELECT current_setting('DateStyle')")
        assert cursor.fetchone() == ("ISO, YMD",)
    with psycopg.connect(pooled) as other:
        assert other.execute("SHOW DateStyle").fetchone() == ("SQL, DMY",)


@pytest.mark.parametrize(
    "arguments",
    [
        ("archive",),
        ("archive", "--end"),
        ("verify",),
        ("purge",),
        ("erase", "--key", "k", "--reason", "a request", "--yes"),
        ("replay", "--name", "x", "--all"),
    ],
    ids=" ".join,
)
def test_lock_through_a_pooler_is_refused(
    conn: psycopg.Connection[Any],
    database_url: str,
    pooled: str,
    agent: Agent,
    arguments: tuple[str, ...],
) -> None:
    add_old_day(conn, 40, 3)
    service = () if arguments[0] == "replay" else ("--service", "shop")
    assert agent("pipeline", "archive", "--service", "shop", "--database", database_url).code == 0
    refused = agent("pipeline", *arguments, *service, "--database", pooled)
    assert (refused.code, refused.out) == (2, "")
    assert "database_url: goes through a pooler" in refused.err
    assert "set DURABLE_LOCK_DATABASE_URL to a direct connection" in refused.err


def test_archive_beside_a_pooler_uses_the_lock_url(
    conn: psycopg.Connection[Any],
    database_url: str,
    pooled: str,
    agent: Agent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_old_day(conn, 40, 3)
    monkeypatch.setenv("DURABLE_LOCK_DATABASE_URL", database_url)
    for command in ("archive", "verify", "purge"):
        assert agent("pipeline", command, "--service", "shop", "--database", pooled).code == 0
    monkeypatch.delenv("DURABLE_LOCK_DATABASE_URL")
    assert agent("pipeline", "status", "--database", pooled).code == 0


@pytest.fixture
def agent(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Agent:
    monkeypatch.setenv("DURABLE_LAKE", str(tmp_path / "lake"))
    return Agent(tmp_path, monkeypatch, capsys)
