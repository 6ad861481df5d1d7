"""Repeats under business keys: a replay takes the first message of each use of a key, and leaves the others out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from durable import Bus, message
from durable.messages.sealed import MAGIC
from durable.pipeline import repeats
from durable.pipeline.archive import archive
from durable.pipeline.lake import Lake
from durable.pipeline.origin import Origin
from durable.testing import eventually
from tests.support.command import Agent
from tests.support.publishing import Outbox

pytestmark = pytest.mark.timeout(600)  # to be cut off amid a call leaves the session of all tests unusable
WINDOW: Final = timedelta(days=7)
BEGINNING: Final = datetime(2026, 1, 2, tzinfo=UTC)
SCHEMA: Final = (
    "number int, service string, side string, outcome string, address string, message_type string, id binary, "
    "sent_at timestamp, seq bigint, body binary"
)
UUIDV7: Final = UUID("01890000-0000-7000-8000-000000000000").int
Sent = Mapping[str, Any]


def sent(draw: Random) -> Iterator[dict[str, Any]]:
    """Messages under a few keys, each used several times: repeats, other contents, other receivers, other outcomes."""
    for number in range(2_000):
        content, key = draw.choice(b"abc"), draw.randrange(12)
        sealed = MAGIC + bytes(8 * [content]) + draw.randbytes(40)

        yield {
            "number": number,
            "service": draw.choice(["shop", "shop", None]),
            "side": draw.choice(["outgoing", "outgoing", "outgoing", "incoming"]),
            "outcome": draw.choice(["sent", "sent", None, "cancelled"]),
            "address": draw.choice(["tcp://a:1", "tcp://b:1"]),
            "message_type": draw.choice(["even", "odd"]),
            "id": UUID(int=key | (UUIDV7 if key % 10 == 0 else 0)).bytes,
            "sent_at": draw.choice([None, *[BEGINNING + draw.randrange(30) * timedelta(days=1)] * 9]),
            "seq": draw.choice([None, draw.randrange(5)]),
            "body": draw.choice([None, sealed, bytes([content]), bytes([content])]),
        }


def _place(each: Sent) -> tuple[datetime, int]:
    return each["sent_at"] or BEGINNING, -1 if each["seq"] is None else each["seq"]


def expected(messages: Sequence[Sent]) -> set[int]:
    """The messages that are no repeats, one after another."""
    began: dict[tuple[Any, ...], Sent] = {}
    kept = set()
    for each in sorted(
        messages, key=lambda one: (one["sent_at"] or BEGINNING, -1 if one["seq"] is None else one["seq"])
    ):
        body = each["body"]
        is_timed = UUID(bytes=each["id"]).version == 7
        is_sent = each["side"] == "outgoing" and each["outcome"] in ("sent", None)
        if is_timed or not is_sent or None in (body, each["sent_at"]):
            kept.add(each["number"])
            continue
        content = body[:16] if body.startswith(MAGIC) else body
        key = (*(each[name] for name in ("service", "address", "message_type", "id")), content)
        first = began.get(key)
        if first is None or each["sent_at"] >= first["sent_at"] + WINDOW:
            first = began[key] = each
        if (first["sent_at"], first["seq"]) == (each["sent_at"], each["seq"]):
            kept.add(each["number"])
    return kept


@pytest.mark.parametrize("seed", range(3))
def test_first_message_of_each_use_is_kept(spark: SparkSession, seed: int) -> None:
    messages = [*sent(Random(seed))]
    rows = spark.createDataFrame([tuple(each.values()) for each in messages], SCHEMA)
    kept = [row["number"] for row in repeats.without(rows, repeats.repeats(rows, WINDOW)).collect()]
    assert len(kept) < len(messages) - 100
    assert sorted(kept) == sorted(expected(messages))


@message("repeated.invoice")
class Invoice(msgspec.Struct):
    number: int


@pytest.mark.parametrize(
    ("ids", "handled_again"), [((), [0, 1, 2, 17]), (("--same-ids",), [0, 17])], ids=["new ids", "same ids"]
)
async def test_message_sent_twice_under_its_key_is_replayed_once(
    spark: SparkSession,
    make_database: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ids: Sequence[str],
    handled_again: list[int],
) -> None:
    """Its receiver has recognised the second one. Then it loses a message of each kind. The repeat comes last: the same
    replay again ends before it.
    """
    ours, theirs, peer = make_database("shop"), make_database("billing"), f"unix://{tmp_path}/billing.sock"
    handled: list[int] = []
    billing = Bus("billing", database=theirs)
    billing.listen(peer)
    shop = Bus("shop", database=ours, history_bodies=True)
    shop.route(Invoice, to=peer)

    @billing.handles(Invoice)
    async def bill(invoice: Invoice) -> None:
        handled.append(invoice.number)

    async def settle() -> None:
        async with billing, shop:
            await eventually(lambda: not Outbox(ours).rows(WAITING) and not Outbox(theirs).rows(WAITING))

    async with shop.unit_of_work():
        shop.send(Invoice(17), id_from="17")
    for number in range(3):
        async with shop.unit_of_work():
            shop.send(Invoice(number))
    await settle()
    async with shop.unit_of_work():
        shop.send(Invoice(17), id_from="17")
    await settle()
    assert sorted(handled) == [0, 1, 2, 17]
    handled.clear()
    for lost in ("received_ids ORDER BY id", "undated_ids"):
        Outbox(theirs).rows(f"DELETE FROM durable.{lost.split()[0]} WHERE id = (SELECT id FROM durable.{lost} LIMIT 1)")

    lake = Lake(str(tmp_path / "lake"))
    archive(lambda: spark, lake, "history", Origin(url=ours, schema="durable", service="shop"))
    agent = Agent(tmp_path, monkeypatch, capsys)
    told = []
    for _ in range(2):
        ended = agent(
            *("pipeline", "replay", "--json", "--lake", lake.url, "--database", ours, "--name", "again"),
            *("--all", "--side", "outgoing", *ids),
        )
        assert ended.code == 0, ended.err
        told.append({name: json.loads(ended.out)[name] for name in ("messages", "added", "repeats")})
        await settle()
    assert told == [{"messages": 4, "added": added, "repeats": left} for added, left in ((4, 1), (0, 0))]
    assert sorted(handled) == handled_again


WAITING: Final = "SELECT 1 FROM durable.incoming_envelopes UNION ALL SELECT 1 FROM durable.outgoing_envelopes"


def test_repeats_are_those_of_the_files_as_they_are_now(
    spark: SparkSession,
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two replays of one session, and between them another file in the same place."""
    agent, place = Agent(tmp_path, monkeypatch, capsys), tmp_path / "messages"
    place.mkdir()
    columns = f"{SCHEMA}, source string"

    def add(*sendings: tuple[int, int]) -> None:
        """Add a file with sendings of these ids, so many hours after the first. Spark does not know that it came."""
        rows = [
            (
                0, "shop", "outgoing", "sent", "local", "again.sent", UUID(int=number).bytes,
                BEGINNING + timedelta(hours=hours), hours, b"{}", "shop",
            )
            for number, hours in sendings
        ]  # fmt: skip
        pq.write_table(spark.createDataFrame(rows, columns).toArrow(), place / f"{uuid4()}.parquet")

    def replayed(name: str) -> tuple[int, int]:
        options = ("--name", name, "--parquet", str(place), "--all", "--database", database_url)
        ended = agent("pipeline", "replay", "--json", *options)
        assert ended.code == 0, ended.err
        counts = json.loads(ended.out)
        return counts["messages"], counts["repeats"]

    add((1, 0), (2, 0))
    assert replayed("a") == (2, 0)
    add((2, 1))
    assert replayed("b") == (2, 1)


@pytest.mark.parametrize("kind", ["int", "boolean", "date", "array<int>"])
def test_outcome_of_another_type_tells_nothing(spark: SparkSession, kind: str) -> None:
    messages = [*sent(Random(0))]
    rows = spark.createDataFrame([tuple(each.values()) for each in messages], SCHEMA).selectExpr(
        "* EXCEPT (outcome)", f"CAST(NULL AS {kind}) AS outcome"
    )
    counted = repeats.repeats(rows, WINDOW).count()
    assert counted == repeats.repeats(rows.drop("outcome"), WINDOW).count() > 0
