"""Publishing again: whatever differs in what a receiver would see is named and refused, and the same rows are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType, TimestampType

from durable.errors import InvalidMessage
from durable.pipeline import contents, publish, writer
from durable.pipeline.copying import connection
from durable.pipeline.publish import uuid8_of
from durable.pipeline.publishable import CARRIED
from durable.pipeline.source import register
from durable.settings import load_settings
from durable.storage import staging
from durable.storage.staging import Batch, Published, Staged
from tests.support.publishing import MESSAGE_TYPE, PEER, SOURCE, Outbox, messages, orders

pytestmark = pytest.mark.timeout(600)

NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)
ROW: Mapping[str, Any] = {
    "message_type": MESSAGE_TYPE,
    "source": SOURCE,
    "body": b"{}",
    "correlation_id": UUID(int=8).bytes,
    "causation_id": None,
    "partition_key": "a",
    "content_type": "application/json",
    "headers": '{"reply-to": "tcp://127.0.0.1:1", "tenant": "a"}',
    "sent_at": NOW,
    "deliver_by": NOW + DAY,
    "execution_time": NOW + timedelta(hours=12),
}
OTHERS: Mapping[str, list[Any]] = {
    "message_type": ["orders.order-changed"],
    "source": ["shop"],
    "body": [b"{ }"],
    "correlation_id": [UUID(int=9).bytes],
    "causation_id": [UUID(int=9).bytes],
    "partition_key": ["b", None, ""],
    "content_type": ["text/plain"],
    "headers": ['{"reply-to": "tcp://127.0.0.1:2", "tenant": "a"}', "{}", '{"tenant": "a"}'],
    "sent_at": [NOW + timedelta(seconds=1)],
    "deliver_by": [NOW + 2 * DAY, None],
    "execution_time": [NOW + timedelta(hours=13), None],
}
CASES = [(column, value) for column, values in OTHERS.items() for value in values]
CHANGES = pytest.mark.parametrize(("column", "value"), CASES, ids=[f"{c}={v!r}"[:40] for c, v in CASES])
PLACES: Mapping[str, Mapping[str, Any]] = {
    "outbox": {"destination": PEER, "endpoint": None},
    "inbox": {"destination": "tcp://127.0.0.1:9", "endpoint": "main"},
}
IN_PLACES = pytest.mark.parametrize("place", PLACES)
KINDS = {
    **dict.fromkeys(("id", "body", "correlation_id", "causation_id"), pa.binary()),
    **dict.fromkeys(("sent_at", "deliver_by", "execution_time"), pa.timestamp("us", "UTC")),
}
IDS = [uuid8_of("1").bytes, uuid8_of("2").bytes]

Write = Callable[..., Published | None]


def table(*rows: Mapping[str, Any]) -> pa.RecordBatch:
    names = sorted({name for row in rows for name in row})
    columns = {name: pa.array([row.get(name) for row in rows], KINDS.get(name, pa.string())) for name in names}
    return pa.RecordBatch.from_pydict(columns)


@pytest.fixture
def database_url(emptied_url: str) -> str:
    return emptied_url


@pytest.fixture
def write(database_url: str) -> Write:
    """Publish two rows of this place with these columns, as tasks and the driver do, without Spark."""

    def written(
        place: str,
        *,
        batch: str | None = None,
        number: int | None = None,
        once: bool = False,
        ids: list[bytes] = IDS,
        copy: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> Published | None:
        rows = [{**ROW, **PLACES[place], "id": each, **columns} for each in ids]
        rows += [] if copy is None else [{**rows[0], **copy}]
        to = writer.target({"url": database_url}, _columns(), overwrite=False)
        intake, name = writer._Intake(to, 0), staging.table_name(to.job, 1)
        writer._copy(to, name, intake.staged(iter([table(*rows)])))
        parts = [Staged(name, intake.rows, intake.local_rows, intake.ordered_rows)]
        names = contents.names_of(intake.contents) if batch is None else [batch]
        found = Batch(names[0], number, contents.written(intake.contents), contents.plain(intake.contents), names[1:])
        with connection(database_url) as conn:
            return staging.publish(conn, to.schema, to.job, found, parts, once=once)

    return written


def _columns() -> StructType:
    kinds: dict[str, DataType] = dict.fromkeys(("id", "body", "correlation_id", "causation_id"), BinaryType())
    kinds |= dict.fromkeys(("sent_at", "deliver_by", "execution_time"), TimestampType())
    return StructType([StructField(name, kinds.get(name, StringType())) for name in ("id", "destination", *CARRIED)])


def settle(url: str, place: str) -> None:
    """Send or handle the messages, as nodes do."""
    side, outcome, rows, address = {
        "outbox": ("outgoing", "sent", "outgoing_envelopes", "destination"),
        "inbox": ("incoming", "handled", "incoming_envelopes", "endpoint"),
    }[place]
    Outbox(url).rows(
        f"WITH done AS (DELETE FROM durable.{rows} RETURNING *) "
        "INSERT INTO durable.envelope_history (id, side, outcome, address, "
        "message_type, source, correlation_id, causation_id, partition_key, sent_at, deliver_by, attempts, "
        f"interruptions, node_id, content_type, headers, body) SELECT id, '{side}', '{outcome}', {address}, "
        "message_type, source, correlation_id, causation_id, partition_key, sent_at, deliver_by, 0, 0, 1, "
        "content_type, headers, body FROM done"
    )


def waiting(url: str) -> int:
    return int(
        Outbox(url).one(
            "SELECT (SELECT count(*) FROM durable.outgoing_envelopes) + count(*) FROM durable.incoming_envelopes"
        )
    )


def test_table_of_changes_has_every_column_of_an_envelope() -> None:
    assert {*OTHERS, "endpoint"} == {*CARRIED}, "an endpoint is the address of a row in the inbox"


@IN_PLACES
@pytest.mark.parametrize("are_settled", [False, True], ids=["waiting", "settled"])
@CHANGES
def test_another_value_in_the_same_batch_is_refused_with_the_column(
    database_url: str, write: Write, place: str, are_settled: bool, column: str, value: Any
) -> None:
    write(place, batch="May")
    if are_settled:
        settle(database_url, place)
    assert write(place, batch="May") is None, "the same rows are the same batch"
    with pytest.raises(InvalidMessage, match=rf"published before.*\b{column}\b.*nothing was published"):
        write(place, batch="May", **{column: value})
    assert waiting(database_url) == (0 if are_settled else 2)


@IN_PLACES
@pytest.mark.parametrize("are_settled", [False, True], ids=["waiting", "settled"])
@pytest.mark.parametrize("column", ["body", "message_type", "headers", "execution_time"])
def test_another_value_without_the_name_of_a_batch_is_refused_unless_all_is_forgotten(
    database_url: str, write: Write, place: str, are_settled: bool, column: str
) -> None:
    other = {column: OTHERS[column][0]}
    write(place)
    if are_settled:
        settle(database_url, place)
    assert write(place) is None, "the same rows are the same batch"
    if are_settled and column in ("body", "message_type") and place == "outbox":
        corrected = write(place, **other)
        assert corrected is not None
        assert corrected.added == 2, "another batch, of messages that only their receivers remember"
        return
    with pytest.raises(InvalidMessage, match=rf"published before.*\b{column}\b.*nothing was published"):
        write(place, **other)
    assert waiting(database_url) == (0 if are_settled else 2)


@IN_PLACES
@pytest.mark.parametrize("are_settled", [False, True], ids=["waiting", "settled"])
@CHANGES
def test_another_value_under_the_same_ids_is_counted_and_refused_in_another_batch(
    database_url: str, write: Write, place: str, are_settled: bool, column: str, value: Any
) -> None:
    write(place, batch="May", once=True)
    if are_settled:
        settle(database_url, place)
    repeated = write(place, batch="June", once=True, ids=[*IDS, uuid8_of("3").bytes])
    assert repeated is not None
    assert (repeated.rows, repeated.added) == (3, 1), "the same rows are known under any name"
    named = "what is not kept" if are_settled and column == "execution_time" else column
    with pytest.raises(InvalidMessage, match=rf"2 rows were published before.*differ in {named}.*\(2\), such as "):
        write(place, batch="July", once=True, **{column: value})
    assert waiting(database_url) == (1 if are_settled else 3)


@IN_PLACES
@CHANGES
def test_another_value_in_a_copy_of_a_row_is_refused(
    database_url: str, write: Write, place: str, column: str, value: Any
) -> None:
    with pytest.raises(InvalidMessage, match=f"two rows of type .* differ in {column}: choose a key"):
        write(place, copy={column: value})
    assert waiting(database_url) == 0
    same = write(place, copy={})
    assert same is not None
    assert (same.rows, same.added) == (3, 2)


@IN_PLACES
def test_another_destination_is_another_batch_except_under_the_same_name(
    database_url: str, write: Write, place: str
) -> None:
    """One message may go to several destinations, at any time; a batch has those that it had."""
    elsewhere = {"outbox": {"destination": "tcp://127.0.0.1:7"}, "inbox": {"endpoint": "second"}}[place]
    write(place, batch="May")
    with pytest.raises(InvalidMessage, match=r"batch 'May' was published before, with other values in (dest|end)"):
        write(place, batch="May", **elsewhere)
    event = write(place, batch="June", **elsewhere)
    assert event is not None
    assert (event.added, waiting(database_url)) == (2, 4)


@IN_PLACES
@pytest.mark.parametrize("is_same", [True, False], ids=["same rows", "other rows"])
@pytest.mark.parametrize("after", [None, 0, 4, 5, 6])
@pytest.mark.parametrize("before", [None, 5])
def test_number_of_a_micro_batch_is_published_once_and_never_drops_rows(
    database_url: str, write: Write, place: str, before: int | None, after: int | None, is_same: bool
) -> None:
    """Numbers of a stream, and None of a batch, under one name."""
    write(place, batch="May", number=before)
    ids = IDS if is_same else [uuid8_of("3").bytes]
    if before is not None and after is not None and after > before:
        assert write(place, batch="May", number=after, ids=ids) == Published("May", len(ids), 0 if is_same else 1)
        assert write(place, batch="May", number=after, ids=ids) is None, "the last micro-batch may come again"
        return
    if before == after and is_same:
        assert write(place, batch="May", number=after, ids=ids) is None
        return
    with pytest.raises(InvalidMessage, match=r"'May' was published before, .*nothing was published"):
        write(place, batch="May", number=after, ids=ids)
    assert waiting(database_url) == 2


def test_swapped_values_are_another_batch(write: Write, database_url: str) -> None:
    """Each column has the same values as before, in other rows."""
    write("outbox", batch="May", ids=IDS[:1], copy={"destination": "tcp://127.0.0.1:7", "causation_id": bytes(16)})
    settle(database_url, "outbox")
    with pytest.raises(InvalidMessage, match="batch 'May' was published before, with the same values in other rows"):
        write(
            "outbox",
            batch="May",
            ids=IDS[:1],
            causation_id=bytes(16),
            copy={"destination": "tcp://127.0.0.1:7", "causation_id": None},
        )


def test_past_time_equals_itself_when_published_again(write: Write, database_url: str) -> None:
    """A node takes the execution_time away when it has come, and a dead letter is sent without its deadline."""
    at = NOW - timedelta(minutes=1)
    write("outbox", batch="May", execution_time=at, deliver_by=at)
    Outbox(database_url).rows("UPDATE durable.outgoing_envelopes SET execution_time = NULL, deliver_by = NULL")
    again = write("outbox", batch="June", execution_time=at, deliver_by=at)
    assert again is not None
    assert again.added == 0


def test_rows_without_a_time_of_sending_are_the_same_at_any_time(write: Write, database_url: str) -> None:
    write("outbox", batch="May", sent_at=None, headers='{"a": "1", "b": "2"}')
    assert write("outbox", batch="May", sent_at=None, headers='{"b":"2","a":"1"}') is None
    again = write("outbox", batch="June", sent_at=None, headers='{"b":"2","a":"1"}')
    assert again is not None
    assert again.added == 0


# ---------------------------------------------------------------- through Spark


@pytest.mark.parametrize(("destination", "mode"), [(PEER, "atomic"), ("local", "fast")])
def test_other_headers_and_deadlines_are_refused_through_spark(
    spark: SparkSession, make_database: Callable[[str], str], destination: str, mode: str
) -> None:
    database_url = make_database("app")  # without the staging tables that refused writes have left
    register(spark)
    settings = load_settings(database_url=database_url)
    rows = orders(spark, 10)
    tagged = messages(rows, destination).withColumn("headers", F.lit('{"tenant": "a"}'))
    first = publish.publish(tagged, settings, mode=mode)
    assert first is not None
    assert first.added == 10
    assert publish.publish(tagged.repartition(3), settings, mode=mode) is None
    changed = tagged.withColumns(
        {"headers": F.lit('{"tenant": "b"}'), "deliver_by": F.when(F.col("body").contains(":0,"), F.lit(NOW + DAY))}
    )
    with pytest.raises(InvalidMessage, match=r"\d+ rows .* differ in headers \(\d+\)"):
        publish.publish(changed, settings, batch="June", mode=mode)
    outbox = Outbox(database_url)
    outbox.empty()
    if mode == "atomic":
        with pytest.raises(InvalidMessage, match=r"published before.*headers.*deliver_by"):
            publish.publish(changed, settings)
    assert outbox.leftovers == []
