"""Publishing beside other transactions: one that the database rolls back for another is tried again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest
from pyspark.sql import SparkSession

from durable.errors import StorageUnavailable
from durable.pipeline import publish
from durable.pipeline.writer import EnvelopeStreamWriter, EnvelopeWriter
from durable.settings import load_settings
from tests.support.publishing import COLUMNS, Outbox, messages, orders, staged

pytestmark = pytest.mark.timeout(600)

SLOW: Final = """
CREATE FUNCTION public.rest() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.5); RETURN NULL; END';
CREATE TRIGGER rest AFTER INSERT ON durable.outgoing_envelopes FOR EACH STATEMENT EXECUTE FUNCTION public.rest();
CREATE TRIGGER rest AFTER INSERT ON durable.incoming_envelopes FOR EACH STATEMENT EXECUTE FUNCTION public.rest()
"""
LOST: Final = """
CREATE FUNCTION public.leave() RETURNS trigger LANGUAGE plpgsql
    AS 'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER leave AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION public.leave()
"""


@pytest.fixture
def outbox(database_url: str) -> Outbox:
    return Outbox(database_url)


@pytest.mark.parametrize("kind", ["batches", "queries"])
@pytest.mark.parametrize("endpoint", [None, "main"], ids=["outbox", "inbox"])
@pytest.mark.parametrize("once", ["false", "true"])
def test_batches_with_the_same_rows_in_other_orders_are_both_published(
    outbox: Outbox, once: str, endpoint: str | None, kind: str
) -> None:
    outbox.rows(SLOW)

    def publish_rows(name: str, *numbers: int) -> None:
        options = {"url": outbox.url, "batch": name, "once": once}
        if kind == "batches":
            batch = EnvelopeWriter(options, COLUMNS, overwrite=False)
            batch.commit([staged(batch._target, [each], attempt=each, endpoint=endpoint) for each in numbers])
        else:
            query = EnvelopeStreamWriter(options, COLUMNS, overwrite=False)
            query.commit([staged(query._target, [each], attempt=each, endpoint=endpoint) for each in numbers], 1)

    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(publish_rows, "one", 1, 2), threads.submit(publish_rows, "other", 2, 1)]:
            done.result()
    assert sorted(outbox.batches) == [(2, 0), (2, 2)]
    assert outbox.leftovers == []


@pytest.mark.parametrize(
    ("table", "said", "published"),
    [
        ("durable.outgoing_envelopes", "not all parts were published, as far as is known: the database cannot", 0),
        (
            "durable.published_batches",
            "all parts are published, and the batch may not be remembered; publish the same rows again: the database",
            3,
        ),
    ],
    ids=["a part", "the batch"],
)
def test_lost_connection_of_fast_mode_is_told_with_the_published_parts(
    spark: SparkSession, outbox: Outbox, table: str, said: str, published: int
) -> None:
    outbox.rows(LOST.format(table=table))
    with pytest.raises(StorageUnavailable, match=f"^{said}"):
        publish.publish(messages(orders(spark, 3)), load_settings(database_url=outbox.url), mode="fast")
    assert len(outbox.orders) == published
