"""Two versions of a message while a deploy is under way: old senders, old and new nodes, and one handler for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import chain
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from durable import Bus, CircuitBreaker, Context, PauseListener, Retry, message, upcaster
from durable.embedded.ports import free_port
from durable.messages.codecs.msgpack import MSGPACK
from durable.testing import InMemoryBus
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK
from tests.support.tables import Tables
from tests.support.waiting_messages import put

OLD, NEW = "versions.placed", "versions.placed.v2"


@message("versions.placed")
class PlacedV1(msgspec.Struct):
    number: int
    total: str


@message("versions.placed", version=2, content_type=MSGPACK)
class Placed(BaseModel):
    number: int
    cents: int


@upcaster(PlacedV1, to=Placed)
def to_cents(old: PlacedV1) -> Placed:
    return Placed(number=old.number, cents=int(old.total))


class New:
    """A node whose code handles the new version, and gets the old one upcast."""

    def __init__(self, tables: Tables, **options: Any) -> None:
        self.bus = Bus("shop", tables.url, **QUICK)
        self.handled: list[Placed] = []
        self.types: list[str] = []
        self.inside = self.most_inside = 0

        @self.bus.handles(Placed, **options)
        async def handle(placed: Placed, ctx: Context) -> None:
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
            await asyncio.sleep(0.01)
            self.inside -= 1
            self.handled.append(placed)
            self.types.append(ctx.message_type)

    def numbers(self) -> list[int]:
        return sorted(placed.number for placed in self.handled)


class Old:
    """A node whose code handles the old version, and knows no other."""

    def __init__(self, tables: Tables) -> None:
        self.bus = Bus("shop", tables.url, **QUICK)
        self.handled: list[PlacedV1] = []

        @self.bus.handles(PlacedV1)
        async def handle(placed: PlacedV1) -> None:
            self.handled.append(placed)


async def send(bus: Bus, *sent: object, to: str | None = None) -> None:
    async with bus.unit_of_work() as uow:
        for each in sent:
            uow.send(each, to=to)


async def test_an_old_sender_and_a_new_one_reach_the_same_handler(
    make_database: Callable[[str], str], tables: Tables
) -> None:
    new, address = New(tables), f"tcp://127.0.0.1:{free_port()}"
    new.bus.listen(address)
    sender = Bus("orders", make_database("orders"), **QUICK)
    async with new.bus, sender:
        await send(sender, PlacedV1(1, "100"), Placed(number=2, cents=200), to=address)
        await eventually(lambda: new.numbers() == [1, 2])
    assert sorted(placed.cents for placed in new.handled) == [100, 200]
    assert sorted(new.types) == [OLD, NEW], "a message keeps the type under which it was sent"


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
@pytest.mark.parametrize("sent", [(0, 1), (1, 0), (0, 1, 1, 0)], ids=str)
async def test_versions_under_one_business_key_have_one_effect(
    make_database: Callable[[str], str], tables: Tables, is_remote: bool, sent: Sequence[int]
) -> None:
    new, address = New(tables), f"tcp://127.0.0.1:{free_port()}"
    new.bus.listen(address)
    sender = Bus("orders", make_database("orders"), **QUICK) if is_remote else new.bus
    versions = PlacedV1(17, "100"), Placed(number=17, cents=100)
    async with new.bus, sender if is_remote else nullcontext():
        for which in sent:
            async with sender.unit_of_work() as uow:
                uow.send(versions[which], to=address if is_remote else None, id_from="order-17")
            await eventually(lambda: new.numbers() == [17])
        await send(sender, PlacedV1(18, "100"), to=address if is_remote else None)
        await eventually(lambda: new.numbers() == [17, 18])
    assert new.types[0] == (OLD, NEW)[sent[0]], "the first one counts"
    reasons = set(tables.rows("SELECT reason FROM durable.dead_letters"))
    assert reasons <= ({"another message was received under the same id before"} if is_remote else set())


async def test_old_and_new_nodes_of_one_service_share_the_work_and_nothing_becomes_a_dead_letter(
    tables: Tables,
) -> None:
    old, new = Old(tables), New(tables)
    async with old.bus, new.bus:
        put(tables, NEW, *[msgspec.json.encode({"number": n, "cents": n}) for n in range(10)])
        put(tables, OLD, *[msgspec.json.encode({"number": 100 + n, "total": "1"}) for n in range(50)])
        await send(old.bus, *[PlacedV1(200 + n, "1") for n in range(10)])
        await send(new.bus, *[PlacedV1(300 + n, "1") for n in range(10)])
        await eventually(lambda: tables.count("incoming_envelopes") == 0)
    assert tables.count("dead_letters") == 0
    both = sorted([*new.numbers(), *(placed.number for placed in old.handled)])
    assert both == [*range(10), *range(100, 150), *range(200, 210), *range(300, 310)]
    assert set(range(10)) <= set(new.numbers())


async def test_new_node_announces_the_old_version_as_handled(tables: Tables) -> None:
    async with New(tables).bus:
        assert tables.one("SELECT capabilities->'message_types' FROM durable.nodes") == [NEW, OLD]


async def test_old_versions_left_in_the_inbox_are_handled_by_new_code(tables: Tables) -> None:
    put(tables, OLD, *[msgspec.json.encode({"number": n, "total": "1"}) for n in range(300)])
    new = New(tables, concurrency=50)
    async with new.bus:
        await eventually(lambda: new.numbers() == list(range(300)))


async def test_concurrency_of_the_handler_covers_all_versions(tables: Tables) -> None:
    put(tables, OLD, *[msgspec.json.encode({"number": n, "total": "1"}) for n in range(10)])
    put(tables, NEW, *[msgspec.json.encode({"number": 10 + n, "cents": 1}) for n in range(10)])
    new = New(tables, concurrency=1)
    async with new.bus:
        await eventually(lambda: new.numbers() == list(range(20)))
    assert new.most_inside == 1


async def test_neither_version_takes_all_the_room_of_the_handler(tables: Tables) -> None:
    put(tables, OLD, *[msgspec.json.encode({"number": n, "total": "1"}) for n in range(200)])
    put(tables, NEW, *[msgspec.json.encode({"number": 1_000 + n, "cents": 1}) for n in range(5)])
    new = New(tables, concurrency=1)
    new.bus.configure(batch_size=5, buffer_size=20)
    async with new.bus:
        await eventually(lambda: NEW in new.types)
        assert tables.count("incoming_envelopes") > 100


async def test_a_group_holds_messages_of_both_versions(tables: Tables) -> None:
    bus, groups = Bus("shop", tables.url, **QUICK), []

    @bus.handles(Placed, max_batch=10, concurrency=1)
    async def handle(placed: list[Placed]) -> None:
        groups.append(sorted(each.number for each in placed))

    put(tables, OLD, b'{"number":1,"total":"1"}')
    put(tables, NEW, b'{"number":2,"cents":1}')
    async with bus:
        await eventually(lambda: sorted(chain.from_iterable(groups)) == [1, 2])


async def test_raising_upcaster_makes_a_dead_letter_at_once(tables: Tables) -> None:
    new = New(tables, retry=Retry(immediate=5, delays=[60]))
    async with new.bus:
        await send(new.bus, PlacedV1(1, "a lot"), PlacedV1(2, "7"))
        await eventually(lambda: new.numbers() == [2])
        [(message_type, kind, reason, body)] = await eventually(tables.dead_letters)
    assert (message_type, kind) == (OLD, "durable.errors.InvalidMessage")
    assert reason.startswith(f"upcaster {__name__}.to_cents failed: ValueError: invalid literal")
    assert body == b'{"number":1,"total":"a lot"}'


class TestCircuits:
    """Of a handler that serves two versions: both stop, whichever it was that failed."""

    async def test_paused_old_version_is_released_also_from_memory(self, tables: Tables) -> None:
        bus, handled, go_on = Bus("shop", tables.url, **QUICK), [], asyncio.Event()

        @bus.handles(Placed, concurrency=1)
        async def handle(placed: Placed) -> None:
            await go_on.wait()
            handled.append(placed.number)

        async with bus:
            await send(bus, Placed(number=0, cents=1))
            await send(bus, PlacedV1(1, "1"), PlacedV1(2, "1"), Placed(number=3, cents=1))
            node = bus.runtime.node
            assert node is not None
            await eventually(lambda: len(node.agents.handlers[NEW].buffer) == 3)
            await bus.pause(PlacedV1)
            await eventually(lambda: node.agents.handlers[NEW].is_paused(OLD))
            go_on.set()
            await eventually(lambda: handled == [0, 3])
            waiting = [(OLD, 0)] * 2
            await eventually(
                lambda: tables.rows("SELECT message_type, owner_id FROM durable.incoming_envelopes") == waiting
            )
            assert await bus.resume(PlacedV1)
            await eventually(lambda: sorted(handled) == [0, 1, 2, 3])

    async def test_paused_old_version_is_not_used_for_a_trial(self, tables: Tables) -> None:
        await tables.change(
            "INSERT INTO durable.circuits (kind, key, reason, actor, until, probing) VALUES"
            " ('handler', %s, 'down', 'node 1', now(), true), ('handler', %s, 'old', 'somebody', NULL, false)",
            NEW,
            OLD,
        )
        put(tables, OLD, b'{"number":1,"total":"1"}')
        new = New(tables)
        async with new.bus:
            node = new.bus.runtime.node
            assert node is not None
            await eventually(lambda: node.agents.handlers[NEW].circuit.probing)
            put(tables, NEW, b'{"number":2,"cents":1}')
            await eventually(lambda: new.numbers() == [2])
            assert tables.one("SELECT epoch FROM durable.incoming_envelopes WHERE message_type = %s", OLD) == 0

    @pytest.mark.parametrize("how", ["PauseListener", "ctx.circuit"])
    async def test_handler_stopping_itself_for_an_old_message_stops_for_all_versions(
        self, tables: Tables, how: str
    ) -> None:
        bus, calls = Bus("shop", tables.url, **QUICK), []

        @bus.handles(Placed, concurrency=1)
        async def handle(placed: Placed, ctx: Context) -> None:
            calls.append(placed.number)
            if len(calls) == 1 and how == "PauseListener":
                raise PauseListener(3600, "full")
            if len(calls) == 1:
                ctx.circuit.open(3600)

        async with bus:
            await send(bus, PlacedV1(1, "1"))
            await eventually(lambda: tables.rows("SELECT key FROM durable.circuits") == [NEW])
            await send(bus, PlacedV1(2, "1"), Placed(number=3, cents=1))
            assert await bus.resume(Placed)
            await eventually(lambda: {2, 3} <= set(calls))

    async def test_an_old_message_closes_the_circuit_of_the_new_handler(self, tables: Tables) -> None:
        bus, down, calls = Bus("shop", tables.url, **QUICK), [True], []

        @bus.handles(
            Placed,
            retry=Retry(immediate=0, delays=[0] * 50),
            circuit_breaker=CircuitBreaker(failure_rate=0.5, at_least=2, open_for=0.1, longest=0.2),
        )
        async def handle(placed: Placed) -> None:
            calls.append(placed.number)
            if down:
                raise ConnectionError("the warehouse is down")

        async with bus:
            await send(bus, *[PlacedV1(number, "1") for number in range(5)])
            await eventually(lambda: tables.rows("SELECT key, probing FROM durable.circuits") == [(NEW, True)])
            down.clear()

            async def is_closed() -> bool:
                await send(bus, PlacedV1(9, "1"))  # there must be something to try it with
                return tables.count("circuits") == 0

            await eventually(is_closed)
            await eventually(lambda: tables.count("incoming_envelopes") == 0)
        assert tables.count("dead_letters") == 0


class TestInMemory:
    async def test_handler_gets_both_versions(self, tables: Tables) -> None:
        new = New(tables)
        async with InMemoryBus(new.bus) as memory:
            memory.deliver(PlacedV1(1, "100"))
            memory.deliver(Placed(number=2, cents=200))
            async with new.bus.unit_of_work() as uow:
                uow.send(PlacedV1(3, "300"))
            await memory.drain()
            assert sorted(placed.cents for placed in new.handled) == [100, 200, 300]
            assert [handled.envelope.content_type for handled in memory.handled] == [
                "application/json",
                MSGPACK,
                "application/json",
            ]
            assert memory.sent(PlacedV1) == [PlacedV1(3, "300")]
            memory.assert_no_dead_letters()

    async def test_raising_upcaster_makes_a_dead_letter(self, tables: Tables) -> None:
        async with InMemoryBus(New(tables).bus) as memory:
            memory.deliver(PlacedV1(1, "a lot"))
            await memory.drain()
            [letter] = memory.dead_letters
            assert letter.message == PlacedV1(1, "a lot")
            assert "to_cents failed" in letter.reason

    async def test_handler_stopping_itself_for_an_old_message_stops_for_all_versions(self, tables: Tables) -> None:
        bus, calls = Bus("shop", tables.url), []

        @bus.handles(Placed)
        async def handle(placed: Placed) -> None:
            calls.append(placed.number)
            if len(calls) == 1:
                raise PauseListener(60)

        async with InMemoryBus(bus) as memory:
            memory.deliver(PlacedV1(1, "1"))
            memory.deliver(Placed(number=2, cents=1))
            await memory.drain()
            assert calls == [1]
            memory.clock.advance(timedelta(seconds=61))
            await memory.drain()
            assert calls == [1, 1, 2]
