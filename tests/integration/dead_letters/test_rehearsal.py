"""Handlers of dead letters run by hand: a rehearsal changes nothing, whatever the handler does; handle() once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx
import msgspec
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import Bus, Context, HandleNext, Incoming, InvalidMessage, Middleware, Reject, message
from durable.calls import service
from durable.dead_letters.rehearsal import AlreadyResolved, Rehearsed, handle, rehearsal
from durable.embedded import Embedded
from durable.errors import StillWaiting, WiringError
from durable.storage import dead_letters, receipts
from durable.storage.dead_letters import DeadLetter, LetterRange, Selection
from durable.storage.receipts import Standing
from tests.failure import leftovers
from tests.support import letters
from tests.support.letters import ENDPOINT, PEER, SCHEMA, envelope
from tests.support.tables import Tables, shared_tables

INSERT = text("INSERT INTO effects (number) VALUES (:number)")


@message("rehearsing.placed")
class Placed(msgspec.Struct):
    number: int


@message("rehearsing.billed")
class Billed(msgspec.Struct):
    number: int


@message("rehearsing.answered")
class Answered(msgspec.Struct):
    number: int


@service("rehearsing.stock", version="1.0")
class Stock:
    async def count(self) -> int:
        raise NotImplementedError


@pytest.fixture(scope="module")
def shared(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        tables.execute("CREATE TABLE effects (effect serial, number integer)")
        tables.execute("CREATE TABLE once (number integer UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        yield tables


@pytest.fixture
def tables(shared: Tables) -> Tables:
    shared.clear()
    shared.execute("TRUNCATE effects, once")
    return shared


@pytest.fixture
def bus(tables: Tables) -> Bus:
    bus = Bus(ENDPOINT, tables.url)
    bus.route(Billed, to=PEER)
    bus.expects(Answered, at=PEER)
    return bus


def letter_of(tables: Tables, number: int = 1, **changes: Any) -> DeadLetter:
    """A letter whose message has this number."""
    with leftovers.transaction(tables.url) as conn:
        (made,) = letters.incoming(
            conn, [msgspec.structs.replace(envelope(number, message_type="rehearsing.placed"), **changes)]
        )
        return dead_letters.read(conn, SCHEMA, Selection(ids=[made.id]), LetterRange(0, 2**40, 1))[0]


def everything(tables: Tables) -> list[Any]:
    """Every row of every table, with the transaction that wrote it and where it lies."""
    names = tables.rows(
        "SELECT format('%%I.%%I', schemaname, tablename) FROM pg_tables "
        "WHERE schemaname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1"
    )
    return [
        (name, tables.rows(f"SELECT xmin::text, ctid::text, t::text FROM {name} t ORDER BY ctid")) for name in names
    ]


async def rehearsed(bus: Bus, letter: DeadLetter) -> Rehearsed:
    async with rehearsal(bus) as stage:
        return await stage.run(letter)


class TestRehearsal:
    async def test_rehearsal_lists_the_sends_and_leaves_no_trace(self, bus: Bus, tables: Tables) -> None:
        seen: list[Any] = []

        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession, ctx: Context) -> Billed:
            await session.execute(INSERT, {"number": placed.number})
            ctx.send(Billed(10), delay=60)
            bus.send(Billed(20))
            seen.append(
                (ctx.attempt, ctx.id, (await session.execute(text("SELECT count(*) FROM effects"))).scalar_one())
            )
            return Billed(30)

        letter = letter_of(tables)
        before = everything(tables)

        found = await rehearsed(bus, letter)

        assert everything(tables) == before
        assert (found.outcome, found.error) == ("succeeds", None)
        assert [(each.message_type, each.destination, each.body) for each in found.sends] == [
            ("rehearsing.billed", PEER, b'{"number":%d}' % number) for number in (10, 20, 30)
        ]
        assert [each.execution_time is not None for each in found.sends] == [True, False, False]
        assert {each.causation_id for each in found.sends} == {letter.summary.id}
        assert seen == [(1, letter.summary.id, 1)], "it saw its own effects"

    async def test_failed_rehearsal_tells_the_error_and_leaves_no_trace(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})
            raise LookupError("no such customer")

        letter = letter_of(tables)
        before = everything(tables)

        found = await rehearsed(bus, letter)

        assert (found.outcome, repr(found.error), found.sends) == ("fails", "LookupError('no such customer')", ())
        assert everything(tables) == before

    async def test_a_sync_handler_is_rehearsed_as_well(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed)
        def place(placed: Placed, session: Session) -> Billed:
            session.execute(INSERT, {"number": placed.number})
            return Billed(2)

        letter = letter_of(tables)
        before = everything(tables)

        found = await rehearsed(bus, letter)

        assert (found.outcome, [each.body for each in found.sends]) == ("succeeds", [b'{"number":2}'])
        assert everything(tables) == before

    async def test_list_handler_is_given_a_list_of_one(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed, max_batch=10)
        async def place(placed: list[Placed]) -> list[Billed]:
            return [Billed(each.number + 1) for each in placed]

        found = await rehearsed(bus, letter_of(tables))

        assert [(each.body, each.causation_id) for each in found.sends] == [(b'{"number":2}', None)]

    async def test_units_of_work_committed_by_the_handler_are_undone(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> None:
            async with bus.unit_of_work() as uow:
                await uow.session.execute(INSERT, {"number": placed.number})
                bus.send(Billed(2))
            await session.execute(INSERT, {"number": placed.number})

        letter = letter_of(tables)
        before = everything(tables)

        found = await rehearsed(bus, letter)

        assert (found.outcome, [each.body for each in found.sends]) == ("succeeds", [b'{"number":2}'])
        assert everything(tables) == before

    async def test_handler_committing_its_session_fails_like_on_a_node(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})
            await session.commit()

        letter = letter_of(tables)
        before = everything(tables)

        found = await rehearsed(bus, letter)

        assert "must not commit its session" in str(found.error)
        assert everything(tables) == before

    @pytest.mark.parametrize("shares_info", [False, True], ids=["", "with the info of the handler's"])
    async def test_a_session_of_the_applications_own_cannot_be_enlisted(
        self, bus: Bus, tables: Tables, shares_info: bool
    ) -> None:
        """Nobody could undo what it commits."""
        sessions = bus.runtime.sessions

        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> None:
            async with AsyncSession(sessions.engine, info=session.info if shares_info else None) as own:
                with bus.enlist(own):
                    pytest.fail("it was")

        found = await rehearsed(bus, letter_of(tables))
        assert "cannot undo" in str(found.error)

    async def test_fault_found_only_by_the_commit_is_reported(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> None:
            await session.execute(text("INSERT INTO once VALUES (1), (1)"))

        found = await rehearsed(bus, letter_of(tables))
        assert "once_number_key" in str(found.error)

    async def test_handler_exceeding_its_timeout_fails(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed, timeout=timedelta(milliseconds=50))
        async def place(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})
            await session.execute(text("SELECT pg_sleep(30)"))

        @bus.handles(Billed, timeout=timedelta(milliseconds=50))
        def bill(billed: Billed, session: Session) -> None:
            time.sleep(0.1)

        late = letter_of(tables)
        late_too = letter_of(tables, message_type="rehearsing.billed")
        async with rehearsal(bus) as stage:
            outcomes = [await stage.run(late), await stage.run(late_too), await stage.run(late)]
        assert [type(each.error) for each in outcomes] == [TimeoutError] * 3
        assert tables.rows("SELECT * FROM effects") == []

    async def test_handler_awaiting_a_cancelled_task_fails_and_the_rehearsal_ends(
        self, bus: Bus, tables: Tables
    ) -> None:
        @bus.handles(Placed)
        async def place(placed: Placed) -> None:
            task = asyncio.create_task(asyncio.sleep(10))
            task.cancel()
            await task

        found = await rehearsed(bus, letter_of(tables))
        assert (found.outcome, "was cancelled" in str(found.error)) == ("fails", True)

    async def test_letters_are_rehearsed_one_after_the_other_and_see_nothing_of_each_other(
        self, bus: Bus, tables: Tables
    ) -> None:
        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})
            assert (await session.execute(text("SELECT count(*) FROM effects"))).scalar_one() == 1
            if placed.number == 2:
                raise Reject("not this one")

        three = [letter_of(tables, number) for number in (1, 2, 3)]
        async with rehearsal(bus) as stage:
            outcomes = [(await stage.run(each)).outcome for each in three]
        assert outcomes == ["succeeds", "fails", "succeeds"]

    async def test_letter_unfit_for_any_handler_is_reported(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed)
        async def place(placed: Placed) -> None:
            pytest.fail("it runs")

        undecodable = letter_of(tables, body=b"{")
        unknown = letter_of(tables, message_type="rehearsing.unheard-of")
        bytes_alone = msgspec.structs.replace(undecodable, summary=undecodable.summary._replace(replayable=False))
        outgoing = msgspec.structs.replace(undecodable, summary=undecodable.summary._replace(side="outgoing"))
        async with rehearsal(bus) as stage:
            outcomes = [await stage.run(each) for each in (undecodable, unknown, bytes_alone, outgoing)]
        assert [(each.outcome, str(each.error)[:26]) for each in outcomes] == [
            ("fails", "the body is no Placed: Inp"),
            ("fails", "shop has no handler for re"),
            ("fails", f"letter {undecodable.summary.letter_id} is no whole envelope"[:26]),
            ("is sent", "None"),
        ]

    async def test_running_bus_cannot_rehearse(self, bus: Bus) -> None:
        async with bus:
            with pytest.raises(WiringError, match="in a process of its own"):
                async with rehearsal(bus):
                    pytest.fail("it does")

    async def test_bus_runs_after_a_rehearsal(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})

        assert (await rehearsed(bus, letter_of(tables))).outcome == "succeeds"
        async with bus, bus.unit_of_work() as uow:
            await uow.session.execute(INSERT, {"number": 7})
        assert tables.rows("SELECT number FROM effects") == [7]


class Calls:
    """Every public method of a bus, as a handler may call it; what is left out declares, or does nothing by itself."""

    def __init__(self, bus: Bus, waiting: UUID) -> None:
        self.bus = bus
        self.waiting = waiting

    async def send(self) -> None:
        self.bus.send(Billed(2))

    async def request(self) -> None:
        self.bus.request(Billed(2), Answered)

    async def publish(self) -> None:
        self.bus.publish(Placed(2))

    async def unit_of_work(self) -> None:
        async with self.bus.unit_of_work() as uow:
            await uow.session.execute(INSERT, {"number": 1})
            uow.send(Billed(2))

    async def enlist(self) -> None:
        async with self.bus.runtime.sessions.open() as session:
            with self.bus.enlist(session):
                self.bus.send(Billed(2))
            await session.commit()

    async def pause(self) -> None:
        await self.bus.pause(Placed)
        await self.bus.pause(destination=PEER, for_=60)
        await self.bus.pause(schedule="nightly")

    async def resume(self) -> None:
        assert await self.bus.resume(listener=ENDPOINT)

    async def cancel(self) -> None:
        assert await self.bus.cancel(self.waiting)

    async def wait_for(self) -> None:
        with pytest.raises(StillWaiting):
            await self.bus.wait_for(self.waiting, timeout=0.2)

    async def run_now(self) -> None:
        assert await self.bus.run_now(self.waiting)

    async def run_schedule(self) -> None:
        assert await self.bus.run_schedule("nightly")

    async def reschedule(self) -> None:
        assert await self.bus.reschedule(self.waiting, delay=60)

    async def reschedule_next(self) -> None:
        assert await self.bus.reschedule_next("nightly", delay=60)

    async def serve(self) -> None:
        with pytest.raises(WiringError, match="use another bus"):
            await self.bus.serve()

    async def run(self) -> None:
        with pytest.raises(WiringError, match="use another bus"):
            async with self.bus:
                pytest.fail("it runs")

    async def statistics(self) -> None:
        assert self.bus.statistics().node_id is None

    async def providers(self) -> None:
        assert await self.bus.providers(Stock) == []

    async def asgi(self) -> None:
        self.bus.asgi()

    async def metrics_app(self) -> None:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(self.bus.metrics_app()), base_url="http://shop"
        ) as client:
            assert "durable_" in (await client.get("/metrics")).text


DECLARES = {
    "caller",
    "configure",
    "connect",
    "disconnect",
    "every",
    "expects",
    "handles",
    "keys_from",
    "listen",
    "meter",
    "offer",
    "on_error",
    "route",
    "subscribe",
    "trace",
    "use",
    "withdraw",
}
NO_CALLS = {"application", "running_on", "runtime"}
CALLS = sorted(name for name in vars(Calls) if not name.startswith("_"))


class TestCallsOfTheBus:
    @pytest.fixture
    async def waiting(self, bus: Bus, tables: Tables) -> UUID:
        """A message and a schedule that wait for their time, and a listener that is paused."""
        tables.execute("INSERT INTO durable.circuits (kind, key, reason, actor) VALUES ('listener', 'shop', 'x', 'x')")
        tables.execute("INSERT INTO durable.nodes (node_id, service, description, version) VALUES (7, 'shop', '', '')")
        tables.execute(
            "INSERT INTO durable.schedules (name, cron, tz, misfire, declaration, declared_by, due_at, occurrence_at)"
            " VALUES ('nightly', '0 3 * * *', 'UTC', 'once', 'x', 7, now() + interval '1 h', now() + interval '1 h')"
        )
        async with bus.unit_of_work() as uow:
            return uow.send(Billed(1), delay=3600)

    def test_calls_cover_each_public_method(self) -> None:
        public = {name for name in vars(Bus) if not name.startswith("_")}
        assert public == {*CALLS, *DECLARES, *NO_CALLS}

    async def test_handler_goes_on_when_the_look_for_a_receipt_is_over(
        self, bus: Bus, tables: Tables, waiting: UUID, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        look, calls = receipts.look_again, Calls(bus, waiting)

        def look_slowly(conn: Connection, schema: str, ids: Collection[UUID], *, since: int) -> list[Standing]:
            conn.execute(text("SELECT pg_sleep(0.3)"))
            return look(conn, schema, ids, since=since)

        monkeypatch.setattr(receipts, "look_again", look_slowly)

        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> None:
            await calls.wait_for()
            async with session.begin_nested():
                await session.execute(INSERT, {"number": 1})
                await asyncio.sleep(0.5)

        found = await rehearsed(bus, letter_of(tables))
        assert (found.outcome, found.error) == ("succeeds", None)

    @pytest.mark.parametrize("name", CALLS)
    async def test_rehearsal_leaves_no_trace_of_any_call(
        self, name: str, bus: Bus, tables: Tables, waiting: UUID
    ) -> None:
        calls = Calls(bus, waiting)

        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": 1})
            await getattr(calls, name)()
            await session.execute(INSERT, {"number": 2})

        letter = letter_of(tables)
        before = everything(tables)

        found = await rehearsed(bus, letter)

        assert (found.outcome, found.error) == ("succeeds", None)
        assert everything(tables) == before

    async def test_rehearsal_lists_the_calls_of_the_bus_without_effect(
        self, bus: Bus, tables: Tables, waiting: UUID
    ) -> None:
        calls = Calls(bus, waiting)

        @bus.handles(Placed)
        async def place(placed: Placed, ctx: Context) -> None:
            await calls.pause()
            await calls.cancel()
            ctx.circuit.open(60)
            ctx.circuit.open(60, destination=PEER)

        letter = letter_of(tables)
        before = everything(tables)

        async with rehearsal(bus) as stage:
            found = [await stage.run(letter), await stage.run(letter)]

        assert [list(each.does) for each in found] == [
            [
                "pause handler rehearsing.placed",
                f"pause destination {PEER}",
                "pause schedule nightly",
                f"cancel message {waiting}",
                "pause handler rehearsing.placed",
                f"pause destination {PEER}",
            ]
        ] * 2
        assert everything(tables) == before

    async def test_middleware_of_a_sync_handler_leaves_no_trace_of_a_pause(self, bus: Bus, tables: Tables) -> None:
        class Pauses(Middleware):
            async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
                await bus.pause(Placed)
                return await call_next(incoming)

        bus.use(Pauses())

        @bus.handles(Placed)
        def place(placed: Placed, session: Session) -> None:
            session.execute(INSERT, {"number": placed.number})

        letter = letter_of(tables)
        before = everything(tables)

        found = await rehearsed(bus, letter)

        assert (found.outcome, list(found.does)) == ("succeeds", ["pause handler rehearsing.placed"])
        assert everything(tables) == before

    async def test_failing_call_leaves_the_session_unchanged(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": 1})
            with pytest.raises(InvalidMessage):
                await bus.pause(Placed, reason="a nul: \0")
            assert (await session.execute(text("SELECT count(*) FROM effects"))).scalar_one() == 1

        found = await rehearsed(bus, letter_of(tables))
        assert (found.outcome, list(found.does)) == ("succeeds", [])

    async def test_call_between_two_letters_is_refused(self, bus: Bus) -> None:
        async with rehearsal(bus):
            with pytest.raises(WiringError, match="would not be undone"):
                await bus.pause(destination=PEER)


class TestHandling:
    async def test_circuit_opened_by_the_handler_is_open(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed)
        async def place(placed: Placed, ctx: Context) -> None:
            ctx.circuit.open(reason="quota used up")

        await handle(bus, letter_of(tables), actor="ada")
        assert tables.rows("SELECT kind, key, reason FROM durable.circuits") == [
            ("handler", "rehearsing.placed", "quota used up")
        ]

    async def test_effects_sends_and_resolution_are_one_transaction(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> Billed:
            await session.execute(INSERT, {"number": placed.number})
            return Billed(2)

        letter = letter_of(tables)

        sends = await handle(bus, letter, actor="ada", reason="it was urgent")

        assert [each.body for each in sends] == [b'{"number":2}']
        resolution = tables.one(
            "SELECT resolution, resolved_by, resolution_reason, replay_count FROM durable.dead_letters"
        )
        assert resolution == ("handled", "ada", "it was urgent", 1)
        assert tables.rows("SELECT owner_id, body FROM durable.outgoing_envelopes") == [(0, b'{"number":2}')]
        assert tables.rows("SELECT side, outcome FROM durable.envelope_history WHERE outcome = 'handled'") == [
            ("incoming", "handled")
        ]
        together = "SELECT xmin::text FROM effects UNION SELECT xmin::text FROM durable.dead_letters"
        assert len(tables.rows(f"{together} UNION SELECT xmin::text FROM durable.outgoing_envelopes")) == 1

    async def test_effects_sends_and_resolution_of_a_sync_handler_are_one_transaction(
        self, bus: Bus, tables: Tables
    ) -> None:
        @bus.handles(Placed)
        def place(placed: Placed, session: Session) -> None:
            session.execute(INSERT, {"number": placed.number})

        await handle(bus, letter_of(tables), actor="ada")
        assert tables.rows("SELECT number FROM effects") == [1]
        assert tables.rows("SELECT resolution FROM durable.dead_letters") == ["handled"]

    async def test_failure_leaves_the_letter_unchanged(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})
            raise LookupError

        letter = letter_of(tables)
        before = everything(tables)
        with pytest.raises(LookupError):
            await handle(bus, letter, actor="ada")
        assert everything(tables) == before

    async def test_two_concurrent_runs_have_one_effect(self, bus: Bus, tables: Tables) -> None:
        met = asyncio.Barrier(2)

        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})
            await met.wait()

        letter = letter_of(tables)
        ended = await asyncio.gather(
            handle(bus, letter, actor="ada"), handle(bus, letter, actor="bob"), return_exceptions=True
        )
        assert [type(each) for each in ended if isinstance(each, Exception)] == [AlreadyResolved]
        assert tables.rows("SELECT number FROM effects") == [1]

    async def test_letter_replayed_meanwhile_is_not_handled(self, bus: Bus, tables: Tables) -> None:
        @bus.handles(Placed)
        async def place(placed: Placed, session: AsyncSession) -> None:
            await session.execute(INSERT, {"number": placed.number})
            with leftovers.transaction(tables.url) as conn:
                dead_letters.replay(conn, SCHEMA, Selection(), LetterRange(0, 2**40, 10), actor="bob")

        with pytest.raises(AlreadyResolved):
            await handle(bus, letter_of(tables), actor="ada")
        assert (tables.rows("SELECT * FROM effects"), tables.count("incoming_envelopes")) == ([], 1)
