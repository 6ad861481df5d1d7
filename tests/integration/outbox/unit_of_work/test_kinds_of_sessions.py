"""Sessions of every kind, bound in every way, and what durable keeps of them: it is theirs alone, and the application's
sessions are its own again afterwards.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import msgspec
import pytest
from sqlalchemy import Connection, Engine, create_engine, event, func, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, SessionTransaction

from durable import Bus, NoUnitOfWork, Retry, WiringError, message
from durable.application.incoming import Incoming
from durable.application.middleware import HandleNext, Middleware
from durable.outbox.outbox import Outbox
from durable.testing import InMemoryBus, eventually
from tests.integration.outbox.unit_of_work.sessions import BILLING, Base, Flavour, Line, Placed, sent_numbers
from tests.support.tables import Tables

Bound = Callable[[Any, Any], dict[str, Any]]

JOIN_MODES: Final = ("conditional_savepoint", "create_savepoint", "rollback_only", "control_fully")


def _joined(mode: str) -> Bound:
    return lambda engine, connection: {"bind": connection, "join_transaction_mode": mode}


def _joined_by_class(mode: str) -> Bound:
    return lambda engine, connection: {"binds": {Base: connection}, "join_transaction_mode": mode}


BOUND: Final[dict[str, Bound]] = {
    "an engine": lambda engine, connection: {"bind": engine},
    "an engine for each class": lambda engine, connection: {"binds": {Base: engine}},
    **{f"a connection, {mode}": _joined(mode) for mode in JOIN_MODES},
    **{f"a connection for each class, {mode}": _joined_by_class(mode) for mode in JOIN_MODES},
}
each_bound = pytest.mark.parametrize("bound", BOUND.values(), ids=BOUND)


@message("uow.ordered")
class Ordered(msgspec.Struct):
    number: int


class Refused(Exception):
    """What a handler, or the block of a unit of work, raises."""


async def with_connection(engine: AsyncEngine | Engine, work: Callable[[Connection], None]) -> None:
    """Do this work with a connection whose transaction has begun, and commit that."""

    def whole(connection: Connection) -> None:
        connection.begin()
        work(connection)
        connection.commit()

    if isinstance(engine, AsyncEngine):
        async with engine.connect() as connection:
            await connection.run_sync(whole)
    else:
        with engine.connect() as sync_connection:
            whole(sync_connection)


def place(session: Session, outbox: Outbox, number: int) -> None:
    session.add(Line(line=number))
    outbox.send(Placed(number))


class TestEnlisted:
    @each_bound
    @pytest.mark.parametrize("end", [Session.commit, Session.rollback], ids=["commit", "rollback"])
    @pytest.mark.parametrize("flushes", [True, False], ids=["flushed", "not flushed"])
    async def test_session_stores_its_messages_with_its_rows(
        self, flavour: Flavour, tables: Tables, bound: Bound, end: Callable[[Session], None], flushes: bool
    ) -> None:
        def work(connection: Connection) -> None:
            with Session(**bound(connection.engine, connection)) as session:
                place(session, flavour.enlist(session), 1)
                if flushes:
                    session.flush()
                end(session)

        await with_connection(flavour.engine, work)
        assert tables.rows("SELECT line FROM lines") == sent_numbers(tables) == [1] * (end is Session.commit)
        assert len(flavour.agents.told()) == len(sent_numbers(tables))

    @each_bound
    @pytest.mark.parametrize("first_ends", ["before", "after"])
    @pytest.mark.parametrize("end", [Session.commit, Session.rollback], ids=["commit", "rollback"])
    async def test_session_with_the_info_of_another_has_an_outbox_of_its_own(
        self, flavour: Flavour, tables: Tables, bound: Bound, first_ends: str, end: Callable[[Session], None]
    ) -> None:
        def work(connection: Connection) -> None:
            with Session(**bound(connection.engine, connection), info={"tenant": 7}) as first:
                place(first, flavour.enlist(first), 1)
                first.flush()
                if first_ends == "before":
                    first.commit()
                with Session(connection.engine, info=first.info) as second:
                    place(second, flavour.enlist(second), 2)
                    end(second)
                first.commit()

        await with_connection(flavour.engine, work)
        expected = [1, 2] if end is Session.commit else [1]
        assert tables.rows("SELECT line FROM lines ORDER BY line") == sorted(sent_numbers(tables)) == expected

    async def test_messages_of_a_session_without_an_engine_for_them_are_refused_with_advice(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(connection: Connection) -> None:
            with Session(binds={Base: connection.engine}) as session:
                flavour.enlist(session).send(Placed(1))
                with pytest.raises(WiringError, match="give it bind= beside binds="):
                    session.commit()

        await with_connection(flavour.engine, work)
        assert sent_numbers(tables) == []

    async def test_session_without_autobegin_sends_within_a_transaction_alone(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(connection: Connection) -> None:
            with Session(connection.engine, autobegin=False) as session:
                outbox = flavour.enlist(session)
                with pytest.raises(NoUnitOfWork, match="autobegin=False"):
                    outbox.send(Placed(1))
                with session.begin():
                    outbox.send(Placed(2))

        await with_connection(flavour.engine, work)
        assert sent_numbers(tables) == [2]


class Lent:
    """A bus in memory over two sessions of the test."""

    def __init__(self, session: AsyncSession, sync_session: Session) -> None:
        self.bus = Bus("shop")
        self.bus.route(Placed, to=BILLING)
        self.errors: list[Exception] = []
        self.fails = False
        self.memory = InMemoryBus(self.bus, lambda: session, sync_session_factory=lambda: sync_session)

    def work(self, session: Session, number: int) -> None:
        session.add(Line(line=number))
        self.bus.send(Placed(number))
        session.flush()
        if self.fails:
            error = Refused()
            self.errors.append(error)  # its traceback knows all that has failed with it
            raise error

    def prepare(self, door: str) -> None:
        if door == "handler":

            @self.bus.handles(Ordered, retry=Retry(immediate=0, delays=[]))
            async def handle(ordered: Ordered, session: AsyncSession) -> None:
                await session.run_sync(self.work, ordered.number)

        elif door != "unit of work":

            @self.bus.handles(Ordered, retry=Retry(immediate=0, delays=[]))
            def handle_sync(ordered: Ordered, session: Session) -> None:
                self.work(session, ordered.number)

        if door == "sync handler in steps":
            self.bus.use(PassingOn())

    async def do(self, door: str, number: int) -> None:
        if door != "unit of work":
            self.memory.deliver(Ordered(number))
            await self.memory.drain()
            return
        with suppress(Refused):
            async with self.bus.unit_of_work() as uow:
                await uow.session.run_sync(self.work, number)


class PassingOn(Middleware):
    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        return await call_next(incoming)


@pytest.fixture(params=["asyncpg", "psycopg"])
async def engine(request: pytest.FixtureRequest, tables: Tables) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(tables.url.replace("postgresql://", f"postgresql+{request.param}://"))
    yield engine
    await engine.dispose()


@pytest.fixture
def sync_engine(tables: Tables) -> Iterator[Engine]:
    engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
    yield engine
    engine.dispose()


COUNT: Final = select(func.count()).select_from(Line)


def leaves_rows(options: dict[str, Any], door: str) -> bool:
    """Tell whether close(), which ends a handler that fails, leaves rows of such a session in the transaction that it
    has joined.
    """
    return door != "unit of work" and options.get("join_transaction_mode") in ("conditional_savepoint", "rollback_only")


@each_bound
@pytest.mark.parametrize("fails", [False, True], ids=["", "failed"])
class TestLent:
    """A session that the application has made is its own again after a unit of work or a handler, and so is a
    connection that it has opened.
    """

    @pytest.mark.parametrize("door", ["unit of work", "handler"])
    async def test_async_session_stays_usable(
        self, engine: AsyncEngine, tables: Tables, bound: Bound, door: str, fails: bool, caplog: Any
    ) -> None:
        async with engine.connect() as connection:
            await connection.begin()
            options = bound(engine, connection)
            session = AsyncSession(**options, expire_on_commit=False)
            lent = Lent(session, Session())
            lent.fails = fails
            stay = not fails or leaves_rows(options, door)
            lent.prepare(door)
            async with lent.memory as memory:
                for number in (1, 2):
                    await lent.do(door, number)
                    assert await session.scalar(COUNT) == number * stay
                    await session.commit()
                assert await session.scalar(COUNT) == 2 * stay
                await connection.commit()  # beside a transaction of the session
                await session.close()
                assert [sent.number for sent in memory.sent(Placed)] == [1, 2] * stay
            assert await connection.scalar(COUNT) == await session.scalar(COUNT) == 2 * stay
            await session.close()
        assert len(lent.errors) == 2 * fails
        assert "cannot be rolled back" not in caplog.text

    @pytest.mark.parametrize("door", ["sync handler", "sync handler in steps"])
    async def test_sync_session_stays_usable(
        self, sync_engine: Engine, tables: Tables, bound: Bound, door: str, fails: bool
    ) -> None:
        with sync_engine.connect() as connection:
            connection.begin()
            options = bound(sync_engine, connection)
            session = Session(**options, expire_on_commit=False)
            lent = Lent(AsyncSession(), session)
            lent.fails = fails
            stay = not fails or leaves_rows(options, door)
            lent.prepare(door)
            async with lent.memory as memory:
                for number in (1, 2):
                    await lent.do(door, number)
                    assert session.scalar(COUNT) == number * stay
                    session.commit()
                assert session.scalar(COUNT) == 2 * stay
                connection.commit()  # beside a transaction of the session
                session.close()
                assert [sent.number for sent in memory.sent(Placed)] == [1, 2] * stay
            assert connection.scalar(COUNT) == session.scalar(COUNT) == 2 * stay
            session.close()
        assert len(lent.errors) == 2 * fails


async def test_session_with_the_info_of_a_handlers_commits_by_itself(
    engine: AsyncEngine, sync_engine: Engine, tables: Tables
) -> None:
    bus = Bus("shop")

    @bus.handles(Ordered, retry=Retry(immediate=0, delays=[]))
    async def handle(ordered: Ordered, session: AsyncSession) -> None:
        await session.execute(insert(Line).values(line=1))
        async with AsyncSession(engine, info=session.info) as audit:
            await audit.execute(insert(Line).values(line=2))
            await audit.commit()
        raise Refused

    async with InMemoryBus(bus, lambda: AsyncSession(engine)) as memory:
        memory.deliver(Ordered(1))
        await memory.drain()
        assert [letter.reason.endswith("Refused") for letter in memory.dead_letters] == [True]
    assert tables.rows("SELECT line FROM lines") == [2]


class TestTwoBuses:
    """After the last COMMIT of a session nothing can be sent with it, by whatever bus."""

    @staticmethod
    def listen(session: AsyncSession, other: Bus, enlists: str) -> list[str]:
        """Let the other bus send when the transaction has ended. Returns what became of it."""
        told: list[str] = []
        sync_session = session.sync_session
        outboxes = [other.runtime.sessions.outbox(session)] if enlists == "before" else []

        @event.listens_for(sync_session, "before_commit")
        def enlist(_: Session) -> None:
            outboxes.append(other.runtime.sessions.outbox(session))

        @event.listens_for(sync_session, "after_transaction_end")
        def send(_: Session, transaction: SessionTransaction) -> None:
            if transaction.parent is None and not told:
                try:
                    outboxes[0].send(Placed(1))
                    told.append("sent")
                except NoUnitOfWork:
                    told.append("refused")

        return told

    @pytest.mark.parametrize("enlists", ["before", "at the COMMIT"])
    @pytest.mark.parametrize("door", ["unit of work", "handler"])
    async def test_other_bus_is_refused_after_the_last_commit(self, tables: Tables, door: str, enlists: str) -> None:
        bus, other = Bus("shop", tables.url), Bus("stock", tables.url)
        other.route(Placed, to=BILLING)
        told: list[str] = []
        if door == "unit of work":
            async with bus.unit_of_work() as uow:
                told = self.listen(uow.session, other, enlists)
                await uow.session.execute(insert(Line).values(line=1))
        else:

            @bus.handles(Ordered)
            async def handle(ordered: Ordered, session: AsyncSession) -> None:
                nonlocal told
                told = self.listen(session, other, enlists)
                await session.execute(insert(Line).values(line=1))

            async with bus:
                async with bus.unit_of_work():
                    bus.send(Ordered(1))
                await eventually(lambda: bool(told), what="the end of the handler")
        assert told == ["refused"]
        assert sent_numbers(tables) == []
        await bus.runtime.stop()
