"""What applications rely on, on Postgres and in memory alike: durable.testing shows what will happen in production."""

from __future__ import annotations

import asyncio
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, NamedTuple, Self
from uuid import UUID, uuid4, uuid5

import attrs
import msgspec
import pytest
from pydantic import BaseModel
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from durable import (
    Bus,
    Context,
    Depends,
    HandleNext,
    Incoming,
    InvalidMessage,
    InvalidSetting,
    Middleware,
    NoUnitOfWork,
    Outgoing,
    PutBack,
    Reject,
    Release,
    Retry,
    RetryAfter,
    RetryLater,
    RoutingError,
    SendNext,
    UnknownMessageType,
    WiringError,
    message,
)
from durable.embedded import Embedded
from durable.envelope import Envelope, new_id
from durable.messages.registry import name_of
from durable.recovery import membership
from durable.storage import dead_letters
from durable.testing import InMemoryBus, eventually
from durable.transports.memory import MemoryTransport
from tests.support.receivers import MemoryReceiver
from tests.support.tables import Tables, shared_tables

BILLING = "memory://billing"
MAIL = "memory://mail"
ORDERS = "memory://orders"  # the address of the bus under test
NEVER = Retry(immediate=0, delays=[])
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)  # longer than any test takes to look


class Panic(BaseException):
    """What an extension raises that is no Exception."""


class Deadly(Exception):
    """Cannot be shown: whoever tries ends."""

    def __str__(self) -> str:
        raise SystemExit

    __repr__ = __str__


class Base(DeclarativeBase):
    pass


class Kept(Base):
    __tablename__ = "effects"
    number: Mapped[int] = mapped_column(primary_key=True)


class Busy(Exception):
    retry_after = 0


@message("contract.unrouted")
class Unrouted(msgspec.Struct):
    """Has neither a route nor a handler."""


@message("contract.order-placed")
class OrderPlaced(msgspec.Struct):
    number: int
    note: str = ""


@message("contract.order-shipped")
class OrderShipped(msgspec.Struct):
    number: int


@message("contract.order-billed")
class OrderBilled(msgspec.Struct):
    number: int


@message("contract.nobody-wants-this")
class NobodyWantsThis(msgspec.Struct):
    number: int = 0


@message("contract.dataclass")
@dataclass
class AsDataclass:
    id: UUID
    total: float


@message("contract.pydantic")
class AsModel(BaseModel):
    id: UUID
    total: float


@message("contract.attrs")
@attrs.define
class AsAttrs:
    id: UUID
    total: float


@message("contract.struct")
class AsStruct(msgspec.Struct):
    id: UUID
    total: float


@message("contract.unfinished")
class Unfinished(msgspec.Struct):
    part: NotYet  # type: ignore[name-defined]  # noqa: F821


class NoMessage(msgspec.Struct):
    """A class that no @message has registered."""


class Letter(NamedTuple):
    message_type: str | None
    exception_type: str
    reason: str
    traceback: str
    attempts: int


class World(ABC):
    """A bus, where it runs, and what can be seen of it from outside."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        bus.listen(ORDERS)

    async def __aenter__(self) -> Self:
        return self

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...

    def for_sending(self) -> AbstractAsyncContextManager[Any]:
        """Instead of entering it: no agent runs."""
        return self

    @abstractmethod
    async def settle(self) -> None:
        """Return when nothing is to be done now."""

    @abstractmethod
    async def pause(self, cls: type | None = None, **destination: str) -> None:
        """Pause a handler or a destination, and return when its agent obeys."""

    @abstractmethod
    async def advance(self, by: timedelta) -> None:
        """Let time pass, for what waits, and settle."""

    @abstractmethod
    async def arrive(self, envelope: Envelope) -> None:
        """Let an envelope of another service arrive, and settle."""

    @abstractmethod
    def sent_to(self, destination: str) -> list[tuple[str, bytes]]:
        """Type and body of everything that has reached this destination."""

    @abstractmethod
    def deadlines(self, destination: str) -> list[datetime | None]:
        """The deliver_by of what went there."""

    @abstractmethod
    def dead_letters(self) -> list[Letter]: ...

    @abstractmethod
    async def discard(self) -> None:
        """Give every dead letter up."""

    @abstractmethod
    def expired(self) -> list[str]:
        """The types of the messages that expired."""

    @abstractmethod
    def scheduled(self) -> int:
        """How many messages wait for their time."""

    @abstractmethod
    def waiting(self) -> int:
        """How many messages are stored and not yet done with."""


# Behind a message of the same key that waits for its next attempt, or paused.
HELD = """((deliver_by IS NULL OR deliver_by >= now()) AND (
    EXISTS (SELECT FROM durable.incoming_envelopes AS earlier WHERE earlier.ordering_key = row.ordering_key
        AND earlier.seq < row.seq AND earlier.attempts > 0 AND earlier.execution_time > now())
    OR EXISTS (SELECT FROM durable.circuits WHERE (kind, key) IN (('key', row.partition_key),
        ('handler', row.message_type)))))"""


class OnPostgres(World):
    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        settings: dict[str, Any] = {
            "poll_interval": timedelta(milliseconds=30),
            "delete_linger": timedelta(milliseconds=2),
            "concurrency": 2,
            "pool_size": 3,
        }
        bus = Bus("orders", tables.url, **settings)
        self._transport = MemoryTransport(bus.settings)
        bus.application.transports.append(self._transport)
        self._receivers = {uri: MemoryReceiver() for uri in (BILLING, MAIL)}
        super().__init__(bus)

    async def __aenter__(self) -> Self:
        for uri, receiver in self._receivers.items():
            await self._transport.listener(uri, uri).serve(receiver)
        await self.bus.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.bus.__aexit__(None, None, None)

    @asynccontextmanager
    async def for_sending(self) -> AsyncIterator[Any]:
        yield self
        await self.bus.runtime.sessions.close()

    async def settle(self) -> None:
        await eventually(self._is_quiet, within=30, what="quiet")

    def _is_quiet(self) -> bool:
        due = "(execution_time IS NULL OR execution_time <= now() OR deliver_by < now())"
        nothing = (
            f"NOT EXISTS (SELECT FROM durable.outgoing_envelopes WHERE {due} AND NOT EXISTS ("
            "SELECT FROM durable.circuits WHERE kind = 'destination' AND key = destination))",
            f"NOT EXISTS (SELECT FROM durable.incoming_envelopes AS row WHERE {due} AND (owner_id <> 0 OR NOT {HELD}))",
        )
        return bool(self._tables.one(f"SELECT {' AND '.join(nothing)}"))  # one look: a reply goes from one to the other

    async def pause(self, cls: type | None = None, **destination: str) -> None:
        await self.bus.pause(cls, **destination)

        def is_obeyed() -> bool:
            found = self.bus.statistics()
            handlers = all(found.handling[name_of(each)].paused for each in (cls,) if each)
            return handlers and all(found.sending[uri].paused for uri in destination.values())

        await eventually(is_obeyed, what="the pause")

    async def advance(self, by: timedelta) -> None:
        await self._tables.pass_time(by)
        await self.settle()

    async def arrive(self, envelope: Envelope) -> None:
        await self._transport.sender(ORDERS).send([envelope])
        await self.settle()

    def sent_to(self, destination: str) -> list[tuple[str, bytes]]:
        return [(e.message_type, e.body) for e in self._receivers[destination].stored.values()]

    def deadlines(self, destination: str) -> list[datetime | None]:
        return [e.deliver_by for e in self._receivers[destination].stored.values()]

    def dead_letters(self) -> list[Letter]:
        rows = self._tables.rows(
            "SELECT message_type, exception_type, reason, COALESCE(traceback, ''), attempts "
            "FROM durable.dead_letters ORDER BY letter_id"
        )
        return [Letter(*row) for row in rows]

    async def discard(self) -> None:
        every, whole = dead_letters.Selection(), dead_letters.LetterRange(0, 2**62, 100)
        await self.bus.runtime.database.transaction(dead_letters.discard, every, whole, actor="ada", reason="a test")

    def expired(self) -> list[str]:
        return self._tables.rows("SELECT message_type FROM durable.envelope_history WHERE outcome = 'expired'")

    def scheduled(self) -> int:
        waiting = "SELECT count(*) FROM durable.{} WHERE execution_time > now()"
        return sum(self._tables.one(waiting.format(table)) for table in ("outgoing_envelopes", "incoming_envelopes"))

    def waiting(self) -> int:
        return self._tables.count("outgoing_envelopes") + self._tables.count("incoming_envelopes")


class InMemory(World):
    def __init__(self, **factories: Any) -> None:
        bus = Bus("orders")
        bus.application.transports.append(MemoryTransport(bus.settings))
        self._memory = InMemoryBus(bus, **factories)
        self._others = {uri: InMemoryBus(Bus(uri.removeprefix("memory://"))) for uri in (BILLING, MAIL)}
        self._stack = AsyncExitStack()
        super().__init__(bus)

    async def __aenter__(self) -> Self:
        memory = await self._stack.enter_async_context(self._memory)
        for uri, other in self._others.items():
            memory.connect(uri, await self._stack.enter_async_context(other))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def settle(self) -> None:
        await self._memory.drain()

    async def pause(self, cls: type | None = None, **destination: str) -> None:
        await self.bus.pause(cls, **destination)

    async def advance(self, by: timedelta) -> None:
        self._memory.clock.advance(by)
        await self._memory.drain()

    async def arrive(self, envelope: Envelope) -> None:
        self._memory.deliver(envelope)
        await self._memory.drain()

    def sent_to(self, destination: str) -> list[tuple[str, bytes]]:
        # The others handle nothing, so what arrived there are dead letters.
        letters = self._others[destination].dead_letters
        return [(letter.envelope.message_type, letter.envelope.body) for letter in letters]

    def deadlines(self, destination: str) -> list[datetime | None]:
        return [e.deliver_by for e in self._memory.envelopes() if e.destination == destination]

    def dead_letters(self) -> list[Letter]:
        return [
            Letter(d.envelope.message_type, d.exception_type, d.reason, d.traceback or "", d.attempts)
            for d in self._memory.dead_letters
        ]

    async def discard(self) -> None:
        self._memory.discard()

    def expired(self) -> list[str]:
        return [expired.envelope.message_type for expired in self._memory.expired]

    def scheduled(self) -> int:
        return len(self._memory.scheduled)

    def waiting(self) -> int:
        return len(self._memory.envelopes()) - len(self._memory.handled)


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        tables.execute("CREATE TABLE effects (number integer)")
        yield tables


@pytest.fixture(autouse=True)
def leaving_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's thread listens for 0.2 s before it sees that it is to leave: most of the time that a test takes."""
    monkeypatch.setattr(membership, "_LISTEN_SECONDS", 0.02)


@pytest.fixture(params=["postgres", "memory"])
def world(request: pytest.FixtureRequest) -> World:
    if request.param == "memory":
        return InMemory()
    database = request.getfixturevalue("database")
    database.clear()
    return OnPostgres(database)


@pytest.fixture(params=["postgres", "memory"])
async def world_with_tables(request: pytest.FixtureRequest, database: Tables) -> AsyncIterator[World]:
    """A world whose sessions are those of a database, the one in memory too."""
    database.clear()
    await database.change("DELETE FROM effects")
    if request.param == "postgres":
        yield OnPostgres(database)
        return
    engine = create_async_engine(database.url.replace("postgresql://", "postgresql+asyncpg://"))
    sync_engine = create_engine(database.url.replace("postgresql://", "postgresql+psycopg://"))
    yield InMemory(session_factory=async_sessionmaker(engine), sync_session_factory=sessionmaker(sync_engine))
    sync_engine.dispose()
    await engine.dispose()


def collect(bus: Bus, cls: type = OrderPlaced, **options: Any) -> list[Any]:
    """Declare a handler that does nothing but collect what it is given."""
    seen: list[Any] = []

    async def handle(given: Any) -> None:
        seen.append(given)

    handle.__annotations__["given"] = cls
    bus.handles(cls, **options)(handle)
    return seen


def arriving(message_type: str = "contract.order-placed", body: bytes = b'{"number":1}') -> Envelope:
    return Envelope(
        id=new_id(),
        message_type=message_type,
        destination=ORDERS,
        source="shop",
        correlation_id=new_id(),
        body=body,
        sent_at=datetime.now(UTC),
    )


Misdate = Callable[[datetime], tuple[dict[str, Any], str]]
"""Makes fields of an envelope that arrives now, and the reason why it is a dead letter."""


def dated_id(moment: datetime) -> UUID:
    return UUID(int=int(moment.timestamp() * 1000) << 80 | 7 << 76 | 2 << 62 | new_id().int & ((1 << 62) - 1))


def id_of_2100(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": dated_id(datetime(2100, 1, 1, tzinfo=UTC))}, "the time in its id is more than clock_lead"


def id_of_the_day_after_tomorrow(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": dated_id(now + timedelta(days=1, minutes=1))}, "the time in its id is more than clock_lead"


def sent_the_day_after_tomorrow(now: datetime) -> tuple[dict[str, Any], str]:
    return {"sent_at": now + timedelta(days=1, minutes=1)}, "its sent_at is more than clock_lead"


def id_older_than_the_window(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": dated_id(now - timedelta(days=7, minutes=1))}, "it is older than duplicates are remembered"


def undated_id_sent_before_the_window(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": uuid4(), "sent_at": now - timedelta(days=7, minutes=1)}, "it is older than duplicates are remembered"


def due_beyond_the_window(now: datetime) -> tuple[dict[str, Any], str]:
    return {"execution_time": now + timedelta(days=7, minutes=1)}, "it is put off for longer than duplicates"


def due_in_the_year_9998(now: datetime) -> tuple[dict[str, Any], str]:
    return {"execution_time": datetime(9998, 1, 1, tzinfo=UTC)}, "it is put off for longer than duplicates"


def nil_id(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": UUID(int=0)}, "is no id of a message"


def max_id(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": UUID(int=2**128 - 1)}, "is no id of a message"


MISDATED: list[Misdate] = [
    id_of_2100, id_of_the_day_after_tomorrow, sent_the_day_after_tomorrow, id_older_than_the_window,
    undated_id_sent_before_the_window, due_beyond_the_window, due_in_the_year_9998, nil_id, max_id,
]  # fmt: skip


def a_little_ahead(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": dated_id(now + timedelta(hours=23)), "sent_at": now + timedelta(hours=23)}, ""


def within_the_window(now: datetime) -> tuple[dict[str, Any], str]:
    moment = now - timedelta(days=6, hours=23)
    return {"id": dated_id(moment), "sent_at": moment}, ""


def due_within_the_window(now: datetime) -> tuple[dict[str, Any], str]:
    return {"execution_time": now + timedelta(days=6, hours=23)}, ""


WELL_DATED: list[Misdate] = [a_little_ahead, within_the_window, due_within_the_window]

# What handlers depend on; here, because annotations are resolved among a module's names.

steps: list[str] = []


def name_order(order: OrderPlaced) -> str:
    return f"order {order.number}"


async def make_greeting(name: Annotated[str, Depends(name_order)]) -> str:
    return f"hello, {name}"


async def open_connection() -> AsyncIterator[str]:
    steps.append("opened")
    yield "connection"
    steps.append("closed")


async def swallow() -> AsyncIterator[str]:
    with suppress(ValueError):
        yield "resource"


def swallow_sync() -> Iterator[str]:
    with suppress(ValueError):
        yield "resource"


def take_resource() -> Iterator[str]:
    steps.append("taken")
    yield "resource"
    steps.append("given back")


def double(order: OrderPlaced) -> int:
    return order.number * 2


class TestUnitOfWork:
    async def test_a_message_is_handled_once_after_the_commit_and_not_before(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                await world.settle()
                assert seen == []
            await world.settle()
            assert seen == [OrderPlaced(1)]

    async def test_a_unit_of_work_takes_a_timeout_above_0(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work(timeout=600) as uow:
                uow.send(OrderPlaced(1))
            for nothing in (0, -1, timedelta(0)):
                with pytest.raises(InvalidSetting, match="timeout must be above 0"):
                    world.bus.unit_of_work(timeout=nothing)
            await world.settle()
            assert seen == [OrderPlaced(1)]

    async def test_rollback_discards_the_messages_sent(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work() as uow:
                world.bus.send(OrderPlaced(1))
                await uow.session.rollback()
            await world.settle()
            assert seen == []

    async def test_exception_in_the_block_discards_the_messages_and_is_raised(self, world: World) -> None:
        seen = collect(world.bus)

        async def fail_after_sending() -> None:
            async with world.bus.unit_of_work() as uow:
                uow.send(OrderPlaced(1))
                raise ZeroDivisionError

        async with world:
            with pytest.raises(ZeroDivisionError):
                await fail_after_sending()
            await world.settle()
            assert seen == []

    async def test_each_commit_of_a_session_stores_its_messages(self, world: World) -> None:
        seen = collect(world.bus, concurrency=1)
        async with world:
            async with world.bus.unit_of_work() as uow:
                uow.send(OrderPlaced(1))
                await uow.session.commit()
                uow.send(OrderPlaced(2))
                await uow.session.rollback()
                uow.send(OrderPlaced(3))
                await uow.session.commit()
                uow.send(OrderPlaced(4))
            await world.settle()
            assert [order.number for order in seen] == [1, 3, 4]

    async def test_savepoint_rolled_back_discards_its_messages(self, world: World) -> None:
        seen = collect(world.bus, concurrency=1)
        async with world:
            async with world.bus.unit_of_work() as uow:
                uow.send(OrderPlaced(1))
                async with uow.session.begin_nested() as savepoint:
                    uow.send(OrderPlaced(2))
                    await savepoint.rollback()
                async with uow.session.begin_nested():
                    uow.send(OrderPlaced(3))
                    async with uow.session.begin_nested() as inner:
                        uow.send(OrderPlaced(4))
                        await inner.rollback()
                uow.send(OrderPlaced(5))
            await world.settle()
            assert [order.number for order in seen] == [1, 3, 5]

    async def test_send_outside_a_unit_of_work_raises_with_advice(self, world: World) -> None:
        collect(world.bus)
        async with world:
            with pytest.raises(NoUnitOfWork, match=r"bus\.unit_of_work\(\)"):
                world.bus.send(OrderPlaced(1))
            async with world.bus.unit_of_work():
                pass
            with pytest.raises(NoUnitOfWork):
                world.bus.publish(OrderPlaced(1))

    async def test_two_tasks_each_have_their_own_unit_of_work(self, world: World) -> None:
        seen = collect(world.bus)
        both_open = asyncio.Barrier(2)

        async def place(number: int, *, commits: bool) -> None:
            async with world.bus.unit_of_work() as uow:
                world.bus.send(OrderPlaced(number))
                await both_open.wait()
                if not commits:
                    await uow.session.rollback()

        async with world:
            await asyncio.gather(place(1, commits=True), place(2, commits=False))
            await world.settle()
            assert seen == [OrderPlaced(1)]

    async def test_a_session_of_the_application_is_a_unit_of_work_when_enlisted(self, world_with_tables: World) -> None:
        world = world_with_tables
        seen = collect(world.bus, concurrency=1)
        async with world, world.bus.runtime.sessions.open() as session:
            with world.bus.enlist(session) as outbox:
                await session.execute(text("INSERT INTO effects VALUES (1)"))
                outbox.send(OrderPlaced(1))
                world.bus.send(OrderPlaced(2))
                await session.commit()
            outbox.send(OrderPlaced(3))
            await session.commit()
            await world.settle()
            assert [order.number for order in seen] == [1, 2, 3]

    async def test_a_sync_session_is_a_unit_of_work_when_enlisted(self, world_with_tables: World) -> None:
        world = world_with_tables
        seen = collect(world.bus)
        async with world:
            with world.bus.runtime.sessions.open_sync() as session, world.bus.enlist(session):
                world.bus.send(OrderPlaced(1))
                session.rollback()
                session.execute(text("INSERT INTO effects VALUES (1)"))
                world.bus.send(OrderPlaced(2))
                session.commit()
            await world.settle()
            assert seen == [OrderPlaced(2)]

    @pytest.mark.parametrize("commits", [True, False])
    async def test_session_joined_to_a_transaction_is_committed_by_the_transaction(
        self, world_with_tables: World, commits: bool
    ) -> None:
        world = world_with_tables
        seen = collect(world.bus)
        async with world, world.bus.runtime.sessions.open() as opened:
            assert isinstance(opened.bind, AsyncEngine)
            async with opened.bind.connect() as connection:
                outer = await connection.begin()
                async with AsyncSession(connection) as session:
                    with world.bus.enlist(session):
                        await session.execute(text("INSERT INTO effects VALUES (1)"))
                        world.bus.send(OrderPlaced(1))
                        await session.commit()
                await world.settle()
                assert seen == []
                await (outer.commit() if commits else outer.rollback())
            await world.settle()
            assert seen == [OrderPlaced(1)] * commits

    async def test_task_outliving_a_unit_of_work_cannot_send(self, world: World) -> None:
        seen = collect(world.bus)
        over = asyncio.Event()

        async def outlive() -> None:
            await over.wait()
            with pytest.raises(NoUnitOfWork, match="this task was started is over"):
                world.bus.send(OrderPlaced(1))

        async with world:
            async with world.bus.unit_of_work() as uow:
                outliving = asyncio.create_task(outlive())
            over.set()
            await outliving
            with pytest.raises(NoUnitOfWork):
                uow.send(OrderPlaced(2))
            await world.settle()
            assert seen == []

    async def test_each_of_two_buses_has_its_own_outbox_of_a_session(self, world_with_tables: World) -> None:
        world = world_with_tables
        seen = collect(world.bus)
        other = Bus("audit")
        gathered = collect(other)
        async with world, InMemoryBus(other) as memory:
            async with world.bus.unit_of_work() as uow:
                uow.send(OrderPlaced(1))
                with other.enlist(uow.session):
                    other.send(OrderPlaced(2))
            await world.settle()
            await memory.drain()
            assert (seen, gathered) == ([OrderPlaced(1)], [OrderPlaced(2)])


class TestSending:
    async def test_an_event_goes_to_every_subscriber_and_to_the_handler_here(self, world: World) -> None:
        seen = collect(world.bus)
        world.bus.subscribe(OrderPlaced, to=BILLING)
        world.bus.subscribe(OrderPlaced, to=MAIL)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.publish(OrderPlaced(1))
            await world.settle()
            assert seen == [OrderPlaced(1)]
            copy = ("contract.order-placed", b'{"number":1,"note":""}')
            assert (world.sent_to(BILLING), world.sent_to(MAIL)) == ([copy], [copy])

    async def test_event_without_subscribers_is_published_without_an_error(self, world: World) -> None:
        async with world:
            async with world.bus.unit_of_work():
                assert isinstance(world.bus.publish(NobodyWantsThis()), UUID)
            await world.settle()
            assert world.dead_letters() == []

    async def test_paused_destination_is_sent_nothing_until_resumed(self, world: World) -> None:
        world.bus.route(OrderPlaced, to=BILLING)
        async with world:
            await world.pause(destination=BILLING)
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert world.sent_to(BILLING) == []
            assert await world.bus.resume(destination=BILLING)
            await world.settle()
            assert len(world.sent_to(BILLING)) == 1

    @pytest.mark.parametrize("delay", [0, 60])
    async def test_message_of_a_business_key_is_sent_once(self, world: World, delay: int) -> None:
        seen = collect(world.bus)
        world.bus.route(OrderBilled, to=BILLING)
        async with world:
            for number in (1, 2):
                async with world.bus.unit_of_work():
                    world.bus.send(OrderPlaced(number), id_from="order-1", delay=delay)
                    world.bus.send(OrderBilled(1), id_from="order-1", delay=delay)
                await world.settle()
            assert world.scheduled() == (2 if delay else 0)
            await world.advance(timedelta(seconds=61))
            assert seen == [OrderPlaced(1)]
            assert world.sent_to(BILLING) == [("contract.order-billed", b'{"number":1}')]
            assert world.dead_letters() == []

    async def test_command_without_a_destination_raises_with_advice(self, world: World) -> None:
        async with world, world.bus.unit_of_work():
            with pytest.raises(RoutingError, match=r"bus\.route\('contract.order-placed', to=\.\.\.\)"):
                world.bus.send(OrderPlaced(1))

    async def test_a_command_goes_to_its_route(self, world: World) -> None:
        world.bus.route(OrderPlaced, to=BILLING)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                world.bus.send(OrderPlaced(2), to=MAIL)
            await world.settle()
            assert [body for _, body in world.sent_to(BILLING)] == [b'{"number":1,"note":""}']
            assert [body for _, body in world.sent_to(MAIL)] == [b'{"number":2,"note":""}']

    async def test_object_of_an_unregistered_class_is_refused_at_send(self, world: World) -> None:
        async with world, world.bus.unit_of_work():
            with pytest.raises(UnknownMessageType, match="NoMessage is not a message"):
                world.bus.send(NoMessage())

    @pytest.mark.parametrize(
        ("given", "options"),
        [
            pytest.param(AsStruct(new_id(), math.nan), {}, id="NaN in the body"),
            pytest.param(AsModel(id=new_id(), total=math.inf), {}, id="infinity in the body"),
            pytest.param(OrderPlaced(1, "\ud800"), {}, id="a lone surrogate in the body"),
            pytest.param(OrderPlaced(1, "x" * (1 << 20)), {}, id="a body over the limit"),
            pytest.param(OrderPlaced(1), {"headers": {"a": "\0"}}, id="NUL in a header"),
            pytest.param(OrderPlaced(1), {"headers": {"a": "b\r\nc"}}, id="CRLF in a header"),
            pytest.param(OrderPlaced(1), {"headers": {"a": math.nan}}, id="a header that is no text"),
            pytest.param(OrderPlaced(1), {"deliver_by": datetime(2030, 1, 1)}, id="a naive deliver_by"),
            pytest.param(OrderPlaced(1), {"at": datetime(2030, 1, 1)}, id="a naive time"),
            pytest.param(OrderPlaced(1), {"at": datetime.now(UTC), "delay": 1}, id="at and delay"),
            pytest.param(OrderPlaced(1), {"key": "x" * 1001}, id="a key over the limit"),
        ],
    )
    async def test_unstorable_or_unreadable_message_is_refused_at_send(
        self, world: World, given: object, options: Any
    ) -> None:
        async with world.for_sending(), world.bus.unit_of_work() as uow:
            with pytest.raises(InvalidMessage):
                world.bus.send(given, to=ORDERS, **options)
            await uow.session.commit()
        assert world.waiting() == 0

    async def test_a_refused_message_leaves_the_others_of_its_unit_of_work(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                with pytest.raises(InvalidMessage):
                    world.bus.send(OrderPlaced(2, "\ud800"))
            await world.settle()
            assert seen == [OrderPlaced(1)]

    async def test_a_delayed_message_waits_for_its_time(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1), delay=60)
                world.bus.send(OrderPlaced(2), at=datetime.now(UTC) + timedelta(hours=1))
                world.bus.send(OrderPlaced(3), delay=timedelta(minutes=1), to=BILLING)
            await world.settle()
            assert (seen, world.sent_to(BILLING), world.scheduled()) == ([], [], 3)
            await world.advance(timedelta(seconds=62))
            assert seen == [OrderPlaced(1)]
            assert [body for _, body in world.sent_to(BILLING)] == [b'{"number":3,"note":""}']
            await world.advance(timedelta(hours=1))
            assert seen == [OrderPlaced(1), OrderPlaced(2)]

    async def test_message_past_its_deadline_expires_unhandled(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1), deliver_by=datetime.now(UTC) - timedelta(hours=1))
                world.bus.send(OrderPlaced(2), deliver_by=timedelta(hours=2), delay=60)
            await world.settle()
            assert world.expired() == ["contract.order-placed"]
            await world.advance(timedelta(seconds=61))
            assert world.expired() == ["contract.order-placed"]
            assert seen == [OrderPlaced(2)]
            assert world.dead_letters() == []

    async def test_message_due_after_its_deliver_by_is_refused(self, world: World) -> None:
        async with world, world.bus.unit_of_work():
            given: list[dict[str, Any]] = [{"delay": 60}, {"delay": 30}, {"at": datetime.now(UTC) + timedelta(hours=1)}]
            for late in given:
                with pytest.raises(InvalidMessage, match="when its deliver_by"):
                    world.bus.send(OrderPlaced(1), to=BILLING, deliver_by=timedelta(seconds=30), **late)

    async def test_message_expires_at_once_when_its_next_attempt_is_past_the_deadline(self, world: World) -> None:
        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[60]))
        async def fail(order: OrderPlaced) -> None:
            raise LookupError("no such order")

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1), deliver_by=timedelta(seconds=30))
                world.bus.send(OrderPlaced(2), deliver_by=timedelta(seconds=90))
            await world.settle()
            assert world.expired() == ["contract.order-placed"]
            assert (world.scheduled(), world.dead_letters()) == (1, [])

    async def test_message_sent_by_a_handler_inherits_the_deadline_when_declared(self, world: World) -> None:
        @world.bus.handles(OrderPlaced, inherit_deliver_by=True)
        async def ship(order: OrderPlaced, ctx: Context) -> list[OrderShipped]:
            assert ctx.deliver_by is not None
            world.bus.send(OrderShipped(2), to=BILLING, deliver_by=timedelta(hours=9))
            ctx.send(OrderShipped(3), to=BILLING, deliver_by=None)
            return [OrderShipped(1)]

        world.bus.route(OrderShipped, to=BILLING)
        deadline = datetime.now(UTC) + timedelta(hours=1)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1), deliver_by=deadline)
            await world.settle()
        own, none, inherited = world.deadlines(BILLING)
        assert own is not None
        assert abs(own - deadline - timedelta(hours=8)) < timedelta(minutes=5)
        assert (none, inherited) == (None, deadline)

    @pytest.mark.parametrize("cls", [AsStruct, AsDataclass, AsModel, AsAttrs])
    async def test_a_message_may_be_of_any_of_the_four_kinds(self, world: World, cls: type) -> None:
        seen = collect(world.bus, cls)
        given = cls(id=new_id(), total=17.5)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(given)
            await world.settle()
            assert seen == [given]
            assert type(seen[0]) is cls


class TestHandling:
    async def test_context_describes_the_message(self, world: World) -> None:
        contexts: list[Context] = []

        @world.bus.handles(OrderPlaced)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            contexts.append(ctx)

        async with world:
            async with world.bus.unit_of_work():
                sent = world.bus.send(OrderPlaced(1), headers={"tenant": "blue"}, key="order-1")
            await world.settle()
            (ctx,) = contexts
            assert (ctx.id, ctx.correlation_id, ctx.causation_id) == (sent, sent, None)
            assert (ctx.source, ctx.message_type, ctx.attempt) == ("orders", "contract.order-placed", 1)
            assert ctx.headers == {"tenant": "blue"}

    @pytest.mark.parametrize(
        ("returned", "expected"),
        [
            (OrderShipped(1), [1]),
            ([OrderShipped(1), OrderShipped(2)], [1, 2]),
            ((OrderShipped(1), None), [1]),
            (None, []),
        ],
    )
    async def test_messages_returned_by_a_handler_are_sent(
        self, world: World, returned: object, expected: list[int]
    ) -> None:
        shipped = collect(world.bus, OrderShipped, concurrency=1)

        @world.bus.handles(OrderPlaced)
        async def handle(order: OrderPlaced) -> object:
            return returned

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert [order.number for order in shipped] == expected

    async def test_event_returned_by_a_handler_goes_to_every_subscriber(self, world: World) -> None:
        world.bus.subscribe(OrderShipped, to=BILLING)
        world.bus.subscribe(OrderShipped, to=MAIL)

        @world.bus.handles(OrderPlaced)
        async def handle(order: OrderPlaced) -> OrderShipped:
            return OrderShipped(order.number)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert world.sent_to(BILLING) == world.sent_to(MAIL) == [("contract.order-shipped", b'{"number":1}')]

    async def test_a_conversation_keeps_its_correlation_id_and_each_message_its_cause(self, world: World) -> None:
        contexts: dict[str, Context] = {}

        @world.bus.handles(OrderPlaced)
        async def place(order: OrderPlaced, ctx: Context) -> OrderShipped:
            contexts["placed"] = ctx
            return OrderShipped(order.number)

        @world.bus.handles(OrderShipped)
        async def ship(order: OrderShipped, ctx: Context) -> None:
            contexts["shipped"] = ctx
            world.bus.send(OrderBilled(order.number))

        @world.bus.handles(OrderBilled)
        async def bill(order: OrderBilled, ctx: Context) -> None:
            contexts["billed"] = ctx

        async with world:
            async with world.bus.unit_of_work():
                sent = world.bus.send(OrderPlaced(1))
            await world.settle()
        assert {ctx.correlation_id for ctx in contexts.values()} == {sent}
        assert contexts["shipped"].causation_id == contexts["placed"].id == sent
        assert contexts["billed"].causation_id == contexts["shipped"].id

    async def test_repeated_attempt_sends_the_same_ids(self, world: World) -> None:
        attempts: list[list[UUID]] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=2, delays=[]))
        async def place(order: OrderPlaced, ctx: Context) -> None:
            attempts.append([ctx.send(OrderShipped(1)), ctx.send(OrderShipped(2)), ctx.send(OrderBilled(1))])
            if ctx.attempt < 3:
                raise RuntimeError("not yet")

        shipped = collect(world.bus, OrderShipped)
        collect(world.bus, OrderBilled)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
        assert len(attempts) == 3
        assert attempts[0] == attempts[1] == attempts[2]
        assert len(set(attempts[0])) == 3
        assert sorted(order.number for order in shipped) == [1, 2]

    async def test_messages_under_one_business_key_are_one_message(self, world: World) -> None:
        billed = collect(world.bus, OrderBilled)
        async with world:
            for _ in range(2):
                async with world.bus.unit_of_work():
                    world.bus.send(OrderBilled(1), id_from="invoice-1")
            async with world.bus.unit_of_work():
                for _ in range(2):
                    world.bus.send(OrderBilled(2), id_from="invoice-2")
            await world.settle()
        assert sorted(bill.number for bill in billed) == [1, 2]

    @pytest.mark.parametrize(
        "letter", ["x", "\N{CYRILLIC SMALL LETTER ZHE}", "\N{CJK UNIFIED IDEOGRAPH-4E2D}"], ids=ascii
    )
    async def test_key_is_bounded_in_bytes_of_any_alphabet(self, world: World, letter: str) -> None:
        shipped = collect(world.bus, OrderShipped)
        longest = letter * (1_000 // len(letter.encode()))
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderShipped(1), key=longest, delay=60)
                with pytest.raises(InvalidMessage, match="partition_key is longer than 1000 bytes"):
                    world.bus.send(OrderShipped(2), key=longest + letter, delay=60)
            await world.advance(timedelta(seconds=61))
        assert shipped == [OrderShipped(1)]

    @pytest.mark.parametrize("to", [None, MAIL], ids=["local", "remote"])
    async def test_cancelled_message_frees_its_business_key(self, world: World, to: str | None) -> None:
        billed = collect(world.bus, OrderBilled)
        async with world:
            async with world.bus.unit_of_work():
                first = world.bus.send(OrderBilled(1), to=to, id_from="invoice-1", delay=3_600)
            assert await world.bus.cancel(first)
            async with world.bus.unit_of_work():
                assert world.bus.send(OrderBilled(2), to=to, id_from="invoice-1") == first
            await world.settle()
            assert (billed if to is None else world.sent_to(MAIL)) == (
                [OrderBilled(2)] if to is None else [("contract.order-billed", b'{"number":2}')]
            )

    @pytest.mark.parametrize("came_in", [False, True], ids=["local", "from a peer"])
    async def test_discarded_dead_letter_frees_its_business_key(self, world: World, came_in: bool) -> None:
        seen: list[int] = []

        @world.bus.handles(OrderBilled, retry=NEVER)
        async def handle(billed: OrderBilled) -> None:
            seen.append(billed.number)
            if billed.number == 1:
                raise RuntimeError("the first is wrong")

        async def send(number: int) -> None:
            async with world.bus.unit_of_work():
                world.bus.send(OrderBilled(number), to=ORDERS if came_in else None, id_from="invoice-1")
            await world.settle()

        async with world:
            await send(1)
            assert len(world.dead_letters()) == 1
            await world.discard()
            await send(2)
            await send(3)
        assert seen == [1, 2]

    async def test_discarded_letter_of_another_message_frees_no_business_key(self, world: World) -> None:
        billed = collect(world.bus, OrderBilled)
        first = msgspec.structs.replace(
            arriving("contract.order-billed"), id=uuid5(UUID(int=0), "invoice-1"), sent_at=datetime.now(UTC)
        )
        async with world:
            for number in (1, 2):
                body = b'{"number":%d}' % number
                await world.arrive(msgspec.structs.replace(first, body=body))
            assert [letter.exception_type for letter in world.dead_letters()] == ["quarantined on arrival"]
            await world.discard()
            await world.arrive(msgspec.structs.replace(first, sent_at=first.sent_at + SECOND))
        assert billed == [OrderBilled(1)]

    async def test_reply_goes_to_the_address_of_reply_to(self, world: World) -> None:
        billed = collect(world.bus, OrderBilled)

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            ctx.reply(OrderBilled(order.number))

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1), reply_to=ORDERS)
                world.bus.send(OrderPlaced(2))
            await world.settle()
            assert billed == [OrderBilled(1)]
            (letter,) = world.dead_letters()
            assert letter.exception_type == "durable.errors.RoutingError"
            assert "asks for no reply" in letter.reason

    async def test_error_with_a_text_ending_the_process_is_a_failed_attempt(self, world: World) -> None:
        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced) -> None:
            raise Deadly

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert "cannot be made" in letter.reason

    @pytest.mark.parametrize("ends", ["close", "invalidate"])
    async def test_handler_ending_its_session_and_returning_a_message_is_retried(self, world: World, ends: str) -> None:
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]))
        async def handle(order: OrderPlaced, session: AsyncSession, ctx: Context) -> OrderShipped:
            if ctx.attempt == 1:
                await getattr(session, ends)()
            return OrderShipped(ctx.attempt)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
        assert (shipped, world.dead_letters()) == ([OrderShipped(2)], [])

    async def test_handler_swallowing_a_failed_flush_and_returning_a_message_is_retried(
        self, world_with_tables: World
    ) -> None:
        world = world_with_tables
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]))
        async def handle(order: OrderPlaced, session: AsyncSession, ctx: Context) -> OrderShipped:
            if ctx.attempt == 1:
                session.add(Kept(number=2**40))  # out of range
                with suppress(DBAPIError):
                    await session.flush()
            return OrderShipped(ctx.attempt)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
        assert (shipped, world.dead_letters()) == ([OrderShipped(2)], [])

    async def test_a_provider_cannot_make_a_success_of_a_failure(self, world: World) -> None:
        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, resource: Annotated[str, Depends(swallow)]) -> None:
            raise ValueError("the handler's own")

        @world.bus.handles(OrderShipped, retry=NEVER)
        def handle_sync(order: OrderShipped, resource: Annotated[str, Depends(swallow_sync)]) -> None:
            raise ValueError("the handler's own")

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                world.bus.send(OrderShipped(1))
            await world.settle()
            assert [letter.reason for letter in world.dead_letters()] == ["the handler's own"] * 2

    async def test_a_handler_sends_publishes_and_schedules_by_its_context(self, world: World) -> None:
        shipped = collect(world.bus, OrderShipped)
        world.bus.subscribe(OrderBilled, to=MAIL)

        @world.bus.handles(OrderPlaced)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            ctx.send(OrderShipped(1))
            ctx.publish(OrderBilled(2))
            ctx.send(OrderShipped(3), delay=60)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert shipped == [OrderShipped(1)]
            assert world.sent_to(MAIL) == [("contract.order-billed", b'{"number":2}')]
            await world.advance(timedelta(seconds=61))
            assert shipped == [OrderShipped(1), OrderShipped(3)]

    async def test_dependencies_are_made_for_each_attempt_and_cleaned_up_afterwards(self, world: World) -> None:
        steps.clear()

        @world.bus.handles(OrderPlaced)
        async def handle(
            order: OrderPlaced,
            greeting: Annotated[str, Depends(make_greeting)],
            connection: Annotated[str, Depends(open_connection)],
            resource: Annotated[str, Depends(take_resource)],
        ) -> None:
            steps.append(f"{greeting} by {connection} with {resource}")

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
        assert steps == ["opened", "taken", "hello, order 1 by connection with resource", "given back", "closed"]

    async def test_a_sync_handler_runs_in_a_thread_with_a_sync_session(self, world_with_tables: World) -> None:
        world = world_with_tables
        shipped = collect(world.bus, OrderShipped)
        threads: list[str] = []

        @world.bus.handles(OrderPlaced)
        def handle(
            order: OrderPlaced, session: Session, ctx: Context, doubled: Annotated[int, Depends(double)]
        ) -> OrderShipped:
            threads.append(threading.current_thread().name)
            session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": doubled})
            world.bus.send(OrderShipped(doubled))
            return OrderShipped(ctx.attempt)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(4))
            await world.settle()
            assert {order.number for order in shipped} == {8, 1}
            assert threads[0].startswith("durable contract.order-placed")
            async with world.bus.unit_of_work() as uow:
                assert list(await uow.session.scalars(text("SELECT number FROM effects"))) == [8]

    async def test_handler_of_a_list_is_given_the_whole_group(self, world: World) -> None:
        groups: list[list[int]] = []

        @world.bus.handles(OrderPlaced, max_batch=100, concurrency=1)
        async def handle(orders: list[OrderPlaced]) -> None:
            groups.append([order.number for order in orders])

        async with world:
            async with world.bus.unit_of_work():
                for number in range(20):
                    world.bus.send(OrderPlaced(number))
            await world.settle()
            assert groups == [list(range(20))]


class TestFailing:
    async def test_the_sends_and_effects_of_a_failed_attempt_are_forgotten(self, world_with_tables: World) -> None:
        world = world_with_tables
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]))
        async def handle(order: OrderPlaced, session: AsyncSession, ctx: Context) -> None:
            await session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": ctx.attempt})
            ctx.send(OrderShipped(ctx.attempt))
            if ctx.attempt == 1:
                raise ZeroDivisionError

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert shipped == [OrderShipped(2)]
            async with world.bus.unit_of_work() as uow:
                assert list(await uow.session.scalars(text("SELECT number FROM effects"))) == [2]

    async def test_failing_message_is_retried_at_once_then_after_each_delay_then_dead_lettered(
        self, world: World
    ) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[10, 60], jitter=0))
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            raise ZeroDivisionError("no orders today")

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert (attempts, world.scheduled()) == ([1, 2], 1)
            await world.advance(timedelta(seconds=11))
            assert attempts == [1, 2, 3]
            await world.advance(timedelta(seconds=11))
            assert (attempts, world.scheduled()) == ([1, 2, 3], 1)
            await world.advance(timedelta(seconds=50))
            assert attempts == [1, 2, 3, 4]
            (letter,) = world.dead_letters()
            assert letter[:3] == ("contract.order-placed", "ZeroDivisionError", "no orders today")
            assert letter.attempts == 4
            assert 'raise ZeroDivisionError("no orders today")' in letter.traceback

    @pytest.mark.parametrize(
        ("by_setting", "by_handler", "buried"),
        [
            ("forget", None, False),
            ("forget", "dead-letter", True),
            ("dead-letter", None, True),
            ("dead-letter", "forget", False),
        ],
    )
    @pytest.mark.parametrize("comes", ["while it waits", "before its retry", "before it is sent"])
    async def test_expired_message_is_a_dead_letter_when_on_expiry_asks_for_one(
        self, world: World, by_setting: str, by_handler: Any, buried: bool, comes: str
    ) -> None:
        world.bus.configure(on_expiry=by_setting)
        world.bus.route(OrderBilled, to=BILLING)

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[60], jitter=0), on_expiry=by_handler)
        async def handle(order: OrderPlaced) -> None:
            raise ZeroDivisionError

        async with world:
            if comes == "while it waits":
                await world.pause(OrderPlaced)
            async with world.bus.unit_of_work():
                if comes == "before it is sent":
                    world.bus.send(OrderBilled(1), deliver_by=timedelta(seconds=-1))
                else:
                    world.bus.send(OrderPlaced(1), deliver_by=timedelta(seconds=30))
            await world.settle()
            await world.advance(timedelta(seconds=31))
            if comes == "before it is sent":
                buried = by_setting == "dead-letter"
            assert [letter.exception_type for letter in world.dead_letters()] == ["expired"] * buried
            assert len(world.expired()) == (not buried)
            reasons = {
                "while it waits": "expired before it was handled",
                "before its retry": "the next attempt",
                "before it is sent": "expired before it was sent",
            }
            assert all(letter.reason.startswith(reasons[comes]) for letter in world.dead_letters())

    @pytest.mark.parametrize("is_moved", [False, True])
    async def test_delay_of_a_message_is_no_part_of_its_age(self, world: World, is_moved: bool) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[30], jitter=0, max_age=60))
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            raise ZeroDivisionError

        async with world:
            async with world.bus.unit_of_work():
                message_id = world.bus.send(OrderPlaced(1), delay=60 if is_moved else 3_600)
            if is_moved:
                assert await world.bus.reschedule(message_id, delay=3_600)
            await world.advance(timedelta(seconds=3_601))
            assert (attempts, world.scheduled()) == ([1, 2], 1)
            await world.advance(timedelta(seconds=32))
            assert (attempts, len(world.dead_letters())) == ([1, 2, 3], 1)

    async def test_policy_of_a_class_of_errors_is_used_and_the_handler_precedes_the_service(self, world: World) -> None:
        attempts: dict[str, int] = {}
        errors = {"os": FileNotFoundError("os"), "key": KeyError("key"), "value": ValueError("value")}
        world.bus.on_error(OSError, KeyError, retry=Retry(immediate=1, delays=[]))

        @world.bus.handles(OrderPlaced, retry=Retry.never(), on_error={KeyError: Retry(immediate=3, delays=[])})
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts[ctx.headers["fails"]] = ctx.attempt
            raise errors[ctx.headers["fails"]]

        async with world:
            async with world.bus.unit_of_work():
                for name in errors:
                    world.bus.send(OrderPlaced(1), headers={"fails": name})
            await world.settle()
            assert attempts == {"os": 2, "key": 4, "value": 1}
            assert len(world.dead_letters()) == 3

    @pytest.mark.parametrize("error", [int, Reject, "TimeoutError"])
    def test_policy_for_a_class_other_than_an_error_is_refused(self, world: World, error: Any) -> None:
        with pytest.raises(InvalidSetting, match="on_error"):
            world.bus.on_error(error, retry=Retry())

    async def test_message_succeeding_at_last_is_no_dead_letter(self, world: World) -> None:
        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[10]))
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            if ctx.attempt == 1:
                raise ZeroDivisionError

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            await world.advance(timedelta(seconds=12))
            assert (world.scheduled(), world.dead_letters()) == (0, [])

    async def test_a_rejected_message_is_a_dead_letter_at_once(self, world: World) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            raise Reject("we do not ship there")

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert attempts == [1]
            (letter,) = world.dead_letters()
            assert (letter.exception_type, letter.reason) == ("durable.errors.Reject", "we do not ship there")

    async def test_retry_later_sets_the_time_of_the_next_attempt(self, world: World) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            if ctx.attempt < 3:
                raise RetryLater(timedelta(hours=1))

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            await world.advance(timedelta(minutes=50))
            assert attempts == [1]
            await world.advance(timedelta(minutes=11))
            await world.advance(timedelta(minutes=61))
            assert (attempts, world.dead_letters()) == ([1, 2, 3], [])

    async def test_message_put_back_comes_last_with_its_new_headers(self, world: World) -> None:
        seen: list[tuple[int, int, dict[str, str]]] = []

        @world.bus.handles(OrderPlaced, retry=NEVER, concurrency=1)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            seen.append((order.number, ctx.attempt, dict(ctx.headers)))
            if order.number == 1 and ctx.attempt < 3:
                raise PutBack("not now", headers={"lane": f"slow {ctx.attempt}", "hop": None})

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1), headers={"hop": "a", "by": "me"})
                world.bus.send(OrderPlaced(2))
            await world.settle()
        assert seen == [
            (1, 1, {"hop": "a", "by": "me"}),
            (2, 1, {}),
            (1, 2, {"by": "me", "lane": "slow 1"}),
            (1, 3, {"by": "me", "lane": "slow 2"}),
        ]

    @pytest.mark.parametrize("headers", [{"a": "x" * 10_000}, {"a": "line\nbreak"}], ids=["long", "control character"])
    async def test_message_put_back_with_unstorable_headers_is_a_dead_letter(
        self, world: World, headers: dict[str, str]
    ) -> None:
        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced) -> None:
            raise PutBack(headers=headers)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert letter.reason.startswith("it cannot be put back with other headers: ")

    @pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
    @pytest.mark.parametrize("error", [Panic("unwrap() on None"), SystemExit(3), KeyboardInterrupt()], ids=repr)
    async def test_base_exception_is_a_failed_attempt_and_the_next_message_is_handled(
        self, world: World, error: BaseException, is_async: bool
    ) -> None:
        attempts: list[tuple[int, int]] = []

        async def handle(order: OrderPlaced, ctx: Context) -> None:
            handle_sync(order, ctx)

        def handle_sync(order: OrderPlaced, ctx: Context) -> None:
            attempts.append((order.number, ctx.attempt))
            if order.number == 1:
                raise error

        declare = world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]), concurrency=1)
        declare(handle) if is_async else declare(handle_sync)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                world.bus.send(OrderPlaced(2))
            await world.settle()
            (letter,) = world.dead_letters()
            assert letter.exception_type.rpartition(".")[2] == type(error).__name__
        assert attempts == [(1, 1), (1, 2), (2, 1)]

    @pytest.mark.parametrize("mistake", ["route", "return", "reply"])
    async def test_a_mistake_of_the_wiring_is_a_dead_letter_at_once(self, world: World, mistake: str) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced)
        async def handle(order: OrderPlaced, ctx: Context) -> object:
            attempts.append(ctx.attempt)
            if mistake == "route":
                ctx.send(Unrouted())
            elif mistake == "reply":
                ctx.reply(OrderShipped(1))
            return object()

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            kinds = {"return": "UnknownMessageType"}
            assert letter.exception_type == f"durable.errors.{kinds.get(mistake, 'RoutingError')}"
        assert attempts == [1]

    async def test_error_without_a_retry_time_uses_the_retries_of_the_handler(self, world: World) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[1, 1]), on_error={Busy: RetryAfter()})
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            raise Busy

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))

            async def has_ended() -> bool:
                await world.advance(2 * SECOND)
                return bool(world.dead_letters())

            await eventually(has_ended, within=30)
            assert attempts == [1, 2, 3]

    async def test_a_released_message_comes_again_and_the_attempt_is_not_counted(self, world: World) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            if len(attempts) < 3:
                raise Release

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert (attempts, world.dead_letters()) == ([1, 1, 1], [])

    async def test_failing_message_of_a_group_alone_is_run_again(self, world: World) -> None:
        shipped = collect(world.bus, OrderShipped)
        attempts: dict[int, list[int]] = {}

        @world.bus.handles(OrderPlaced, max_batch=10, concurrency=1, retry=Retry(immediate=1, delays=[]))
        async def handle(order: OrderPlaced, ctx: Context) -> OrderShipped:
            attempts.setdefault(order.number, []).append(ctx.attempt)
            if order.number == 3:
                raise ZeroDivisionError
            return OrderShipped(order.number)

        async with world:
            async with world.bus.unit_of_work():
                for number in range(6):
                    world.bus.send(OrderPlaced(number))
            await world.settle()
            assert sorted(order.number for order in shipped) == [0, 1, 2, 4, 5]
            assert [letter.attempts for letter in world.dead_letters()] == [2]
            assert attempts[3] == [1, 1, 2]  # in the group, then alone
            assert attempts[5] == [1]

    @pytest.mark.parametrize("is_async", [True, False])
    async def test_handler_exceeding_its_timeout_fails(self, world: World, is_async: bool) -> None:
        shipped = collect(world.bus, OrderShipped)
        let_go = threading.Event()

        async def handle(order: OrderPlaced) -> OrderShipped:
            await asyncio.Event().wait()
            return OrderShipped(1)

        def handle_in_thread(order: OrderPlaced) -> OrderShipped:
            let_go.wait(5)
            return OrderShipped(1)

        declare = world.bus.handles(OrderPlaced, timeout=0.05, retry=NEVER)
        declare(handle) if is_async else declare(handle_in_thread)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert letter.exception_type == "TimeoutError"
            let_go.set()  # the thread cannot be stopped; what it does now must not be committed
        assert shipped == []

    async def test_a_handler_must_not_commit_its_session(self, world: World) -> None:
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, session: AsyncSession) -> None:
            world.bus.send(OrderShipped(1))
            await session.commit()

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert letter.exception_type == f"durable.errors.{WiringError.__name__}"
            assert "durable commits it" in letter.reason
            assert shipped == []

    @pytest.mark.parametrize("is_async", [True, False])
    @pytest.mark.parametrize("shape", ["transaction", "context manager", "savepoint open", "connection"])
    async def test_a_handler_must_not_commit_its_session_in_any_other_way(
        self, world_with_tables: World, is_async: bool, shape: str
    ) -> None:
        world = world_with_tables
        shipped = collect(world.bus, OrderShipped)

        def commit(session: Session) -> None:
            world.bus.send(OrderShipped(1))
            session.execute(text("INSERT INTO effects VALUES (1)"))
            transaction = session.get_transaction()
            assert transaction is not None
            if shape == "connection":
                session.connection().commit()
            elif shape == "context manager":
                with transaction:
                    pass
            else:
                if shape == "savepoint open":
                    session.begin_nested()
                transaction.commit()

        if is_async:

            @world.bus.handles(OrderPlaced, retry=NEVER)
            async def handle(order: OrderPlaced, session: AsyncSession) -> None:
                await session.run_sync(commit)
        else:

            @world.bus.handles(OrderPlaced, retry=NEVER)
            def handle_in_thread(order: OrderPlaced, session: Session) -> None:
                commit(session)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert letter.exception_type == f"durable.errors.{WiringError.__name__}"
            assert shipped == []
            async with world.bus.unit_of_work() as uow:
                assert (await uow.session.execute(text("SELECT count(*) FROM effects"))).scalar_one() == 0

    async def test_message_sent_by_a_task_outliving_its_handler_is_stored_or_refused(self, world: World) -> None:
        shipped = collect(world.bus, OrderShipped)
        accepted: list[UUID] = []
        left: set[asyncio.Task[None]] = set()

        async def keep_sending(ctx: Context) -> None:
            for _ in range(200):
                with suppress(NoUnitOfWork):
                    accepted.append(ctx.send(OrderShipped(1)))
                await asyncio.sleep(0)

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, session: AsyncSession, ctx: Context) -> None:
            left.add(asyncio.create_task(keep_sending(ctx)))
            await asyncio.sleep(0)

        async with world:
            async with world.bus.unit_of_work():
                for number in range(5):
                    world.bus.send(OrderPlaced(number))
            await world.settle()
            await asyncio.wait(left)
            await world.settle()
            assert len(left) == 5
            assert len(shipped) == len(set(accepted)) >= 5
            assert len(accepted) < 5 * 200
            assert world.dead_letters() == []

    async def test_handler_swallowing_the_refusal_of_its_commit_commits_once(self, world: World) -> None:
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, session: AsyncSession) -> OrderShipped:
            with pytest.raises(WiringError):
                await session.commit()
            return OrderShipped(order.number)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert shipped == [OrderShipped(1)]

    @pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
    async def test_handler_rolling_back_its_session_has_failed(self, world: World, is_async: bool) -> None:
        shipped = collect(world.bus, OrderShipped)

        async def handle(order: OrderPlaced, session: AsyncSession) -> OrderShipped:
            await session.rollback()
            return OrderShipped(order.number)

        def handle_sync(order: OrderPlaced, session: Session) -> OrderShipped:
            session.rollback()
            return OrderShipped(order.number)

        declare = world.bus.handles(OrderPlaced, retry=NEVER)
        declare(handle) if is_async else declare(handle_sync)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert (letter.exception_type, shipped) == ("durable.errors.TransactionEnded", [])

    async def test_handler_raising_cancelled_error_has_failed_and_the_next_message_is_handled(
        self, world: World
    ) -> None:
        seen: list[int] = []

        @world.bus.handles(OrderPlaced, concurrency=1, retry=NEVER)
        async def handle(order: OrderPlaced) -> None:
            if order.number == 1:
                raise asyncio.CancelledError
            seen.append(order.number)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                world.bus.send(OrderPlaced(2))
            await world.settle()
            assert seen == [2]
            assert [letter.exception_type for letter in world.dead_letters()] == ["RuntimeError"]

    async def test_a_sync_handler_may_fail_with_any_exception(self, world: World) -> None:
        @world.bus.handles(OrderPlaced, retry=NEVER)
        def handle(order: OrderPlaced) -> None:
            next(iter([]))

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert "StopIteration" in letter.reason


tenant: ContextVar[str] = ContextVar("tenant", default="none")


class Watching(Middleware):
    """Keeps what passes by."""

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []
        self.ids: list[UUID | None] = []
        self.handled: list[Incoming] = []

    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        self.sent.append(outgoing)
        self.ids.append(call_next(outgoing))
        return self.ids[-1]

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        self.handled.append(incoming)
        return await call_next(incoming)


class Sending(Middleware):
    """A component of one function, around what is sent."""

    def __init__(self, function: Callable[[Outgoing, SendNext], UUID | None]) -> None:
        self._function = function

    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        return self._function(outgoing, call_next)


class Handling(Middleware):
    """A component of one function, around what is handled of one class."""

    def __init__(self, function: Callable[[Incoming, HandleNext], Awaitable[object]], cls: type = OrderPlaced) -> None:
        self._function = function
        self._cls = cls

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        if isinstance(incoming.message, self._cls):
            return await self._function(incoming, call_next)
        return await call_next(incoming)


class TestMiddlewareOfSending:
    async def test_middleware_sees_each_message_sent_once_and_its_headers_arrive(self, world: World) -> None:
        watching, contexts = Watching(), list[Context]()
        world.bus.use(Sending(lambda outgoing, call_next: call_next(outgoing.with_headers({"tenant": "blue"}))))
        world.bus.use(watching, stage="after")
        world.bus.subscribe(OrderBilled, to=BILLING)
        world.bus.subscribe(OrderBilled, to=MAIL)

        @world.bus.handles(OrderPlaced)
        async def place(order: OrderPlaced, ctx: Context) -> OrderShipped:
            contexts.append(ctx)
            ctx.publish(OrderBilled(order.number))
            return OrderShipped(order.number)

        @world.bus.handles(OrderShipped)
        async def ship(order: OrderShipped, ctx: Context) -> None:
            contexts.append(ctx)

        async with world:
            async with world.bus.unit_of_work():
                sent = world.bus.send(OrderPlaced(1), headers={"user": "ann"})
                world.bus.publish(NobodyWantsThis())
            await world.settle()
            assert world.sent_to(BILLING) == world.sent_to(MAIL) == [("contract.order-billed", b'{"number":1}')]
        kinds = [(outgoing.kind, type(outgoing.message)) for outgoing in watching.sent]
        assert kinds == [
            ("command", OrderPlaced),
            ("event", NobodyWantsThis),
            ("event", OrderBilled),
            ("cascade", OrderShipped),
        ]
        causes = [outgoing.caused_by and outgoing.caused_by.id for outgoing in watching.sent]
        assert causes == [None, None, sent, sent]
        assert [ctx.id for ctx in contexts] == [watching.ids[0], watching.ids[3]]
        assert [ctx.headers for ctx in contexts] == [{"user": "ann", "tenant": "blue"}, {"tenant": "blue"}]

    async def test_message_dropped_by_the_middleware_is_not_sent_and_the_sender_proceeds(self, world: World) -> None:
        dropping = Sending(lambda outgoing, call_next: None if outgoing.options.get("key") else call_next(outgoing))
        world.bus.use(dropping)
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                dropped = world.bus.send(OrderPlaced(1), key="dropped")
                sent = world.bus.send(OrderPlaced(2))
            await world.settle()
            assert (seen, world.waiting()) == ([OrderPlaced(2)], 0)
        assert isinstance(dropped, UUID)
        assert dropped != sent

    async def test_replacement_message_goes_to_its_own_destination(self, world: World) -> None:
        def replace(outgoing: Outgoing, call_next: SendNext) -> UUID | None:
            assert isinstance(outgoing.message, OrderPlaced)
            return call_next(outgoing.replace(message=OrderBilled(outgoing.message.number)))

        world.bus.use(Sending(replace))
        world.bus.route(OrderBilled, to=BILLING)
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(7))
            await world.settle()
            assert world.sent_to(BILLING) == [("contract.order-billed", b'{"number":7}')]
        assert seen == []

    async def test_message_sent_twice_by_the_middleware_has_the_same_ids_in_a_repeated_attempt(
        self, world: World
    ) -> None:
        attempts: list[list[UUID | None]] = []

        def twice(outgoing: Outgoing, call_next: SendNext) -> UUID | None:
            if not isinstance(outgoing.message, OrderShipped):
                return call_next(outgoing)
            attempts[-1] += [call_next(outgoing), call_next(outgoing)]
            return attempts[-1][0]

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]))
        async def place(order: OrderPlaced, ctx: Context) -> OrderShipped:
            attempts.append([])
            assert ctx.send(OrderShipped(1)) == attempts[-1][0]
            if ctx.attempt == 1:
                raise RuntimeError("not yet")
            return OrderShipped(2)

        world.bus.use(Sending(twice))
        shipped = collect(world.bus, OrderShipped)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
        assert sorted(order.number for order in shipped) == [1, 1, 2, 2]
        assert attempts[0] == attempts[1][:2]
        assert len(set(attempts[1])) == 4

    async def test_error_of_the_middleware_reaches_the_sender_and_other_messages_are_sent(self, world: World) -> None:
        def refuse(outgoing: Outgoing, call_next: SendNext) -> UUID | None:
            if outgoing.message == OrderPlaced(2):
                raise PermissionError("not today")
            return call_next(outgoing)

        world.bus.use(Sending(refuse))
        seen = collect(world.bus, concurrency=1)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                with pytest.raises(PermissionError, match="not today"):
                    world.bus.send(OrderPlaced(2))
                world.bus.send(OrderPlaced(3))
            await world.settle()
            assert seen == [OrderPlaced(1), OrderPlaced(3)]

    async def test_middleware_cannot_be_added_to_a_working_bus(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            with pytest.raises(WiringError, match="before it starts or sends"):
                world.bus.use(Watching())
            await world.settle()
            assert seen == [OrderPlaced(1)]


class TestMiddlewareOfHandling:
    async def test_middleware_is_given_message_handler_and_attempt(self, world: World) -> None:
        watching = Watching()
        world.bus.use(watching)

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]))
        async def place(order: OrderPlaced, ctx: Context) -> None:
            if ctx.attempt == 1:
                raise RuntimeError("not yet")

        async with world:
            async with world.bus.unit_of_work():
                sent = world.bus.send(OrderPlaced(1), headers={"user": "ann"})
            await world.settle()
        assert [incoming.attempt for incoming in watching.handled] == [1, 2]
        for incoming in watching.handled:
            assert (incoming.message, incoming.context.id) == (OrderPlaced(1), sent)
            assert incoming.context.headers == {"user": "ann"}
            assert incoming.handler.endswith("place")

    async def test_a_message_may_be_finished_without_its_handler(self, world: World) -> None:
        async def skip(incoming: Incoming, call_next: HandleNext) -> object:
            return None if incoming.message == OrderPlaced(1) else await call_next(incoming)

        world.bus.use(Handling(skip))
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                world.bus.send(OrderPlaced(2))
            await world.settle()
            assert (seen, world.dead_letters(), world.waiting()) == ([OrderPlaced(2)], [], 0)

    async def test_the_handler_may_be_given_another_message(self, world: World) -> None:
        async def annotate(incoming: Incoming, call_next: HandleNext) -> object:
            assert isinstance(incoming.message, OrderPlaced)
            return await call_next(incoming.replace(message=OrderPlaced(incoming.message.number, "annotated")))

        world.bus.use(Handling(annotate))
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert seen == [OrderPlaced(1, "annotated")]

    async def test_error_of_the_middleware_counts_as_raised_by_the_handler(self, world: World) -> None:
        async def refuse(incoming: Incoming, call_next: HandleNext) -> object:
            match incoming.message, incoming.attempt:
                case OrderPlaced(1), _:
                    raise Reject("never")
                case OrderPlaced(2), 1:
                    raise RetryLater(5)
                case OrderPlaced(3), 1 | 2:
                    raise ConnectionError("try again")
                case _:
                    return await call_next(incoming)

        world.bus.use(Handling(refuse))
        seen = collect(world.bus, retry=Retry(immediate=2, delays=[60]))
        async with world:
            async with world.bus.unit_of_work():
                for number in (1, 2, 3):
                    world.bus.send(OrderPlaced(number))
            await world.settle()
            assert [(letter.reason, letter.attempts) for letter in world.dead_letters()] == [("never", 1)]
            assert (seen, world.scheduled()) == ([OrderPlaced(3)], 1)
            await world.advance(5 * MINUTE)
            assert seen == [OrderPlaced(3), OrderPlaced(2)]

    async def test_effects_of_the_handler_are_undone_when_the_middleware_fails_afterwards(
        self, world_with_tables: World
    ) -> None:
        async def fail_once(incoming: Incoming, call_next: HandleNext) -> object:
            result = await call_next(incoming)
            if incoming.attempt == 1:
                raise ConnectionError
            return result

        world = world_with_tables
        world.bus.use(Handling(fail_once))
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]))
        async def place(order: OrderPlaced, session: AsyncSession) -> OrderShipped:
            await session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": order.number})
            return OrderShipped(order.number)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(7))
            await world.settle()
            async with world.bus.unit_of_work() as uow:
                assert list(await uow.session.scalars(text("SELECT number FROM effects"))) == [7]
        assert shipped == [OrderShipped(7)]

    async def test_handler_run_twice_by_the_middleware_sends_twice_and_finishes_its_message_once(
        self, world: World
    ) -> None:
        async def twice(incoming: Incoming, call_next: HandleNext) -> object:
            await call_next(incoming)
            return await call_next(incoming)

        world.bus.use(Handling(twice))
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced)
        async def place(order: OrderPlaced, ctx: Context) -> OrderShipped:
            ctx.send(OrderShipped(1))
            return OrderShipped(2)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert sorted(order.number for order in shipped) == [1, 1, 2, 2]
            assert (world.dead_letters(), world.waiting()) == ([], 0)

    async def test_a_run_in_a_savepoint_can_be_forgotten_and_repeated(self, world_with_tables: World) -> None:
        async def repeat(incoming: Incoming, call_next: HandleNext) -> object:
            assert isinstance(incoming.session, AsyncSession)
            try:
                async with incoming.session.begin_nested():
                    return await call_next(incoming)
            except ConnectionError:
                return await call_next(incoming)

        world = world_with_tables
        world.bus.use(Handling(repeat))
        shipped, runs = collect(world.bus, OrderShipped), list[int]()

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def place(order: OrderPlaced, session: AsyncSession, ctx: Context) -> None:
            runs.append(ctx.attempt)
            await session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": len(runs)})
            ctx.send(OrderShipped(len(runs)))
            if len(runs) == 1:
                raise ConnectionError

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert (runs, shipped, world.dead_letters()) == ([1, 1], [OrderShipped(2)], [])
            async with world.bus.unit_of_work() as uow:
                assert list(await uow.session.scalars(text("SELECT number FROM effects"))) == [2]

    async def test_context_variable_set_by_the_middleware_holds_for_the_handler_and_its_messages(
        self, world: World
    ) -> None:
        async def set_up(incoming: Incoming, call_next: HandleNext) -> object:
            token = tenant.set(incoming.context.headers.get("tenant", "none"))
            try:
                return await call_next(incoming)
            finally:
                tenant.reset(token)

        contexts: dict[int, Context] = {}
        world.bus.use(Handling(set_up, object))
        world.bus.use(Sending(lambda outgoing, call_next: call_next(outgoing.with_headers({"tenant": tenant.get()}))))

        @world.bus.handles(OrderPlaced)
        async def place(order: OrderPlaced, ctx: Context) -> OrderShipped:
            ctx.send(OrderShipped(1))
            return OrderShipped(2)

        @world.bus.handles(OrderShipped)
        def ship(order: OrderShipped, ctx: Context) -> OrderBilled:
            contexts[order.number] = ctx
            return OrderBilled(order.number + 2)

        @world.bus.handles(OrderBilled)
        async def bill(order: OrderBilled, ctx: Context) -> None:
            contexts[order.number] = ctx

        async with world:
            tenant.set("blue")
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            tenant.set("none")
            await world.settle()
        assert {number: ctx.headers["tenant"] for number, ctx in contexts.items()} == dict.fromkeys(
            (1, 2, 3, 4), "blue"
        )

    async def test_middleware_sees_each_message_of_a_group_and_a_failing_one_runs_alone(self, world: World) -> None:
        async def refuse(incoming: Incoming, call_next: HandleNext) -> object:
            if incoming.message == OrderPlaced(3):
                raise ZeroDivisionError
            return await call_next(incoming)

        watching = Watching()
        world.bus.use(watching, stage="before")
        world.bus.use(Handling(refuse))

        @world.bus.handles(OrderPlaced, max_batch=10, concurrency=1, retry=NEVER)
        async def place(order: OrderPlaced) -> OrderShipped:
            return OrderShipped(order.number)

        shipped = collect(world.bus, OrderShipped)
        async with world:
            async with world.bus.unit_of_work():
                for number in range(6):
                    world.bus.send(OrderPlaced(number))
            await world.settle()
            assert sorted(order.number for order in shipped) == [0, 1, 2, 4, 5]
            assert [letter.exception_type for letter in world.dead_letters()] == ["ZeroDivisionError"]
        placed = [each.message for each in watching.handled if isinstance(each.message, OrderPlaced)]
        assert placed == [OrderPlaced(number) for number in (0, 1, 2, 3, 0, 1, 2, 3, 4, 5)]

    async def test_middleware_sees_a_list_handler_once_with_every_context(self, world: World) -> None:
        watching, seen = Watching(), list[list[OrderPlaced]]()
        world.bus.use(watching)

        @world.bus.handles(OrderPlaced, max_batch=100, concurrency=1)
        async def place(orders: list[OrderPlaced]) -> None:
            seen.append(orders)

        async with world:
            async with world.bus.unit_of_work():
                sent = [world.bus.send(OrderPlaced(number)) for number in range(5)]
            await world.settle()
        (incoming,) = watching.handled
        assert incoming.message == incoming.messages == seen[0] == [OrderPlaced(number) for number in range(5)]
        assert [ctx.id for ctx in incoming.contexts] == sent
        assert incoming.context is incoming.contexts[0]


class TestMiddlewareOfSyncHandlers:
    async def test_middleware_stays_in_the_loop_and_the_sync_handler_runs_in_its_thread_and_transaction(
        self, world_with_tables: World
    ) -> None:
        threads: dict[str, str] = {}

        async def around(incoming: Incoming, call_next: HandleNext) -> object:
            threads["middleware"] = threading.current_thread().name
            await asyncio.sleep(0)
            result = await call_next(incoming)
            session = incoming.session
            assert isinstance(session, Session)
            await asyncio.to_thread(session.execute, text("INSERT INTO effects VALUES (:n)"), {"n": 2})
            return result

        world = world_with_tables
        world.bus.use(Handling(around))
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced)
        def place(order: OrderPlaced, session: Session, ctx: Context) -> OrderShipped:
            threads.setdefault("handler", threading.current_thread().name)
            session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": order.number})
            world.bus.send(OrderShipped(1))
            return OrderShipped(2)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            async with world.bus.unit_of_work() as uow:
                assert sorted(await uow.session.scalars(text("SELECT number FROM effects"))) == [1, 2]
        assert sorted(order.number for order in shipped) == [1, 2]
        assert threads["middleware"] == threading.main_thread().name
        assert threads["handler"].startswith("durable contract.order-placed")

    async def test_failed_attempt_of_a_sync_handler_is_undone_and_repeated(self, world_with_tables: World) -> None:
        async def fail_once(incoming: Incoming, call_next: HandleNext) -> object:
            result = await call_next(incoming)
            if incoming.attempt == 1:
                raise ConnectionError
            return result

        world = world_with_tables
        world.bus.use(Handling(fail_once))
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, max_batch=10, concurrency=1, retry=Retry(immediate=2, delays=[]))
        def place(order: OrderPlaced, session: Session, ctx: Context) -> OrderShipped:
            session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": order.number})
            if (order.number, ctx.attempt) == (2, 2):
                raise StopIteration
            return OrderShipped(order.number)

        async with world:
            async with world.bus.unit_of_work():
                for number in (1, 2, 3):
                    world.bus.send(OrderPlaced(number))
            await world.settle()
            async with world.bus.unit_of_work() as uow:
                assert sorted(await uow.session.scalars(text("SELECT number FROM effects"))) == [1, 2, 3]
        assert sorted(order.number for order in shipped) == [1, 2, 3]
        assert world.dead_letters() == []

    async def test_sync_handler_exceeding_its_timeout_fails_and_commits_nothing_later(self, world: World) -> None:
        let_go, went_on = threading.Event(), threading.Event()
        watching = Watching()
        world.bus.use(watching)
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, timeout=0.05, retry=NEVER)
        def place(order: OrderPlaced) -> OrderShipped:
            let_go.wait(5)
            went_on.set()
            return OrderShipped(1)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert letter.exception_type == "TimeoutError"
            let_go.set()
            await eventually(went_on.is_set)
        assert len(watching.handled) == 1
        assert shipped == []


class TestOrder:
    async def send(self, world: World, *messages: Any, key: str = "a", **options: Any) -> None:
        async with world.bus.unit_of_work() as uow:
            for each in messages:
                uow.send(each, key=key, **options)

    async def test_message_waiting_for_its_retry_holds_only_its_own_key(self, world: World) -> None:
        seen: list[int] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[60, 60], jitter=0))
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            if order.number == 1 and ctx.attempt < 3:
                raise RuntimeError("not yet")
            seen.append(order.number)

        async with world:
            await self.send(world, *map(OrderPlaced, (1, 2, 3)))
            await self.send(world, OrderPlaced(10), key="b")
            await world.settle()
            assert seen == [10]
            await world.advance(MINUTE)
            assert seen == [10]
            await world.advance(MINUTE)
            assert seen == [10, 1, 2, 3]

    async def test_group_keeps_a_key_in_order_and_releases_messages_behind_a_failure(self, world: World) -> None:
        seen: list[int] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[60], jitter=0), max_batch=10)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            if order.number == 2 and ctx.attempt < 2:
                raise RuntimeError("not yet")
            if order.number not in seen:
                seen.append(order.number)

        async with world:
            await self.send(world, *map(OrderPlaced, (1, 2, 3, 4)))
            await world.settle()
            assert seen == [1]
            await world.advance(MINUTE)
            assert seen == [1, 2, 3, 4]

    async def test_a_key_orders_messages_of_different_types(self, world: World) -> None:
        seen: list[str] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[60], jitter=0))
        async def place(order: OrderPlaced, ctx: Context) -> None:
            if ctx.attempt == 1:
                raise RuntimeError("not yet")
            seen.append(f"placed {order.number}")

        @world.bus.handles(OrderShipped)
        async def ship(order: OrderShipped) -> None:
            seen.append(f"shipped {order.number}")

        async with world:
            await self.send(world, OrderPlaced(1), OrderShipped(1))
            await self.send(world, OrderShipped(2), key="b")
            await world.settle()
            assert seen == ["shipped 2"]
            await world.advance(MINUTE)
            assert seen == ["shipped 2", "placed 1", "shipped 1"]

    async def test_delayed_message_holds_no_other_of_its_key(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            await self.send(world, OrderPlaced(1), delay=60)
            await self.send(world, OrderPlaced(2))
            await world.settle()
            assert seen == [OrderPlaced(2)]
            await world.advance(MINUTE)
            assert seen == [OrderPlaced(2), OrderPlaced(1)]

    @pytest.mark.parametrize("option", ["continue", "park"])
    async def test_dead_letter_parks_its_key_only_when_asked(self, world: World, option: Any) -> None:
        seen: list[int] = []

        @world.bus.handles(OrderPlaced, retry=NEVER, on_dead_letter=option)
        async def handle(order: OrderPlaced) -> None:
            if order.number == 2:
                raise RuntimeError("broken")
            seen.append(order.number)

        async with world:
            await self.send(world, *map(OrderPlaced, (1, 2, 3)))
            await self.send(world, OrderPlaced(10), key="b")
            await world.settle()
            assert sorted(seen) == ([1, 3, 10] if option == "continue" else [1, 10])
            assert await world.bus.resume(key="a") == (option == "park")
            await world.settle()
            assert sorted(seen) == [1, 3, 10]
            assert len(world.dead_letters()) == 1

    async def test_paused_key_waits_and_others_proceed(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            await world.bus.pause(key="a")
            await self.send(world, OrderPlaced(1))
            await self.send(world, OrderPlaced(10), key="b")
            await world.settle()
            assert seen == [OrderPlaced(10)]
            assert await world.bus.resume(key="a")
            assert not await world.bus.resume(key="a")
            await world.settle()
            assert seen == [OrderPlaced(10), OrderPlaced(1)]

    async def test_an_ordered_handler_has_one_message_at_a_time_in_their_order(self, world: World) -> None:
        seen: list[int] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[60], jitter=0), ordered=True)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            if order.number == 2 and ctx.attempt == 1:
                raise RuntimeError("not yet")
            seen.append(order.number)

        async with world:
            for number in range(5):
                await self.send(world, OrderPlaced(number), key=str(number % 2))
            await world.settle()
            assert seen == [0, 1]
            await world.advance(MINUTE)
            assert seen == [0, 1, 2, 3, 4]


class TestArriving:
    async def test_envelope_arriving_twice_is_handled_once(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            envelope = arriving()
            await world.arrive(envelope)
            await world.arrive(envelope)
            assert seen == [OrderPlaced(1)]
            assert world.dead_letters() == []

    async def test_another_message_under_the_same_id_is_a_dead_letter(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            envelope = arriving()
            await world.arrive(envelope)
            await world.arrive(msgspec.structs.replace(envelope, body=b'{"number":2}'))
            assert seen == [OrderPlaced(1)]
            (letter,) = world.dead_letters()
            assert "under the same id" in letter.reason

    async def test_undecodable_body_is_a_dead_letter_without_an_attempt(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            await world.arrive(arriving(body=b'{"number":"one"}'))
            assert seen == []
            (letter,) = world.dead_letters()
            assert letter.exception_type == "durable.errors.InvalidMessage"
            assert "the body is no OrderPlaced" in letter.reason

    async def test_unhandled_type_is_a_dead_letter(self, world: World) -> None:
        async with world:
            await world.arrive(arriving("os.system"))
            (letter,) = world.dead_letters()
            assert (letter.message_type, letter.attempts) == ("os.system", 0)
            assert letter.reason == "no node has a handler for os.system"

    @pytest.mark.parametrize("misdate", MISDATED, ids=lambda misdate: misdate.__name__)
    async def test_misdated_envelope_is_quarantined(self, world: World, misdate: Misdate) -> None:
        seen = collect(world.bus, OrderPlaced)
        changed, reason = misdate(datetime.now(UTC))
        async with world:
            await world.arrive(msgspec.structs.replace(arriving(), **changed))
            assert [reason in letter.reason for letter in world.dead_letters()] == [True]
            await world.arrive(arriving())
            assert len(seen) == 1

    @pytest.mark.parametrize("date", WELL_DATED, ids=lambda date: date.__name__)
    async def test_envelope_within_the_bounds_of_time_is_taken(self, world: World, date: Misdate) -> None:
        collect(world.bus, OrderPlaced)
        changed, _ = date(datetime.now(UTC))
        async with world:
            await world.arrive(msgspec.structs.replace(arriving(), **changed))
            assert world.dead_letters() == []

    async def test_unstorable_envelope_is_quarantined(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            await world.arrive(msgspec.structs.replace(arriving(), headers={"a": "\0"}))
            assert seen == []
            assert [letter.exception_type for letter in world.dead_letters()] == ["quarantined on arrival"]


class TestRefused:
    async def test_misspelt_option_is_refused_and_nothing_is_sent(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work() as uow:
                for send in (world.bus.send, uow.send, world.bus.publish, uow.publish):
                    with pytest.raises(InvalidSetting, match="unknown option 'dealy'; did you mean 'delay'"):
                        send(OrderPlaced(1), dealy=60)  # type: ignore[call-arg]
            await world.settle()
            assert seen == []

    async def test_value_unfit_for_its_annotation_is_refused_at_send(self, world: World) -> None:
        seen = collect(world.bus, AsDataclass)
        async with world:
            async with world.bus.unit_of_work() as uow:
                with pytest.raises(InvalidMessage, match="AsDataclass"):
                    uow.send(AsDataclass("no id", 1.0))  # type: ignore[arg-type]
                uow.send(AsDataclass(UUID(int=1), 1))
            await world.settle()
            assert seen == [AsDataclass(UUID(int=1), 1)]
            assert world.dead_letters() == []

    async def test_event_without_any_subscriber_is_told_of_once(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with world, world.bus.unit_of_work() as uow:
            uow.publish(NobodyWantsThis(1))
            uow.publish(NobodyWantsThis(2))
        told = [record for record in caplog.records if "was published without a receiver" in record.message]
        assert [record.args for record in told] == [("contract.nobody-wants-this",)]

    async def test_handler_returning_a_message_without_a_destination_is_refused_at_the_start(
        self, world: World
    ) -> None:
        @world.bus.handles(OrderPlaced)
        async def ship(order: OrderPlaced) -> list[NobodyWantsThis] | None: ...

        with pytest.raises(RoutingError, match=r"ship: the returned message .*contract\.nobody-wants-this"):
            async with world:
                pass

    async def test_handler_returning_no_message_is_refused_at_the_start(self, world: World) -> None:
        @world.bus.handles(OrderPlaced)
        async def count(order: OrderPlaced) -> int: ...  # type: ignore[empty-body]

        with pytest.raises(UnknownMessageType, match="count: return type int is no message"):
            async with world:
                pass

    async def test_undecodable_class_is_refused_at_the_start(self, world: World) -> None:
        world.bus.route(Unfinished, to=BILLING)

        with pytest.raises(InvalidSetting, match=r"Unfinished: an annotation cannot be resolved: .*NotYet"):
            async with world:
                pass

    async def test_listener_of_a_bus_without_handlers_is_told_of(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with world:
            pass
        assert [record.args for record in caplog.records if "no handler is declared" in record.message] == [(ORDERS,)]
