"""Rows that a trigger or a constraint of the database refuses, at their statement or at the COMMIT."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from durable.errors import InvalidMessage
from durable.pipeline import publish
from durable.pipeline.source import register
from durable.pipeline.writer import EnvelopeWriter
from durable.settings import load_settings
from tests.pipeline.test_replay import history
from tests.pipeline.test_replay_continued import stored
from tests.support.command import Agent
from tests.support.publishing import Outbox, messages, orders

pytestmark = pytest.mark.timeout(600)

FUNCTION = """
CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF (convert_from(new.body, 'UTF8')::json->>'order_id')::int = 7 THEN
        RAISE EXCEPTION 'no order of this kind';
    END IF;
    RETURN new;
END $$
"""
BEFORE = """
CREATE TRIGGER refuse BEFORE INSERT ON durable.outgoing_envelopes FOR EACH ROW EXECUTE FUNCTION public.refuse()
"""
AT_COMMIT = """
CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON durable.outgoing_envelopes DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION public.refuse()
"""
REFUSED = (
    "the database refuses a row: no order of this kind; "
    "nothing of this batch (of a replay, of this chunk) was published; "
)
ADVICE = "put that right and run the same again, which goes on from there"


@pytest.fixture
def outbox(spark: SparkSession, database_url: str) -> Outbox:
    register(spark)
    outbox = Outbox(database_url)
    outbox.rows(FUNCTION)
    return outbox


@pytest.mark.parametrize("trigger", [BEFORE, AT_COMMIT])
def test_refused_row_is_told_and_publishes_nothing(spark: SparkSession, outbox: Outbox, trigger: str) -> None:
    outbox.rows(trigger)
    settings = load_settings(database_url=outbox.url)
    with pytest.raises(InvalidMessage) as refused:
        publish.publish(messages(orders(spark, 10)), settings)
    assert str(refused.value) == REFUSED + ADVICE
    with pytest.raises(InvalidMessage, match="not all parts were published: of one part, the database refuses a row"):
        publish.publish(messages(orders(spark, 10)), settings, mode="fast")
    assert (outbox.orders, outbox.leftovers) == ([0, 1, 2, 3, 4], [])

    outbox.rows("DROP TRIGGER refuse ON durable.outgoing_envelopes")
    publish.publish(messages(orders(spark, 10)), settings)
    assert outbox.orders == [*range(10)]


def test_refused_commit_is_told_without_a_worker(spark: SparkSession, outbox: Outbox) -> None:
    """Without a worker of Spark's between."""
    outbox.rows("CREATE FUNCTION public.no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''no batch''; END'")
    outbox.rows(
        "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON durable.published_batches DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION public.no()"
    )
    schema = messages(orders(spark, 1)).schema
    with pytest.raises(InvalidMessage, match="the database refuses a row: no batch; nothing of this batch"):
        EnvelopeWriter({"url": outbox.url}, schema, overwrite=False).commit([])
    with pytest.raises(InvalidMessage, match="the database refuses a row: no batch; all parts are published, and"):
        EnvelopeWriter({"url": outbox.url, "mode": "fast"}, schema, overwrite=False).commit([])


def test_replay_goes_on_after_a_refused_commit(
    spark: SparkSession,
    outbox: Outbox,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place, agent = str(tmp_path / "messages"), Agent(tmp_path, monkeypatch, capsys)
    body = "CAST(concat('{\"order_id\":', n, '}') AS BINARY)"
    history(spark, 12, partition_key="'a'", body=body).write.parquet(place)
    outbox.rows(AT_COMMIT)
    options = ("--name", "May", "--parquet", place, "--all", "--chunk", "3", "--database", outbox.url)
    ended = agent("pipeline", "replay", *options)
    assert (ended.code, ended.err.count("\n")) == (1, 1), ended.err
    assert "the database refuses a row: no order of this kind" in ended.err
    assert ADVICE in ended.err
    assert stored(outbox.url) == [*range(6)]

    outbox.rows("DROP TRIGGER refuse ON durable.outgoing_envelopes")
    assert agent("pipeline", "replay", *options).code == 0
    assert stored(outbox.url) == [*range(12)]
