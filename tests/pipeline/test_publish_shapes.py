"""Publishing of uneven batches: many destinations, most rows under one key, parts with a flaw, tables in use."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from durable.envelope import new_id
from durable.errors import InvalidMessage
from durable.pipeline import bodies, contents, publish, publishable
from durable.pipeline.contents import Contents
from durable.pipeline.copying import connection
from durable.pipeline.source import register
from durable.settings import load_settings
from durable.storage import staging
from durable.storage.staging import Batch, Staged
from tests.failure.leftovers import SCHEMA
from tests.support.publishing import MESSAGE_TYPE, PEER, SOURCE, Outbox, messages, orders

ROWS, DESTINATIONS = 20_000, 1_000


@pytest.fixture
def outbox(spark: SparkSession, database_url: str) -> Outbox:
    register(spark)
    return Outbox(database_url)


@pytest.mark.parametrize("mode", ["atomic", "fast"])
def test_rows_for_a_thousand_destinations_and_mostly_of_one_key_are_published_once(
    spark: SparkSession, outbox: Outbox, mode: str
) -> None:
    """Rows with a key need the mode atomic; those without go in either."""
    hot_key = F.when(F.col("order_id") % 10 < 9, F.lit("hot")).otherwise(F.col("order_id").cast("string"))
    made = publish.envelopes(
        orders(spark, ROWS, partitions=4),
        key="order_id",
        message_type=MESSAGE_TYPE,
        source=SOURCE,
        destination=F.format_string("tcp://shop-%d:2301", F.col("order_id") % DESTINATIONS),
        partition_key=hot_key if mode == "atomic" else None,
    )
    settings = load_settings(database_url=outbox.url)
    done = publish.publish(made, settings, mode=mode)
    assert done is not None
    assert (done.rows, done.added) == (ROWS, ROWS)
    counts = outbox.rows("SELECT count(*) FROM durable.outgoing_envelopes GROUP BY destination")
    assert counts == [(ROWS // DESTINATIONS,)] * DESTINATIONS
    hot = "SELECT count(*) FROM durable.outgoing_envelopes WHERE ordering_key = 'hot'"
    assert outbox.one(hot) == (ROWS // 10 * 9 if mode == "atomic" else 0)
    again = publish.publish(made.repartition(3), settings, mode=mode)
    assert again is None or again.added == 0, "the same rows in other parts are the same batch"
    assert outbox.one("SELECT count(*) FROM durable.outgoing_envelopes") == ROWS


ROW = st.tuples(st.sampled_from("abc"), st.binary(min_size=16, max_size=16), st.none() | st.sampled_from("xy"))


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=30), st.integers(1, 7), st.data())
def test_contents_of_a_batch_are_those_of_its_rows_under_any_partitioning(
    rows: list[tuple[str, bytes, str | None]], size: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(rows))
    parts = [shuffled[first : first + size] for first in range(0, len(rows), size)]
    whole = contents_of(rows)
    assert contents.merged(map(contents_of, parts)) == contents.merged([whole]) == whole
    changed = data.draw(st.lists(ROW, min_size=1, max_size=30))
    assert (contents_of(changed) == whole) == (Counter(changed) == Counter(rows))


def contents_of(rows: list[tuple[str, bytes, str | None]]) -> Contents:
    """In the middle of a larger batch, as a slice."""
    padded = [("before", bytes(16), None), *rows, ("after", bytes(16), None)]
    columns = {
        "destination": pa.array([destination for destination, _, _ in padded], pa.string()),
        "id": pa.array([row for _, row, _ in padded], pa.binary()),
        "message_type": pa.array(["kind"] * len(padded), pa.string()),
        "source": pa.array(["shop"] * len(padded), pa.string()),
        "body": pa.array([b"body"] * len(padded), pa.binary()),
        "partition_key": pa.array([key for _, _, key in padded], pa.string()),
    }
    batch = publishable.whole(pa.RecordBatch.from_pydict(columns), datetime.now(UTC)).slice(1, len(rows))
    return contents.of(contents.words(batch, pa.array([False] * len(rows)), bodies.of(batch, None)))


def test_flaw_of_one_part_is_reported_without_denying_the_others(spark: SparkSession, outbox: Outbox) -> None:
    flawed = orders(spark, 20).withColumn(
        "body", F.when(F.col("order_id") != 19, F.lit("{}")).otherwise(F.repeat(F.lit("x"), 2 << 20))
    )
    made = publish.envelopes(
        flawed, key="order_id", message_type=MESSAGE_TYPE, source=SOURCE, destination=PEER, body="body"
    )
    with pytest.raises(InvalidMessage, match="not all parts were published: the body has 2097152 bytes"):
        publish.publish(made, load_settings(database_url=outbox.url), mode="fast")
    assert outbox.one("SELECT count(*) FROM durable.outgoing_envelopes") == 10


def test_staging_table_in_use_does_not_hold_up_its_job(spark: SparkSession, outbox: Outbox) -> None:
    """An attempt that nobody waits for any more may still be at its own table."""
    job = new_id()
    abandoned = staging.table_name(job, 1)
    with psycopg.connect(outbox.url) as conn:
        conn.execute("SELECT durable.make_staging(%s, current_user::text)", (abandoned,))
        conn.commit()
        conn.execute(f"SELECT FROM durable.{abandoned}".encode())
        with connection(outbox.url) as own:
            done = staging.publish(own, SCHEMA, job, Batch("x"), [Staged("", 0, 0)])
        assert done is not None
    assert outbox.batches == [(0, 0)]
    assert outbox.leftovers == [abandoned], "it is swept when it is old"
    publish.publish(messages(orders(spark, 10)), load_settings(database_url=outbox.url))
    assert outbox.orders == [*range(10)]
