"""Receipts on Postgres: other nodes, replays, the number of statements, a database that is away."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import event, make_url

from durable import Bus, Reject, Retry, StillWaiting, StorageUnavailable, UnknownMessage, message
from durable.envelope import new_id
from durable.storage import dead_letters
from durable.testing import eventually
from tests.support.proxy import ChaosProxy
from tests.support.servers import address_of
from tests.support.tables import Tables

SOON = 20
WHOLE = dead_letters.LetterRange(0, 2**62, 100)


@message("receipts.counted")
class Counted(msgspec.Struct):
    number: int


def bus_on(url: str, **settings: Any) -> Bus:
    return Bus("counting", url, poll_interval=timedelta(milliseconds=30), **settings)


async def send(bus: Bus, number: int = 1, **options: Any) -> UUID:
    async with bus.unit_of_work() as uow:
        return uow.send(Counted(number), **options)


async def paused(bus: Bus) -> None:
    """Pause the handler, and return when this node obeys."""
    await bus.pause(Counted)
    await eventually(lambda: bus.statistics().handling["receipts.counted"].paused, what="the pause")


class Watched:
    """The statements about history that this bus has executed."""

    def __init__(self, bus: Bus) -> None:
        self.seen: Counter[bool] = Counter()
        event.listen(bus.runtime.database.engine.sync_engine, "before_cursor_execute", self._executed)

    def _executed(self, _conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        self.seen['FROM "durable".envelope_history' in statement] += 1

    @property
    def looks(self) -> int:
        return self.seen[True]


async def test_receipt_is_given_by_another_node_after_a_restart(tables: Tables) -> None:
    first = bus_on(tables.url)
    first.handles(Counted)(_nothing)
    async with first:
        await paused(first)
        sent = await send(first)
    second = bus_on(tables.url)
    second.handles(Counted)(_nothing)
    async with second:
        with pytest.raises(StillWaiting):
            await second.wait_for(sent, timeout=0.05)
        await second.resume(Counted)
        assert (await second.wait_for(sent, timeout=SOON)).outcome == "handled"
    third = bus_on(tables.url, mode="send-only")
    async with third:
        assert (await third.wait_for(sent, timeout=SOON)).outcome == "handled"


async def test_receipt_of_a_replayed_letter_tells_its_last_life(tables: Tables) -> None:
    bus, is_broken = bus_on(tables.url), [True]

    @bus.handles(Counted, retry=Retry(immediate=0, delays=[]))
    async def count(counted: Counted) -> None:
        if is_broken:
            raise Reject("broken")

    async with bus:
        sent = await send(bus)
        assert (await bus.wait_for(sent, timeout=SOON)).outcome == "dead-lettered"
        await paused(bus)
        everything = dead_letters.Selection()
        await bus.runtime.database.transaction(dead_letters.replay, everything, WHOLE, actor="ada")
        with pytest.raises(StillWaiting):
            await bus.wait_for(sent, timeout=0.1)
        is_broken.clear()
        await bus.resume(Counted)
        assert (await bus.wait_for(sent, timeout=SOON)).outcome == "handled"


async def test_callers_share_their_looks_however_many_wait(tables: Tables) -> None:
    bus = bus_on(tables.url)
    bus.handles(Counted)(_nothing)
    async with bus:
        await paused(bus)
        sent = [await send(bus, number) for number in range(20)]
        callers = [asyncio.create_task(bus.wait_for(each, timeout=SOON)) for each in sent for _ in range(10)]
        watched = Watched(bus)
        began = time.monotonic()
        await eventually(lambda: watched.looks > 0)
        await asyncio.sleep(0.3)
        at_most = (time.monotonic() - began) / 0.02 * 2  # a first look and one of those that follow, in each tick
        assert watched.looks <= min(at_most, len(callers) - 1)
        await bus.resume(Counted)
        assert {receipt.outcome for receipt in await asyncio.gather(*callers)} == {"handled"}
        await eventually(lambda: not bus.runtime.watch._watched)
        await asyncio.sleep(0.1)
        before = watched.looks
        await asyncio.sleep(0.3)
        assert watched.looks == before  # none is taken while nobody waits


async def test_later_looks_read_only_history_written_since_the_first(tables: Tables) -> None:
    """Old rows of the same id are found by the first look alone."""
    bus = bus_on(tables.url)
    bus.handles(Counted)(_nothing)
    seen: list[int] = []
    async with bus:
        await paused(bus)
        sent = await send(bus)

        def executed(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            if "envelope_history" in statement and "SELECT id, side" in statement:
                seen.append(next(each for each in parameters if isinstance(each, int)))

        event.listen(bus.runtime.database.engine.sync_engine, "before_cursor_execute", executed)
        with pytest.raises(StillWaiting):
            await bus.wait_for(sent, timeout=0.3)
    assert seen[0] == 0
    assert len(seen) > 1
    assert all(since > 0 for since in seen[1:])


async def test_message_is_unknown_when_its_history_is_gone(tables: Tables) -> None:
    bus = bus_on(tables.url)
    bus.handles(Counted)(_nothing)
    async with bus:
        sent = await send(bus)
        await bus.wait_for(sent, timeout=SOON)
        await tables.change("DELETE FROM durable.envelope_history")
        with pytest.raises(UnknownMessage):
            await bus.wait_for(sent, timeout=SOON)


async def test_message_is_unknown_when_deleted_under_its_callers(tables: Tables) -> None:
    bus = bus_on(tables.url)
    bus.handles(Counted)(_nothing)
    async with bus:
        await paused(bus)
        sent = await send(bus)
        caller = asyncio.create_task(bus.wait_for(sent, timeout=SOON))
        await asyncio.sleep(0.1)
        await tables.change("DELETE FROM durable.incoming_envelopes")
        with pytest.raises(UnknownMessage):
            await caller


async def test_caller_waits_through_an_outage_and_learns_of_a_longer_one(tables: Tables) -> None:
    async with ChaosProxy(address_of(tables.url)) as proxy:
        port = int(proxy.uri.rpartition(":")[2])
        behind = make_url(tables.url).set(drivername="postgresql+asyncpg", host="127.0.0.1", port=port, query={})
        bus = bus_on(behind.render_as_string(hide_password=False), mode="send-only")
        bus.handles(Counted)(_nothing)
        async with bus:
            sent = await send(bus)
            caller = asyncio.create_task(bus.wait_for(sent, timeout=60))
            await asyncio.sleep(0.1)
            proxy.refuse()
            with pytest.raises(StorageUnavailable, match=str(sent)):
                await bus.wait_for(sent, timeout=3)
            assert not caller.done()
            proxy.restore()
            handling = bus_on(tables.url)
            handling.handles(Counted)(_nothing)
            async with handling:
                assert (await caller).outcome == "handled"


async def test_callers_are_told_to_ask_again_when_the_bus_stops(tables: Tables) -> None:
    bus = bus_on(tables.url)
    bus.handles(Counted)(_nothing)
    async with bus:
        waited = await send(bus, delay=3_600)
        watch = bus.runtime.watch
        asking = [asyncio.create_task(bus.wait_for(waited, timeout=3_600)) for _ in range(5)]
        await eventually(lambda: sum(len(each.callers) for each in watch._watched.values()) == 5)
    told = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(each) for each in told} == {StillWaiting}
    assert len({id(each) for each in told}) == 5
    assert "was stopped" in str(told[0])
    with pytest.raises(StillWaiting, match="was stopped"):
        await watch.wait(waited, timedelta(seconds=5))


async def test_unknown_id_leaves_other_callers_of_the_look_waiting(tables: Tables) -> None:
    bus = bus_on(tables.url)
    bus.handles(Counted)(_nothing)
    async with bus:
        await paused(bus)
        sent = await send(bus)
        waits, unknown = (asyncio.create_task(bus.wait_for(each, timeout=SOON)) for each in (sent, new_id()))
        with pytest.raises(UnknownMessage):
            await unknown
        await bus.resume(Counted)
        assert (await waits).outcome == "handled"


async def _nothing(counted: Counted) -> None: ...
