"""Encrypted bodies through the pipeline: kept as they are in the lake, opened only where a replay has to."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from durable import Bus, Keys, Retry, message
from durable.encryption.ring import KeyRing
from durable.errors import Forged, InvalidMessage, InvalidSetting, MissingKey
from durable.messages.sealed import KEY_ID_AT, MAGIC, is_sealed, parted
from durable.pipeline import publish
from durable.pipeline.archive import archive
from durable.pipeline.lake import Lake
from durable.pipeline.origin import Origin
from durable.pipeline.sealing import OLD_ID, Sealing, _envelope, _faults
from durable.pipeline.source import register
from durable.settings import load_settings
from durable.testing import eventually
from tests.support import canary
from tests.support.canary import CANARY
from tests.support.command import Agent
from tests.support.publishing import Outbox
from tests.support.sealed_looks import looking_sealed

pytestmark = pytest.mark.timeout(600)  # to be cut off amid a call leaves the session of all tests unusable
A, B = (bytes([number]) * 32 for number in (1, 2))
BROKEN_OFF = [MAGIC, MAGIC + b"\xff" * 60, MAGIC.ljust(KEY_ID_AT, b"\0") + b"\x03\xff\xfe\xfd" + b"rest" * 10]


@message("sealed.placed", encrypted=True)
class Placed(msgspec.Struct):
    number: int
    card: str = CANARY


def give(monkeypatch: pytest.MonkeyPatch, **keys: bytes) -> None:
    encoded = {name: base64.b64encode(key).decode() for name, key in keys.items()}
    monkeypatch.setenv("DURABLE_ENCRYPTION_KEYS", json.dumps(encoded))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    monkeypatch.setenv("DURABLE_LAKE", str(tmp_path / "lake"))
    return Agent(tmp_path, monkeypatch, capsys)


class Shop:
    """A bus that handles what is replayed into its inbox."""

    def __init__(self, url: str, **keys: bytes) -> None:
        self.seen: list[Placed] = []
        self.bus = Bus("shop", database=url, history_bodies=True)
        self.bus.keys_from(lambda: Keys(keys))

        @self.bus.handles(Placed)
        async def place(placed: Placed) -> None:
            self.seen.append(placed)

    async def handle(self, count: int) -> None:
        async with self.bus:
            await eventually(lambda: len(self.seen) == count, within=60)

    async def send(self, *numbers: int) -> None:
        async with self.bus.unit_of_work():
            for number in numbers:
                self.bus.send(Placed(number), tenant=f"tenant-{number % 2}")


async def test_lake_keeps_bodies_encrypted_and_replays_them(
    spark: SparkSession, agent: Agent, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(database_url, a=A)
    await shop.send(*range(6))
    await shop.handle(6)
    lake = Lake(str(tmp_path / "lake"))
    archive(lambda: spark, lake, "history", Origin(url=database_url, schema="durable", service="shop"))
    files = b"".join(path.read_bytes() for path in (tmp_path / "lake").rglob("*") if path.is_file())
    assert files
    assert canary.in_text(files) == []

    def again(*arguments: str) -> Any:
        return agent("pipeline", "replay", "--json", "--database", database_url, "--type", "sealed.placed", *arguments)

    report = agent("pipeline", "report", "--json", "--out", str(tmp_path / "page.html"))
    assert report.code == 0, report.err
    assert canary.in_text((tmp_path / "page.html").read_text()) == []

    refused = again("--name", "first")
    assert (refused.code, "no key a, which 6 of these messages need; give" in refused.err) == (2, True), refused.err
    give(monkeypatch, b=B)
    refused = again("--name", "first")
    assert (refused.code, "encryption_keys: no key a, which 6 of these messages need; give" in refused.err) == (2, True)
    assert Outbox(database_url).rows("SELECT 1 FROM durable.incoming_envelopes") == []

    give(monkeypatch, a=A)
    ended = again("--name", "first")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["added"] == 6
    bodies = [bytes(body) for (body,) in Outbox(database_url).rows("SELECT body FROM durable.incoming_envelopes")]
    assert len(bodies) == 6
    assert all(map(is_sealed, bodies))
    await shop.handle(12)
    assert sorted(each.number for each in shop.seen) == sorted([*range(6)] * 2)
    assert {each.card for each in shop.seen} == {CANARY}

    give(monkeypatch, b=B, a=A)  # the key was rotated: the same replay is still the same
    ended = again("--name", "first")
    assert (ended.code, json.loads(ended.out)["added"]) == (0, 0), ended.err
    assert json.loads(again("--name", "second").out)["added"] == 6
    await shop.handle(18)

    monkeypatch.delenv("DURABLE_ENCRYPTION_KEYS")
    ended = again("--name", "the same", "--same-ids")
    assert ended.code == 0, ended.err  # the bodies are as they were: no key is needed
    assert json.loads(ended.out)["messages"] == 6
    ended = again("--name", "the same, into the inbox", "--same-ids", "--destination", "local")
    assert (ended.code, json.loads(ended.out)["added"]) == (0, 0), ended.err
    assert Outbox(database_url).rows("SELECT 1 FROM durable.dead_letters") == []


def test_rotated_letters_are_archived_again_and_verified(
    spark: SparkSession, agent: Agent, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = Bus("shop", database=database_url, history_bodies=True)
    bus.keys_from(lambda: Keys({"a": A}))

    @bus.handles(Placed, retry=Retry.never())
    async def place(placed: Placed) -> None:
        raise LookupError("no such order")

    outbox = Outbox(database_url)

    async def fail() -> None:
        async with bus:
            async with bus.unit_of_work():
                for number in range(3):
                    bus.send(Placed(number))
            await eventually(lambda: len(outbox.rows("SELECT 1 FROM durable.dead_letters")) == 3, within=60)

    def pipeline(*arguments: str) -> Any:
        ended = agent("pipeline", *arguments, "--json", "--service", "shop", "--database", database_url)
        assert ended.code == 0, ended.err or ended.out
        return json.loads(ended.out)

    asyncio.run(fail())
    pipeline("archive")
    give(monkeypatch, b=B, a=A)
    rotated = agent("keys", "rotate", "--json", "--database", database_url)
    assert [each["done"] for each in json.loads(rotated.out)["places"]] == [0, 0, 3]
    pipeline("archive")
    pipeline("verify")


async def test_published_bodies_are_encrypted(
    spark: SparkSession, database_url: str, make_database: Callable[[str], str]
) -> None:
    settings = load_settings(database_url=database_url, encryption_keys={"a": base64.b64encode(A).decode()})
    rows = spark.range(0, 40, 1, 2).selectExpr("id AS number", f"'{CANARY}' AS card")
    messages = publish.envelopes(
        rows, key="number", message_type="sealed.placed", source="shop", destination="local", partition_key="number"
    )
    published = publish.publish(messages, settings)
    assert published is not None
    assert (published.rows, published.added) == (40, 40)
    outbox = Outbox(database_url)
    bodies = [bytes(body) for (body,) in outbox.rows("SELECT body FROM durable.incoming_envelopes")]
    assert all(parts is not None and parts.key_id == "a" for parts in map(parted, bodies))
    shop = Shop(database_url, a=A)
    await shop.handle(40)
    assert sorted(each.number for each in shop.seen) == list(range(40))
    assert {each.card for each in shop.seen} == {CANARY}

    assert publish.publish(messages, settings) is None  # the same rows are the same batch
    changed = rows.selectExpr("number", "card || '!' AS card")
    corrected = publish.envelopes(
        changed, key="number", message_type="sealed.placed", source="shop", destination="local", partition_key="number"
    )
    with pytest.raises(InvalidMessage, match="were published before, under the same ids, and differ in body"):
        publish.publish(corrected, settings)


def test_all_bodies_are_encrypted_when_the_setting_says_so(spark: SparkSession, database_url: str) -> None:
    rows = spark.range(0, 4, 1, 1).selectExpr("id AS number")
    messages = publish.envelopes(
        rows, key="number", message_type="unknown.type", source="shop", destination="tcp://127.0.0.1:1"
    )
    settings: dict[str, Any] = {"database_url": database_url, "encrypt_all": True}
    with pytest.raises(InvalidSetting, match="no key is given, and encrypt_all is on"):
        publish.publish(messages, load_settings(**settings))
    publish.publish(messages, load_settings(**settings, encryption_keys={"a": base64.b64encode(A).decode()}))
    bodies = [bytes(body) for (body,) in Outbox(database_url).rows("SELECT body FROM durable.outgoing_envelopes")]
    assert len(bodies) == 4
    assert all(map(is_sealed, bodies))


def test_written_bodies_are_encrypted_with_a_file_of_keys(
    spark: SparkSession, database_url: str, tmp_path: Path
) -> None:
    """As by `df.write.format("durable")`, which knows no settings of this process."""
    register(spark)
    document = {"keys": {"a": base64.b64encode(A).decode()}}
    (tmp_path / "keys.json").write_text(json.dumps(document))
    rows = spark.range(0, 4, 1, 1).selectExpr("id AS number")
    messages = publish.envelopes(
        rows, key="number", message_type="unknown.type", source="shop", destination="tcp://127.0.0.1:1"
    )
    options = {"url": database_url, "encryption_key_file": str(tmp_path / "keys.json"), "encrypt_all": "true"}
    messages.write.format("durable").mode("append").options(**options).save()
    bodies = [bytes(body) for (body,) in Outbox(database_url).rows("SELECT body FROM durable.outgoing_envelopes")]
    assert len(bodies) == 4
    assert all(map(is_sealed, bodies))


FAULTS = {
    "no key is given": "no key a, which 2 of these messages need, and no key b, which 2 of these messages need",
    "a key is missing": "no key b, which 2 of these messages need",
    "bodies only look encrypted": "3 bodies that no key opens, such as: body of ",
    "a key has other bytes": "2 bodies that no key opens, such as: the encrypted body of ",
}

GIVEN: dict[str, dict[str, bytes]] = {
    "no key is given": {},
    "a key is missing": {"a": A},
    "bodies only look encrypted": {"a": A, "b": B},
    "a key has other bytes": {"a": A, "b": A},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dry_run", [True, False], ids=["dry-run", "run"])
async def test_replay_tells_unopened_bodies_and_leaves_them_out_on_request(
    spark: SparkSession,
    agent: Agent,
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    dry_run: bool,
) -> None:
    sent = Shop(database_url)
    sent.bus.keys_from(lambda: Keys({"a": A, "b": B}, tenants={"tenant-1": "b"}))
    await sent.send(*range(4))
    await sent.handle(4)
    if fault == "bodies only look encrypted":
        with psycopg.connect(database_url, autocommit=True) as conn:
            ids = conn.execute("SELECT id FROM durable.envelope_history ORDER BY id").fetchall()
            for (each,), body in zip(ids, BROKEN_OFF, strict=False):
                conn.execute("UPDATE durable.envelope_history SET body = %s WHERE id = %s", (body, each))
    origin = Origin(url=database_url, schema="durable", service="shop")
    archive(lambda: spark, Lake(str(tmp_path / "lake")), "history", origin)
    if GIVEN[fault]:
        give(monkeypatch, **GIVEN[fault])

    def again(*arguments: str) -> Any:
        asked = ("--json", "--database", database_url, "--type", "sealed.placed", "--name", "again", *arguments)
        return agent("pipeline", "replay", *asked, *(["--dry-run"] if dry_run else []))

    refused = again("--chunk", "1")
    assert (refused.code, f"encryption_keys: {FAULTS[fault]}" in refused.err) == (2, True), refused.err
    assert "leave them out with --leave-unopened" in refused.err
    assert Outbox(database_url).rows("SELECT 1 FROM durable.incoming_envelopes") == []
    left = {"no key is given": 4, "bodies only look encrypted": 3}.get(fault, 2)
    opened = 4 - left
    ended = again("--leave-unopened")
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert (told["messages"], told["unopened"], told["added"]) == (opened, left, 0 if dry_run else opened)


@pytest.mark.parametrize("options", [(), ("--same-ids", "--destination", "tcp://127.0.0.1:9")], ids=["new", "same"])
@pytest.mark.parametrize("sound", [*product((False, True), repeat=3)], ids=str)
def test_sound_message_is_no_repeat_of_an_unopened_one(
    spark: SparkSession,
    agent: Agent,
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sound: tuple[bool, ...],
    options: tuple[str, ...],
) -> None:
    """Three sendings under one key, and a message of its own that opens."""
    give(monkeypatch, a=A)
    ring, now = KeyRing(lambda: Keys({"a": A})), datetime.now(UTC).replace(microsecond=0)
    address, rows = "tcp://127.0.0.1:2301", list[dict[str, Any]]()
    for number, (id_, opens) in enumerate([*((1, each) for each in sound), (2, True)]):
        row = {"id": UUID(int=id_).bytes, "message_type": "sealed.placed", "destination": address, "headers": "{}"}
        body = ring.seal(_envelope(row, b"{}"), b"{}", address)
        rows.append(row | {"body": body if opens else body[:-5], "sent_at": now + timedelta(minutes=number - 60)})
    place = tmp_path / "messages.parquet"
    pq.write_table(pa.Table.from_pylist([row | {"source": "shop"} for row in rows]), place)
    asked = ("pipeline", "replay", "--json", "--parquet", str(place), "--database", database_url, "--name", "x")
    ended = agent(*asked, "--all", "--leave-unopened", *options)
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    of_key = 1 if any(sound) else 0
    counts = (told["messages"], told["added"], told["repeats"], told["unopened"])
    assert counts == (1 + of_key, 1 + of_key, sum(sound) - of_key, 3 - sum(sound))


@settings(deadline=None)
@example(bodies=BROKEN_OFF)
@given(bodies=st.lists(looking_sealed(), min_size=1, max_size=20))
def test_unopened_body_is_told_by_its_key_or_as_forged(bodies: list[bytes]) -> None:
    about = {"id": bytes(16), "message_type": "sealed.placed", "destination": "local", "headers": "{}"}
    rows = [about | {"body": body, OLD_ID: bytes(16)} for body in bodies]
    found = list(_faults([pa.RecordBatch.from_pylist(rows)], Sealing(Keys({"a": A})).ring))
    for body, fault in zip(bodies, found, strict=True):
        parts = parted(body)
        if not is_sealed(body):
            assert fault is None
        elif parts is None or parts.key_id == "a":
            assert isinstance(fault, Forged)
        else:
            assert isinstance(fault, MissingKey)
            assert fault.key_id == parts.key_id
