"""Publishing in bulk: every row once, whatever is repeated, fails or dies, and nothing that does not fit."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from durable.errors import InvalidMessage, InvalidSetting, StorageUnavailable
from durable.messages.digest import message_digest
from durable.pipeline import publish
from durable.pipeline.publish import message_id_of
from durable.pipeline.session import spark_errors
from durable.pipeline.source import register
from durable.pipeline.writer import target
from durable.settings import Settings, load_settings
from durable.storage import staging
from durable.storage.database import channel
from durable.storage.staging import Batch, Staged
from tests.failure.leftovers import SCHEMA, transaction
from tests.support.publishing import (
    COLUMNS,
    MESSAGE_TYPE,
    PEER,
    SOURCE,
    FailingSource,
    Outbox,
    messages,
    orders,
    write,
)
from tests.support.roles import runtime_role

pytestmark = pytest.mark.timeout(600)  # to be cut off amid a call leaves the session of all tests unusable
MODES = pytest.mark.parametrize("mode", ["atomic", "fast"])


@pytest.fixture(autouse=True)
def sources(spark: SparkSession) -> None:
    register(spark)
    spark.dataSource.register(FailingSource)


@pytest.fixture
def database_url(emptied_url: str) -> str:
    return emptied_url


@pytest.fixture
def outbox(database_url: str) -> Outbox:
    return Outbox(database_url)


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings(database_url=database_url)


# ---------------------------------------------------------------- texts that do not fit


SURROGATE = "a\ud800b"


@pytest.mark.parametrize("batch", ["", "a\0b", SURROGATE, "a" * 12_800])
def test_unfit_name_of_a_batch_is_refused_before_spark_is_asked(
    spark: SparkSession, outbox: Outbox, settings: Settings, batch: str
) -> None:
    with pytest.raises(InvalidSetting, match=r"^batch: "):
        publish.publish(messages(orders(spark, 3)), settings, batch=batch)
    assert outbox.batches == []
    publish.publish(messages(orders(spark, 3)), settings, batch="a")
    assert outbox.orders == [0, 1, 2], "the session goes on"


def test_unfit_name_of_a_batch_is_refused_as_an_option(spark: SparkSession, outbox: Outbox) -> None:
    with pytest.raises(InvalidSetting, match=r"^option batch: has 12,800 bytes"), spark_errors():
        write(messages(orders(spark, 3)), outbox.url, batch="a" * 12_800)
    assert outbox.orders == []


@pytest.mark.parametrize(
    "option", ["key", "message_type", "source", "destination", "body", "content_type", "partition_key", "order_by"]
)
def test_lone_surrogate_in_a_text_is_refused_before_spark_is_asked(spark: SparkSession, option: str) -> None:
    named: dict[str, Any] = {"key": "order_id", "message_type": MESSAGE_TYPE, "source": SOURCE, "destination": PEER}
    with pytest.raises(InvalidSetting, match=f"^{option}: .* has a lone surrogate"):
        publish.envelopes(orders(spark, 1), **{**named, option: SURROGATE})
    assert spark.range(3).count() == 3


def test_lone_surrogate_in_the_mode_is_refused(spark: SparkSession, settings: Settings) -> None:
    with pytest.raises(InvalidSetting, match=r"^mode: .* has a lone surrogate"):
        publish.publish(messages(orders(spark, 1)), settings, mode=SURROGATE)


# ---------------------------------------------------------------- what is published


def test_row_becomes_an_unowned_envelope_with_an_id_derived_from_its_key(spark: SparkSession, outbox: Outbox) -> None:
    rows = orders(spark, 2).withColumn("tenant", F.lit("a"))
    made = publish.envelopes(
        rows,
        key="order_id",
        message_type=MESSAGE_TYPE,
        source=SOURCE,
        destination=PEER,
        body=F.to_json(F.struct("order_id")),
        partition_key="order_id",
        headers=F.create_map(F.lit("tenant"), F.col("tenant")),
        deliver_by=F.lit(datetime(2100, 1, 1, tzinfo=UTC)),
    )
    write(made, outbox.url)

    first = outbox.rows(
        "SELECT id, correlation_id, causation_id, destination, message_type, source, partition_key, ordering_key, "
        "content_type, headers, body, deliver_by, execution_time, attempts, owner_id, epoch, "
        "sent_at > now() - interval '1 minute' "
        "FROM durable.outgoing_envelopes ORDER BY partition_key"
    )[0]
    made_id = message_id_of("0", message_type=MESSAGE_TYPE, source=SOURCE)
    assert first == (
        *(made_id, made_id, None, PEER, MESSAGE_TYPE, SOURCE, "0", "0", "application/json"),
        *({"tenant": "a"}, b'{"order_id":0}', datetime(2100, 1, 1, tzinfo=UTC), None, 0, 0, 0, True),
    )


def test_id_computed_by_spark_is_the_one_computed_here(spark: SparkSession) -> None:
    """Of every version: rows that are published again as another version are the same messages."""
    ids = {
        bytes(row.id)
        for message_type in (MESSAGE_TYPE, f"{MESSAGE_TYPE}.v2")
        for row in spark.range(17, 18)
        .select(publish.message_id("id", message_type=message_type, source=SOURCE).alias("id"))
        .collect()
    }
    assert ids == {message_id_of("17", message_type=f"{MESSAGE_TYPE}.v3", source=SOURCE).bytes}


@MODES
def test_rows_published_as_another_version_are_refused_while_the_first_waits(
    spark: SparkSession, outbox: Outbox, mode: str
) -> None:
    def publish_as(message_type: str) -> None:
        rows = publish.envelopes(
            orders(spark, 2), key="order_id", message_type=message_type, source=SOURCE, destination=PEER
        )
        write(rows, outbox.url, mode=mode)

    publish_as(MESSAGE_TYPE)
    with pytest.raises(PySparkException, match="message_type"):
        publish_as(f"{MESSAGE_TYPE}.v2")
    assert outbox.rows("SELECT DISTINCT message_type, count(*) FROM durable.outgoing_envelopes GROUP BY 1") == [
        (MESSAGE_TYPE, 2)
    ]


def test_a_local_message_goes_into_the_inbox_and_is_remembered_as_received(spark: SparkSession, outbox: Outbox) -> None:
    write(messages(orders(spark, 3), "local"), outbox.url)
    assert (outbox.inbox, outbox.orders) == ([0, 1, 2], [])
    known = outbox.rows("SELECT id, endpoint, message_digest FROM durable.undated_ids")
    assert len(known) == 3
    made_id = message_id_of("1", message_type=MESSAGE_TYPE, source=SOURCE)
    assert (made_id, "local", message_digest(MESSAGE_TYPE, b'{"order_id":1,"total":2}')) in known
    endpoints = "SELECT DISTINCT endpoint, owner_id FROM durable.incoming_envelopes"
    assert outbox.rows(endpoints) == [("local", 0)]


def test_an_event_goes_to_each_destination_under_one_id(spark: SparkSession, outbox: Outbox) -> None:
    event = messages(orders(spark, 2))
    write(event.union(messages(orders(spark, 2), "local")).union(messages(orders(spark, 2), "tcp://b:1")), outbox.url)
    assert (outbox.orders, outbox.inbox) == ([0, 0, 1, 1], [0, 1])
    assert outbox.one("SELECT count(DISTINCT id) FROM durable.outgoing_envelopes") == 2


@MODES
def test_publishing_wakes_the_nodes(spark: SparkSession, outbox: Outbox, mode: str) -> None:
    with psycopg.connect(outbox.url, autocommit=True) as listening:
        listening.execute(f"LISTEN {channel(SCHEMA)}".encode())
        write(messages(orders(spark, 3)), outbox.url, mode=mode)
        assert [told.channel for told in listening.notifies(timeout=20, stop_after=1)] == [channel(SCHEMA)]


# ---------------------------------------------------------------- each row once


@MODES
def test_repeated_batch_adds_nothing(spark: SparkSession, outbox: Outbox, settings: Settings, mode: str) -> None:
    first = publish.publish(messages(orders(spark, 100)), settings, mode=mode)
    again = publish.publish(messages(orders(spark, 150, partitions=3)), settings, mode=mode)
    assert first is not None
    assert again is not None
    assert [(each.rows, each.added) for each in (first, again)] == [(100, 100), (150, 50)]
    assert outbox.orders == list(range(150))
    assert outbox.leftovers == []


def test_batch_published_again_adds_nothing_even_when_sent_meanwhile(
    spark: SparkSession, outbox: Outbox, settings: Settings
) -> None:
    publish.publish(messages(orders(spark, 100)), settings)
    outbox.empty()
    assert publish.publish(messages(orders(spark, 100, partitions=5)), settings) is None, "however it is shared out"
    assert publish.publish(messages(orders(spark, 10)), settings, batch="May") is not None
    outbox.empty()
    assert publish.publish(messages(orders(spark, 10)), settings, batch="May") is None
    with pytest.raises(InvalidMessage, match=r"batch 'May' was published before, with other rows .10, and now 20."):
        publish.publish(messages(orders(spark, 20)), settings, batch="May")
    assert (outbox.orders, outbox.leftovers) == ([], [])


@pytest.mark.parametrize("batch", [None, "June"])
@pytest.mark.parametrize("destination", [PEER, "local"])
def test_corrected_bodies_under_published_keys_are_refused(
    spark: SparkSession, outbox: Outbox, settings: Settings, destination: str, batch: str | None
) -> None:
    """With and without a name of its own the correction is another batch; its rows would be dropped in silence."""
    publish.publish(messages(orders(spark, 10), destination), settings)
    corrected = orders(spark, 12).withColumn("total", F.lit(-1))
    with pytest.raises(InvalidMessage, match=r"10 rows were published before, .* differ in body \(10\), such as"):
        publish.publish(messages(corrected, destination), settings, batch=batch)
    assert len([*outbox.orders, *outbox.inbox]) == 10
    assert outbox.leftovers == []


def test_row_published_again_with_once_adds_nothing_even_when_sent_meanwhile(
    spark: SparkSession, outbox: Outbox, settings: Settings
) -> None:
    publish.publish(messages(orders(spark, 10)), settings, once=True)
    outbox.empty()
    again = publish.publish(messages(orders(spark, 15)), settings, once=True)
    assert again is not None
    assert (again.rows, again.added, outbox.orders) == (15, 5, [10, 11, 12, 13, 14])


def test_copies_of_a_row_are_one_message(spark: SparkSession, outbox: Outbox) -> None:
    write(messages(orders(spark, 10).union(orders(spark, 10))), outbox.url)
    assert (outbox.orders, outbox.batches) == (list(range(10)), [(20, 10)])


@pytest.mark.parametrize("partitions", [1, 2], ids=["in one task", "in two tasks"])
@pytest.mark.parametrize("destination", [PEER, "local"])
def test_two_messages_under_one_key_are_refused(
    spark: SparkSession, outbox: Outbox, settings: Settings, partitions: int, destination: str
) -> None:
    other = orders(spark, 10).withColumn("total", F.lit(-1))
    both = messages(orders(spark, 10).union(other).coalesce(partitions), destination)
    with pytest.raises(InvalidMessage, match=r"have the id .* and differ in body: choose a key"):
        publish.publish(both, settings)
    assert (outbox.orders, outbox.inbox, outbox.batches, outbox.leftovers) == ([], [], [], [])


def test_publishing_raises_when_a_crash_has_emptied_staged_rows(make_database: Callable[[str], str]) -> None:
    """An unlogged table is empty after a crash of the server; a batch of nothing would be lost for good."""
    outbox, job = Outbox(make_database("app")), uuid4()
    with transaction(outbox.url) as conn:
        conn.exec_driver_sql("SELECT durable.make_staging(%s, current_user::text)", (staging.table_name(job, 1),))
    with (
        pytest.raises(StorageUnavailable, match=r"5 of 5 staged rows are gone.*publish it again"),
        transaction(outbox.url) as conn,
    ):
        staging.publish(conn, SCHEMA, job, Batch("May"), [Staged(staging.table_name(job, 1), 5, 0)])
    assert outbox.batches == []


def test_a_dataframe_without_rows_publishes_nothing(spark: SparkSession, outbox: Outbox) -> None:
    write(messages(orders(spark, 10).where("order_id > 99")), outbox.url)
    assert (outbox.orders, outbox.leftovers) == ([], [])


# ---------------------------------------------------------------- tasks that fail


@MODES
@pytest.mark.parametrize("end", ["in mid-copy", "after its copy"])
def test_retried_task_publishes_its_rows_once(
    spark: SparkSession, outbox: Outbox, tmp_path: Path, mode: str, end: str
) -> None:
    """Killed in mid-copy it leaves nothing; after its copy it leaves rows as a speculative attempt does."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    try:
        write(messages(orders(spark, 1_000)), outbox.url, source="failing", mode=mode, end=end, died=tmp_path / "died")
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")

    assert (tmp_path / "died").read_text() == ("200" if end == "in mid-copy" else "500")
    assert outbox.orders == list(range(1_000))
    assert outbox.leftovers == []


def test_staged_rows_of_a_dead_job_are_swept(make_database: Callable[[str], str]) -> None:
    outbox = Outbox(make_database("app"))
    old, young = (
        f"staged_{int((datetime.now(UTC) - age).timestamp() * 1_000):012x}{'7' * 20}_1"
        for age in (staging.LONGEST_JOB + timedelta(minutes=1), timedelta(0))
    )
    with transaction(outbox.url) as conn:
        for name in (old, young):
            conn.exec_driver_sql("SELECT durable.make_staging(%s, current_user::text)", (name,))
        conn.exec_driver_sql(
            "INSERT INTO durable.published_batches (batch, job, number, published_at) VALUES "
            "('old', gen_random_uuid(), NULL, now() - interval '9 days'), ('new', gen_random_uuid(), NULL, now()), "
            "('a query', gen_random_uuid(), 3, now() - interval '900 days')"
        )
        conn.exec_driver_sql(
            "INSERT INTO durable.replays (name, plan, begun_at) VALUES ('old', '{}', now() - interval '9 days'), "
            "('new', '{}', now())"
        )
    with transaction(outbox.url) as conn:
        assert staging.sweep(conn, SCHEMA, keep_batches=timedelta(days=8)) == [old]
    assert outbox.leftovers == [young]
    assert outbox.rows("SELECT batch FROM durable.published_batches ORDER BY batch") == [("a query",), ("new",)]
    assert outbox.rows("SELECT name FROM durable.replays") == [("new",)]


@pytest.mark.parametrize(
    "name", ["nodes", "staged_x", 'staged_1"; DROP TABLE nodes; --', "staged_" + "0" * 32 + "_1; x"]
)
def test_staging_functions_refuse_names_of_other_tables(outbox: Outbox, name: str) -> None:
    with pytest.raises(psycopg.Error, match="is no name of a staging table"):
        outbox.rows("SELECT durable.make_staging(%s, current_user::text)", name)
    assert outbox.rows("SELECT durable.drop_staging(%s, interval '-1 day')", name) == []


# ---------------------------------------------------------------- what does not fit


def changed(rows: DataFrame, **columns: Any) -> DataFrame:
    return rows.withColumns({name: F.expr(sql) for name, sql in columns.items()})


BAD_COLUMNS: dict[str, tuple[Any, str]] = {
    "missing": (lambda rows: rows.drop("id"), r"column id: missing; must be BINARY of 16 bytes; .*envelopes\(\)"),
    "another type": (lambda rows: changed(rows, body="17"), "column body: is INT, must be BINARY or STRING"),
    "a text id": (lambda rows: changed(rows, id="uuid()"), "column id: is STRING, must be BINARY of 16 bytes"),
    "no time zone": (
        lambda rows: changed(rows, deliver_by="localtimestamp()"),
        "column deliver_by: is TIMESTAMP_NTZ, must be TIMESTAMP",
    ),
    "unknown": (lambda rows: changed(rows, destinaton="1"), "column destinaton: unknown; did you mean 'destination'"),
}


@pytest.mark.parametrize("bad", BAD_COLUMNS)
def test_unfit_column_is_named_with_the_expected_type(
    spark: SparkSession, outbox: Outbox, settings: Settings, bad: str
) -> None:
    change, reason = BAD_COLUMNS[bad]
    with pytest.raises(InvalidSetting, match=reason):
        publish.publish(change(messages(orders(spark, 3))), settings)
    assert (outbox.orders, outbox.leftovers) == ([], [])


BAD_ROWS = {
    "NULL": ({"destination": "IF(key, NULL, destination)"}, "column destination: is NULL"),
    "a NUL": ({"partition_key": r"IF(key, '\u0000', '')"}, "partition_key has a control character"),
    "too large": ({"body": "IF(key, repeat('x', 1048577), 'x')"}, "the body has 1048577 bytes, more than max_message"),
    "headers": ({"headers": "IF(key, '[]', '{}')"}, "column headers: is no JSON object of texts"),
    **{
        f"{name} in latin-1": (
            {name: f"CAST(IF(key, X'{sound.encode().hex()}FC', '{sound}') AS string)"},
            f"column {name}: text is not UTF-8",
        )
        for name, sound in {
            "destination": PEER,
            "message_type": MESSAGE_TYPE,
            "source": SOURCE,
            "body": "x",
            "partition_key": "",
            "content_type": "text/plain",
            "headers": "{}",
        }.items()
    },
    "a short id": ({"id": "IF(key, X'00', id)"}, "column id: has not 16 bytes"),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_row_unfit_for_send_is_named_and_nothing_is_published(
    spark: SparkSession, outbox: Outbox, settings: Settings, bad: str
) -> None:
    columns, reason = BAD_ROWS[bad]
    one = {name: sql.replace("key", "body LIKE '%:77,%'") for name, sql in columns.items()}
    rows = changed(messages(orders(spark, 100)), **one)
    with pytest.raises(InvalidMessage, match=f"nothing was published: {reason}.*row .*{re.escape(MESSAGE_TYPE)}"):
        publish.publish(rows, settings)
    assert (outbox.orders, outbox.batches, outbox.leftovers) == ([], [], [])


@pytest.mark.parametrize("encrypted", [False, True])
def test_text_in_latin_1_of_a_string_body_is_refused_and_named(
    spark: SparkSession, outbox: Outbox, settings: Settings, encrypted: bool
) -> None:
    partitions = 1 if encrypted else 3  # the encryption ends the job; tables of tasks that ran on are swept later
    name = F.expr("CAST(IF(order_id = 77, X'4DFC', 'M') AS string)")
    rows = orders(spark, 100, partitions=partitions).withColumn("name", name)
    made = messages(rows, body="name")
    if encrypted:
        settings = load_settings(
            database_url=outbox.url, encryption_keys={"a": b64encode(bytes(32)).decode()}, encrypt_all=True
        )
    named = f"row {message_id_of('77', message_type=MESSAGE_TYPE, source=SOURCE)}, {re.escape(MESSAGE_TYPE)}"
    with pytest.raises(InvalidMessage, match=f"column body: text is not UTF-8 .{named}"):
        publish.publish(made, settings)
    assert (outbox.orders, outbox.leftovers) == ([], [])


@pytest.mark.parametrize(
    ("column", "options"),
    [
        ("body", {}),
        ("headers", {"headers": "map('name', name)"}),
        ("headers", {"headers": "map(name, 'name')"}),
        ("headers", {"headers": "named_struct('name', name)"}),
        ("body", {"body": None, "more": "array(map('a', named_struct('a.b', name, 'none', NULL)), NULL)"}),
    ],
    ids=["row", "header", "name of a header", "headers by struct", "nested"],
)
def test_text_in_latin_1_is_refused_and_never_published_as_other_json(
    spark: SparkSession, outbox: Outbox, settings: Settings, column: str, options: dict[str, str]
) -> None:
    rows = orders(spark, 10).withColumn("name", F.expr("CAST(IF(order_id = 7, X'4DFC', 'M\u00fc\ufffd') AS string)"))
    if "more" in options:
        rows = rows.select("order_id", F.expr(options["more"]).alias("More of.it"), F.lit(b"\xff").alias("bytes"))
    made = messages(
        rows,
        body=None if column == "body" else F.to_json(F.struct("order_id")),
        headers=F.expr(options["headers"]) if "headers" in options else None,
    )
    with pytest.raises(InvalidMessage, match=f"nothing was published: column {column}: text is not UTF-8 .row"):
        publish.publish(made, settings)
    publish.publish(
        made.where(F.col("id") != F.lit(bytearray(message_id_of("7", message_type=MESSAGE_TYPE, source=SOURCE).bytes))),
        settings,
    )
    assert len(outbox.orders) == 9


def test_row_with_columns_of_one_name_is_published(spark: SparkSession, outbox: Outbox, settings: Settings) -> None:
    rows = orders(spark, 3).select("order_id", F.lit("a").alias("b"), F.lit("c").alias("B"), F.lit(None).alias("n"))
    publish.publish(messages(rows), settings)
    assert outbox.orders == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"save_mode": "overwrite"}, "only .append.: what was published cannot be taken back"),
        ({"mode": "swift"}, "option mode: 'swift'; must be atomic or fast"),
        ({"batsh": "x"}, "option batsh: unknown; did you mean 'batch'"),
        ({"schema": "nowhere"}, "run: durable-agent migrate"),
        ({"max_message_bytes": "many"}, "max_message_bytes: "),
        ({"once": "yes"}, "option once: 'yes'; must be true or false"),
        ({"path": "/tmp/x"}, "option path: unknown"),
    ],
    ids=["overwrite", "mode", "unknown option", "no tables", "a limit", "no boolean", "a place"],
)
def test_write_with_wrong_options_names_the_fault(
    spark: SparkSession, outbox: Outbox, options: dict[str, str], reason: str
) -> None:
    with pytest.raises(PySparkException, match=reason):
        write(messages(orders(spark, 3)), outbox.url, **options)
    assert outbox.orders == []


@pytest.mark.parametrize("word", ["true", "false", "True", "FALSE"])
def test_option_once_is_true_or_false_as_in_spark(outbox: Outbox, word: str) -> None:
    assert target({"url": outbox.url, "once": word}, COLUMNS, overwrite=False).once == (word.lower() == "true")


@pytest.mark.parametrize("name", ["once", "mode", "job", "dedupe_window", "encrypt_all", "max_message_bytes"])
@pytest.mark.parametrize("word", ["1 ", "ja", "tru", "", " true", "\u0661"])
def test_option_with_another_word_is_refused(outbox: Outbox, name: str, word: str) -> None:
    if name == "max_message_bytes" and word == "1 ":
        return
    with pytest.raises(InvalidSetting, match=name):
        target({"url": outbox.url, name: word}, COLUMNS, overwrite=False)


@pytest.mark.parametrize("way", ["publish", "write"])
def test_thread_of_its_own_publishes(spark: SparkSession, outbox: Outbox, settings: Settings, way: str) -> None:
    """Its thread of the JVM has no active session."""

    def run() -> None:
        if way == "publish":
            publish.publish(messages(orders(spark, 3)), settings)
        else:
            register(spark)
            write(messages(orders(spark, 3)), outbox.url)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert outbox.orders == [0, 1, 2]


@MODES
def test_a_role_without_rights_to_make_tables_publishes(spark: SparkSession, outbox: Outbox, mode: str) -> None:
    with runtime_role(outbox.url) as url:
        write(messages(orders(spark, 3)), url, mode=mode)
    assert (outbox.orders, outbox.leftovers) == ([0, 1, 2], [])
