"""Keys in their order from the rows of a DataFrame to the handler: however they are shared out, cut up and begun again.

Each case publishes generated rows, has them handled, and counts inversions: pairs of messages of one key that were
handled the other way round than their columns of order say.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import reduce
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, Retry, message
from durable.embedded import Embedded
from durable.errors import InvalidMessage, InvalidSetting
from durable.pipeline import choosing, publish, replay
from durable.pipeline.source import register
from durable.settings import load_settings
from durable.testing import eventually
from tests.conftest import fresh_databases
from tests.support.command import Agent
from tests.support.publishing import FailingSource, Outbox, write
from tests.support.servers import EMBEDDED

pytestmark = pytest.mark.timeout(600)  # to be cut off amid a call leaves the session of all tests unusable
NOW = datetime.now(UTC).replace(microsecond=0)
SOON = Retry(immediate=0, delays=[0.01] * 50)


@message("key-order.counted")
class Counted(msgspec.Struct):
    number: int
    key: str | None


class Row(NamedTuple):
    """A row of the source."""

    number: int
    key: str | None
    sent_at: datetime | None
    seq: int | None
    name: str | None


class Case(NamedTuple):
    keys: int
    partitions: int
    order: str
    chunk: int = 1_000
    restarts: int = 0

    def __str__(self) -> str:
        return "-".join(map(str, self))


def nulls_first(*values: Any) -> tuple[tuple[bool, Any], ...]:
    return tuple((value is not None, value if value is not None else 0) for value in values)


ORDERS: dict[str, tuple[Any, Callable[[Row], Any]]] = {
    "by default": (None, lambda row: nulls_first(row.sent_at, row.seq)),
    "seq": (["seq"], lambda row: nulls_first(row.seq)),
    "sent_at": (["sent_at"], lambda row: nulls_first(row.sent_at)),
    "name and seq": (
        ["name", "seq"],
        lambda row: nulls_first(None if row.name is None else row.name.encode(), row.seq),
    ),
}
COUNT = 120
CASES = [
    Case(keys, partitions, order, chunk, restarts)
    for (keys, partitions), order, (chunk, restarts) in zip(
        [(1, 1), (1, 7), (3, 2), (10, 5), (40, 3), (3, 7), (1, 3), (10, 2)],
        [*ORDERS, *ORDERS],
        [(1_000, 0), (40, 0), (1, 0), (17, 1), (50, 2), (120, 1), (13, 3), (119, 0)],
        strict=True,
    )
]
CASES[2] = CASES[2]._replace(chunk=30)  # a chunk of one row has a test of its own, with fewer rows


def generated(case: Case, count: int = COUNT) -> list[Row]:
    """Rows in no order, with many that are level and many NULLs."""
    chance = random.Random(str(case))
    rows = [
        Row(
            number,
            None if chance.random() < 0.1 else f"key {number % case.keys}",
            None if chance.random() < 0.2 else NOW - timedelta(seconds=chance.randrange(12)),
            None if chance.random() < 0.2 else chance.randrange(-3, 20),
            None if chance.random() < 0.2 else chance.choice(["", "a", "ab", "b", "é", "a\x01"]),
        )
        for number in range(count)
    ]
    chance.shuffle(rows)
    return rows


def inversions(rows: Sequence[Row], handled: Sequence[int], order: str) -> int:
    """How many pairs of one key were handled the other way round."""
    by_number, rank = {row.number: row for row in rows}, ORDERS[order][1]
    done: dict[str, list[Any]] = defaultdict(list)
    for number in handled:
        if (key := by_number[number].key) is not None:
            done[key].append(rank(by_number[number]))
    return sum(first > second for of_key in done.values() for first, second in combinations(of_key, 2))


def frame(spark: SparkSession, rows: Sequence[Row], partitions: int) -> DataFrame:
    schema = "number INT, key STRING, sent_at TIMESTAMP, seq BIGINT, name STRING"
    return spark.createDataFrame([tuple(row) for row in rows], schema).repartition(partitions)


def messages(rows: DataFrame, destination: str = "local", order_by: Any = None) -> DataFrame:
    return publish.envelopes(
        rows,
        key="number",
        message_type="key-order.counted",
        source="source",
        destination=destination,
        body=F.to_json(F.struct("number", "key"), {"ignoreNullFields": "false"}),
        partition_key="key",
        order_by=order_by,
    )


def history(rows: DataFrame, side: str, address: str) -> DataFrame:
    """The same rows as messages of the past."""
    return choosing.complete(
        rows.selectExpr(
            "unhex(lpad(hex((number * 7919) % 10007), 32, '0')) AS id",
            f"'{side}' AS side",
            f"'{address}' AS address",
            "'key-order.counted' AS message_type",
            "'source' AS source",
            "CAST(to_json(struct(number, key), map('ignoreNullFields', 'false')) AS BINARY) AS body",
            "key AS partition_key",
            "sent_at",
            "seq",
            "name",
        )
    )


class Service:
    """Handles what is in its inbox; every seventh message only at the second attempt. What is handled is in a table,
    because messages that share a transaction with one that fails are run again.
    """

    def __init__(self, url: str, *, listen: str | None = None, **options: Any) -> None:
        self._url, self._table = url, f"handled_{uuid4().hex}"
        self._query(f"CREATE TABLE {self._table} (seq bigint GENERATED ALWAYS AS IDENTITY, number integer)")
        insert = text(f"INSERT INTO {self._table} (number) VALUES (:number)")
        self.bus = Bus("shop", database=url)
        if listen is not None:
            self.bus.listen(listen)

        @self.bus.handles(Counted, retry=SOON, **options)
        async def count(counted: Counted, session: AsyncSession) -> None:
            if counted.number % 7 == 0 and counted.number not in self._failed:
                self._failed.add(counted.number)
                raise ValueError("the first attempt fails")
            await session.execute(insert, {"number": counted.number})

        self._failed: set[int] = set()

    @property
    def handled(self) -> list[int]:
        return [number for (number,) in self._query(f"SELECT number FROM {self._table} ORDER BY seq")]

    def _query(self, sql: str) -> list[Any]:
        with psycopg.connect(self._url, autocommit=True) as conn:
            cursor = conn.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    async def handle(self, count: int) -> list[int]:
        async with self.bus:
            await self.has_handled(count)
        return self.handled

    async def has_handled(self, count: int) -> None:
        await eventually(lambda: len(self.handled) >= count, within=60)


@pytest.fixture
def database_url(emptied_url: str) -> str:
    return emptied_url


@pytest.fixture(autouse=True)
def sources(spark: SparkSession) -> None:
    register(spark)
    spark.dataSource.register(FailingSource)


# ---------------------------------------------------------------- from the rows to the handler


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_published_rows_of_a_key_are_handled_in_their_order(
    spark: SparkSession, database_url: str, case: Case
) -> None:
    rows = generated(case)
    order_by, _ = ORDERS[case.order]
    made = messages(frame(spark, rows, case.partitions), order_by=order_by)
    publish.publish(made, load_settings(database_url=database_url))
    handled = await Service(database_url).handle(COUNT)
    assert sorted(handled) == list(range(COUNT))
    assert inversions(rows, handled, case.order) == 0


@pytest.mark.parametrize("end", ["in mid-copy", "after its copy"])
async def test_a_key_is_in_order_when_a_task_is_tried_again(
    spark: SparkSession, database_url: str, tmp_path: Path, end: str
) -> None:
    case = Case(keys=3, partitions=4, order="by default")
    rows = generated(case, 1_600)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    try:
        write(
            messages(frame(spark, rows, case.partitions)),
            database_url,
            source="failing",
            end=end,
            died=tmp_path / "died",
        )
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert (tmp_path / "died").exists()
    in_table = Outbox(database_url).rows(
        "SELECT (convert_from(body, 'UTF8')::json->>'number')::int FROM durable.incoming_envelopes ORDER BY seq"
    )
    assert len(in_table) == 1_600
    assert inversions(rows, [number for (number,) in in_table], case.order) == 0


class Killed(Exception):
    """Ends a replay between two chunks, as a kill would."""


def killed_after(chunks: int) -> Callable[[int, int], None]:
    left = iter(range(chunks - 1, -1, -1))

    def show(done: int, total: int) -> None:
        if next(left) == 0:
            raise Killed

    return show


def replay_with_restarts(chosen: DataFrame, url: str, case: Case, count: int = COUNT) -> Iterator[replay.Replayed]:
    """Begun again after each kill, with chunks of another size."""
    settings = load_settings(database_url=url)
    for restart in range(case.restarts):
        with pytest.raises(Killed):
            replay.replay(
                chosen, settings, total=count, chunk_size=case.chunk + restart, show=killed_after(restart + 1)
            )
    yield replay.replay(chosen, settings, total=count, chunk_size=case.chunk)


WITH_DESTINATION = [CASES[1], CASES[3], CASES[6]]


class Replays:
    """One replay for each case: its rows for the inbox, and some cases' rows for a destination among them."""

    def __init__(self, spark: SparkSession, make_database: Callable[[str], str], folder: Path) -> None:
        self._spark, self._make_database, self._folder = spark, make_database, folder
        self._handled: dict[Case, dict[str, list[int]]] = {}

    async def handled(self, case: Case) -> dict[str, list[int]]:
        """Return the numbers that the inbox (local) and the destination (peer) have handled, in their order."""
        if case not in self._handled:
            self._handled[case] = await self._replayed(case)
        return self._handled[case]

    async def _replayed(self, case: Case) -> dict[str, list[int]]:
        here = self._make_database("shop")
        if case not in WITH_DESTINATION:
            self._replay(case, here, ("incoming", "local"))
            return {"local": await Service(here).handle(COUNT)}
        peer = f"unix://{self._folder}/{WITH_DESTINATION.index(case)}.sock"
        self._replay(case, here, ("incoming", "local"), ("outgoing", peer))
        shop, billing = Service(here), Service(self._make_database("billing"), listen=peer)
        async with shop.bus:
            sent = await billing.handle(COUNT)
            await shop.has_handled(COUNT)
        return {"local": shop.handled, "peer": sent}

    def _replay(self, case: Case, url: str, *places: tuple[str, str]) -> None:
        """The chunks of two places are twice as large, and as many as those of one."""
        rows = frame(self._spark, generated(case), case.partitions)
        past = reduce(DataFrame.unionByName, (history(rows, *place) for place in places))
        chosen = replay.messages(past, name="again", order_by=ORDERS[case.order][0] or None)
        each = case._replace(chunk=case.chunk * len(places))
        (done,) = replay_with_restarts(chosen, url, each, COUNT * len(places))
        assert done.rows == COUNT * len(places)


@pytest.fixture(scope="module")
def replays(
    spark: SparkSession, servers: Callable[[int], Embedded], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replays]:
    with fresh_databases(servers(EMBEDDED)) as make_database:
        yield Replays(spark, make_database, tmp_path_factory.mktemp("replays"))


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_messages_replayed_into_the_inbox_are_handled_in_the_order_of_their_keys(
    replays: Replays, case: Case
) -> None:
    handled = (await replays.handled(case))["local"]
    assert sorted(handled) == list(range(COUNT))
    assert inversions(generated(case), handled, case.order) == 0


@pytest.mark.parametrize("case", WITH_DESTINATION, ids=str)
async def test_messages_replayed_to_a_destination_are_handled_there_in_the_order_of_their_keys(
    replays: Replays, case: Case
) -> None:
    handled = (await replays.handled(case))["peer"]
    assert sorted(handled) == list(range(COUNT))
    assert inversions(generated(case), handled, case.order) == 0


async def test_replayed_history_is_handled_in_the_order_of_its_commits(spark: SparkSession, database_url: str) -> None:
    """Also where the times at which it was sent are level: history knows the order of commits."""
    shop = Service(database_url, ordered=True)
    shop.bus.configure(history_bodies=True)
    async with shop.bus.unit_of_work():
        for number in range(30):
            shop.bus.send(Counted(number, "k"), key="k")
    await shop.handle(30)
    assert shop.handled == list(range(30))
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("UPDATE durable.envelope_history SET sent_at = date_trunc('day', sent_at)")
    past = spark.read.format("durable").option("url", database_url).option("table", "envelope_history").load()
    chosen = replay.messages(choosing.complete(past), name="again")
    replay.replay(chosen, load_settings(database_url=database_url), total=30, chunk_size=7)
    again = await shop.handle(60)
    assert again[30:] == list(range(30))


# ---------------------------------------------------------------- the rules of send()

LONG = "x" * 1_200
DECLARED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "an ordered handler": {"handler": {"ordered": True}},
    "a fair handler": {"handler": {"fair_by": "tenant"}},
    "a handler that is fair by key": {"handler": {"fair_by": "key"}},
    "an ordered destination": {"route": {"ordered": True}},
    "a fair destination": {"route": {"fair_by": "tenant"}},
    "a destination that is fair by key": {"route": {"fair_by": "key"}},
}


@message("key-order.routed")
class Routed(msgspec.Struct):
    number: int


@pytest.mark.parametrize("declared", DECLARED)
async def test_published_row_has_the_same_placement_as_a_message_sent(
    spark: SparkSession, database_url: str, declared: str
) -> None:
    """Without the code of the service: what a node of it has declared is in the database."""
    options = DECLARED[declared]
    bus = Bus("shop", database=database_url)
    peer = "tcp://127.0.0.1:9"
    bus.route(Routed, to=peer, **options.get("route", {}))

    @bus.handles(Counted, **options.get("handler", {}))
    async def count(counted: Counted) -> None: ...

    members: list[tuple[str | None, dict[str, str]]] = [
        (key, headers)
        for key in (None, "k", "another")
        for headers in ({}, {"tenant": "blue"}, {"tenant": LONG}, {"other": "x"})
    ]
    async with bus.unit_of_work():
        for number, (key, headers) in enumerate(members):
            bus.send(Counted(number, key), key=key, headers=headers)
            bus.send(Routed(number), key=key, headers=headers)
    places = (
        "SELECT (convert_from(body, 'UTF8')::json->>'number')::int AS number, ordering_key, fair_key "
        "FROM durable.{} ORDER BY number"
    )
    outbox = Outbox(database_url)
    tables = ("incoming_envelopes", "outgoing_envelopes")
    sent = [outbox.rows(places.format(table)) for table in tables]
    assert [len(rows) for rows in sent] == [len(members)] * 2
    outbox.rows("TRUNCATE durable.incoming_envelopes, durable.outgoing_envelopes")

    async with bus:
        pass
    rows = spark.createDataFrame(
        [(number, key, headers) for number, (key, headers) in enumerate(members)],
        "number INT, key STRING, headers MAP<STRING, STRING>",
    )
    for kind, destination in ((Counted, "local"), (Routed, peer)):
        made = publish.envelopes(
            rows,
            key="number",
            message_type=f"key-order.{kind.__name__.lower()}",
            source="shop",
            destination=destination,
            body=F.to_json(F.struct("number")),
            partition_key="key",
            headers=F.col("headers"),
        )
        publish.publish(made, load_settings(database_url=database_url))
    assert [outbox.rows(places.format(table)) for table in tables] == sent


async def test_an_ordered_handler_handles_published_rows_of_all_keys_in_their_order(
    spark: SparkSession, database_url: str
) -> None:
    shop = Service(database_url, ordered=True)
    await shop.handle(0)
    rows = generated(Case(keys=5, partitions=4, order="by default"))
    publish.publish(messages(frame(spark, rows, 4)), load_settings(database_url=database_url))
    handled = await shop.handle(COUNT)
    assert inversions([row._replace(key="all") for row in rows], handled, "by default") == 0


async def test_node_started_without_a_declaration_revokes_the_stored_one(database_url: str) -> None:
    special = "SELECT name, ordering_key IS NOT NULL FROM durable.placements WHERE side = 'incoming'"
    await Service(database_url, ordered=True).handle(0)
    assert Outbox(database_url).rows(special) == [("key-order.counted", True)]
    await Service(database_url).handle(0)
    assert Outbox(database_url).rows(special) == [("key-order.counted", False)]


ORDERED = """
@bus.handles(OrderPlaced, ordered=True)
async def place(order: OrderPlaced) -> None: ...
"""


def test_replay_given_the_bus_obeys_its_declarations_before_any_node_has_started(
    spark: SparkSession, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    agent = Agent(tmp_path, monkeypatch, capsys)
    name = agent.application(ORDERED)
    rows = [Row(number, None, None, 50 - number, None) for number in range(50)]
    past = history(frame(spark, rows, 4), "incoming", "local").drop(choosing.TIME)
    place = str(tmp_path / "messages")
    past.withColumn("message_type", F.lit(f"{name}.order-placed")).write.parquet(place)
    options = ("--name", "x", "--parquet", place, "--all", "--database", database_url, "--chunk", "20")
    ended = agent("pipeline", "replay", f"{name}:bus", *options)
    assert ended.code == 0, ended.err
    stored = Outbox(database_url).rows(
        "SELECT ordering_key IS NOT NULL, (convert_from(body, 'UTF8')::json->>'number')::int "
        "FROM durable.incoming_envelopes ORDER BY seq"
    )
    assert stored == [(True, number) for number in reversed(range(50))]


def test_a_stream_keeps_the_order_of_each_micro_batch(spark: SparkSession, database_url: str, tmp_path: Path) -> None:
    rows = generated(Case(keys=3, partitions=4, order="by default"))
    folder, found = str(tmp_path / "rows"), list[int]()
    for part in (rows[:60], rows[60:]):
        frame(spark, part, 4).write.mode("append").parquet(folder)
        read = spark.readStream.schema(frame(spark, part, 1).schema).parquet(folder)
        writer = messages(read).writeStream.format("durable").option("url", database_url)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination()
        stored = Outbox(database_url).rows(
            "SELECT (convert_from(body, 'UTF8')::json->>'number')::int FROM durable.incoming_envelopes ORDER BY seq"
        )
        assert sorted(number for (number,) in stored[len(found) :]) == sorted(row.number for row in part)
        assert inversions(part, [number for (number,) in stored[len(found) :]], "by default") == 0
        found += [number for (number,) in stored[len(found) :]]
    assert len(found) == COUNT


# ---------------------------------------------------------------- what does not go together


OTHERS = {
    "bodies": {"body": "'{}'"},
    "keys": {"partition_key": "'b'"},
    "types": {"message_type": "'key-order.routed'"},
    "headers": {"headers": """'{"tenant": "blue"}'"""},
}


@pytest.mark.parametrize("partitions", [1, 2], ids=["in one task", "in two tasks"])
@pytest.mark.parametrize("destination", ["tcp://127.0.0.1:9", "local"])
@pytest.mark.parametrize("what", OTHERS)
def test_two_rows_under_one_id_are_refused_when_they_are_two_messages(
    spark: SparkSession, database_url: str, partitions: int, destination: str, what: str
) -> None:
    one = messages(frame(spark, [Row(0, "a", None, None, None)], 1), destination).withColumn("headers", F.lit("{}"))
    two = one.withColumns({name: F.expr(sql) for name, sql in OTHERS[what].items()})
    with pytest.raises(InvalidMessage, match=f"have the id .* and differ in {next(iter(OTHERS[what]))}: choose a key"):
        publish.publish(one.unionByName(two).coalesce(partitions), load_settings(database_url=database_url))
    outbox = Outbox(database_url)
    assert (outbox.rows("SELECT 1 FROM durable.incoming_envelopes"), outbox.batches, outbox.leftovers) == ([], [], [])


def test_a_row_without_a_key_is_another_message_than_one_with_a_key(spark: SparkSession, database_url: str) -> None:
    one = messages(frame(spark, [Row(0, "a", None, None, None)], 1))
    two = one.withColumn("partition_key", F.lit(None).cast("string"))
    with pytest.raises(InvalidMessage, match="and differ in partition_key"):
        publish.publish(one.unionByName(two), load_settings(database_url=database_url))
    empty = two.withColumn("partition_key", F.lit(""))
    assert publish.publish(two.unionByName(empty), load_settings(database_url=database_url)), "an empty key is none"


def test_fast_mode_refuses_ordered_rows(spark: SparkSession, database_url: str) -> None:
    rows = generated(Case(keys=2, partitions=2, order="by default"), 10)
    with pytest.raises(
        InvalidMessage, match=r"not all parts were published: .* rows of a task have a key.*use the mode 'atomic'"
    ):
        publish.publish(messages(frame(spark, rows, 1)), load_settings(database_url=database_url), mode="fast")
    assert Outbox(database_url).rows("SELECT 1 FROM durable.incoming_envelopes") == []


def test_order_by_refuses_a_column_without_a_sort_order(spark: SparkSession, database_url: str) -> None:
    rows = frame(spark, generated(CASES[0], 3), 1)
    settings = load_settings(database_url=database_url)
    with pytest.raises(InvalidSetting, match=r"column order_by: is .*map<.*, must be decimal, .* or a struct of these"):
        publish.publish(messages(rows, order_by=F.create_map("key", "name")), settings)
    with pytest.raises(InvalidSetting, match="order_by: there is no column 'seqq'; did you mean 'seq'"):
        replay.messages(history(rows, "incoming", "local"), name="x", order_by=["seqq"])
    with pytest.raises(PySparkException):
        publish.publish(messages(rows, order_by="missing"), settings)


# ---------------------------------------------------------------- chunks and the rate

TIMES: dict[str, Callable[[int], datetime | None]] = {
    "missing": lambda number: None,
    "level": lambda number: NOW,
    "different": lambda number: NOW - timedelta(seconds=number),
    "some missing": lambda number: None if number % 3 else NOW,
}


@pytest.mark.parametrize(
    ("times", "count", "size"),
    [
        *((times, 100, 40) for times in TIMES),
        ("missing", 100, 100),
        ("level", 100, 50),
        ("level", 3, 1),
        ("level", 0, 9),
    ],
)
def test_chunks_have_the_given_number_of_rows_for_any_times(
    spark: SparkSession, database_url: str, times: str, count: int, size: int
) -> None:
    rows = [Row(number, "k", TIMES[times](number), None, None) for number in range(count)]
    chosen = replay.messages(history(frame(spark, rows, 3), "incoming", "local"), name="x")
    shown: list[tuple[int, int]] = []
    done = replay.replay(
        chosen,
        load_settings(database_url=database_url),
        total=count,
        chunk_size=size,
        show=lambda done, total: shown.append((done, total)),
    )
    assert done == (count, count)
    assert shown == [(min(end, count), count) for end in range(size, count + size, size) if count]
    batches = Outbox(database_url).batches
    assert batches == [(min(size, count - begin),) * 2 for begin in range(0, count, size)]


@pytest.mark.parametrize("times", ["missing", "level"])
def test_replay_rate_paces_by_count_for_any_times(
    spark: SparkSession, database_url: str, times: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row(number, None, TIMES[times](number), None, None) for number in range(100)]
    chosen = replay.messages(history(frame(spark, rows, 3), "incoming", "local"), name="x")
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 1_000.0 + sum(pauses), sleep=pauses.append)
    monkeypatch.setattr("durable.pipeline.replay.time", clock)
    done = replay.replay(chosen, load_settings(database_url=database_url), total=100, rate=8.0)
    assert done == (100, 100)
    assert pauses == [0.0, 5.0, 5.0], "forty at a time, five seconds apart"


def test_the_command_reports_each_message_once(
    spark: SparkSession, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    place = str(tmp_path / "messages")
    history(frame(spark, [Row(n, "k", None, None, None) for n in range(40)], 2), "incoming", "local").drop(
        choosing.TIME
    ).write.parquet(place)
    ended = Agent(tmp_path, monkeypatch, capsys)(
        *("pipeline", "replay", "--json", "--name", "x", "--parquet", place, "--all", "--database", database_url),
        *("--chunk", "15", "--order-by", "name", "--order-by", "seq"),
    )
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert (told["messages"], told["added"]) == (40, 40)
    assert Outbox(database_url).batches == [(15, 15), (15, 15), (10, 10)]
