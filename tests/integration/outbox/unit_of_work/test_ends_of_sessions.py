"""Sessions that end in any state: their connections are back in the pool, and in no transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from durable import Bus, Retry, message
from durable.agents.runner import Here, InLoop, InSteps, Place
from durable.agents.threads import Threads
from durable.outbox.scope import Scope
from durable.outbox.unit_of_work import UnitOfWork
from durable.testing import InMemoryBus
from tests.failure.waiting import eventually
from tests.integration.outbox.unit_of_work.sessions import Flavour, Line, Placed
from tests.support.tables import Tables

_IN_TRANSACTION = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND starts_with(state, 'idle in transaction')
"""
_OPTIONS: dict[str, Any] = {"close_resets_only": False, "join_transaction_mode": "create_savepoint"}

Step = Callable[[Session], object]


class Gone(Exception):
    """The end of a block."""


def begin_savepoint(session: Session) -> None:
    session.begin_nested()


def begin_savepoint_and_execute(session: Session) -> None:
    session.begin_nested()
    session.execute(text("SELECT 1"))


def release_savepoint(session: Session) -> None:
    if savepoint := session.get_nested_transaction():
        savepoint.commit()


def roll_back_savepoint(session: Session) -> None:
    if savepoint := session.get_nested_transaction():
        savepoint.rollback()


def begin_savepoint_of_the_connection(session: Session) -> None:
    session.connection().begin_nested()


def begin_savepoint_as_text(session: Session) -> None:
    session.execute(text("SAVEPOINT own"))


def roll_back_savepoint_as_text(session: Session) -> None:
    session.execute(text("ROLLBACK TO SAVEPOINT own"))


def execute(session: Session) -> None:
    session.execute(text("SELECT 1"))


def fail_in_a_statement(session: Session) -> None:
    session.execute(text("SELECT 1 / 0"))


def fail_in_a_flush(session: Session) -> None:
    session.add(Line(number=2**40))
    session.flush()


def break_the_commit(session: Session) -> None:
    session.add(Line(number=404))
    session.flush()


def break_the_rollback(session: Session) -> None:
    connection = session.info["connection"] = session.connection()  # not left to the collection of garbage
    event.listen(connection, "rollback", _fail, once=True)


def _fail(_: Connection) -> None:
    raise ValueError("a listener of the application")


def prepare(session: Session) -> None:
    session.prepare()


def lose_the_connection(session: Session) -> None:
    session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))


def commit(session: Session) -> None:
    session.commit()


def roll_back(session: Session) -> None:
    session.rollback()


def reset(session: Session) -> None:
    session.reset()


def close(session: Session) -> None:
    session.close()


def leave(_: Session) -> None:
    raise Gone


_WITHIN: Sequence[Step] = (
    begin_savepoint,
    begin_savepoint_and_execute,
    release_savepoint,
    roll_back_savepoint,
    begin_savepoint_of_the_connection,
    begin_savepoint_as_text,
    roll_back_savepoint_as_text,
    execute,
    fail_in_a_statement,
    fail_in_a_flush,
    break_the_commit,
)
_FAULTS: Sequence[Step] = (execute, fail_in_a_statement, fail_in_a_flush, break_the_commit)
_ENDS: Sequence[Step] = (execute, commit, roll_back, reset, close, leave)
_STEPS = (*_WITHIN, *_ENDS, break_the_rollback, lose_the_connection)


def run(steps: Sequence[Step], session: Session) -> None:
    """Take these steps, and swallow their errors."""
    for step in steps:
        try:
            step(session)
        except Gone:
            raise
        except Exception:
            continue


# ---------------------------------------------------------------- places


class House:
    """A pool of connections, and one kind of place where sessions on it work and end."""

    def __init__(self, kind: str, tables: Tables) -> None:
        self._kind, _, driver = kind.partition(" ")
        self._driver = driver or "psycopg"
        self._url = tables.url.replace("postgresql://", f"postgresql+{self._driver}://")
        self._sessions: list[object] = []  # no collection of garbage gives their connections back
        self.is_async = bool(driver)
        self.flavour = Flavour(create_async_engine(self._url) if self.is_async else create_engine(self._url))

    async def work(
        self,
        steps: Sequence[Step],
        *,
        before: Sequence[Step] = (),
        on: AsyncConnection | Connection | None = None,
        twophase: bool = False,
    ) -> None:
        """Do this in a session, which is then committed and closed; `before` it has an outbox, this."""
        bind: Any = on or self.flavour.engine
        options = {**_OPTIONS, "twophase": twophase}
        session = AsyncSession(bind, **options) if self.is_async else Session(bind, **options)
        self._sessions.append(session)
        if isinstance(session, AsyncSession):
            await session.run_sync(lambda each: run(before, each))
        else:
            run(before, session)
        outbox = self.flavour.enlist(session)
        with suppress(Exception):
            if self._kind == "unit_of_work":
                assert isinstance(session, AsyncSession)
                async with UnitOfWork(session, outbox, Scope()) as uow:
                    uow.send(Placed(1))
                    await session.run_sync(lambda each: run(steps, each))
                return
            place = self._place(session)
            async with place.closing():
                await place.do(lambda each: run(steps, each))
                await place.commit()

    def _place(self, session: AsyncSession | Session) -> Place:
        if isinstance(session, AsyncSession):
            return InLoop(session)
        return Here(session) if self._kind == "here" else InSteps(session, Threads(1, name="ends"), lambda: False)

    @property
    def in_use(self) -> int:
        pool: Any = self.flavour.engine.pool
        return int(pool.checkedout())

    async def dispose(self) -> None:
        if (disposed := self.flavour.engine.dispose()) is not None:
            await disposed


_KINDS = (
    "unit_of_work asyncpg",
    "unit_of_work psycopg",
    "handler asyncpg",
    "handler psycopg",
    "here",
    "threads",
)


@asynccontextmanager
async def housed(kind: str, tables: Tables) -> AsyncIterator[House]:
    house = House(kind, tables)
    try:
        yield house
    finally:
        await house.dispose()


async def take(kind: str, tables: Tables, steps: Sequence[Step]) -> None:
    async with housed(kind, tables) as house:
        await house.work(steps)
        assert house.in_use == 0
        await eventually(lambda: not tables.rows(_IN_TRANSACTION))


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("savepoints", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", _KINDS)
async def test_session_gives_its_connection_back(kind: str, savepoints: int, tables: Tables) -> None:
    async with housed(kind, tables) as house:
        for fault, end in product(_FAULTS, _ENDS):
            await house.work([execute, *[begin_savepoint_and_execute] * savepoints, fault, end])
            assert house.in_use == 0, (fault.__name__, end.__name__)
            assert not tables.rows(_IN_TRANSACTION), (fault.__name__, end.__name__)


@pytest.mark.parametrize("kind", _KINDS)
@given(steps=st.lists(st.sampled_from(_STEPS), min_size=1, max_size=9))
@example(
    steps=[begin_savepoint_and_execute, begin_savepoint_and_execute, fail_in_a_statement, commit, roll_back, execute]
)
@example(steps=[break_the_rollback, reset, execute])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_session_gives_its_connection_back_after_any_steps(kind: str, steps: list[Step], tables: Tables) -> None:
    asyncio.run(take(kind, tables, steps))


@pytest.mark.parametrize("kind", _KINDS)
async def test_session_gives_an_older_connection_back(kind: str, tables: Tables) -> None:
    async with housed(kind, tables) as house:
        savepoints = [begin_savepoint_and_execute] * 2
        await house.work([*savepoints, fail_in_a_statement], before=[execute])
        assert house.in_use == 0
        assert not tables.rows(_IN_TRANSACTION)


@pytest.mark.parametrize("savepoints", [0, 1, 2])
@pytest.mark.parametrize("kind", [kind for kind in _KINDS if "asyncpg" not in kind])
async def test_session_in_two_phases_gives_its_connection_back(kind: str, savepoints: int, tables: Tables) -> None:
    """asyncpg has no two phases."""
    async with housed(kind, tables) as house:
        for fault, end in product(_FAULTS, (*_ENDS, prepare)):
            steps = [execute, *[begin_savepoint_and_execute] * savepoints, fault, prepare, end]
            await house.work(steps, twophase=True)
            assert house.in_use == 0, (fault.__name__, end.__name__)
            assert not tables.rows(_IN_TRANSACTION), (fault.__name__, end.__name__)
            assert not tables.rows("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")


@pytest.mark.parametrize("savepoints", [1, 2, 3])
@pytest.mark.parametrize("kind", _KINDS)
async def test_joined_transaction_goes_on_when_its_session_has_ended(
    kind: str, savepoints: int, tables: Tables
) -> None:
    async with housed(kind, tables) as house:
        for fault, end in product(_FAULTS, _ENDS):
            steps = [execute, *[begin_savepoint_and_execute] * savepoints, fault, end]
            assert await _goes_on(house, steps), (fault.__name__, end.__name__)


async def _goes_on(house: House, steps: Sequence[Step]) -> bool:
    engine: Any = house.flavour.engine
    if not house.is_async:
        with engine.connect() as connection:
            transaction = connection.begin()
            await house.work(steps, on=connection)
            return bool(connection.scalar(text("SELECT 1")) and transaction.is_active)
    async with engine.connect() as connection:
        transaction = await connection.begin()
        await house.work(steps, on=connection)
        return bool(await connection.scalar(text("SELECT 1")) and transaction.is_active)


# ---------------------------------------------------------------- handlers


@message("ends.in-session")
@dataclass
class InSession:
    number: int


@message("ends.in-async-session")
@dataclass
class InAsyncSession:
    number: int


_LEFT_OPEN = (begin_savepoint_and_execute, begin_savepoint_and_execute, fail_in_a_statement)


def handled(bus: Bus) -> None:
    """Handlers that leave savepoints open after a failed statement."""

    @bus.handles(InSession, retry=Retry.never())
    def in_session(_: InSession, session: Session) -> None:
        run(_LEFT_OPEN, session)

    @bus.handles(InAsyncSession, retry=Retry.never())
    async def in_async_session(_: InAsyncSession, session: AsyncSession) -> None:
        await session.run_sync(lambda each: run(_LEFT_OPEN, each))


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_handlers_leave_the_pools_whole(driver: str, tables: Tables) -> None:
    """More messages than a pool has connections."""
    url = tables.url.replace("postgresql://", f"postgresql+{driver}://")
    bus = Bus("shop", url, pool_size=2, poll_interval="50ms")
    handled(bus)
    async with bus:
        async with bus.unit_of_work() as uow:
            for number in range(4):
                uow.send(InSession(number))
                uow.send(InAsyncSession(number))
        await eventually(lambda: tables.count("dead_letters") == 8)
        await eventually(lambda: not any(pool.in_use for pool in bus.statistics().pools.values()))


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_handlers_of_a_bus_in_memory_leave_the_pools_whole(driver: str, tables: Tables) -> None:
    bus = Bus("shop")
    handled(bus)
    async with housed(f"handler {driver}", tables) as of_tasks, housed("threads", tables) as of_threads:
        engine: Any = of_tasks.flavour.engine
        sync_engine: Any = of_threads.flavour.engine
        factory, sync_factory = async_sessionmaker(engine), sessionmaker(sync_engine)
        async with InMemoryBus(bus, factory, sync_session_factory=sync_factory) as memory:
            async with bus.unit_of_work() as uow:
                uow.send(InSession(1))
                uow.send(InAsyncSession(1))
            await memory.drain()
            assert len(memory.dead_letters) == 2
        assert (of_tasks.in_use, of_threads.in_use) == (0, 0)
        assert not tables.rows(_IN_TRANSACTION)
