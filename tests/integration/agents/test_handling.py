"""The handling agent on Postgres: effects, sends and completion in one transaction, fenced by owner and epoch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, SessionTransaction, mapped_column

from durable import Context, NoUnitOfWork, PauseListener, Reject, Release, Retry
from durable.agents.settling import Settling
from durable.agents.stuck_threads import StuckThreads
from durable.embedded import Embedded
from durable.envelope import ANY_NODE, LeasedEnvelope
from durable.tasks.crew import end
from durable.telemetry import Event
from durable.testing import ManualClock, eventually
from tests.support.one_handler import NODE, Billed, Placed, Shop, envelope, shop_tables
from tests.support.tables import Tables


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "effects"
    effect: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shop_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    database.execute("TRUNCATE effects, once")
    return database


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def shop(tables: Tables, clock: ManualClock) -> AsyncIterator[Shop]:
    shop = Shop(tables, clock)
    yield shop
    await shop.close()


class TestWorkers:
    async def test_worker_goes_on_after_a_late_cancellation_by_its_handler(self, shop: Shop) -> None:
        workers = list[asyncio.Task[Any]]()

        async def handle(order: Placed) -> None:
            task = asyncio.current_task()
            assert task is not None
            workers.append(task)

        shop.handles(handle)
        async with shop.open():
            await shop.receive(1)
            await shop.settled()
            workers[0].cancel()  # as asyncio.get_running_loop().call_later(1, task.cancel) does in a handler
            await asyncio.sleep(0)
            await shop.receive(2)
            await shop.settled()
        assert len(workers) == 2
        assert shop.inbox() == []

    async def test_repeated_cancellation_reaches_a_handler(self, shop: Shop) -> None:
        cancelled = list[int]()
        begun = asyncio.Event()

        async def handle(order: Placed) -> None:
            begun.set()
            while len(cancelled) < 2:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.append(1)

        shop.handles(handle, timeout=timedelta(minutes=5))
        running = asyncio.create_task(shop.agent.run())
        await shop.receive(1)
        await begun.wait()
        assert await end([running], within=20) == []
        assert len(cancelled) == 2

    async def test_room_is_given_back_when_messages_cannot_be_handed_back(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def refuse(*_: object) -> None:
            raise PermissionError("permission denied for table incoming_envelopes")

        async def handle(order: Placed) -> None: ...

        shop.handles(handle)
        room = shop.agent.buffer.room
        await shop.receive(1, 2)
        shop.agent.observe_circuit(True)
        monkeypatch.setattr(Settling, "hand_back", refuse)
        async with shop.open():
            await shop.settled()
        assert shop.agent.buffer.room == room


class TestOneTransaction:
    async def test_effects_sends_and_completion_are_committed_together(self, shop: Shop) -> None:
        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> Billed:
            await shop.write(session, order.number)
            ctx.send(Billed(order.number + 1))
            assert (shop.effects(), shop.sent(), len(shop.inbox())) == ([], [], 1)
            return Billed(order.number + 2)

        shop.handles(handle)
        async with shop.open():
            await shop.receive(1)
            await shop.settled()
        assert (shop.effects(), shop.sent(), shop.inbox()) == ([1], [2, 3], [])
        history = shop.tables.one(
            "SELECT side, outcome, address, attempts, node_id, count(*) OVER (PARTITION BY xid) "
            "FROM durable.envelope_history"
        )
        assert history == ("incoming", "handled", "shop", 0, NODE, 1)
        xids = "SELECT xid FROM durable.envelope_history UNION SELECT xmin::text::bigint FROM effects"
        assert len(shop.tables.rows(xids)) == 1

    async def test_listener_of_the_last_flush_sends_in_the_unit_of_work(self, shop: Shop) -> None:
        """What is added is flushed after the handler."""

        async def handle(order: Placed, session: AsyncSession) -> None:
            session.add(Effect(number=order.number))

        def send(*_: object) -> None:
            shop.sessions.scope.outbox.send(Billed(2))

        event.listen(Effect, "after_insert", send)
        shop.handles(handle)
        try:
            async with shop.open():
                await shop.receive(1)
                await shop.settled()
        finally:
            event.remove(Effect, "after_insert", send)
        assert (shop.effects(), shop.sent(), shop.tables.count("dead_letters")) == ([1], [2], 0)

    @pytest.mark.parametrize("moment", ["after_commit", "after_transaction_end"])
    async def test_listener_of_the_end_cannot_send(self, shop: Shop, moment: str) -> None:
        refused = list[str]()

        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> None:
            def send(ended: Session, transaction: SessionTransaction | None = None) -> None:
                if transaction is None or transaction.parent is None:
                    for by in (shop.sessions.scope.outbox.send, ctx.send):
                        with pytest.raises(NoUnitOfWork):
                            by(Billed(2))
                        refused.append(moment)

            event.listen(session.sync_session, moment, send, once=True)

        shop.handles(handle)
        async with shop.open():
            await shop.receive(1)
            await shop.settled()
        assert refused == [moment, moment]
        assert (shop.sent(), shop.tables.count("dead_letters")) == ([], 0)

    async def test_dead_letter_is_logged_with_the_command_to_see_more(
        self, shop: Shop, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def handle(order: Placed) -> None:
            raise LookupError("no such customer")

        shop.handles(handle)
        async with shop.open():
            (lease,) = await shop.receive(1)
            await shop.settled()
        assert f"no such customer; see: durable-agent dead-letters show APP:BUS {lease.envelope.id}" in caplog.text

    async def test_a_failure_leaves_no_effect_and_no_message(self, shop: Shop) -> None:
        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> None:
            await shop.write(session, order.number)
            ctx.send(Billed(1))
            raise LookupError("no such customer")

        shop.handles(handle)
        async with shop.open():
            (lease,) = await shop.receive(1)
            await shop.settled()
        assert (shop.effects(), shop.sent(), shop.inbox()) == ([], [], [])
        letter = shop.tables.one(
            "SELECT id, side, address, exception_type, reason, attempts, traceback, body FROM durable.dead_letters"
        )
        assert letter[:6] == (lease.envelope.id, "incoming", "shop", "LookupError", "no such customer", 1)
        assert 'raise LookupError("no such customer")' in letter[6]
        assert letter[7] == lease.envelope.body
        assert shop.tables.rows("SELECT outcome, error FROM durable.envelope_history") == [
            ("dead-lettered", "no such customer")
        ]

    async def test_commit_refused_by_the_database_is_a_failed_attempt(self, shop: Shop) -> None:
        await shop.tables.change("INSERT INTO once VALUES (1)")
        attempts: list[int] = []

        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> Billed:
            attempts.append(ctx.attempt)
            await shop.write(session, order.number)
            await session.execute(text("INSERT INTO once VALUES (1)"))
            if ctx.attempt == 2:
                await shop.tables.change("DELETE FROM once")
            return Billed(ctx.attempt)

        shop.handles(handle, retry=Retry(immediate=1, delays=[]))
        async with shop.open():
            await shop.receive(1)
            await shop.settled()
        assert (attempts, shop.effects(), shop.sent(), shop.inbox()) == ([1, 2], [1], [2], [])

    async def test_a_sync_handler_has_one_transaction_too(self, shop: Shop) -> None:
        def handle(order: Placed, session: Session, ctx: Context) -> Billed:
            session.execute(text("INSERT INTO effects (number) VALUES (:number)"), {"number": order.number})
            if order.number == 1:
                raise LookupError
            return Billed(order.number)

        shop.handles(handle, concurrency=2)
        async with shop.open():
            await shop.receive(1, 2)
            await shop.settled()
        assert (shop.effects(), shop.sent(), shop.inbox()) == ([2], [2], [])

    async def test_group_has_one_transaction_and_its_failing_message_runs_alone(self, shop: Shop) -> None:
        async def handle(order: Placed, session: AsyncSession) -> Billed:
            await shop.write(session, order.number)
            if order.number == 2:
                raise LookupError
            return Billed(order.number)

        shop.handles(handle, max_batch=10)
        async with shop.open():
            await shop.receive(*range(5))
            await shop.settled()
            await shop.receive(10, 11, 12)
            await shop.settled()
        assert (shop.effects(), shop.sent(), shop.inbox()) == ([0, 1, 3, 4, 10, 11, 12], [0, 1, 3, 4, 10, 11, 12], [])
        transactions = "SELECT count(*) FROM effects GROUP BY xmin::text ORDER BY 1"
        assert shop.tables.rows(transactions) == [1, 1, 1, 1, 3]
        assert shop.counters[Event.HANDLED] == 7


class TestConcurrency:
    async def test_no_more_messages_run_at_once_than_the_handler_allows(self, shop: Shop) -> None:
        running: list[int] = []
        most: list[int] = []
        all_slots_used = asyncio.Event()

        async def handle(order: Placed) -> None:
            running.append(order.number)
            most.append(len(running))
            if len(running) == 3:
                all_slots_used.set()
            await all_slots_used.wait()
            await asyncio.sleep(0)
            running.remove(order.number)

        shop.handles(handle, concurrency=3)
        async with shop.open():
            await shop.receive(*range(20))
            await shop.settled()
        assert max(most) == 3
        assert shop.counters[Event.HANDLED] == 20

    async def test_slow_message_does_not_delay_the_others(self, shop: Shop) -> None:
        slow = asyncio.Event()

        async def handle(order: Placed) -> None:
            if order.number == 0:
                await slow.wait()

        shop.handles(handle, concurrency=2)
        async with shop.open():
            await shop.receive(*range(10))
            await eventually(lambda: shop.counters[Event.HANDLED] == 9)
            assert len(shop.agent.held()) == 1
            slow.set()
            await shop.settled()

    async def test_a_handler_with_room_again_asks_for_more(self, shop: Shop) -> None:
        async def handle(order: Placed) -> None: ...

        shop.handles(handle)
        async with shop.open():
            shop.agent.claim_pending = True
            await shop.receive(1)
            await shop.settled()
        assert (shop.asked_for_work, shop.agent.claim_pending) == (1, False)

    @pytest.mark.parametrize(
        ("stuck", "left"),
        [(1, (True, True)), (2, (False, True)), (3, (False, True)), (4, (False, False))],
        ids=["one", "as many as run", "one of the last", "all"],
    )
    async def test_threads_of_a_handler_are_used_up_by_twice_its_concurrency(
        self, shop: Shop, stuck: int, left: tuple[bool, bool]
    ) -> None:
        def handle(order: Placed) -> None: ...

        threads = StuckThreads()
        for _ in range(stuck):
            threads.add("handling.placed", Future(), [], lambda: None)
        shop.handles(handle, concurrency=2, stuck=threads)
        assert (shop.attempts.has_threads, shop.attempts.has_last_threads) == left
        assert shop.attempts.standing() is None  # a former node of the process has lost them, and ended for it

    @pytest.mark.parametrize(
        ("stopped", "claimed"),
        [
            ([], ["handling.placed", "handling.older"]),
            (["handling.placed"], []),
            (["handling.older"], ["handling.placed"]),
        ],
        ids=["none", "the handler", "an older version"],
    )
    async def test_stopped_handler_and_paused_version_claim_nothing(
        self, shop: Shop, stopped: list[str], claimed: list[str]
    ) -> None:
        async def handle(order: Placed) -> None: ...

        shop.handles(handle)
        shop.agent.observe_circuits(dict.fromkeys(stopped, False), shop.agent.circuit.generation.number)
        assert [each for each in ("handling.placed", "handling.older") if shop.agent.takes(each)] == claimed


class TestTheFence:
    async def test_message_taken_away_during_its_handling_leaves_no_effect(self, shop: Shop) -> None:
        leases: list[LeasedEnvelope] = []

        async def handle(order: Placed, session: AsyncSession) -> Billed:
            await shop.write(session, order.number)
            if order.number == 1:
                shop.take_away(leases[0])
            return Billed(order.number)

        shop.handles(handle)
        leases += await shop.receive(1)
        async with shop.open():
            await shop.settled()
            await shop.receive(2)
            await shop.settled()
        assert (shop.effects(), shop.sent()) == ([2], [2])
        assert shop.inbox() == [(0, 1, 0, None)]  # for the node that has it now
        assert (shop.counters[Event.LEASE_LOST], shop.tables.count("dead_letters")) == (1, 0)

    async def test_lost_lease_of_a_failed_message_is_no_retry(self, shop: Shop) -> None:
        leases: list[LeasedEnvelope] = []

        async def handle(order: Placed) -> None:
            shop.take_away(leases[0])
            raise LookupError

        shop.handles(handle, retry=Retry(immediate=0, delays=[60]))
        leases += await shop.receive(1)
        async with shop.open():
            await shop.settled()
        assert (shop.counters[Event.LEASE_LOST], shop.counters[Event.RETRIED]) == (1, 0)

    async def test_one_lost_lease_rolls_back_the_group_and_the_others_are_handled(self, shop: Shop) -> None:
        leases: list[LeasedEnvelope] = []

        async def handle(order: Placed, session: AsyncSession) -> None:
            await shop.write(session, order.number)
            if order.number == 1 and leases:
                shop.take_away(leases.pop())

        shop.handles(handle, max_batch=10)
        leases.append((await shop.receive(0, 1, 2))[1])
        async with shop.open():
            await shop.settled()
        assert sorted(shop.effects()) == [0, 2]
        assert shop.inbox() == [(0, 1, 0, None)]

    @pytest.mark.parametrize(
        "verdict",
        [LookupError(), Reject("no"), Release()],
        ids=["put off", "dead letter", "release"],
    )
    async def test_failure_of_a_message_taken_away_settles_nothing(self, shop: Shop, verdict: Exception) -> None:
        leases: list[LeasedEnvelope] = []

        async def handle(order: Placed) -> None:
            shop.take_away(leases[0])
            raise verdict

        shop.handles(handle, retry=Retry(immediate=0, delays=[60]))
        leases += await shop.receive(1)
        async with shop.open():
            await shop.settled()
        assert shop.inbox() == [(0, 1, 0, None)]
        assert (shop.tables.count("dead_letters"), shop.tables.count("envelope_history")) == (0, 0)


class TestRetrying:
    async def test_delayed_retry_waits_in_the_database_without_an_owner(self, shop: Shop) -> None:
        async def handle(order: Placed) -> None:
            raise LookupError

        shop.handles(handle, retry=Retry(immediate=2, delays=[60], jitter=0))
        async with shop.open():
            await shop.receive(1)
            await shop.settled()
        assert shop.inbox() == [(0, 1, 3, True)]
        (wait,) = shop.tables.rows("SELECT execution_time - now() FROM durable.incoming_envelopes")
        assert timedelta(seconds=50) < wait <= timedelta(seconds=60)
        assert shop.counters[Event.RETRIED] == 1

    async def test_failed_attempt_is_logged_with_its_line_and_the_next_attempt(
        self, shop: Shop, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def handle(order: Placed) -> None:
            raise LookupError("no such customer")

        line = handle.__code__.co_firstlineno + 1
        shop.handles(handle, retry=Retry(immediate=1, delays=[60], jitter=0))
        async with shop.open():
            await shop.receive(1)
            await shop.settled()
        for number, outlook in ((1, "again at once, attempt 2 of 3"), (2, "again in 60 s, attempt 3 of 3")):
            assert f"attempt {number}: LookupError: no such customer (" in caplog.text
            assert f"test_handling.py:{line}); {outlook}" in caplog.text

    async def test_a_released_message_is_for_any_node_and_not_counted(self, shop: Shop) -> None:
        async def handle(order: Placed) -> None:
            raise Release

        shop.handles(handle)
        async with shop.open():
            await shop.receive(1, attempts=2)
            await shop.settled()
        assert shop.inbox() == [(0, 1, 2, None)]

    async def test_attempts_go_on_where_another_node_has_left_off(self, shop: Shop) -> None:
        attempts: list[int] = []

        async def handle(order: Placed, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            raise LookupError

        shop.handles(handle, retry=Retry(immediate=1, delays=[60]))
        async with shop.open():
            await shop.receive(1, attempts=2)
            await shop.settled()
        assert attempts == [3]
        assert shop.tables.rows("SELECT attempts FROM durable.dead_letters") == [3]


class TestSuspects:
    async def test_attempt_of_a_suspect_is_counted_before_its_run(self, shop: Shop) -> None:
        seen: list[tuple[int, Any]] = []

        async def handle(order: Placed, ctx: Context) -> None:
            seen.append((ctx.attempt, shop.inbox()))

        shop.handles(handle, retry=Retry(immediate=2, delays=[]))
        async with shop.open():
            await shop.receive(1, attempts=1, interruptions=2)
            await shop.settled()
        assert seen == [(2, [(NODE, 0, 2, None)])]
        assert shop.inbox() == []

    async def test_suspect_with_too_many_interruptions_is_dead_lettered_without_a_run(self, shop: Shop) -> None:
        async def handle(order: Placed) -> None:
            pytest.fail("it runs")

        shop.handles(handle, retry=Retry(immediate=2, delays=[]))
        async with shop.open():
            await shop.receive(1, attempts=3, interruptions=4)
            await shop.settled()
        (letter,) = shop.tables.dead_letters()
        assert letter[1:3] == (
            "killed its node",
            "its node died, or met an error of its own, 4 times while it held it",
        )

    async def test_attempt_of_a_suspect_is_not_counted_again_by_its_failure(self, shop: Shop) -> None:
        attempts: list[int] = []

        async def handle(order: Placed, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            raise LookupError

        shop.handles(handle, retry=Retry(immediate=1, delays=[60]))
        async with shop.open():
            await shop.receive(1, interruptions=2)
            await shop.settled()
        assert attempts == [1, 2]
        assert shop.inbox() == [(0, 1, 2, True)]

    @pytest.mark.parametrize("interruptions", [0, 2], ids=["sound", "suspect"])
    @pytest.mark.parametrize("attempts", [0, 1])
    @pytest.mark.parametrize(
        "raised",
        [Release(), PauseListener(60, "the bank asks for patience")],
        ids=lambda raised: type(raised).__name__,
    )
    async def test_uncounted_attempt_leaves_the_number_of_attempts_unchanged(
        self, shop: Shop, raised: Exception, attempts: int, interruptions: int
    ) -> None:
        async def handle(order: Placed) -> None:
            raise raised

        shop.handles(handle, retry=Retry(immediate=2, delays=[]))
        async with shop.open():
            await shop.receive(1, attempts=attempts, interruptions=interruptions)
            await shop.settled()
        assert shop.inbox() == [(0, 1, attempts, None)]

    async def test_one_suspect_runs_at_a_time_and_apart_from_any_group(self, shop: Shop) -> None:
        running: list[int] = []

        async def handle(order: Placed, session: AsyncSession) -> None:
            assert running == []
            running.append(order.number)
            await shop.write(session, order.number)
            running.remove(order.number)

        shop.handles(handle, concurrency=4, max_batch=4)
        async with shop.open():
            await shop.receive(*range(8), interruptions=2)
            await shop.settled()
        assert shop.tables.rows("SELECT count(*) FROM effects GROUP BY xmin::text") == [1] * 8
        assert shop.tables.count("dead_letters") == 0

    async def test_message_with_one_interruption_is_handled_like_any_other(self, shop: Shop) -> None:
        async def handle(order: Placed, session: AsyncSession) -> None:
            await shop.write(session, order.number)

        shop.handles(handle, max_batch=10)
        leases = await shop.receive(0, 1, 2, interruptions=1)
        async with shop.open():
            await shop.settled()
        assert len(leases) == 3
        assert shop.tables.rows("SELECT count(*) FROM effects GROUP BY xmin::text") == [3]


class TestExpiry:
    async def test_late_message_is_expired_and_recorded_in_the_history(self, shop: Shop) -> None:
        async def handle(order: Placed) -> None:
            pytest.fail("it runs")

        shop.handles(handle)
        async with shop.open():
            await shop.receive(1, deliver_by=datetime.now(UTC) - timedelta(seconds=1))
            await shop.settled()
        assert shop.inbox() == []
        assert shop.tables.rows("SELECT outcome FROM durable.envelope_history") == ["expired"]
        assert shop.counters[Event.EXPIRED] == 1

    async def test_node_with_a_fast_clock_expires_no_message_in_time(self, shop: Shop, clock: ManualClock) -> None:
        seen: list[int] = []

        async def handle(order: Placed) -> None:
            seen.append(order.number)

        shop.handles(handle)
        clock.advance(timedelta(days=1))
        async with shop.open():
            await shop.receive(1, deliver_by=datetime.now(UTC) + timedelta(minutes=1))
            await shop.settled()
        assert (seen, shop.counters[Event.EXPIRED]) == ([1], 0)


class TestAge:
    """The time for which a message is retried, by the database's clock."""

    @pytest.mark.parametrize("ahead", [24, -24], ids=lambda hours: f"{hours} h")
    @pytest.mark.parametrize(("age", "runs"), [(0, 2), (1, 1)])
    async def test_age_of_a_message_follows_the_database_when_the_clock_of_its_node_is_wrong(
        self, tables: Tables, ahead: int, age: int, runs: int
    ) -> None:
        shop = Shop(tables, ManualClock(datetime.now(UTC) + timedelta(hours=ahead)))
        seen: list[int] = []

        async def handle(order: Placed) -> None:
            seen.append(order.number)
            raise ValueError("no")

        shop.handles(handle, retry=Retry(immediate=1, delays=[], max_age="20m"))
        async with shop.open():
            await shop.receive(1, sent_at=datetime.now(UTC) - timedelta(hours=age))
            await shop.settled()
        await shop.close()
        assert (len(seen), shop.tables.count("dead_letters")) == (runs, 1)


class TestStopping:
    async def test_stopping_agent_finishes_the_running_message_and_releases_the_others(self, shop: Shop) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def handle(order: Placed, session: AsyncSession) -> None:
            begun.set()
            await go_on.wait()
            await shop.write(session, order.number)

        shop.handles(handle)
        async with shop.open():
            await shop.receive(1, 2, 3)
            await begun.wait()
            shop.agent.stop()
            assert shop.agent.reserve(envelope(4)) == ANY_NODE
            go_on.set()
        assert shop.effects() == [1]
        assert len(shop.inbox()) == 2

    async def test_handler_cancelled_with_its_node_leaves_no_effect(self, shop: Shop) -> None:
        begun = asyncio.Event()

        async def handle(order: Placed, session: AsyncSession) -> None:
            await shop.write(session, order.number)
            begun.set()
            await asyncio.Event().wait()

        shop.handles(handle)
        running = asyncio.create_task(shop.agent.run())
        await shop.receive(1)
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (shop.effects(), shop.inbox()) == ([], [(NODE, 0, 0, None)])
        assert shop.tables.count("dead_letters") == 0

    async def test_worker_survives_a_handler_awaiting_a_cancelled_task(self, shop: Shop) -> None:
        async def handle(order: Placed, session: AsyncSession) -> None:
            await shop.write(session, order.number)
            if order.number == 1:
                task = asyncio.create_task(asyncio.sleep(10))
                task.cancel()
                await task

        shop.handles(handle)
        async with shop.open():
            await shop.receive(1, 2)
            await shop.settled()
        assert shop.effects() == [2]
        (letter,) = shop.tables.dead_letters()
        assert letter[1:3] == ("RuntimeError", "something that the handler awaited was cancelled")
