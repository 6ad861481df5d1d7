"""Replaying: archived messages are sent or handled again, once under each name, and only what was chosen."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import reduce
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import msgspec
import psycopg
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from durable import Bus, Context, message
from durable.envelope import unix_ms
from durable.errors import InvalidSetting
from durable.messages.routing import LOCAL
from durable.pipeline import choosing, publish, replay
from durable.pipeline.archive import archive
from durable.pipeline.choosing import Choice
from durable.pipeline.chunks import chunks
from durable.pipeline.copying import connection
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import LakeTable
from durable.pipeline.origin import Origin
from durable.pipeline.undisturbed import publishing
from durable.settings import load_settings
from durable.storage import purging
from durable.testing import eventually
from tests.support.command import Agent
from tests.support.history import add_history, add_letters
from tests.support.publishing import Outbox

pytestmark = pytest.mark.timeout(600)  # to be cut off amid a call leaves the session of all tests unusable
NOW = datetime.now(UTC).replace(microsecond=0)


@message("replayed.placed")
class Placed(msgspec.Struct):
    number: int


@message("replayed.billed")
class Billed(msgspec.Struct):
    number: int


@pytest.fixture
def database_url(emptied_url: str) -> str:
    return emptied_url


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.fixture
def again(spark: SparkSession, agent: Agent, lake: Lake) -> Callable[..., dict[str, Any]]:
    """`pipeline replay --json` on the lake."""

    def run(url: str, *arguments: str) -> dict[str, Any]:
        command = ("pipeline", "replay", "--json", "--lake", lake.url, "--database", url)
        ended = agent(*command, *arguments)
        assert ended.code == 0, ended.err
        return dict(json.loads(ended.out))

    return run


def archived(spark: SparkSession, lake: Lake, url: str, service: str = "shop", table: LakeTable = "history") -> None:
    archive(lambda: spark, lake, table, Origin(url=url, schema="durable", service=service))


# ---------------------------------------------------------------- from one end to the other


async def test_handled_message_is_handled_once_more_for_each_replay_name(
    spark: SparkSession, lake: Lake, again: Callable[..., dict[str, Any]], database_url: str
) -> None:
    handled: list[tuple[int, UUID, UUID]] = []
    sent: dict[UUID, datetime] = {}
    shop = Bus("shop", database=database_url, history_bodies=True)

    @shop.handles(Placed)
    async def place(placed: Placed, ctx: Context) -> None:
        handled.append((placed.number, ctx.id, ctx.correlation_id))
        sent[ctx.id] = ctx.sent_at

    async def handle(count: int) -> None:
        async with shop:
            await eventually(lambda: len(handled) == count and not Outbox(database_url).rows(WAITING))

    async with shop.unit_of_work():
        for number in range(5):
            shop.send(Placed(number), headers={"tenant": "a"})
    await handle(5)
    archived(spark, lake, database_url)

    first = again(database_url, "--name", "prices were wrong", "--type", "replayed.placed")
    assert (first["messages"], first["added"]) == (5, 5)
    assert Outbox(database_url).rows("SELECT DISTINCT headers FROM durable.incoming_envelopes") == [({"tenant": "a"},)]
    await handle(10)
    assert again(database_url, "--name", "prices were wrong", "--type", "replayed.placed")["added"] == 0
    archived(spark, lake, database_url)
    same = again(database_url, "--name", "prices were wrong", "--type", "replayed.placed")
    assert (same["messages"], same["added"]) == (5, 0), "its own copies are none of its messages"
    assert again(database_url, "--name", "once more", "--type", "replayed.placed")["messages"] == 10
    await handle(20)

    assert sorted(number for number, _, _ in handled) == sorted([*range(5)] * 4)
    for number, made, correlation_id in handled[:5]:
        names = ("prices were wrong", "once more")
        copies = {(number, replay.new_id_of(made, name=name, sent_at=sent[made]), correlation_id) for name in names}
        assert copies < set(handled)


WAITING = "SELECT 1 FROM durable.incoming_envelopes UNION ALL SELECT 1 FROM durable.outgoing_envelopes"


async def test_replay_with_same_ids_is_handled_only_by_receivers_without_the_message(
    spark: SparkSession,
    lake: Lake,
    again: Callable[..., dict[str, Any]],
    make_database: Callable[[str], str],
    tmp_path: Path,
) -> None:
    sent_from, received_in = make_database("shop"), make_database("billing")
    peer = f"unix://{tmp_path}/billing.sock"
    handled: list[int] = []
    billing = Bus("billing", database=received_in)
    billing.listen(peer)
    shop = Bus("shop", database=sent_from, history_bodies=True)
    shop.route(Billed, to=peer)

    @billing.handles(Billed)
    async def bill(billed: Billed) -> None:
        handled.append(billed.number)

    async def settle() -> None:
        async with billing, shop:
            await eventually(lambda: not Outbox(sent_from).rows(WAITING) and not Outbox(received_in).rows(WAITING))

    async with shop.unit_of_work():
        for number in range(5):
            shop.send(Billed(number))
    await settle()
    archived(spark, lake, sent_from)
    Outbox(received_in).rows(
        "DELETE FROM durable.received_ids WHERE id IN (SELECT id FROM durable.envelope_history ORDER BY id LIMIT 2)"
    )

    again_to_billing = ("--name", "billing lost some", "--side", "outgoing", "--all", "--same-ids")
    assert again(sent_from, *again_to_billing)["added"] == 5
    await settle()
    assert sorted(handled) == [0, 0, 1, 1, 2, 3, 4]
    assert again(sent_from, *again_to_billing)["added"] == 0
    assert again(sent_from, "--name", "all of it", "--all", "--side", "outgoing")["added"] == 5
    await settle()
    assert sorted(handled) == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4]


# What was dropped, as a purge or a node notes it: the kind, the last time in hours ago, the rows; the retention of a
# node whose history is not archived. Then: the age in hours up to which history was dropped, if it was.
DROPS: dict[str, tuple[tuple[tuple[str, int, int], ...], int | None, int | None]] = {
    "nothing": ((), None, None),
    "a purge": ((("dropped", 50, 3),), None, 50),
    "two days": ((("dropped", 50, 3), ("gap", 26, 1)), None, 26),
    "lost by a restore": ((("foreign", 50, 3), ("gap", 50, 0)), None, None),
    "a short retention": ((), 30, 30),
    "a long retention": ((), 24 * 30, 24 * 30),
    "before the first archive": ((("gap", 26, 1),), 30, 26),
}


@pytest.mark.parametrize("name", DROPS)
def test_local_messages_are_refused_as_far_as_their_history_was_dropped(
    spark: SparkSession, lake: Lake, database_url: str, name: str
) -> None:
    drops, retention, expected = DROPS[name]
    if retention is None:
        archived(spark, lake, database_url)
    with connection(database_url) as conn:
        for number, (kind, hours, rows) in enumerate(drops):
            conn.exec_driver_sql(
                "INSERT INTO durable.absent_rows (table_name, day, kind, first_at, last_at, row_count, below) VALUES "
                "('envelope_history', CURRENT_DATE - CAST(%s AS int), %s, now(), now() - %s, %s, 1)",
                (number, kind, timedelta(hours=hours), rows),
            )
        until = purging.dropped_until(conn, "durable", timedelta(hours=retention or 1))
    age = None if until is None else round((datetime.now(UTC) - until) / timedelta(hours=1))
    assert age == expected

    # One message of each hour, of a time before this one: under a UUIDv7 of then, or another id, and sent then.
    for made, sent in (("v7", 0), ("v7", 9), ("other", 0)):
        hourly = [
            {
                "id": id_of(datetime.now(UTC) - timedelta(hours=hour + 0.5), made).bytes,
                "sent_at": datetime.now(UTC) - timedelta(hours=hour + 0.5 + sent),
                "destination": address,
                "endpoint": endpoint,
            }
            for hour in range(160)
            for address, endpoint in ((LOCAL, None), (LOCAL, LOCAL), ("tcp://a:1", None), ("shop", "shop"))
        ]
        chosen = spark.createDataFrame(hourly, "id binary, sent_at timestamp, destination string, endpoint string")
        known = 0 if age is None else 2 * sum(1 for hour in range(160) if hour + sent >= age)
        if not known:
            replay.refuse_forgotten(chosen, timedelta(days=7), until)
        else:
            with pytest.raises(InvalidSetting, match=f"^same_ids: {known:,} of these messages are local"):
                replay.refuse_forgotten(chosen, timedelta(days=7), until)


def id_of(moment: datetime, made: str) -> UUID:
    milliseconds = int(moment.timestamp() * 1_000)
    return UUID(int=milliseconds << 80 | 7 << 76 | 2 << 62 | 1) if made == "v7" else uuid4()


async def test_local_messages_are_handled_once_after_a_purge_below_the_dedupe_window(
    spark: SparkSession,
    lake: Lake,
    again: Callable[..., dict[str, Any]],
    agent: Agent,
    database_url: str,
) -> None:
    handled: list[int] = []
    shop = Bus("shop", database=database_url, history_bodies=True)

    @shop.handles(Placed)
    async def place(placed: Placed) -> None:
        handled.append(placed.number)

    async def settle() -> None:
        async with shop:
            await eventually(lambda: len(handled) >= 5 and not Outbox(database_url).rows(WAITING))

    async with shop.unit_of_work():
        for number in range(5):
            shop.send(Placed(number))
    await settle()
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("SELECT durable.make_partition('envelope_history', CAST(now() - interval '3 days' AS date))")
        conn.execute(
            "UPDATE durable.envelope_history SET finished_at = finished_at - interval '3 days', "
            "sent_at = sent_at - interval '3 days'"
        )
    archived(spark, lake, database_url)
    archived(spark, lake, database_url, table="dead_letters")
    assert again(database_url, "--name", "before", "--all", "--same-ids")["added"] == 0

    options = ("--lake", lake.url, "--database", database_url)
    purged = agent("pipeline", "purge", "--keep", "1", "--service", "shop", *options)
    assert (purged.code, "dropped 1 day" in purged.out) == (0, True), purged
    command = ("pipeline", "replay", *options, "--all", "--same-ids")
    for named in (("--name", "after"), ("--name", "after", "--dry-run"), ("--name", "b", "--destination", LOCAL)):
        ended = agent(*command, *named)
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended
        assert "same_ids: 5 of these messages are local and were sent before" in ended.err
    await settle()
    assert sorted(handled) == [0, 1, 2, 3, 4]


def test_local_messages_of_another_database_are_refused_under_their_ids(
    spark: SparkSession,
    lake: Lake,
    again: Callable[..., dict[str, Any]],
    agent: Agent,
    make_database: Callable[[str], str],
) -> None:
    """Both have local messages, and messages that came in at an endpoint: two of each."""
    urls = [make_database("app"), make_database("app")]
    for number, url in enumerate(urls):
        with psycopg.connect(url, autocommit=True) as conn:
            add_history(conn, 4, first=1 + 10 * number)
            conn.execute(
                "UPDATE durable.envelope_history SET side = 'incoming', outcome = 'handled', body = '{}', "
                "address = CASE WHEN id IN (SELECT id FROM durable.envelope_history ORDER BY id LIMIT 2) "
                "THEN 'local' ELSE 'shop' END"
            )
        archived(spark, lake, url)
    command = ("pipeline", "replay", "--lake", lake.url, "--database", urls[0], "--same-ids", "--all")
    for options, count in (((), 2), (("--dry-run",), 2), (("--destination", LOCAL), 2)):
        ended = agent(*command, "--name", "all", *options)
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended
        assert f"same_ids: {count} of these messages are local to another database of the lake" in ended.err
    (condition,) = re.findall(r"--where \"(.*?)\"", ended.err)
    assert again(urls[0], "--name", "own", "--same-ids", "--all", "--where", condition)["messages"] == 4
    assert again(urls[0], "--name", "new", "--all")["messages"] == 8


def test_purge_is_refused_while_a_replay_is_at_work(
    agent: Agent, lake: Lake, database_url: str, spark: SparkSession
) -> None:
    archived(spark, lake, database_url)
    settings = load_settings(database_url=database_url)
    with publishing(settings, lake):
        command = ("pipeline", "purge", "--lake", lake.url, "--database", database_url, "--service", "shop")
        ended = agent(*command)
    assert ended.code == 1
    assert "a replay is at work on this database, and may ask the history" in ended.err


def test_dead_letters_of_the_lake_are_replayed_unless_they_were_resolved(
    spark: SparkSession,
    lake: Lake,
    again: Callable[..., dict[str, Any]],
    make_database: Callable[[str], str],
) -> None:
    database_url = make_database("app")  # whose letters have the numbers from 1 on
    with psycopg.connect(database_url, autocommit=True) as conn:
        add_letters(conn, 5)
        archived(spark, lake, database_url, table="dead_letters")
        conn.execute(
            "UPDATE durable.dead_letters SET resolution = 'discarded', resolved_at = now(), xid = DEFAULT "
            "WHERE letter_id = 2"
        )
        archived(spark, lake, database_url, table="dead_letters")

    done = again(database_url, "--name", "fixed", "--from", "dead-letters", "--where", "reason = 'a test'")
    assert (done["messages"], done["added"]) == (4, 4)
    rows = Outbox(database_url).rows("SELECT DISTINCT endpoint, headers, owner_id FROM durable.incoming_envelopes")
    assert rows == [("shop", {"tenant": "a"}, 0)]


# ---------------------------------------------------------------- choosing


def history(spark: SparkSession, count: int = 10, **columns: str) -> DataFrame:
    """Rows of history with bodies, a minute apart, oldest first: id 0 is `count` minutes old."""
    values = {
        "service": "'shop'",
        "id": "unhex(lpad(hex(n), 32, '0'))",
        "side": "'outgoing'",
        "outcome": "'sent'",
        "address": "'tcp://127.0.0.1:2301'",
        "message_type": "IF(n % 2 = 0, 'even', 'odd')",
        "source": "'shop'",
        "correlation_id": "unhex(lpad(hex(n + 1000), 32, '0'))",
        "causation_id": "unhex(lpad(hex(n + 2000), 32, '0'))",
        "body": "CAST(concat('{\"order_id\":', n, '}') AS BINARY)",
        "sent_at": f"TIMESTAMP'{NOW:%Y-%m-%d %H:%M:%S}' - make_interval(0, 0, 0, 0, 0, {count} - n)",
    } | columns
    return (
        spark.range(0, count, 1, 2)
        .withColumnRenamed("id", "n")
        .selectExpr(*(f"{sql} AS {name}" for name, sql in values.items()))
    )


def uuid(number: int) -> UUID:
    return UUID(int=number)


CHOICES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "types": ({"types": ["odd"]}, [1, 3, 5, 7, 9]),
    "ids": ({"ids": [uuid(3), uuid(4), uuid(99)]}, [3, 4]),
    "addresses": ({"addresses": ["tcp://127.0.0.1:2301"]}, list(range(10))),
    "another address": ({"addresses": ["local"]}, []),
    "time": ({"since": NOW - timedelta(minutes=8), "until": NOW - timedelta(minutes=5)}, [2, 3, 4]),
    "a condition": ({"where": "body LIKE '%7%' OR id = X'" + "0" * 31 + "2'"}, [2, 7]),
    "all of them": ({"types": ["odd"], "where": "hex(id) > '" + "0" * 31 + "5'"}, [7, 9]),
    "side": ({"side": "incoming"}, []),
}


@pytest.mark.parametrize("name", CHOICES)
def test_replay_chooses_messages_matching_all_conditions(spark: SparkSession, name: str) -> None:
    given, numbers = CHOICES[name]
    rows = choosing.matching(choosing.complete(history(spark)), Choice(**given))
    found = sorted(int.from_bytes(row.id) for row in rows.select("id").collect())
    assert found == numbers


def test_survey_counts_chosen_messages_and_those_without_a_body(spark: SparkSession) -> None:
    rows = choosing.complete(history(spark, 5, body="IF(n < 3, NULL, CAST('{}' AS BINARY))"))
    groups = [(g.service, g.side, g.message_type, g.messages, g.without_body) for g in choosing.survey(rows)]
    assert groups == [("shop", "outgoing", "even", 3, 2), ("shop", "outgoing", "odd", 2, 1)]
    assert replay.messages(rows, name="x").count() == 2


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York"])
def test_times_of_groups_are_utc_in_any_time_zone(
    spark: SparkSession, agent: Agent, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    place, of_session = str(tmp_path / "messages"), "spark.sql.session.timeZone"
    at = datetime(2026, 11, 20, 1, 2, 3, tzinfo=UTC)
    history(spark, 2, sent_at=f"timestamp_seconds({int(at.timestamp())})").write.parquet(place)
    before = str(spark.conf.get(of_session))
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        spark.conf.set(of_session, zone)
        groups = choosing.survey(choosing.complete(spark.read.parquet(place)))
        ended = agent(
            *("pipeline", "replay", "--json", "--name", "x", "--parquet", place, "--all", "--dry-run"),
            *("--database", database_url),
        )
    finally:
        spark.conf.set(of_session, before)
        monkeypatch.undo()
        time.tzset()
    assert {(group.first, group.last) for group in groups} == {(at, at)}
    told = json.loads(ended.out)["groups"]
    assert {(group["first"], group["last"]) for group in told} == {("2026-11-20T01:02:03Z", "2026-11-20T01:02:03Z")}


def test_each_use_of_a_freed_key_is_replayed(spark: SparkSession, database_url: str) -> None:
    """A key that a discard has freed was the key of two messages, of which the second one has two rows."""
    uses = [history(spark, 3, body=f"CAST('{n}' AS BINARY)", sent_at=f"timestamp_seconds({n})") for n in (7, 8, 8)]
    rows = reduce(DataFrame.unionByName, uses)
    for added in (6, 0):
        chosen = replay.messages(choosing.complete(rows), name="x")
        assert replay.replay(chosen, load_settings(database_url=database_url), total=9).added == added
    bodies = Outbox(database_url).rows("SELECT body, count(*) FROM durable.outgoing_envelopes GROUP BY body ORDER BY 1")
    assert bodies == [(b"7", 3), (b"8", 3)]


# ---------------------------------------------------------------- publishing in chunks


def test_chunks_follow_in_time_and_are_one_batch_each(spark: SparkSession, database_url: str) -> None:
    shown: list[tuple[int, int]] = []
    chosen = replay.messages(choosing.complete(history(spark, 10)), name="x")
    done = replay.replay(
        chosen,
        load_settings(database_url=database_url),
        total=10,
        chunk_size=4,
        show=lambda done, total: shown.append((done, total)),
    )
    assert done == (10, 10)
    assert [total for _, total in shown] == [10, 10, 10]
    assert shown[-1][0] == 10
    outbox = Outbox(database_url)
    assert len(outbox.batches) == 3
    orders = "(convert_from(body, 'UTF8')::json->>'order_id')::integer"
    in_order = [n for (n,) in outbox.rows(f"SELECT {orders} FROM durable.outgoing_envelopes ORDER BY seq")]
    first = shown[0][0]
    assert sorted(in_order[:first]) == list(range(first)), "the oldest go first"
    sent_at = NOW - timedelta(minutes=7)
    kept = outbox.rows(
        f"SELECT correlation_id, causation_id, id, attempts FROM durable.outgoing_envelopes WHERE {orders} = 3"
    )
    assert kept == [(uuid(1003), uuid(2003), replay.new_id_of(uuid(3), name="x", sent_at=sent_at), 0)]


def test_rate_bounds_the_start_of_the_next_chunk(
    spark: SparkSession, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    chosen = replay.messages(choosing.complete(history(spark, 10)), name="x")
    settings = load_settings(database_url=database_url)
    monkeypatch.setattr("durable.pipeline.replay.time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    done = replay.replay(chosen, settings, total=10, rate=1.0)
    assert done == (10, 10)
    assert len(pauses) == 2, "five seconds' worth at once"
    assert pauses[0] == 0
    assert 0 <= pauses[1] <= 5


def test_rate_counts_no_known_message(spark: SparkSession, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that goes on passes by what it has done."""
    pauses: list[float] = []
    chosen = replay.messages(choosing.complete(history(spark, 10)), name="x")
    settings = load_settings(database_url=database_url)
    replay.replay(chosen, settings, total=10)
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=pauses.append)
    monkeypatch.setattr("durable.pipeline.replay.time", clock)
    assert replay.replay(chosen, settings, total=10, rate=1.0) == (10, 0)
    assert pauses == [0, 0]


ORDERS: dict[str, str] = {
    "a struct": "named_struct('tens', n div 4, 'rest', named_struct('ones', CAST(n AS STRING), 'none', NULLIF(n, n)))",
    "a struct that is NULL": "IF(n < 3, NULL, named_struct('n', n))",
    "a text": "concat('\\'\\\\', n)",
    "bytes": "CAST(CAST(n AS STRING) AS BINARY)",
    "a decimal": "CAST(n / 1000 AS DECIMAL(38, 18))",
    "a truth": "n >= 5",
    "a day": "date_add(DATE'0001-01-01', CAST(n AS INT))",
    "a time": "timestamp_micros(-62135596800000000 + n)",
    "a float": "IF(n < 3, NULL, CAST(n / 3 AS FLOAT))",
    "NaN": "IF(n < 8, CAST(n AS DOUBLE), CAST('NaN' AS DOUBLE))",
}


@pytest.mark.parametrize("name", ORDERS)
def test_chunks_follow_each_other_in_columns_of_every_kind(spark: SparkSession, name: str) -> None:
    rows = choosing.complete(history(spark, 10, o=ORDERS[name]))
    chosen = replay.messages(rows, name="x", same_ids=True, order_by=["o"])
    parts = [part.select("id").collect() for part in chunks(chosen, "order_by", total=10, size=4)]
    assert [len(part) for part in parts] == [4, 4, 2]
    numbers = [int.from_bytes(row.id) for part in parts for row in part]
    assert sorted(numbers) == list(range(10))
    assert all(max(a.id for a in one) < min(b.id for b in other) for one, other in pairwise(parts))


@pytest.mark.parametrize("sql", ["array(n)", "map(n, n)", "make_interval(n)", "NULL"])
def test_a_column_without_an_order_is_refused_before_anything_is_written(spark: SparkSession, sql: str) -> None:
    with pytest.raises(InvalidSetting, match=r"order_by: column o is \w+.*, must be decimal, tinyint"):
        replay.messages(choosing.complete(history(spark, 10, o=sql)), name="x", order_by=["o"])


# ---------------------------------------------------------------- the command


@pytest.fixture
def parquet(spark: SparkSession, tmp_path: Path) -> str:
    place = str(tmp_path / "messages")
    history(spark).write.parquet(place)
    return place


@pytest.mark.parametrize("folder", ["l[a]{b}*", "a b#?%20é", "'q\\"])
def test_a_place_of_files_is_taken_by_its_letters(
    again: Callable[..., dict[str, Any]],
    spark: SparkSession,
    database_url: str,
    tmp_path: Path,
    parquet: str,
    folder: str,
) -> None:
    place = tmp_path / folder
    shutil.copytree(parquet, place)
    assert again(database_url, "--name", "x", "--parquet", str(place), "--all", "--dry-run")["messages"] == 10


def test_name_of_a_message_beside_the_chosen_ones_is_not_refused(
    again: Callable[..., dict[str, Any]], database_url: str, parquet: str
) -> None:
    both = ("--type", "odd", "--type", "even", "--where", "message_type = 'odd'")
    none = ("--type", "odd", "--until", "2001-01-01T00:00Z")
    counts = [again(database_url, "--name", "x", "--parquet", parquet, "--dry-run", *each) for each in (both, none)]
    assert [counted["messages"] for counted in counts] == [5, 0]


def test_a_dry_run_counts_and_changes_nothing(
    again: Callable[..., dict[str, Any]], database_url: str, parquet: str
) -> None:
    counted = again(database_url, "--name", "x", "--parquet", parquet, "--type", "odd", "--dry-run")
    assert (counted["messages"], counted["added"], counted["without_body"]) == (5, 0, 0)
    (group,) = counted["groups"]
    assert (group["message_type"], group["messages"], group["address"]) == ("odd", 5, "tcp://127.0.0.1:2301")
    assert Outbox(database_url).orders == []


def test_replayed_messages_go_to_the_given_destination(
    again: Callable[..., dict[str, Any]], database_url: str, parquet: str
) -> None:
    again(database_url, "--name", "x", "--parquet", parquet, "--all", "--destination", "local", "--chunk", "6")
    assert Outbox(database_url).inbox == list(range(10))


def test_replay_prints_the_numbers_of_replayed_and_added_messages(
    agent: Agent, spark: SparkSession, database_url: str, parquet: str
) -> None:
    ended = agent("pipeline", "replay", "--name", "x", "--parquet", parquet, "--all", "--database", database_url)
    assert ended.code == 0
    assert "10 messages replayed, 10 of them added" in ended.out
    assert "odd" in ended.out


REFUSALS: dict[str, tuple[tuple[str, ...], str]] = {
    "no filter": ((), "filter the messages, such as by --type or --since; or give --all"),
    "a bad id": (("--id", "17"), "--id: '17' is no UUID of a message"),
    "a bad time": (("--since", "May"), "--since: 'May' is not a time"),
    "a bad condition": (("--where", "colour = 'red'"), "where: \"colour = 'red'\" is no condition over these columns"),
    "malformed SQL": (("--where", "id ="), "where: 'id =' is no condition over these columns"),
    "a misspelt type": (("--type", "od"), "--type: no message has 'od'; did you mean 'odd'?"),
    "a misspelt type beside another": (
        ("--type", "odd", "--type", "eve"),
        "no message has 'eve'; did you mean 'even'?",
    ),
    "a misspelt service": (("--all", "--service", "x"), "--service: no message has 'x'; known: "),
    "an unknown address": (("--address", "tcp://127.0.0.1:9"), "--address: no message has 'tcp://127.0.0.1:9'"),
    "an unknown id": (
        ("--id", str(UUID(int=1 << 100))),
        f"--id: no message has {UUID(int=1 << 100)}; leave it out, or archive",
    ),
    "no name": (("--all", "--name", "\x07"), "--name: '\\x07' is no name; give printable text"),
    "a long name": (("--all", "--name", "é" * 501), "--name: has 1,002 bytes in UTF-8; give a name of at most 1,000"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_replay_with_wrong_arguments_fails_with_one_line(
    agent: Agent, spark: SparkSession, database_url: str, parquet: str, name: str
) -> None:
    arguments, reason = REFUSALS[name]
    command = ("pipeline", "replay", "--name", "x", "--parquet", parquet, "--database", database_url)
    ended = agent(*command, *arguments)
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert reason in ended.err
    assert Outbox(database_url).orders == []


WRONG_ROWS: dict[str, tuple[dict[str, str], tuple[str, ...], str]] = {
    "both sides": (
        {"side": "IF(n > 5, 'incoming', 'outgoing')"},
        (),
        "--side: the messages are of incoming and outgoing",
    ),
    "another side": (
        {"side": "IF(n > 5, 'Incoming', 'outgoing')"},
        (),
        "column side: 'Incoming' is neither 'incoming' nor 'outgoing'; correct it in the files",
    ),
    "services": ({"service": "IF(n > 5, 'a', 'b')"}, (), "--service: the messages are of a and b; choose one"),
    "no bodies": ({"body": "CAST(NULL AS BINARY)"}, (), "history_bodies: none of these messages has its body"),
    "too old": (
        {"sent_at": "TIMESTAMP'2020-01-01 00:00:00'"},
        ("--same-ids",),
        "same_ids: 10 of these messages are older than dedupe_window",
    ),
    "some of unknown age": (
        {"sent_at": f"IF(n > 5, NULL, TIMESTAMP'{NOW:%Y-%m-%d %H:%M:%S}')"},
        ("--same-ids",),
        "same_ids: 4 of these messages have no sent_at, and ids without a time in them",
    ),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_unfit_messages_are_refused_before_any_is_replayed(
    agent: Agent, spark: SparkSession, database_url: str, tmp_path: Path, name: str
) -> None:
    columns: dict[str, Any]
    columns, options, reason = WRONG_ROWS[name]
    place = str(tmp_path / f"wrong {uuid4().hex}")
    history(spark, 10, **columns).write.parquet(place)
    command = ("pipeline", "replay", "--name", "x", "--parquet", place, "--all", "--database", database_url)
    ended = agent(*command, *options)
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert reason in ended.err
    assert Outbox(database_url).orders == []


@pytest.mark.parametrize(("digits", "fault"), [(0, "has not 16 bytes"), (30, "has not 16 bytes"), (34, "has not 16")])
def test_replay_refuses_an_id_of_another_length(
    agent: Agent, spark: SparkSession, database_url: str, tmp_path: Path, digits: int, fault: str
) -> None:
    """A new id would hide it."""
    place = str(tmp_path / "messages")
    history(spark, 10, id=f"unhex(lpad(hex(n), IF(n = 7, {digits}, 32), '0'))").write.parquet(place)
    ended = agent(*("pipeline", "replay", "--name", "x", "--parquet", place, "--all", "--database", database_url))
    assert ended.code == 1
    assert f"column id: {fault}" in ended.err
    assert Outbox(database_url).orders == []


def test_files_without_required_columns_are_refused(spark: SparkSession) -> None:
    with pytest.raises(InvalidSetting, match="column body: missing; a replay needs"):
        choosing.complete(history(spark).drop("body"))
    plain = history(spark).withColumn("destination", F.col("address")).drop("side", "address", "service", "headers")
    assert replay.messages(choosing.complete(plain), name="x").count() == 10


def test_replay_of_history_without_bodies_names_the_setting_history_bodies(
    spark: SparkSession, lake: Lake, agent: Agent, database_url: str
) -> None:
    with psycopg.connect(database_url, autocommit=True) as conn:
        add_history(conn, 3)
    archived(spark, lake, database_url)
    ended = agent("pipeline", "replay", "--name", "x", "--all", "--lake", lake.url, "--database", database_url)
    assert (ended.code, "history_bodies" in ended.err) == (2, True)


def test_spark_reads_the_time_of_an_id_as_python_does(spark: SparkSession) -> None:
    kinds = [(version, variant) for version in range(16) for variant in range(16)]
    ids = [UUID(int=(0x0180_0000_0001 << 80) | version << 76 | variant << 60) for version, variant in kinds]
    frame = spark.createDataFrame(
        [(place, bytearray(each.bytes)) for place, each in enumerate(ids)], "place int, id binary"
    )
    read = {row.place: row.ms for row in frame.select("place", replay.unix_ms("id").alias("ms")).collect()}
    assert [read[place] for place in range(len(ids))] == [unix_ms(each) for each in ids]


@pytest.mark.parametrize("option", ["name", "destination", "order_by"])
def test_lone_surrogate_in_a_text_of_a_replay_is_refused(spark: SparkSession, option: str) -> None:
    rows = choosing.complete(history(spark))
    named: dict[str, Any] = {"name": "x", option: ["a\ud800b"] if option == "order_by" else "a\ud800b"}
    with pytest.raises(InvalidSetting, match=rf"^{option}: .*\\ud800"):
        replay.messages(rows, **named)
    assert spark.range(3).count() == 3


# ---------------------------------------------------------------- files of messages that wait to be published

SENDINGS = "SELECT convert_from(body, 'UTF8'), deliver_by, execution_time FROM durable.outgoing_envelopes ORDER BY seq"


def write_envelopes(spark: SparkSession, place: str, count: int = 5, **columns: str) -> None:
    """Write messages whose order is that of their negated numbers."""
    rows = spark.range(0, count, 1, 2).selectExpr("id AS n", *(f"{sql} AS {name}" for name, sql in columns.items()))
    made = publish.envelopes(
        rows,
        key="n",
        message_type="placed",
        source="shop",
        destination="tcp://127.0.0.1:2301",
        body=F.col("n").cast("string"),
        partition_key=F.lit("one"),
        order_by=[-F.col("n"), "n"],
        deliver_by="deliver_by",
        execution_time="execution_time",
    )
    made.write.mode("overwrite").parquet(place)


def in_sql(moment: datetime) -> str:
    return f"TIMESTAMP'{moment:%Y-%m-%d %H:%M:%S}Z'"


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ((), "43210"),
        (("--chunk", "2"), "43210"),
        (("--order-by", "body"), "01234"),
        (("--order-by", "sent_at", "--order-by", "seq"), "01234"),
    ],
)
def test_messages_to_be_published_keep_their_order_and_times(
    agent: Agent, spark: SparkSession, database_url: str, tmp_path: Path, options: tuple[str, ...], order: str
) -> None:
    place, (due, end) = str(tmp_path / "made"), (NOW + timedelta(days=days) for days in (1, 2))
    write_envelopes(spark, place, deliver_by=in_sql(end), execution_time=f"IF(n = 3, {in_sql(due)}, NULL)")
    made = spark.read.parquet(place).withColumn("seq", F.col("body").cast("bigint")).toArrow()
    pq.write_table(made, f"{place}.parquet")
    place = f"{place}.parquet"
    ended = agent(
        *("pipeline", "replay", "--name", "x", "--parquet", place, "--all", "--database", database_url, *options)
    )
    assert ended.code == 0, ended.err
    assert Outbox(database_url).rows(SENDINGS) == [(each, end, due if each == "3" else None) for each in order]


def test_unordered_messages_keep_the_order_of_their_sending(spark: SparkSession) -> None:
    """Beside a file with one; their ids are in another order."""
    rows = history(spark, 5, seq="n", id="unhex(lpad(hex(99 - n), 32, '0'))", order_by="CAST(NULL AS INT)")
    made = choosing.complete(rows.withColumnRenamed("address", "destination").drop("side", "sent_at"))
    found = replay.messages(made, name="x").orderBy("order_by").select("body").collect()
    assert [bytes(row.body) for row in found] == [b'{"order_id":%d}' % number for number in range(5)]


def test_messages_behind_their_deadline_are_refused_before_a_replay_begins(
    agent: Agent, spark: SparkSession, database_url: str, tmp_path: Path
) -> None:
    """A replay that goes on has begun in time."""
    place, over = str(tmp_path / "made"), in_sql(NOW - timedelta(days=1))
    command = ("pipeline", "replay", "--name", "x", "--parquet", place, "--all", "--database", database_url)
    write_envelopes(spark, place, deliver_by=f"IF(n < 2, {over}, NULL)", execution_time="CAST(NULL AS TIMESTAMP)")
    for more in ("--dry-run",), ():
        ended = agent(*command, *more)
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
        assert "column deliver_by: 2 of these messages have a deadline that is over" in ended.err
    assert Outbox(database_url).rows(SENDINGS) == []
    ahead = f"IF(n < 5, {in_sql(NOW + timedelta(days=1))}, {over})"
    for count in (5, 6):
        write_envelopes(spark, place, count, deliver_by=ahead, execution_time="CAST(NULL AS TIMESTAMP)")
        ended = agent(*command)
        assert ended.code == 0, ended.err
        assert len(Outbox(database_url).rows(SENDINGS)) == count


def test_archived_messages_are_replayed_without_their_deadline(spark: SparkSession) -> None:
    rows = history(spark, deliver_by="TIMESTAMP'2020-01-01 00:00:00'", execution_time="TIMESTAMP'2020-01-01 00:00:00'")
    columns = replay.messages(choosing.complete(rows), name="x").columns
    assert {"deliver_by", "execution_time"}.isdisjoint(columns)


@pytest.mark.parametrize("column", ["deliver_by", "Execution_Time"])
@pytest.mark.parametrize("sql", ["'2030-05-01'", "7", "DATE'2030-05-01'"])
def test_time_of_another_type_is_named(spark: SparkSession, column: str, sql: str) -> None:
    rows = history(spark, 1, **{column: sql}).withColumnRenamed("address", "destination").drop("side")
    with pytest.raises(InvalidSetting, match=f"column {column}: is .*, must be TIMESTAMP; convert it"):
        replay.messages(choosing.complete(rows), name="x")
