"""Connections to the database that carry nothing any more: noticed within a bound, given up, and nothing is lost.

A hole is opened in a proxy: for the connections that are open, as by a firewall that forgot them, or for all and one
direction, as by a route that is gone. No keepalive sees it, because the proxy acknowledges every packet.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import msgspec
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import Bus, message
from durable.agents.waking import Waker
from durable.calls import service
from durable.embedded import Embedded
from durable.envelope import NodeId
from durable.errors import StorageUnavailable
from durable.recovery.registering import Registering
from durable.settings import Settings, load_settings
from durable.storage import engines
from durable.storage.database import Database
from durable.storage.outages import is_outage
from tests.failure.waiting import eventually
from tests.support.proxy import DOWN, UP, ChaosProxy
from tests.support.servers import address_of
from tests.support.tables import Tables, shared_tables

Hole = Callable[[ChaosProxy], None]

HOLES: dict[str, Hole] = {
    "stranded": ChaosProxy.strand,
    "no answers": lambda proxy: proxy.swallow(DOWN),
    "no questions": lambda proxy: proxy.swallow(UP),
}
DRIVERS = ["asyncpg", "psycopg"]
BOUND = 30.0  # seconds; far above each limit below, far below for ever
QUICK: dict[str, Any] = {
    "statement_timeout": 1.0,
    "unit_of_work_timeout": 1.0,
    "handler_timeout": 1.0,
    "connect_timeout": 1.0,
    "pool_timeout": 5.0,
    "heartbeat_interval": 0.2,
    "heartbeat_stale": 3.0,
    "poll_interval": 0.1,
    "forgotten_after": 1.0,
}

PATIENT: dict[str, Any] = {
    "drain_timeout": 1.0,
    "heartbeat_interval": 0.5,
    "heartbeat_stale": 4.0,
    "dormant_grace": 1.0,
    "connect_timeout": 2.0,
    "statement_timeout": 3.0,
    "poll_interval": 0.3,
}


@message("holes.noted")
class Noted(msgspec.Struct):
    number: int


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "GRACE", timedelta(milliseconds=200))


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=HOLES)
def open_hole(request: pytest.FixtureRequest) -> Hole:
    return HOLES[request.param]


@pytest.fixture
def tables(server: Embedded) -> Iterator[Tables]:
    with shared_tables(server) as tables:
        tables.execute("CREATE TABLE notes (number int)")
        yield tables


@asynccontextmanager
async def proxied(database: str, driver: str) -> AsyncIterator[tuple[ChaosProxy, str]]:
    async with ChaosProxy(address_of(database)) as proxy:
        port = int(proxy.uri.rpartition(":")[2])
        behind = make_url(database).set(drivername=f"postgresql+{driver}", host="127.0.0.1", port=port, query={})
        yield proxy, behind.render_as_string(hide_password=False)


def answer(conn: Connection, _: str) -> int:
    return int(conn.exec_driver_sql("SELECT 1").scalar_one())


def open_from_a_thread(loop: asyncio.AbstractEventLoop, hole: Hole, proxy: ChaosProxy) -> None:
    opened = threading.Event()

    def open_it() -> None:
        hole(proxy)
        opened.set()

    loop.call_soon_threadsafe(open_it)
    assert opened.wait(BOUND)


# ---------------------------------------------------------------- a start


@service("clerk", version="1.0")
class Clerk(Protocol):
    async def greet(self, name: str) -> str: ...


class Greeter:
    async def greet(self, name: str) -> str:
        return f"hello {name}"


async def test_bus_starts_although_its_database_freezes_amid_the_start(
    database_url: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The membership is lost meanwhile. What the node had begun has time to end, however short drain_timeout is."""
    join, begun = Registering.join, asyncio.Event()

    async def joining(self: Registering, node: NodeId) -> None:
        asyncio.get_running_loop().call_later(0.15, begun.set)  # amid its work
        await join(self, node)

    monkeypatch.setattr(Registering, "join", joining)
    async with proxied(database_url, driver) as (proxy, url):
        bus = Bus("holes", database=url, **{**QUICK, **PATIENT})
        bus.offer(Clerk, Greeter())
        bus.handles(Noted)(_slow)
        async with bus.unit_of_work():
            for number in range(40):
                bus.send(Noted(number))
        starting = asyncio.create_task(bus.__aenter__())
        await begun.wait()
        proxy.hold(UP)
        await asyncio.sleep(6)
        proxy.release(UP)
        proxy.restore()
        async with asyncio.timeout(BOUND):
            await starting
            await bus.__aexit__(None, None, None)


async def _slow(noted: Noted, session: AsyncSession) -> None:
    await session.execute(text("SELECT 1"))
    await asyncio.sleep(0.05)


# ---------------------------------------------------------------- the pools


async def test_an_agents_statement_is_given_up(database_url: str, driver: str, open_hole: Hole) -> None:
    async with proxied(database_url, driver) as (proxy, url):
        database = Database(load_settings(database_url=url, **QUICK))
        await database.transaction(answer)
        open_hole(proxy)
        async with asyncio.timeout(BOUND):
            with pytest.raises(StorageUnavailable, match=r"no answer|connection timeout|TimeoutError"):
                await database.transaction(answer)
            proxy.restore()
            assert await database.transaction_with_retry(answer) == 1
            await database.close()


@pytest.mark.parametrize("fault", ["stranded", "cut"])
async def test_dead_pooled_connection_is_replaced_without_an_error(
    database_url: str, driver: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_CHECKED_AFTER", 0.0)
    async with proxied(database_url, driver) as (proxy, url):
        database = Database(load_settings(database_url=url, **QUICK))
        await asyncio.gather(*(database.transaction_with_retry(answer) for _ in range(3)))
        before = proxy.connections
        proxy.strand() if fault == "stranded" else proxy.cut()
        async with asyncio.timeout(BOUND):
            assert [await database.transaction(answer) for _ in range(3)] == [1, 1, 1]
            assert proxy.connections > before
            await database.close()


async def test_stranded_pools_are_closed(database_url: str, driver: str) -> None:
    async with proxied(database_url, driver) as (proxy, url):
        database = Database(load_settings(database_url=url, **QUICK))
        await asyncio.gather(*(database.transaction_with_retry(answer) for _ in range(3)))
        proxy.strand()
        async with asyncio.timeout(BOUND):
            await database.close()
            assert await database.transaction_with_retry(answer) == 1
            await database.close()


async def test_a_unit_of_work_is_given_up(tables: Tables, driver: str, open_hole: Hole) -> None:
    async with proxied(tables.url, driver) as (proxy, url):
        bus = Bus("holes", database=url, **QUICK)
        async with bus.unit_of_work() as uow:
            await uow.session.execute(text("INSERT INTO notes VALUES (1)"))
        async with asyncio.timeout(BOUND):
            uow = bus.unit_of_work()
            await uow.session.execute(text("INSERT INTO notes VALUES (2)"))
            open_hole(proxy)
            with pytest.raises((DBAPIError, OSError)) as caught:
                await uow.end(commit=True)
            assert is_outage(caught.value)
            proxy.restore()
            async with bus.unit_of_work() as uow:
                await uow.session.execute(text("INSERT INTO notes VALUES (3)"))
            await bus.runtime.sessions.close()
    assert {1, 3} <= set(tables.rows("SELECT number FROM notes"))


async def test_a_sync_session_is_given_up(tables: Tables, open_hole: Hole) -> None:
    async with proxied(tables.url, "psycopg") as (proxy, url):
        bus = Bus("holes", database=url, **QUICK)
        loop = asyncio.get_running_loop()

        def note(number: int, then: Callable[[], None] = lambda: None) -> None:
            with bus.runtime.sessions.open_sync() as session:
                session.execute(text("INSERT INTO notes VALUES (:number)"), {"number": number})
                then()
                session.commit()

        await asyncio.to_thread(note, 1)
        async with asyncio.timeout(BOUND):
            with pytest.raises(DBAPIError) as caught:
                await asyncio.to_thread(note, 2, lambda: open_from_a_thread(loop, open_hole, proxy))
            assert is_outage(caught.value)
            proxy.restore()
            await asyncio.to_thread(note, 3)
            await bus.runtime.sessions.close()
    assert {1, 3} <= set(tables.rows("SELECT number FROM notes"))


async def test_the_command_line_gives_up(database_url: str) -> None:
    from durable.cli.target import connection

    async with proxied(database_url, "psycopg") as (proxy, url):
        loop = asyncio.get_running_loop()

        def ask() -> None:
            with connection(load_settings(database_url=url, **QUICK)) as conn:
                answer(conn, "")
                open_from_a_thread(loop, ChaosProxy.strand, proxy)
                answer(conn, "")

        async with asyncio.timeout(BOUND):
            with pytest.raises(StorageUnavailable, match="no answer within"):
                await asyncio.to_thread(ask)


async def test_a_cancelled_task_stays_cancelled_when_its_connection_is_stranded(database_url: str, driver: str) -> None:
    async with proxied(database_url, driver) as (proxy, url):
        database = Database(load_settings(database_url=url, **QUICK))
        await database.transaction(answer)
        proxy.strand()
        stuck = asyncio.create_task(database.transaction(answer))
        await proxy.swallowed(UP)
        stuck.cancel()
        async with asyncio.timeout(BOUND):
            with pytest.raises(asyncio.CancelledError):
                await stuck
            await database.close()


# ---------------------------------------------------------------- the login, and the first statements


class Silence:
    """A server that says nothing more after so many chunks on each connection, and keeps it open."""

    def __init__(self, database: str, chunks: int) -> None:
        self._target = urlsplit(address_of(database))
        self._chunks = chunks
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.was_silent = False
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.1)  # asyncpg opens another connection, to ask for the end of the statement
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # for the loop to close the sockets

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._server.is_serving():
            writer.transport.abort()
            return
        self._writers.append(writer)
        self._tasks.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._target.scheme == "unix":
            answers, questions = await asyncio.open_unix_connection(self._target.path)
        else:
            answers, questions = await asyncio.open_connection(self._target.hostname, self._target.port)
        self._writers.append(questions)
        try:
            await asyncio.gather(self._ask(reader, questions), self._answer(answers, writer))
        finally:
            writer.transport.abort()
            questions.transport.abort()

    async def _ask(self, reader: asyncio.StreamReader, questions: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            questions.write(data)
        questions.close()

    async def _answer(self, answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chunks = 0
        while data := await answers.read(1 << 16):
            chunks += 1
            if chunks > self._chunks:
                self.was_silent = True
            else:
                writer.write(data)


def behind(database: str, driver: str, silence: Silence) -> str:
    url = make_url(database).set(drivername=f"postgresql+{driver}", host="127.0.0.1", port=silence.port, query={})
    return url.render_as_string(hide_password=False)


CHUNKS = range(9)  # of what the server says: the first few are the login's
REASONS = re.compile(r"within \d\S* s|no answer in time|no answer within|timeout expired")


async def assert_silence_is_noticed(silence: Silence, asking: Awaitable[int]) -> None:
    [outcome] = await asyncio.gather(asking, return_exceptions=True)
    if outcome == 1:
        return
    assert isinstance(outcome, StorageUnavailable)
    assert silence.was_silent
    assert REASONS.search(str(outcome)), outcome
    assert "transaction" not in str(outcome), outcome  # the limit of a single wait, not that of all of them


@pytest.mark.parametrize("pooler", ["auto", "none", "transaction"])
async def test_connection_falling_silent_at_its_start_is_given_up(database_url: str, driver: str, pooler: str) -> None:
    async def begin(chunks: int) -> None:
        async with Silence(database_url, chunks) as silence:
            url = behind(database_url, driver, silence)
            database = Database(load_settings(database_url=url, pooler=pooler, **QUICK | {"statement_timeout": 5.0}))
            await assert_silence_is_noticed(silence, database.transaction(answer))
            await database.close()

    async with asyncio.timeout(BOUND):
        await asyncio.gather(*map(begin, CHUNKS))


async def test_connection_falling_silent_at_its_start_raises_an_outage(database_url: str, driver: str) -> None:
    async def begin(chunks: int) -> None:
        async with Silence(database_url, chunks) as silence:
            database = Database(load_settings(database_url=behind(database_url, driver, silence), **QUICK))
            try:
                async with database.engine.begin() as conn:
                    await conn.run_sync(answer, "")
            except Exception as error:
                if not is_outage(error):
                    raise
            await database.close()

    async with asyncio.timeout(BOUND):
        await asyncio.gather(*map(begin, CHUNKS))


@pytest.mark.parametrize("pooler", ["auto", "none", "transaction"])
async def test_sync_connection_falling_silent_at_its_start_is_given_up(database_url: str, pooler: str) -> None:
    from durable.cli.target import connection

    def ask(settings: Settings) -> int:
        with connection(settings) as conn:
            return answer(conn, "")

    async def begin(chunks: int) -> None:
        async with Silence(database_url, chunks) as silence:
            url = behind(database_url, "psycopg", silence)
            settings = load_settings(database_url=url, pooler=pooler, **QUICK)
            await assert_silence_is_noticed(silence, asyncio.to_thread(ask, settings))

    async with asyncio.timeout(BOUND):
        await asyncio.gather(*map(begin, CHUNKS))


# ---------------------------------------------------------------- a process that only sends


async def test_waking_thread_ends_within_seconds_when_the_database_is_silent(
    database_url: str, open_hole: Hole
) -> None:
    async with proxied(database_url, "psycopg") as (proxy, url):
        waker = Waker(load_settings(database_url=url))
        waker.wake()
        assert waker._thread is not None
        await eventually(lambda: waker._told_at > 0, within=BOUND)
        open_hole(proxy)
        waker.wake()
        await asyncio.to_thread(waker._thread.join, BOUND / 3)
        assert not waker._thread.is_alive()


# ---------------------------------------------------------------- a node


def notes(tables: Tables) -> Counter[int]:
    return Counter(tables.rows("SELECT number FROM notes"))


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_a_node_outlives_a_hole_in_its_pools(
    tables: Tables, driver: str, open_hole: Hole, is_async: bool
) -> None:
    """Its lock is on another way: the heartbeats go on."""
    async with proxied(tables.url, driver) as (proxy, url):
        bus = Bus("holes", database=url, lock_database_url=tables.url, **QUICK)
        statement = text("INSERT INTO notes VALUES (:number)")

        async def note(noted: Noted, session: AsyncSession) -> None:
            await session.execute(statement, {"number": noted.number})

        def note_in_thread(noted: Noted, session: Session) -> None:
            session.execute(statement, {"number": noted.number})

        bus.handles(Noted)(note if is_async else note_in_thread)
        expected: set[int] = set()

        async def send(number: int) -> None:
            try:
                async with bus.unit_of_work() as uow:
                    uow.send(Noted(number))
            except (DBAPIError, OSError) as error:
                if not is_outage(error):
                    raise
            else:
                expected.add(number)

        async with bus:
            for number in range(20):
                await send(number)
            open_hole(proxy)
            async with asyncio.timeout(BOUND):
                for number in range(20, 24):
                    await send(number)
            proxy.restore()
            for number in range(30, 50):
                await send(number)
            await eventually(lambda: expected <= set(notes(tables)), within=BOUND)
            await eventually(lambda: tables.count("incoming_envelopes") == 0, within=BOUND)
    assert set(notes(tables).values()) == {1}
    assert len(expected) >= 39


@pytest.mark.parametrize("driver", ["asyncpg"])
async def test_node_with_a_silent_lock_connection_joins_again(
    tables: Tables, driver: str, open_hole: Hole, caplog: pytest.LogCaptureFixture
) -> None:
    """The wake-ups of other processes come over the same connection."""
    async with proxied(tables.url, "psycopg") as (proxy, url):
        bus = Bus("holes", database=tables.url, lock_database_url=url, **QUICK)

        @bus.handles(Noted)
        async def note(noted: Noted, session: AsyncSession) -> None:
            await session.execute(text("INSERT INTO notes VALUES (:number)"), {"number": noted.number})

        async with bus:
            before = bus.runtime.node_id
            pool = bus.runtime.database.engine.pool
            open_hole(proxy)
            await eventually(lambda: bus.runtime.node_id != before, within=BOUND)
            proxy.restore()
            await eventually(lambda: bus.runtime.node_id not in (0, before), within=BOUND)
            assert bus.runtime.database.engine.pool is not pool  # its connections may have been in the hole, too
            async with bus.unit_of_work() as uow:
                uow.send(Noted(1))
            await eventually(lambda: notes(tables) == Counter({1: 1}), within=BOUND)
    [lost] = [said for record in caplog.records if "is no member any more" in (said := record.getMessage())]
    assert re.search(r"no answer|timeout|timed out|server closed", lost), lost
