"""A message whose key is missing waits, visibly, and is handled when the key appears; nothing else waits for it."""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from durable import Bus, Context, Keys, PutBack, Retry, message
from durable.recovery import agent
from durable.recovery.agent import RecoveryAgent
from durable.storage import parked as storage
from durable.storage.sql.parked import PARKED_OWNER
from durable.telemetry import Event
from durable.testing import InMemoryBus, eventually
from tests.failure.workbench import QUICK
from tests.support.command import Agent
from tests.support.tables import Tables

A, B = (bytes([number]) * 32 for number in (1, 2))


@message("missing.paid", encrypted=True)
class Paid(msgspec.Struct):
    number: int


@message("missing.noted")
class Noted(msgspec.Struct):
    number: int


@message("missing.moved", encrypted=True)
class Moved(msgspec.Struct):
    number: int


class Shop:
    """A bus that handles both, with keys that can be changed while it runs."""

    def __init__(self, url: str | None, keys: Keys, **settings: Any) -> None:
        self.keys = keys
        self.seen: list[int] = []
        self.bus = Bus("shop", url, **dict[str, Any]({**QUICK, "encryption_reload": timedelta(hours=1), **settings}))
        if "encryption_key_file" not in settings:
            self.bus.keys_from(lambda: self.keys)
        for cls in (Paid, Noted):
            self.bus.handles(cls, retry=Retry(immediate=0, delays=[]), concurrency=1)(self._handler(cls))

    def _handler(self, cls: type) -> Callable[..., Any]:
        async def handle(arrived: Any) -> None:
            self.seen.append(arrived.number)

        handle.__annotations__["arrived"] = cls
        return handle

    async def send(self, *messages: Any, **options: Any) -> None:
        async with self.bus.unit_of_work():
            for each in messages:
                self.bus.send(each, **options)


def parked(tables: Tables) -> int:
    return int(tables.one(f"SELECT count(*) FROM durable.incoming_envelopes WHERE owner_id = {PARKED_OWNER}"))


async def put(tables: Tables, *messages: Any, **options: Any) -> None:
    """Messages under key `b`, which wait in the inbox."""
    shop = Shop(tables.url, Keys({"b": B}))
    await shop.send(*messages, **options)
    await shop.bus.runtime.sessions.close()


async def test_message_is_parked_and_handled_when_its_key_appears(
    tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "durable")
    await put(tables, *map(Paid, range(50)))
    shop = Shop(tables.url, Keys({"a": A}))
    async with shop.bus:
        await eventually(lambda: parked(tables) == 50)
        await shop.send(Paid(100), Noted(101))
        await eventually(lambda: sorted(shop.seen) == [100, 101])
        assert shop.bus.runtime.counters[Event.PARKED] == 50
        assert shop.bus.runtime.counters[Event.ATTEMPT_FAILED] == 0
        shop.keys = Keys({"a": A, "b": B})
        await eventually(lambda: len(shop.seen) == 52, within=40, what="handling of what was parked")
        await eventually(lambda: tables.count("incoming_envelopes") == 0)
    assert sorted(shop.seen) == [*range(50), 100, 101]
    assert tables.count("dead_letters") == 0
    lines = [record.getMessage() for record in caplog.records if "is missing" in record.getMessage()]
    assert len(lines) == 1  # and not one for each message
    assert lines[0].startswith("encryption key b is missing: ")


async def test_message_put_back_for_another_tenant_waits_for_its_key(
    tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    """Its key has gone while it was handled."""
    shop, tenants = Shop(tables.url, Keys({"a": A})), list[str | None]()

    @shop.bus.handles(Moved, retry=Retry(immediate=0, delays=[]))
    async def handle(moved: Moved, context: Context) -> None:
        tenants.append(context.headers.get("tenant"))
        if tenants == ["red"]:
            shop.keys = Keys({"b": B})
            shop.bus.application.ring.refresh()
            raise PutBack(headers={"tenant": "blue"})

    await shop.send(Moved(1), tenant="red")
    async with shop.bus:
        await eventually(lambda: parked(tables) == 1)
        shop.keys = Keys({"a": A, "b": B})
        shop.bus.application.ring.refresh()
        await eventually(lambda: len(tenants) == 2, within=40)
        await eventually(lambda: tables.count("incoming_envelopes") == 0)
    assert (tenants, tables.count("dead_letters")) == (["red", "red"], 0)
    assert "internal error" not in caplog.text


async def test_release_of_many_parked_messages_is_done_in_bounded_steps(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that takes too long is taken for a standstill."""
    steps, look, release = list[int](), RecoveryAgent._release_parked, storage.release

    async def stepped(self: RecoveryAgent) -> None:
        steps.append(0)
        await look(self)

    def released(*given: Any) -> int:
        steps[-1] += 1
        return release(*given)

    monkeypatch.setattr(agent, "LONGEST_STEP", 0.0)
    monkeypatch.setattr(agent, "_BETWEEN_LOOKS", timedelta(seconds=0.1))
    monkeypatch.setattr(RecoveryAgent, "_release_parked", stepped)
    monkeypatch.setattr(storage, "release", released)
    await put(tables, *map(Paid, range(50)))
    shop = Shop(tables.url, Keys({"a": A}), recovery_batch_size=10)
    async with shop.bus:
        await eventually(lambda: parked(tables) == 50)
        shop.keys = Keys({"a": A, "b": B})
        await eventually(lambda: len(shop.seen) == 50, within=40)
    assert max(steps) == 1


async def test_replaced_file_releases_messages(tables: Tables, tmp_path: Path) -> None:
    def write(**keys: bytes) -> None:
        text = json.dumps({"keys": {name: base64.b64encode(key).decode() for name, key in keys.items()}})
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", tmp_path / "keys.json")

    await put(tables, Paid(1))
    write(a=A)
    shop = Shop(tables.url, Keys(), encryption_key_file=tmp_path / "keys.json")
    async with shop.bus:
        await eventually(lambda: parked(tables) == 1)
        write(a=A, b=B)
        shop.bus.application.ring.missing(tables.one("SELECT body FROM durable.incoming_envelopes"))
        await eventually(lambda: shop.seen == [1], within=40)


async def test_key_order_holds_behind_a_parked_message(tables: Tables) -> None:
    await put(tables, Paid(1), key="order-1")
    shop = Shop(tables.url, Keys({"a": A}))
    async with shop.bus:
        await eventually(lambda: parked(tables) == 1)
        await shop.send(Paid(2), Noted(3), key="order-1")
        await shop.send(Paid(10), key="order-2")
        await shop.send(Noted(11))
        await eventually(lambda: sorted(shop.seen) == [10, 11])
        shop.keys = Keys({"a": A, "b": B})
        shop.bus.application.ring.refresh()
        await eventually(lambda: len(shop.seen) == 5, within=40)
    assert [number for number in shop.seen if number < 10] == [1, 2, 3]


async def test_parked_message_goes_to_the_node_with_its_key(tables: Tables) -> None:
    await put(tables, *map(Paid, range(5)))
    without, has = Shop(tables.url, Keys({"a": A})), Shop(tables.url, Keys({"a": A, "b": B}))
    async with without.bus:
        await eventually(lambda: parked(tables) == 5)
        async with has.bus:
            await eventually(lambda: len(has.seen) == 5, within=60)
    assert without.seen == []
    assert tables.count("dead_letters") == 0


async def test_parked_message_expires(tables: Tables) -> None:
    await put(tables, Paid(1), deliver_by=timedelta(minutes=5))
    shop = Shop(tables.url, Keys({"a": A}))
    async with shop.bus:
        await eventually(lambda: parked(tables) == 1)
        await tables.pass_time(timedelta(minutes=6))
        await eventually(lambda: tables.count("incoming_envelopes") == 0)
    assert tables.rows("SELECT outcome FROM durable.envelope_history") == ["expired"]


async def test_suspect_is_parked_uncounted(tables: Tables) -> None:
    """A message whose nodes died may not come to its end by waiting for a key."""
    await put(tables, Paid(1))
    await tables.change("UPDATE durable.incoming_envelopes SET interruptions = 5")
    shop = Shop(tables.url, Keys({"a": A}))
    async with shop.bus:
        for _ in range(3):
            await eventually(lambda: parked(tables) == 1)
            assert tables.one("SELECT attempts FROM durable.incoming_envelopes") == 0
            await tables.change("UPDATE durable.incoming_envelopes SET owner_id = 0")
        shop.keys = Keys({"a": A, "b": B})
        shop.bus.application.ring.refresh()
        await eventually(lambda: shop.seen == [1], within=40)


async def test_status_tells_of_parked_messages(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await put(tables, *map(Paid, range(3)))
    shop = Shop(tables.url, Keys({"a": A}), health_unattended=timedelta(milliseconds=10))
    async with shop.bus:
        await eventually(lambda: parked(tables) == 3)
        problems = [each for each in (await shop.bus.runtime.monitor.read()).problems if "key" in each]
        assert len(problems) == 1
        assert problems[0].startswith("3 messages wait for encryption key b, the oldest for ")
    monkeypatch.setenv("DURABLE_DATABASE_URL", tables.url)
    agent = Agent(tmp_path, monkeypatch, capsys)
    report = json.loads(agent("status", "--json").out)
    assert [(each["key"], each["waiting"]) for each in report["parked"]] == [("b", 3)]
    assert report["nodes"] == {"alive": 0, "stale": 0, "dead": 0}  # to be parked is to be owned by no node
    assert "messages that wait for an encryption key" in agent("status").out
    assert json.loads(agent("nodes", "--json").out) == []


async def test_start_is_not_refused_for_closed_bodies(tables: Tables) -> None:
    await put(tables, Paid(1), Paid(2))
    await tables.change(
        "UPDATE durable.incoming_envelopes SET body = substring(body FROM 1 FOR octet_length(body) - 1) || '\\x00'"
        " WHERE seq = (SELECT max(seq) FROM durable.incoming_envelopes)"
    )
    shop = Shop(tables.url, Keys({"a": A}))
    async with shop.bus:
        await eventually(lambda: parked(tables) == 2)


# ---------------------------------------------------------------- in memory


async def test_bus_in_memory_parks_and_releases() -> None:
    shop = Shop(None, Keys({"a": A}))
    sender = Shop(None, Keys({"b": B}))
    async with InMemoryBus(shop.bus) as here, InMemoryBus(sender.bus) as there:
        there.connect("tcp://shop:1", here)
        async with sender.bus.unit_of_work():
            for number in (1, 2):
                sender.bus.send(Paid(number), to="tcp://shop:1", key="order-1")
        async with shop.bus.unit_of_work():
            shop.bus.send(Noted(10))
        await there.drain()
        assert shop.seen == [10]
        assert here.dead_letters == []
        shop.keys = Keys({"a": A, "b": B})
        shop.bus.application.ring.refresh()
        await there.drain()
        assert shop.seen == [10, 1, 2]


async def test_bus_in_memory_shows_messages_readable() -> None:
    shop = Shop(None, Keys({"a": A}))
    async with InMemoryBus(shop.bus) as here:
        async with shop.bus.unit_of_work():
            shop.bus.send(Paid(1))
        assert here.sent(Paid) == [Paid(1)]
        [envelope] = here.envelopes(Paid)
        assert b"number" not in envelope.body
        await here.drain()
        assert [each.message for each in here.handled] == [Paid(1)]
