"""The bus in memory, in what it has beyond the real one; that it behaves like it is tested in contract/bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import StaticPool

from durable import (
    Bus,
    CircuitBreaker,
    Context,
    InvalidMessage,
    InvalidSetting,
    PauseListener,
    Retry,
    RetryAfter,
    RoutingError,
    WiringError,
    message,
)
from durable.envelope import Envelope, new_id
from durable.runtime import Runtime
from durable.storage import nodes
from durable.testing import InMemoryBus, ManualClock, eventually
from tests.support.subclasses import TEXTS

BILLING = "tcp://127.0.0.1:2302"
SHOP = "tcp://127.0.0.1:2301"
ONCE = Retry(immediate=0, delays=[])


@message("testing.placed")
class Placed(msgspec.Struct):
    number: int


@message("testing.billed")
class Billed(msgspec.Struct):
    number: int


@pytest.mark.parametrize("name", TEXTS.values(), ids=list(TEXTS))
def test_declared_names_of_subclasses_of_text_are_plain_text(name: str) -> None:
    bus = Bus("shop")
    bus.every("0 3 * * *", Placed(1), name=name, to=BILLING)
    bus.listen(SHOP, name=name)
    bus.asgi(name)

    (schedule,), (listening,) = bus.application.schedules.values(), bus.application.listeners
    names = [*bus.application.schedules, schedule.name, listening.endpoint]
    assert [f"{each}" for each in names] == ["acme"] * 3
    assert list(bus.application.mounted) == ["asgi:acme"]


class RateLimited(Exception):
    retry_after = 60


@pytest.fixture
def bus() -> Bus:
    return Bus("shop")


@pytest.fixture
async def memory(bus: Bus) -> AsyncIterator[InMemoryBus]:
    async with InMemoryBus(bus) as memory:
        yield memory


async def send(bus: Bus, *messages: object, **options: Any) -> None:
    async with bus.unit_of_work():
        for given in messages:
            bus.send(given, **options)


def handling(bus: Bus, **options: Any) -> list[int]:
    """Declare a handler of Placed; the numbers that it has seen, one for each attempt."""
    seen: list[int] = []

    @bus.handles(Placed, **options)
    async def handle(order: Placed) -> None:
        seen.append(order.number)

    return seen


class TestRecords:
    async def test_messages_sent_are_shown_decoded_from_the_committed_body(self, bus: Bus, memory: InMemoryBus) -> None:
        given = Placed(1)
        await send(bus, given, to=BILLING, headers={"tenant": "blue"})
        await send(bus, Billed(2), to=SHOP)
        given.number = 3
        assert memory.sent(Placed) == [Placed(1)]
        assert memory.sent_to(SHOP) == [Billed(2)]
        assert [envelope.headers for envelope in memory.envelopes(Placed)] == [{"tenant": "blue"}]
        assert len(memory.envelopes()) == 2

    async def test_published_event_is_shown_once_and_its_copies_by_destination(
        self, bus: Bus, memory: InMemoryBus
    ) -> None:
        bus.subscribe(Placed, to=BILLING)
        bus.subscribe(Placed, to=SHOP)
        async with bus.unit_of_work():
            bus.publish(Placed(1))
        assert memory.sent(Placed) == [Placed(1)]
        assert memory.sent_to(BILLING) == memory.sent_to(SHOP) == [Placed(1)]

    async def test_messages_are_not_handled_before_drain(self, bus: Bus, memory: InMemoryBus) -> None:
        seen = handling(bus)
        await send(bus, Placed(1), Placed(2))
        assert (seen, memory.handled) == ([], [])
        await memory.drain()
        assert seen == [1, 2]
        assert [(handled.message, handled.attempt) for handled in memory.handled] == [(Placed(1), 1), (Placed(2), 1)]

    async def test_messages_of_a_conversation_are_handled_in_the_order_of_sending(
        self, bus: Bus, memory: InMemoryBus
    ) -> None:
        @bus.handles(Placed)
        async def place(order: Placed) -> list[object]:
            return [Billed(order.number), Placed(order.number - 1)] if order.number else []

        @bus.handles(Billed)
        async def bill(order: Billed) -> None: ...

        await send(bus, Placed(2))
        await memory.drain()
        assert [handled.message for handled in memory.handled] == [
            Placed(2), Billed(2), Placed(1), Billed(1), Placed(0),
        ]  # fmt: skip

    async def test_dead_letters_can_be_told_apart_and_asserted_away(self, bus: Bus, memory: InMemoryBus) -> None:
        memory.assert_no_dead_letters()

        @bus.handles(Placed, retry=ONCE)
        async def handle(order: Placed) -> None:
            raise LookupError("no such order")

        await send(bus, Placed(1))
        await memory.drain()
        (letter,) = memory.dead_letters
        assert (letter.message, letter.attempts, letter.exception_type) == (Placed(1), 1, "LookupError")
        with pytest.raises(AssertionError, match=r"(?s)1 dead letter:.*testing\.placed.*LookupError: no such order"):
            memory.assert_no_dead_letters()

    async def test_dead_letters_are_replayed_one_or_all(self, bus: Bus, memory: InMemoryBus) -> None:
        mended: set[int] = set()
        attempts: list[tuple[int, int]] = []

        @bus.handles(Placed, retry=Retry(immediate=1, delays=[]))
        async def handle(order: Placed, ctx: Context) -> None:
            attempts.append((order.number, ctx.attempt))
            if order.number not in mended:
                raise LookupError

        await send(bus, Placed(1), Placed(2), Placed(3))
        await memory.drain()
        first, second, _ = memory.dead_letters
        mended.update((1, 3))

        memory.replay(second)
        await memory.drain()
        assert memory.handled == []
        assert [letter.message for letter in memory.dead_letters] == [Placed(1), Placed(3), Placed(2)]

        memory.replay()
        await memory.drain()
        assert [handled.message for handled in memory.handled] == [Placed(1), Placed(3)]
        assert memory.handled[0].envelope.id == first.envelope.id
        assert [letter.message for letter in memory.dead_letters] == [Placed(2)]
        assert attempts.count((2, 1)) == 3, "each time it is new"

    async def test_quarantined_message_cannot_be_replayed(self, bus: Bus, memory: InMemoryBus) -> None:
        handling(bus)
        memory.deliver(Placed(1), id_from="order-1")
        memory.deliver(Placed(2), id_from="order-1")
        await memory.drain()
        with pytest.raises(ValueError, match="quarantined"):
            memory.replay()
        assert len(memory.dead_letters) == 1

    async def test_unreadable_message_is_shown_by_its_envelope(self, bus: Bus, memory: InMemoryBus) -> None:
        handling(bus)
        envelope = Envelope(
            id=new_id(),
            message_type="testing.placed",
            destination=SHOP,
            source="elsewhere",
            correlation_id=new_id(),
            body=b"no JSON",
            sent_at=datetime.now(UTC),
        )
        memory.deliver(envelope)
        await memory.drain()
        (letter,) = memory.dead_letters
        assert (letter.message, letter.envelope) == (None, envelope)


class TestTime:
    async def test_retries_are_due_exactly_after_their_delays(self, bus: Bus, memory: InMemoryBus) -> None:
        @bus.handles(Placed, retry=Retry(immediate=0, delays=[10, timedelta(minutes=1)], jitter=0.5))
        async def handle(order: Placed, ctx: Context) -> None:
            if ctx.attempt < 3:
                raise LookupError

        await send(bus, Placed(1))
        await memory.drain()
        (waiting,) = memory.scheduled
        assert (waiting.message, waiting.attempts) == (Placed(1), 1)
        assert waiting.due == memory.clock.now() + timedelta(seconds=10)
        memory.clock.advance(9.999)
        await memory.drain()
        assert memory.handled == []
        memory.clock.advance(0.001)
        await memory.drain()
        memory.clock.advance(timedelta(minutes=1))
        await memory.drain()
        assert [handled.attempt for handled in memory.handled] == [3]

    async def test_scheduled_messages_are_shown_with_the_next_first(self, bus: Bus, memory: InMemoryBus) -> None:
        seen = handling(bus)
        await send(bus, Placed(1), delay=60)
        await send(bus, Placed(2), delay=timedelta(seconds=30))
        await send(bus, Placed(3), delay=90, to=BILLING)
        assert [waiting.message for waiting in memory.scheduled] == [Placed(2), Placed(1), Placed(3)]
        memory.clock.advance(timedelta(seconds=60))
        await memory.drain()
        assert seen == [1, 2]
        assert [waiting.message for waiting in memory.scheduled] == [Placed(3)]

    async def test_delivered_message_has_the_options_of_a_sent_one(self, memory: InMemoryBus) -> None:
        with pytest.raises(InvalidMessage, match="deliver: delay=-1 is negative; give 0 or more"):
            memory.deliver(Placed(1), delay=-1)
        with pytest.raises(InvalidSetting, match="deliver: unknown option 'dealy'; did you mean 'delay'"):
            memory.deliver(Placed(1), dealy=1)  # type: ignore[call-arg]

    async def test_late_message_expires_in_inbox_and_outbox(self, bus: Bus, memory: InMemoryBus) -> None:
        seen = handling(bus)
        await send(bus, Placed(1), deliver_by=10)
        await send(bus, Placed(2), deliver_by=10, to=BILLING)
        await send(bus, Placed(3), deliver_by=11, delay=5)
        memory.clock.advance(11)
        await memory.drain()
        assert seen == [3]
        assert [expired.message for expired in memory.expired] == [Placed(1), Placed(2)]

    def test_manual_clock_stands_still_until_advanced(self) -> None:
        start = datetime(2024, 2, 29, tzinfo=UTC)
        clock = ManualClock(start)
        assert (clock.now(), clock.monotonic()) == (start, 0.0)
        assert clock.advance(1.5) == clock.now() == start + timedelta(seconds=1.5)
        clock.advance(timedelta(days=1))
        assert clock.monotonic() == 86_401.5
        assert clock.advance("8d") == start + timedelta(days=9, seconds=1.5)

    def test_manual_clock_refuses_a_bad_time_with_advice(self) -> None:
        for bad in ("soon", "", float("nan"), None):
            with pytest.raises(InvalidSetting, match=r"advance: by: .* is no length of time; give seconds"):
                ManualClock().advance(bad)  # type: ignore[arg-type]

    def test_a_clock_does_not_go_back_and_knows_its_zone(self) -> None:
        with pytest.raises(ValueError, match="does not go back"):
            ManualClock().advance(-1)
        with pytest.raises(ValueError, match="aware"):
            ManualClock(datetime(2024, 2, 29))


class TestFailing:
    async def test_injected_faults_fail_the_next_attempts(self, bus: Bus, memory: InMemoryBus) -> None:
        seen = handling(bus, retry=Retry(immediate=2, delays=[]))
        memory.fail(Placed, LookupError("not now"), times=2)
        await send(bus, Placed(1), Placed(2))
        await memory.drain()
        assert seen == [1, 2]
        assert [handled.attempt for handled in memory.handled] == [3, 1]

    async def test_fault_may_be_injected_by_handler_and_as_a_class(self, bus: Bus, memory: InMemoryBus) -> None:
        @bus.handles(Placed, retry=ONCE)
        def handle(order: Placed) -> None: ...

        memory.fail(handle, LookupError)
        memory.fail(handle, ValueError("second"))
        await send(bus, Placed(1), Placed(2), Placed(3))
        await memory.drain()
        assert [letter.exception_type for letter in memory.dead_letters] == ["LookupError", "ValueError"]
        assert [handled.message for handled in memory.handled] == [Placed(3)]

    async def test_failing_commit_does_not_undo_external_effects_of_the_handler(
        self, bus: Bus, memory: InMemoryBus
    ) -> None:
        mails: list[int] = []

        @bus.handles(Placed)
        async def handle(order: Placed) -> Billed:
            mails.append(order.number)
            return Billed(order.number)

        @bus.handles(Billed)
        async def bill(order: Billed) -> None: ...

        memory.fail(Placed, ConnectionError, after_handling=True)
        await send(bus, Placed(1))
        await memory.drain()
        assert mails == [1, 1]
        assert memory.sent(Billed) == [Billed(1)]

    async def test_injected_fault_hits_one_message_of_a_group(self, bus: Bus, memory: InMemoryBus) -> None:
        seen = handling(bus, max_batch=10, retry=ONCE)
        memory.fail(Placed, LookupError)
        await send(bus, *map(Placed, range(4)))
        await memory.drain()
        assert [letter.message for letter in memory.dead_letters] == [Placed(0)]
        assert seen == [1, 2, 3]

    async def test_message_delivered_twice_is_handled_once(self, bus: Bus, memory: InMemoryBus) -> None:
        seen = handling(bus)
        memory.deliver_twice(Placed, times=2)
        memory.deliver(Placed(1))
        await send(bus, Placed(2), Placed(3))
        await memory.drain()
        assert (seen, memory.duplicates) == ([1, 2, 3], 2)

    async def test_endless_chain_of_messages_is_found(self, bus: Bus, memory: InMemoryBus) -> None:
        @bus.handles(Placed)
        async def handle(order: Placed) -> Placed:
            return order

        await send(bus, Placed(1))
        with pytest.raises(AssertionError, match="cause each other"):
            await memory.drain(at_most=20)
        assert len(memory.handled) == 21

    async def test_handler_cannot_drain(self, bus: Bus, memory: InMemoryBus) -> None:
        @bus.handles(Placed, retry=ONCE)
        async def handle(order: Placed) -> None:
            await memory.drain()

        await send(bus, Placed(1))
        await memory.drain()
        assert "drain() is under way" in memory.dead_letters[0].reason


class TestOtherServices:
    async def test_two_buses_have_a_conversation(self, bus: Bus, memory: InMemoryBus) -> None:
        bus.listen(SHOP)
        billed: list[tuple[int, str]] = []

        @bus.handles(Billed)
        async def thank(order: Billed, ctx: Context) -> None:
            billed.append((order.number, ctx.source))

        billing = Bus("billing", answer_to=(SHOP,))

        @billing.handles(Placed)
        async def bill(order: Placed, ctx: Context) -> None:
            ctx.reply(Billed(order.number), delay=60)

        async with InMemoryBus(billing, clock=memory.clock) as other:
            memory.connect(BILLING, other)
            other.connect(SHOP, memory)
            await send(bus, Placed(1), to=BILLING, reply_to=SHOP)
            await memory.drain()
            assert ([h.message for h in other.handled], billed) == ([Placed(1)], [])
            memory.clock.advance(60)
            await memory.drain()
        assert billed == [(1, "billing")]
        first, reply = memory.envelopes(Placed)[0], other.envelopes(Billed)[0]
        assert (reply.correlation_id, reply.causation_id) == (first.id, first.id)

    async def test_message_to_a_disconnected_service_waits(self, bus: Bus, memory: InMemoryBus) -> None:
        billing = Bus("billing")
        seen = handling(billing)
        async with InMemoryBus(billing) as other:
            memory.connect(BILLING, other)
            memory.disconnect(BILLING)
            await send(bus, Placed(1), to=BILLING)
            await memory.drain()
            assert seen == []
            memory.connect(BILLING, other)
            await memory.drain()
            assert seen == [1]

    async def test_a_service_may_send_to_its_own_address(self, bus: Bus, memory: InMemoryBus) -> None:
        bus.listen(SHOP)
        seen = handling(bus)
        await send(bus, Placed(1), to=SHOP)
        await memory.drain()
        assert seen == [1]

    async def test_message_refused_by_the_other_service_is_its_dead_letter(self, bus: Bus, memory: InMemoryBus) -> None:
        small = Bus("billing", max_message_bytes=5)
        async with InMemoryBus(small) as other:
            memory.connect(BILLING, other)
            await send(bus, Placed(1), to=BILLING)
            await memory.drain()
            assert "more than max_message_bytes (5)" in other.dead_letters[0].reason

    async def test_a_message_arrives_from_elsewhere(self, bus: Bus, memory: InMemoryBus) -> None:
        contexts: list[Context] = []

        @bus.handles(Placed)
        async def handle(order: Placed, ctx: Context) -> None:
            contexts.append(ctx)

        delivered = memory.deliver(Placed(1), source="warehouse", headers={"tenant": "blue"})
        await memory.drain()
        assert [(ctx.id, ctx.source, ctx.headers) for ctx in contexts] == [(delivered, "warehouse", {"tenant": "blue"})]
        assert memory.sent(Placed) == []


class TestSessions:
    async def test_session_without_a_database_commits_and_refuses_statements_with_advice(
        self, bus: Bus, memory: InMemoryBus
    ) -> None:
        async with bus.unit_of_work() as uow:
            await uow.session.commit()
            async with uow.session.begin_nested():
                pass
            with pytest.raises(WiringError, match="give InMemoryBus a session_factory="):
                await uow.session.execute(text("SELECT 1"))

    async def test_sync_session_without_a_database_refuses_statements_with_advice(
        self, bus: Bus, memory: InMemoryBus
    ) -> None:
        @bus.handles(Placed, retry=ONCE)
        def handle(order: Placed, session: Session) -> None:
            session.execute(text("SELECT 1"))

        await send(bus, Placed(1))
        await memory.drain()
        assert "sync_session_factory= for sync handlers" in memory.dead_letters[0].reason

    async def test_a_mock_stands_in_for_the_session(self, bus: Bus) -> None:
        session = AsyncMock(spec=AsyncSession)
        session.scalar.return_value = 17
        found: list[object] = []
        bus.route(Billed, to=BILLING)

        @bus.handles(Placed)
        async def handle(order: Placed, session: AsyncSession) -> Billed:
            found.append(await session.scalar(text("SELECT total")))
            session.add(order)
            return Billed(order.number)

        async with InMemoryBus(bus, session_factory=lambda: session) as memory:
            async with bus.unit_of_work() as uow:
                uow.session.add("row")
                bus.send(Placed(1))
            session.add.assert_called_once_with("row")
            session.commit.assert_awaited_once_with()
            await memory.drain()
        assert found == [17]
        session.add.assert_called_with(Placed(1))
        assert (session.commit.await_count, session.rollback.await_count) == (2, 0)
        assert memory.sent(Billed) == [Billed(1)]

    async def test_flush_of_a_unit_of_work_reaches_a_mock(self, bus: Bus) -> None:
        session, row = AsyncMock(spec=AsyncSession), Mock(id=None)
        session.flush.side_effect = lambda: setattr(row, "id", 17)
        session.new = {row}
        bus.route(Placed, to=BILLING)
        async with InMemoryBus(bus, session_factory=lambda: session) as memory:
            async with bus.unit_of_work() as uow:
                uow.session.add(row)
                assert list(uow.session.new) == [row]
                await uow.session.flush()
                bus.send(Placed(row.id))
            assert memory.sent(Placed) == [Placed(17)]
        session.flush.assert_awaited_once_with()

    @pytest.mark.parametrize("has_flush", [True, False], ids=["mock", "fake without flush"])
    async def test_flush_of_a_sync_handler_reaches_a_stand_in(self, bus: Bus, has_flush: bool) -> None:
        session = Mock() if has_flush else Mock(spec=["commit", "rollback", "close"])
        bus.route(Billed, to=BILLING)

        @bus.handles(Placed)
        def handle(order: Placed, session: Session) -> Billed:
            session.flush()
            return Billed(order.number)

        async with InMemoryBus(bus, sync_session_factory=lambda: session) as memory:
            await send(bus, Placed(1))
            await memory.drain()
            memory.assert_no_dead_letters()
            assert memory.sent(Billed) == [Billed(1)]
        if has_flush:
            session.flush.assert_called_once_with()

    async def test_mock_failing_to_commit_stores_no_message(self, bus: Bus) -> None:
        session = AsyncMock(spec=AsyncSession)
        session.commit.side_effect = ConnectionError
        async with InMemoryBus(bus, session_factory=lambda: session) as memory:
            with pytest.raises(ConnectionError):
                await send(bus, Placed(1), to=BILLING)
            assert memory.sent(Placed) == []

    async def test_a_mock_is_rolled_back_with_its_unit_of_work(self, bus: Bus) -> None:
        session = AsyncMock(spec=AsyncSession)
        async with InMemoryBus(bus, session_factory=lambda: session):
            with pytest.raises(RoutingError):
                await send(bus, Placed(1))
        session.rollback.assert_awaited_once_with()
        session.commit.assert_not_awaited()

    @pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
    async def test_refused_commit_of_a_handler_does_not_reach_a_mock(self, bus: Bus, is_async: bool) -> None:
        session, sync_session = AsyncMock(spec=AsyncSession), Mock()

        async def handle(order: Placed, session: AsyncSession) -> None:
            await session.commit()

        def handle_sync(order: Placed, session: Session) -> None:
            session.commit()

        declare = bus.handles(Placed, retry=ONCE)
        declare(handle) if is_async else declare(handle_sync)
        async with InMemoryBus(bus, lambda: session, sync_session_factory=lambda: sync_session) as memory:
            memory.deliver(Placed(1))
            await memory.drain()
            assert "must not commit its session" in memory.dead_letters[0].reason
        session.commit.assert_not_called()
        sync_session.commit.assert_not_called()

    async def test_a_mock_of_any_kind_stands_in_for_the_session_of_a_sync_handler(self, bus: Bus) -> None:
        session = Mock()

        @bus.handles(Placed)
        def handle(order: Placed, session: Session) -> None:
            session.add(order)
            session.something_of_their_own(order.number)  # type: ignore[attr-defined]

        async with InMemoryBus(bus, sync_session_factory=lambda: session) as memory:
            await send(bus, Placed(1))
            await memory.drain()
            memory.assert_no_dead_letters()
        session.add.assert_called_once_with(Placed(1))
        session.something_of_their_own.assert_called_once_with(1)
        session.commit.assert_called_once_with()
        session.close.assert_called_once_with()

    async def test_a_real_session_takes_part_with_its_own_transactions(self, bus: Bus) -> None:
        engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
        with engine.begin() as conn:
            conn.execute(text("CREATE TABLE bills (number INTEGER)"))
        bus.route(Billed, to=BILLING)

        @bus.handles(Placed, retry=Retry(immediate=1, delays=[]))
        def handle(order: Placed, session: Session, ctx: Context) -> Billed:
            session.execute(text("INSERT INTO bills VALUES (:attempt)"), {"attempt": ctx.attempt})
            if ctx.attempt == 1:
                raise LookupError
            return Billed(order.number)

        async with InMemoryBus(bus, sync_session_factory=sessionmaker(engine)) as memory:
            with Session(engine) as session, bus.enlist(session):
                bus.send(Placed(1))
                session.rollback()
                bus.send(Placed(2))
                session.commit()
            await memory.drain()
            assert [handled.message for handled in memory.handled] == [Placed(2)]
        with engine.connect() as conn:
            assert conn.execute(text("SELECT number FROM bills")).scalars().all() == [2]
        engine.dispose()

    @pytest.mark.parametrize("mode", ["create_savepoint", "rollback_only"])
    async def test_session_joined_by_savepoints_commits_for_itself(self, bus: Bus, mode: Any) -> None:
        engine = create_engine("sqlite://", poolclass=StaticPool)
        billed: list[Placed] = []

        @bus.handles(Placed)
        def handle(order: Placed, session: Session) -> None:
            billed.append(order)

        with engine.connect() as connection, connection.begin() as outer:
            sessions = sessionmaker(connection, join_transaction_mode=mode)
            async with InMemoryBus(bus, sync_session_factory=sessions) as memory:
                with sessions() as session, bus.enlist(session):
                    session.execute(text("SELECT 1"))
                    bus.send(Placed(1))
                    session.commit()
                await memory.drain()
                assert billed == ([Placed(1)] if mode == "create_savepoint" else [])
            outer.rollback()
        engine.dispose()

    async def test_a_factory_may_give_the_same_session_each_time(self, bus: Bus) -> None:
        shared = Session()

        @bus.handles(Placed, retry=Retry(immediate=1, delays=[]))
        def handle(order: Placed, session: Session, ctx: Context) -> None:
            assert session is shared
            if ctx.attempt == 1:
                raise LookupError

        async with InMemoryBus(bus, sync_session_factory=lambda: shared) as memory:
            await send(bus, Placed(1))
            await memory.drain()
            assert [handled.attempt for handled in memory.handled] == [2]

    async def test_a_factory_of_the_other_kind_of_sessions_is_refused(self, bus: Bus) -> None:
        async with InMemoryBus(bus, session_factory=Session, sync_session_factory=AsyncSession):
            with pytest.raises(WiringError, match="as sync_session_factory="):
                bus.unit_of_work()
            with pytest.raises(WiringError, match="as session_factory="):
                bus.runtime.sessions.open_sync()


class TestTheBlock:
    async def test_the_bus_works_as_before_when_the_block_ends(self, bus: Bus) -> None:
        own = bus.runtime
        async with InMemoryBus(bus) as memory:
            assert bus.runtime is not own
            await send(bus, Placed(1), to=BILLING)
        assert bus.runtime is own
        assert memory.sent(Placed) == [Placed(1)]

    async def test_an_application_may_start_its_bus_in_the_block(self, bus: Bus, memory: InMemoryBus) -> None:
        seen = handling(bus)
        for _ in range(2):
            async with bus:
                await send(bus, Placed(1))
        await memory.drain()
        assert seen == [1, 1]

    async def test_running_bus_is_refused(self, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bus.runtime.life, "node", object())
        with pytest.raises(WiringError, match="before it starts"):
            async with InMemoryBus(bus):
                pass

    async def test_route_declared_in_the_block_counts(self, bus: Bus, memory: InMemoryBus) -> None:
        bus.route(Placed, to=BILLING)
        await send(bus, Placed(1))
        assert memory.sent_to(BILLING) == [Placed(1)]

    async def test_invalid_message_is_refused_at_send(self, bus: Bus, memory: InMemoryBus) -> None:
        with pytest.raises(InvalidMessage):
            await send(bus, Placed(1), to=BILLING, headers={"a": "\0"})
        assert memory.sent(Placed) == []

    async def test_block_has_no_database(self, bus: Bus, memory: InMemoryBus) -> None:
        with pytest.raises(WiringError, match="in memory"):
            await bus.runtime.database.transaction(nodes.read)
        assert isinstance(bus.runtime, Runtime)


class TestCircuits:
    async def test_a_pause_lasts_for_its_time_on_the_clock_of_the_test(self, bus: Bus, memory: InMemoryBus) -> None:
        seen = handling(bus)
        await bus.pause(Placed, for_=60)
        await send(bus, Placed(1))
        await memory.drain()
        assert seen == []
        memory.clock.advance(timedelta(seconds=61))
        await memory.drain()
        assert seen == [1]

    async def test_a_pause_is_resumed(self, bus: Bus, memory: InMemoryBus) -> None:
        seen = handling(bus)
        await bus.pause(Placed)
        await send(bus, Placed(1))
        assert await bus.resume(Placed)
        assert not await bus.resume(Placed)
        await memory.drain()
        assert seen == [1]

    @pytest.mark.parametrize("verdict", [PauseListener(60), RateLimited()])
    async def test_handler_asking_for_a_pause_gets_its_message_again(
        self, bus: Bus, memory: InMemoryBus, verdict: Exception
    ) -> None:
        attempts: list[int] = []

        @bus.handles(Placed, on_error={RateLimited: RetryAfter()})
        async def handle(order: Placed, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            if len(attempts) == 1:
                raise verdict

        await send(bus, Placed(1))
        await memory.drain()
        assert attempts == [1]
        memory.clock.advance(timedelta(seconds=61))
        await memory.drain()
        assert attempts == [1, 1]

    async def test_a_handler_opens_its_own_circuit(self, bus: Bus, memory: InMemoryBus) -> None:
        seen: list[int] = []

        @bus.handles(Placed)
        async def handle(order: Placed, ctx: Context) -> None:
            seen.append(order.number)
            ctx.circuit.open(60)

        await send(bus, Placed(1), Placed(2))
        await memory.drain()
        assert seen == [1]
        memory.clock.advance(timedelta(seconds=61))
        await memory.drain()
        assert seen == [1, 2]

    async def test_breaker_stops_the_handler_and_tries_with_one_message(self, bus: Bus, memory: InMemoryBus) -> None:
        is_down = True
        seen: list[int] = []

        @bus.handles(
            Placed, retry=Retry(immediate=0, delays=[0] * 9), circuit_breaker=CircuitBreaker(0.5, 4, open_for=10)
        )
        async def handle(order: Placed) -> None:
            seen.append(order.number)
            if is_down:
                raise ConnectionError

        await send(bus, *map(Placed, range(6)))
        await memory.drain()
        assert len(seen) == 4
        memory.clock.advance(timedelta(seconds=11))
        await memory.drain()
        assert len(seen) == 5
        is_down = False
        memory.clock.advance(timedelta(seconds=21))
        await memory.drain()
        assert sorted(set(seen)) == list(range(6))
        assert len(memory.handled) == 6


class TestEventually:
    async def test_eventually_returns_the_first_true_answer(self) -> None:
        answers = iter([0, None, "", 17])
        assert await eventually(lambda: next(answers)) == 17

    async def test_eventually_awaits_coroutine_functions(self) -> None:
        done = asyncio.Event()
        asyncio.get_running_loop().call_soon(done.set)

        async def is_done() -> bool:
            return done.is_set()

        assert await eventually(is_done, within=timedelta(seconds=5))

    async def test_eventually_gives_up_at_the_deadline_with_the_last_answer(self) -> None:
        with pytest.raises(AssertionError, match=r"the answer did not come true in time; at last it was \[\]"):
            await eventually(list, within=0, what="the answer")
