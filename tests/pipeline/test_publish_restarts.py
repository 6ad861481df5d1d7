"""Publishing that is cut off and begun again: a driver that is killed inside its commit, and a streaming query."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from durable.errors import InvalidMessage, InvalidSetting
from durable.pipeline import publish
from durable.pipeline.session import spark_errors
from durable.pipeline.source import register
from durable.settings import load_settings
from tests.support.killing import dies_at
from tests.support.publishing import Outbox, messages, orders, write

pytestmark = pytest.mark.timeout(600)  # to be cut off amid a call leaves the session of all tests unusable


@pytest.fixture(autouse=True)
def source(spark: SparkSession) -> None:
    register(spark)


@pytest.fixture
def outbox(database_url: str) -> Outbox:
    return Outbox(database_url)


# ---------------------------------------------------------------- a driver that is killed


@pytest.mark.parametrize(("point", "published"), [("P1", 0), ("P2", 1_000)], ids=["before COMMIT", "after COMMIT"])
def test_driver_killed_during_its_commit_has_published_all_or_nothing(
    spark: SparkSession, outbox: Outbox, point: str, published: int
) -> None:
    dies_at(point, "publishing", outbox.url)
    assert len(outbox.orders) == published
    assert bool(outbox.leftovers) == (published == 0), "they are swept when they are old"

    publish.publish(messages(orders(spark, 1_000)), load_settings(database_url=outbox.url))
    assert outbox.orders == list(range(1_000))
    assert outbox.batches == [(1_000, 1_000)]


# ---------------------------------------------------------------- a streaming query


@pytest.fixture
def run(spark: SparkSession, outbox: Outbox, tmp_path: Path) -> Callable[..., None]:
    """Publish what has come into the folder `orders` since, as one query on one checkpoint."""

    def run_query(**options: str) -> None:
        rows = spark.readStream.schema("order_id BIGINT, total BIGINT").parquet(str(tmp_path / "orders"))
        writer = messages(rows).writeStream.format("durable").options(url=outbox.url, **options)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).queryName("orders")
        with spark_errors():
            query: StreamingQuery = writer.trigger(availableNow=True).start()
            query.awaitTermination()

    return run_query


def come_in(spark: SparkSession, folder: Path, first: int) -> None:
    orders(spark, 10, first=first).write.mode("append").parquet(str(folder / "orders"))


def test_query_restarted_from_its_checkpoint_publishes_each_batch_once(
    spark: SparkSession, outbox: Outbox, run: Callable[..., None], tmp_path: Path
) -> None:
    come_in(spark, tmp_path, 0)
    run()
    assert outbox.orders == list(range(10))

    # As if it had died after our COMMIT, before Spark wrote down that the batch was done. Meanwhile all was sent.
    outbox.empty()
    (tmp_path / "checkpoint" / "commits" / "0").unlink()
    (tmp_path / "checkpoint" / "commits" / ".0.crc").unlink()
    run()
    assert outbox.orders == []

    come_in(spark, tmp_path, 10)
    run()
    assert outbox.orders == list(range(10, 20))
    assert outbox.leftovers == []
    (batch,) = outbox.rows("SELECT batch, number, row_count FROM durable.published_batches")
    assert batch[0].startswith("query ")
    assert batch[1:] == (1, 10)


def test_another_query_publishes_separately(
    spark: SparkSession, outbox: Outbox, run: Callable[..., None], tmp_path: Path
) -> None:
    come_in(spark, tmp_path, 0)
    run()
    (tmp_path / "checkpoint").rename(tmp_path / "of another query")
    run()
    assert outbox.orders == list(range(10)), "the ids are the same"
    assert outbox.one("SELECT count(*) FROM durable.published_batches") == 2


@pytest.mark.parametrize("lost", ["checkpoint", "none of it"])
def test_another_query_under_one_name_of_a_batch_publishes_its_own_rows(
    spark: SparkSession, outbox: Outbox, run: Callable[..., None], tmp_path: Path, lost: str
) -> None:
    for first in (0, 10):
        come_in(spark, tmp_path, first)
        run(batch="May")
    shutil.rmtree(tmp_path / "orders")
    if lost == "checkpoint":
        shutil.rmtree(tmp_path / "checkpoint")
    else:
        (tmp_path / "checkpoint").rename(tmp_path / "of another query")
    come_in(spark, tmp_path, 20)
    run(batch="May")
    assert outbox.orders == list(range(30))
    names = outbox.rows("SELECT batch FROM durable.published_batches")
    assert [name.startswith("May, query ") for (name,) in names] == [True, True]


@pytest.mark.parametrize("is_stream_first", [True, False])
def test_stream_and_batch_under_one_name_are_two(
    spark: SparkSession, outbox: Outbox, run: Callable[..., None], tmp_path: Path, is_stream_first: bool
) -> None:
    come_in(spark, tmp_path, 0)
    if is_stream_first:
        run(batch="May")
    write(messages(orders(spark, 10, first=10)), outbox.url, batch="May")
    if not is_stream_first:
        run(batch="May")
    assert outbox.orders == list(range(20))


@pytest.mark.parametrize("batch", [{}, {"batch": "May"}], ids=["no name", "name"])
@pytest.mark.parametrize("damage", ["older copy", "no offsets"])
def test_older_checkpoint_is_refused_when_other_rows_follow(
    spark: SparkSession,
    outbox: Outbox,
    run: Callable[..., None],
    tmp_path: Path,
    damage: str,
    batch: dict[str, str],
) -> None:
    checkpoint = tmp_path / "checkpoint"
    come_in(spark, tmp_path, 0)
    run(**batch)
    shutil.copytree(checkpoint, tmp_path / "copy")
    come_in(spark, tmp_path, 10)
    run(**batch)
    if damage == "older copy":
        shutil.rmtree(checkpoint)
        (tmp_path / "copy").rename(checkpoint)
    else:
        for name in ("offsets", "commits", "sources"):
            shutil.rmtree(checkpoint / name)
    come_in(spark, tmp_path, 20)
    for _ in range(2):
        with pytest.raises(InvalidMessage, match=r"was published before.*nothing was published.*new checkpoint"):
            run(**batch)
        assert outbox.orders == list(range(20))
    shutil.rmtree(checkpoint)
    run(**batch)
    assert outbox.orders == list(range(30))


def test_streaming_query_must_write_atomically(
    spark: SparkSession, outbox: Outbox, run: Callable[..., None], tmp_path: Path
) -> None:
    come_in(spark, tmp_path, 0)
    with pytest.raises(InvalidSetting, match="a streaming query writes 'atomic'"):
        run(mode="fast")
    assert outbox.orders == []
