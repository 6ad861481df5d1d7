"""Middleware on Postgres: what is in its transaction, where else it stands, what the shipped components do there."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import Bus, Context, HandleNext, Incoming, InvalidMessage, Middleware, Outgoing, Retry, SendNext, message
from durable.application.middlewares import Logging, Validation
from durable.dead_letters.rehearsal import handle, rehearsal
from durable.embedded import Embedded
from durable.storage import dead_letters
from durable.storage.dead_letters import DeadLetter, LetterRange, Selection
from durable.testing import Chaos, eventually
from tests.failure import leftovers
from tests.support import letters
from tests.support.letters import ENDPOINT, SCHEMA, envelope
from tests.support.tables import Tables, shared_tables

INSERT = text("INSERT INTO effects (number) VALUES (:number)")
NEVER = Retry(immediate=0, delays=[])


@message("middleware.placed")
class Placed(msgspec.Struct):
    number: int


@message("middleware.shipped")
class Shipped(msgspec.Struct):
    number: int


@pytest.fixture(scope="module")
def shared(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        tables.execute("CREATE TABLE effects (effect serial, number integer)")
        yield tables


@pytest.fixture
def tables(shared: Tables) -> Tables:
    shared.clear()
    shared.execute("TRUNCATE effects")
    return shared


@pytest.fixture
def bus(tables: Tables) -> Bus:
    return Bus(ENDPOINT, tables.url, pool_size=3, concurrency=2, poll_interval=0.03)


def effects(tables: Tables) -> list[int]:
    return sorted(tables.rows("SELECT number FROM effects"))


def outcomes(tables: Tables) -> Counter[tuple[str, str]]:
    """How often each type of message came to each end."""
    return Counter(tables.rows("SELECT message_type, outcome FROM durable.envelope_history WHERE side = 'incoming'"))


async def settled(tables: Tables) -> None:
    await eventually(lambda: tables.count("incoming_envelopes") == 0, within=20, what="an empty inbox")


async def place(bus: Bus, *numbers: int, **options: Any) -> None:
    async with bus.unit_of_work():
        for number in numbers:
            bus.send(Placed(number), **options)


class Writing(Middleware):
    """Writes effects of its own: 100 before the handler, 200 after it."""

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        assert isinstance(incoming.session, AsyncSession)
        await incoming.session.execute(INSERT, {"number": 100})
        result = await call_next(incoming)
        await incoming.session.execute(INSERT, {"number": 200})
        return result


class TestTransaction:
    async def test_writes_of_the_middleware_are_committed_with_effects_and_completion(
        self, bus: Bus, tables: Tables
    ) -> None:
        bus.use(Writing())

        @bus.handles(Placed)
        async def handler(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})

        async with bus:
            await place(bus, 1)
            await settled(tables)
        assert effects(tables) == [1, 100, 200]
        xids = "SELECT xid FROM durable.envelope_history UNION SELECT xmin::text::bigint FROM effects"
        assert len(tables.rows(xids)) == 1

    async def test_writes_of_the_middleware_are_undone_with_a_failing_handler(self, bus: Bus, tables: Tables) -> None:
        bus.use(Writing())

        @bus.handles(Placed, retry=NEVER)
        async def handler(placed: Placed, session: AsyncSession) -> None:
            raise LookupError

        async with bus:
            await place(bus, 1)
            await settled(tables)
        assert (effects(tables), tables.count("dead_letters")) == ([], 1)

    async def test_middleware_must_not_commit(self, bus: Bus, tables: Tables) -> None:
        class Commits(Middleware):
            async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
                await call_next(incoming)
                assert isinstance(incoming.session, AsyncSession)
                await incoming.session.commit()
                return None

        bus.use(Commits())

        @bus.handles(Placed, retry=NEVER)
        async def handler(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})

        async with bus:
            await place(bus, 1)
            await settled(tables)
        (reason,) = tables.rows("SELECT reason FROM durable.dead_letters")
        assert "must not commit its session" in reason
        assert effects(tables) == []

    async def test_sync_handler_past_its_timeout_is_rolled_back_at_its_end(self, bus: Bus, tables: Tables) -> None:
        class Passes(Middleware):
            async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
                return await call_next(incoming)

        let_go, sessions = threading.Event(), list[Session]()
        bus.use(Passes())

        @bus.handles(Placed, retry=NEVER, timeout=0.2)
        def handler(placed: Placed, session: Session) -> None:
            sessions.append(session)
            session.execute(INSERT, {"number": placed.number})
            if placed.number == 1:
                let_go.wait(10)
                session.execute(INSERT, {"number": placed.number})

        async with bus:
            await place(bus, 1)
            await settled(tables)
            assert [reason for (_, reason, _, _) in tables.dead_letters()] == ["TimeoutError"]
            pool: Any = bus.runtime.sessions.sync_engine.pool
            assert pool.checkedout() == 1, "its transaction is open while it runs"
            let_go.set()
            await eventually(lambda: pool.checkedout() == 0, what="a connection that was given back")
            await place(bus, 2)
            await settled(tables)
        assert effects(tables) == [2]


class TestDeadLetters:
    """What is rehearsed or handled by hand passes the same onion as in the agents."""

    @pytest.mark.parametrize("is_async", [True, False])
    async def test_middleware_surrounds_a_rehearsal_and_a_letter_handled_by_hand(
        self, bus: Bus, tables: Tables, is_async: bool
    ) -> None:
        class Doubling(Middleware):
            def send(self, outgoing: Outgoing, call_next: SendNext) -> Any:
                return call_next(outgoing.with_headers({"passed": "sending"}))

            async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
                assert isinstance(incoming.message, Placed)
                return await call_next(incoming.replace(message=Placed(incoming.message.number * 2)))

        async def handler(placed: Placed) -> Shipped:
            return Shipped(placed.number)

        def handler_sync(placed: Placed) -> Shipped:
            return Shipped(placed.number)

        bus.use(Doubling())
        declare = bus.handles(Placed)
        declare(handler) if is_async else declare(handler_sync)
        bus.handles(Shipped)(ship)
        letter = letter_of(tables, 21)
        async with rehearsal(bus) as stage:
            rehearsed = await stage.run(letter)
        assert (rehearsed.outcome, rehearsed.error) == ("succeeds", None)
        sent = await handle(bus, letter, actor="ann")
        for envelopes in (rehearsed.sends, sent):
            assert [(each.body, each.headers) for each in envelopes] == [(b'{"number":42}', {"passed": "sending"})]


async def ship(shipped: Shipped) -> None: ...


def letter_of(tables: Tables, number: int) -> DeadLetter:
    with leftovers.transaction(tables.url) as conn:
        (made,) = letters.incoming(
            conn,
            [
                msgspec.structs.replace(
                    envelope(number, message_type="middleware.placed"), body=msgspec.json.encode(Placed(number))
                )
            ],
        )
        return dead_letters.read(conn, SCHEMA, Selection(ids=[made.id]), LetterRange(0, 2**40, 1))[0]


class TestChaos:
    async def test_failing_and_dawdling_handlers_leave_one_effect_and_one_cascade_of_each_message(
        self, bus: Bus, tables: Tables
    ) -> None:
        bus.use(Chaos(fail=0.3, delay=0.3, longest_delay=0.005, only="handle", seed=1))
        retry = Retry(immediate=50, delays=[])

        @bus.handles(Placed, retry=retry, max_batch=5)
        async def handler(placed: Placed, session: AsyncSession) -> Shipped:
            await session.execute(INSERT, {"number": placed.number})
            return Shipped(placed.number)

        @bus.handles(Shipped, retry=retry)
        def shipping(shipped: Shipped, session: Session) -> None:
            session.execute(INSERT, {"number": shipped.number + 100})

        async with bus:
            await place(bus, *range(40))
            await settled(tables)
        assert effects(tables) == [*range(40), *range(100, 140)]
        assert outcomes(tables) == {("middleware.placed", "handled"): 40, ("middleware.shipped", "handled"): 40}

    async def test_message_sent_twice_is_handled_twice_and_once_under_a_business_key(
        self, bus: Bus, tables: Tables
    ) -> None:
        bus.use(Chaos(duplicate=1, only="send"))

        @bus.handles(Placed)
        async def handler(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})

        async with bus:
            await place(bus, 1)
            await place(bus, 2, id_from="order-2")
            await settled(tables)
        assert effects(tables) == [1, 1, 2]

    async def test_handler_run_twice_uses_one_transaction_finishing_its_message_once(
        self, bus: Bus, tables: Tables
    ) -> None:
        bus.use(Chaos(duplicate=1, only="handle"))

        @bus.handles(Placed)
        async def handler(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})

        async with bus:
            await place(bus, 1)
            await settled(tables)
        assert effects(tables) == [1, 1]
        assert outcomes(tables) == {("middleware.placed", "handled"): 1}
        assert len(tables.rows("SELECT DISTINCT xmin::text FROM effects")) == 1

    async def test_dropped_message_is_not_sent_or_is_finished_without_its_handler(
        self, bus: Bus, tables: Tables
    ) -> None:
        chaos = Chaos(drop=0.5, seed=2)
        bus.use(chaos)

        @bus.handles(Placed)
        async def handler(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})

        async with bus:
            await place(bus, *range(40))
            await settled(tables)
        finished = outcomes(tables)["middleware.placed", "handled"]
        assert 0 < len(effects(tables)) < finished < 40
        assert len(effects(tables)) == len(set(effects(tables)))

    async def test_delayed_message_is_scheduled_for_later(self, bus: Bus, tables: Tables) -> None:
        bus.use(Chaos(delay=1, longest_delay=1000, only="send"))

        @bus.handles(Placed)
        async def handler(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})

        async with bus:
            await place(bus, 1, 2)
            assert tables.rows("SELECT execution_time > now() FROM durable.incoming_envelopes") == [True, True]


class TestValidation:
    async def test_message_refused_by_a_check_is_a_dead_letter_without_another_attempt(
        self, bus: Bus, tables: Tables
    ) -> None:
        bus.use(Validation({Placed: lambda placed: placed.number < 10}), stage="after")

        class Raises(Middleware):
            """The service that sent it checked nothing."""

            async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
                assert isinstance(incoming.message, Placed)
                return await call_next(incoming.replace(message=Placed(incoming.message.number * 10)))

        bus.use(Raises(), stage="before")
        seen: list[Context] = []

        @bus.handles(Placed)
        async def handler(placed: Placed, ctx: Context) -> None:
            seen.append(ctx)

        async with bus:
            with pytest.raises(InvalidMessage, match=r"Placed is refused by .*lambda"):
                await place(bus, 10)
            await place(bus, 0, 1)
            await settled(tables)
        letter = tables.one("SELECT exception_type, attempts, reason FROM durable.dead_letters")
        assert letter[:2] == ("durable.errors.InvalidMessage", 1)
        assert "Placed is refused by" in letter[2]
        assert len(seen) == 1


class TestLogging:
    async def test_each_send_and_each_attempt_is_one_line_without_the_body(
        self, bus: Bus, tables: Tables, caplog: pytest.LogCaptureFixture
    ) -> None:
        bus.use(Logging(), stage="before")
        caplog.set_level(logging.INFO, "durable.messages")

        @bus.handles(Placed, retry=Retry(immediate=1, delays=[]))
        async def handler(placed: Placed, ctx: Context) -> None:
            if ctx.attempt == 1:
                raise LookupError(f"no order {placed.number}")

        async with bus:
            await place(bus, 4711)
            await settled(tables)
        lines = [record for record in caplog.records if record.name == "durable.messages"]
        told = [getattr(record, "durable") for record in lines]  # noqa: B009  an extra field, which no type has
        assert [(each["event"], each.get("attempt"), each.get("error")) for each in told] == [
            ("sent", None, None),
            ("failed", 1, "LookupError"),
            ("handled", 2, None),
        ]
        assert len({each["id"] for each in told}) == 1
        assert all(each["type"] == "middleware.placed" and each["ms"] >= 0 for each in told)
        assert not any("4711" in record.getMessage() for record in lines)
        assert f"handled type=middleware.placed id={told[2]['id']}" in lines[2].getMessage()


async def test_middleware_of_one_bus_does_not_run_for_another(bus: Bus, tables: Tables) -> None:
    bus.use(Chaos(drop=1))
    other = Bus("other", tables.url)
    other.handles(Placed)(take)
    async with other, asyncio.timeout(20):
        await place(other, 1)
        await settled(tables)
    assert outcomes(tables) == {("middleware.placed", "handled"): 1}


async def take(placed: Placed) -> None: ...
