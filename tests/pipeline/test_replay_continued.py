"""Replays that were interrupted: they are continued with the same messages in the same order, and never with others."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from pyspark.sql import SparkSession

from durable import Bus, message
from durable.pipeline.archive import archive
from durable.pipeline.lake import Lake
from durable.pipeline.origin import Origin
from durable.testing import eventually
from tests.pipeline.test_replay import WAITING, history
from tests.support.command import Agent, Ended
from tests.support.publishing import Outbox

pytestmark = pytest.mark.timeout(600)  # to be cut off amid a call leaves the session of all tests unusable

ROWS = 12


@message("continued.ordered")
class Ordered(msgspec.Struct):
    number: int


@message("continued.paid")
class Paid(msgspec.Struct): ...


BODY = "CAST(concat('{\"order_id\":', n, '}', IF(n = 7, repeat(' ', 2000), '')) AS BINARY)"
OTHERS: dict[str, tuple[str, ...]] = {
    "order-by": ("--order-by", "message_type"),
    "type": ("--type", "odd"),
    "where": ("--where", "id IS NOT NULL"),
    "since": ("--since", "3h"),
    "until": ("--until", "1s"),
    "destination": ("--destination", "tcp://127.0.0.1:7"),
    "address": ("--address", "tcp://127.0.0.1:2301"),
    "service": ("--service", "shop"),
    "side": ("--side", "outgoing"),
    "same-ids": ("--same-ids",),
    "from": ("--from", "dead-letters"),
}


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


def stored(url: str) -> list[int]:
    return [
        row[0]
        for row in Outbox(url).rows(
            "SELECT (convert_from(body, 'UTF8')::json->>'order_id')::int FROM durable.outgoing_envelopes ORDER BY seq"
        )
    ]


def test_interrupted_replay_continues_with_the_same_options_only(
    spark: SparkSession, agent: Agent, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is too large for the service, until its limit is raised: the chunks before it are committed."""
    place, elsewhere = str(tmp_path / "messages"), str(tmp_path / "elsewhere")
    history(spark, ROWS, partition_key="'a'", body=BODY).write.parquet(place)
    shutil.copytree(place, elsewhere)

    def replayed(*arguments: str, files: str = place, since: str = "2h") -> Ended:
        options = ("--name", "May", "--parquet", files, "--database", database_url)
        times = () if "--since" in arguments else ("--since", since)
        return agent("pipeline", "replay", *options, *times, *arguments)

    monkeypatch.setenv("DURABLE_MAX_MESSAGE_BYTES", "1500")
    assert "the body has" in replayed("--chunk", "3").err
    assert stored(database_url) == [*range(6)]
    monkeypatch.delenv("DURABLE_MAX_MESSAGE_BYTES")

    for option, arguments in OTHERS.items():
        refused = replayed(*arguments)
        assert (refused.code, refused.err.count("\n")) == (2, 1), refused.err
        assert f"replay 'May' was begun with other options: --{option} was " in refused.err
        assert "give the same ones to continue it, or another --name" in refused.err
    assert f"--parquet was {place!r}, and is now {elsewhere!r}" in replayed(files=elsewhere).err
    assert "--order-by was " in replayed("--order-by", "message_type", "--dry-run").err
    assert stored(database_url) == [*range(6)]

    continued = replayed("--chunk", "5", "--rate", "1000")
    assert continued.code == 0, continued.err
    assert stored(database_url) == [*range(ROWS)]


def test_continued_replay_keeps_the_relative_time_of_its_first_run(
    spark: SparkSession, agent: Agent, database_url: str, tmp_path: Path
) -> None:
    """The first run was an hour ago; the messages are up to twelve minutes old."""
    place = str(tmp_path / "messages")
    now = f"TIMESTAMP'{datetime.now(UTC):%Y-%m-%d %H:%M:%S}'"
    history(spark, ROWS, sent_at=f"{now} - make_interval(0, 0, 0, 0, 0, {ROWS} - n)").write.parquet(place)
    options = ("--parquet", place, "--since", "5m", "--database", database_url)
    assert agent("pipeline", "replay", "--name", "May", *options).code == 0
    before = len(stored(database_url))
    assert 0 < before < ROWS
    with psycopg.connect(database_url) as conn:
        conn.execute(
            "UPDATE durable.replays SET plan = jsonb_set(plan, '{since,at}', "
            "to_jsonb(CAST((plan->'since'->>'at')::timestamptz - interval '1 h' AS text)))"
        )
    assert agent("pipeline", "replay", "--name", "May", *options).code == 0
    assert len(stored(database_url)) == ROWS


NO_SERVICE = {"service": "CAST(NULL AS STRING)"}
BILLING = {"service": "'billing'"}


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({}, {"service": "'billing'"}),
        (NO_SERVICE, {"service": "'billing'"}),
        ({}, NO_SERVICE),
        ({}, {"side": "'incoming'"}),
    ],
    ids=["service", "service beside none", "none beside a service", "side"],
)
def test_replay_is_continued_when_others_have_come_to_its_place(
    spark: SparkSession,
    agent: Agent,
    database_url: str,
    tmp_path: Path,
    first: dict[str, str],
    other: dict[str, str],
) -> None:
    place = str(tmp_path / "messages")
    history(spark, 3, **first).write.parquet(place)
    options = ("--name", "May", "--parquet", place, "--all", "--database", database_url)
    assert agent("pipeline", "replay", *options).code == 0
    history(spark, 4, **first | other).write.mode("append").parquet(place)
    continued = agent("pipeline", "replay", *options)
    assert (continued.code, continued.err) == (0, "")
    assert sorted(stored(database_url)) == [*range(3)]
    new = agent("pipeline", "replay", "--name", "June", *options[2:])
    assert f"--{next(iter(other))}: the messages are of " in new.err


def test_malformed_destination_is_refused_before_a_replay_has_begun(
    spark: SparkSession, agent: Agent, database_url: str, tmp_path: Path
) -> None:
    place = str(tmp_path / "messages")
    history(spark, 2).write.parquet(place)
    options: Any = ("--name", "May", "--parquet", place, "--all", "--database", database_url)
    for uri in ("tcp://b", "tcp://b:0", "://x", "rabbitmq://default/topic"):
        ended = agent("pipeline", "replay", *options, "--destination", uri)
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert Outbox(database_url).rows("SELECT name FROM durable.replays") == []
    assert agent("pipeline", "replay", *options, "--destination", "tcp://b:1").code == 0


WAYS: dict[str, tuple[str, ...]] = {
    "lake": ("--lake", "{lake}"),
    "end ahead": ("--lake", "{lake}", "--until", "2100-01-01T00:00Z"),
    "files": ("--parquet", "{copied}"),
}


@pytest.mark.parametrize("way", WAYS)
async def test_replay_leaves_its_archived_copies_out(
    spark: SparkSession, agent: Agent, database_url: str, tmp_path: Path, way: str
) -> None:
    """The first run finds nothing yet; the same command replays what is archived then, and nothing after it."""
    lake = Lake(str(tmp_path / "lake"))
    shop = Bus("shop", database=database_url, history_bodies=True)
    handled: list[int] = []

    @shop.handles(Ordered)
    async def handle(ordered: Ordered) -> None:
        handled.append(ordered.number)

    @shop.handles(Paid)
    async def pay(paid: Paid) -> None: ...

    async def settle(*sent: Ordered | Paid) -> None:
        async with shop.unit_of_work():
            for each in sent:
                shop.send(each)
        async with shop:
            await eventually(lambda: not Outbox(database_url).rows(WAITING))
        archive(lambda: spark, lake, "history", Origin(url=database_url, schema="durable", service="shop"))

    def replayed() -> tuple[int, int]:
        copied = tmp_path / "copied"
        copied.mkdir(exist_ok=True)
        for path in lake.sizes("history"):
            shutil.copy(f"{lake.table_url('history')}/{path}", copied)
        place = [part.format(lake=lake.url, copied=copied) for part in WAYS[way]]
        ordered = ("--where", "message_type = 'continued.ordered'")
        options = ("--json", "--name", "again", "--side", "incoming", *ordered, *place)
        ended = agent("pipeline", "replay", *options, "--database", database_url)
        assert ended.code == 0, ended.err
        told = json.loads(ended.out)
        return told["messages"], told["added"]

    await settle(Paid())
    assert replayed() == (0, 0)
    await settle(*map(Ordered, range(3)))
    assert replayed() == (3, 3)
    for _ in range(2):
        await settle()
        assert replayed() == (3, 0)
    assert sorted(handled) == [0, 0, 1, 1, 2, 2]
