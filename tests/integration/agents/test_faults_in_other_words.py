"""Faults of the database in an attempt, whatever the handler raises in their place: none counts as an attempt."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from durable import Incoming, Middleware, Reject, Release, Retry, RetryLater
from durable.application.middleware import HandleNext, MiddlewareStack
from durable.clock import SystemClock
from durable.embedded import Embedded
from durable.errors import StorageUnavailable
from durable.telemetry import Event
from durable.testing import eventually
from tests.support.one_handler import Placed, Shop, shop_tables
from tests.support.tables import Tables

FAULTS = {
    "conflict": "DO $$ BEGIN RAISE EXCEPTION 'could not serialize access' USING ERRCODE = '40001'; END $$",
    "deadlock": "DO $$ BEGIN RAISE EXCEPTION 'deadlock detected' USING ERRCODE = '40P01'; END $$",
    "full disk": "DO $$ BEGIN RAISE EXCEPTION 'no space left' USING ERRCODE = '53100'; END $$",
    "read-only": "DO $$ BEGIN RAISE EXCEPTION 'cannot execute INSERT' USING ERRCODE = '25006'; END $$",
    "lost connection": "SELECT pg_terminate_backend(pg_backend_pid())",
}


class Panic(BaseException):
    pass


class Base(DeclarativeBase):
    pass


class Once(Base):
    __tablename__ = "once"
    number: Mapped[int] = mapped_column(primary_key=True)


RAISED: dict[str, Callable[[], BaseException]] = {
    "error": lambda: ValueError("no"),
    "reject": lambda: Reject("no"),
    "group": lambda: ExceptionGroup("no", [ValueError("a"), KeyError("b")]),
    "panic": lambda: Panic("no"),
    "exit": lambda: SystemExit(3),
    "cancellation": lambda: asyncio.CancelledError("a task of the handler"),
    "group of panics": lambda: BaseExceptionGroup("no", [Panic("a"), asyncio.CancelledError()]),
}


@pytest.fixture
def tables(server: Embedded) -> Iterator[Tables]:
    with shop_tables(server) as tables:
        yield tables


@pytest.fixture(params=["asyncpg", "psycopg"])
async def shop(tables: Tables, request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    url = tables.url.replace("postgresql:", f"postgresql+{request.param}:")
    shop = Shop(tables, SystemClock(), database_url=url)
    yield shop
    await shop.close()


def meet(session: Session, fault: str, error: BaseException) -> None:
    """Swallow the fault, and raise the error in its place."""
    try:
        session.execute(text(FAULTS[fault]))
    except DBAPIError:
        raise error from None


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("fault", FAULTS)
async def test_fault_of_the_database_counts_no_attempt_in_other_words(
    shop: Shop, fault: str, raised: str, kind: str
) -> None:
    runs, times = (
        0,
        {"full disk": 1, "read-only": 2, "lost connection": 2}.get(fault, 3),
    )  # more of those are the message's own fault

    def begin() -> BaseException | None:
        nonlocal runs
        runs += 1
        return RAISED[raised]() if runs <= times else None

    async def handle(order: Placed, session: AsyncSession) -> None:
        await shop.write(session, order.number)
        if error := begin():
            await session.run_sync(meet, fault, error)

    def handle_in_a_thread(order: Placed, session: Session) -> None:
        session.execute(text("INSERT INTO effects (number) VALUES (:number)"), {"number": order.number})
        if error := begin():
            meet(session, fault, error)

    shop.handles(handle if kind == "async" else handle_in_a_thread, retry=Retry.never())
    async with shop.open():
        await shop.receive(7)
        await shop.settled()
    assert (shop.effects(), runs) == ([7], times + 1)
    assert (shop.counters[Event.ATTEMPT_FAILED], shop.tables.count("dead_letters")) == (0, 0)


async def cancel_and_wait() -> None:
    _own_task().cancel()
    await asyncio.sleep(0)


async def cancel_and_raise() -> None:
    _own_task().cancel()
    raise ValueError("the order is wrong")


async def cancel_and_return() -> None:
    _own_task().cancel()


async def cancel_by_a_timer() -> None:
    asyncio.get_running_loop().call_later(0.01, _own_task().cancel)
    await asyncio.sleep(1)


async def cancel_twice() -> None:
    _own_task().cancel()
    asyncio.get_running_loop().call_soon(_own_task().cancel)
    raise ValueError("the order is wrong")


async def raise_before_a_timer() -> None:
    for turns in range(1, 4):  # while its session is closed
        _cancel_after(turns, _own_task())
    raise ValueError("the order is wrong")


def _cancel_after(turns: int, task: asyncio.Task[object]) -> None:
    loop = asyncio.get_running_loop()
    if turns:
        loop.call_soon(_cancel_after, turns - 1, task)
    else:
        task.cancel()


def _own_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


CANCELS = [cancel_and_wait, cancel_and_raise, cancel_and_return, cancel_by_a_timer, cancel_twice, raise_before_a_timer]


@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize(
    ("fault", "cancel"),
    [
        (fault, cancel)
        for fault in FAULTS
        for cancel in CANCELS
        if (fault, cancel) != ("lost connection", raise_before_a_timer)  # nothing is left to be closed
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
async def test_fault_of_the_database_counts_no_attempt_when_the_handler_cancels_its_own_task(
    shop: Shop, fault: str, cancel: Callable[[], Awaitable[None]], max_batch: int
) -> None:
    runs, times = Counter[int](), {"full disk": 1, "read-only": 2, "lost connection": 2}.get(fault, 3)

    async def handle(order: Placed, session: AsyncSession) -> None:
        runs[order.number] += 1
        await shop.write(session, order.number)
        if order.number == 2 and runs[2] <= times:
            with suppress(DBAPIError):
                await session.execute(text(FAULTS[fault]))
            await cancel()

    shop.handles(handle, retry=Retry.never(), max_batch=max_batch)
    async with shop.open():
        await shop.receive(1, 2, 3)
        await shop.settled()
    assert (sorted(shop.effects()), runs[2]) == ([1, 2, 3], times + 1)
    assert (shop.counters[Event.ATTEMPT_FAILED], shop.tables.count("dead_letters")) == (0, 0)


@pytest.mark.parametrize("cancel", CANCELS, ids=lambda cancel: cancel.__name__)
async def test_error_beside_a_cancellation_of_the_own_task_is_named_by_the_dead_letter(
    shop: Shop, cancel: Callable[[], Awaitable[None]]
) -> None:
    async def handle(order: Placed, session: AsyncSession) -> None:
        await shop.write(session, order.number)
        if order.number == 1:
            await cancel()

    shop.handles(handle, retry=Retry(immediate=1, delays=[]))
    async with shop.open():
        await shop.receive(1, 2)
        await shop.settled()
    reasons = shop.tables.rows("SELECT reason FROM durable.dead_letters")
    match cancel.__name__:
        case "cancel_and_return":
            assert (reasons, shop.effects()) == ([], [1, 2])
        case "cancel_and_wait" | "cancel_by_a_timer":
            assert (reasons, shop.effects()) == (["something that the handler awaited was cancelled"], [2])
        case _:
            assert (reasons, shop.effects()) == (["the order is wrong"], [2])


class Passing(Middleware):
    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        return await call_next(incoming)


class Hurried(Middleware):
    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        async with asyncio.timeout(0.3):
            return await call_next(incoming)


@pytest.mark.parametrize("error", [*RAISED, "a timeout of the middleware"])
async def test_next_attempt_of_a_thread_meets_none_of_its_locks(shop: Shop, error: str) -> None:
    runs, busy, met = Counter[int](), set[int](), list[str]()

    def handle(order: Placed, session: Session) -> None:
        runs[order.number] += 1
        is_first = runs[order.number] == 1
        if order.number in busy:
            met.append("another attempt, which goes on")
        busy.add(order.number)
        try:
            session.execute(text(f"SELECT pg_advisory_xact_lock_shared({order.number})"))
            if not session.scalar(text(f"SELECT pg_try_advisory_xact_lock({order.number})")):
                met.append("a lock")
            if is_first and error in RAISED:
                raise RAISED[error]()
            if is_first:
                time.sleep(0.5)
            session.execute(text("INSERT INTO effects (number) VALUES (:number)"), {"number": order.number})
        finally:
            busy.discard(order.number)

    onion = MiddlewareStack()
    onion.use(Passing() if error in RAISED else Hurried(), "core")
    shop.handles(handle, onion, retry=Retry(immediate=3, delays=[]), concurrency=3)
    async with shop.open():
        await shop.receive(*range(9))
        await shop.settled()
    assert met == []
    if error != "reject":
        assert sorted(shop.effects()) == [*range(9)]


DECISIONS: dict[str, Callable[[], Exception]] = {
    "reject": lambda: Reject("sold out"),
    "later": lambda: RetryLater("1h"),
    "release": lambda: Release(),
    "error": lambda: ValueError("sold out"),
}


def within_a_savepoint_of_the_session(session: Session, fault: str) -> None:
    with session.begin_nested():
        session.execute(text(FAULTS[fault]))


def within_a_savepoint_of_the_connection(session: Session, fault: str) -> None:
    with session.connection().begin_nested():
        session.execute(text(FAULTS[fault]))


def within_a_savepoint_as_text(session: Session, fault: str) -> None:
    session.execute(text("SAVEPOINT mine"))
    try:
        session.execute(text(FAULTS[fault]))
    except DBAPIError:
        session.execute(text("ROLLBACK TO mine"))
        raise


def within_the_outer_of_two_savepoints(session: Session, fault: str) -> None:
    with session.begin_nested():
        session.execute(text("SAVEPOINT mine"))
        session.execute(text(FAULTS[fault]))


SURVIVED = ["deadlock", "full disk"]
SAVEPOINTS = [
    within_a_savepoint_of_the_session,
    within_a_savepoint_of_the_connection,
    within_a_savepoint_as_text,
    within_the_outer_of_two_savepoints,
]


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize("savepoint", SAVEPOINTS, ids=lambda savepoint: savepoint.__name__)
@pytest.mark.parametrize("fault", SURVIVED)
async def test_decision_of_a_handler_counts_when_a_savepoint_has_survived_the_fault(
    shop: Shop, fault: str, savepoint: Callable[[Session, str], None], decision: str
) -> None:
    runs = 0

    async def handle(order: Placed, session: AsyncSession) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            with pytest.raises(DBAPIError):
                await session.run_sync(savepoint, fault)
            raise DECISIONS[decision]()

    shop.handles(handle, retry=Retry.never())
    async with shop.open():
        await shop.receive(1)
        await shop.settled()
    assert (runs, shop.counters[Event.ATTEMPT_FAILED]) == (1, 1)
    assert shop.tables.count("dead_letters") == (decision in ("reject", "error"))


@pytest.mark.parametrize("fault", SURVIVED)
async def test_decision_counts_when_raised_from_a_survived_fault(shop: Shop, fault: str) -> None:
    runs = 0

    async def handle(order: Placed, session: AsyncSession) -> None:
        nonlocal runs
        runs += 1
        try:
            await session.run_sync(within_a_savepoint_of_the_session, fault)
        except DBAPIError as error:
            raise Reject("sold out") from error

    shop.handles(handle)
    async with shop.open():
        await shop.receive(1)
        await shop.settled()
    assert (runs, shop.tables.count("dead_letters")) == (1, 1)


@pytest.mark.parametrize("savepoint", SAVEPOINTS, ids=lambda savepoint: savepoint.__name__)
@pytest.mark.parametrize("fault", SURVIVED)
@pytest.mark.parametrize("raised", ["as it is", "as the cause", "in a group"])
async def test_survived_fault_counts_no_attempt_when_raised_on(
    shop: Shop, raised: str, fault: str, savepoint: Callable[[Session, str], None]
) -> None:
    runs = 0

    async def handle(order: Placed, session: AsyncSession) -> None:
        nonlocal runs
        runs += 1
        await shop.write(session, order.number)
        if runs > 1:
            return
        try:
            await session.run_sync(savepoint, fault)
        except DBAPIError as error:
            match raised:
                case "as it is":
                    raise
                case "as the cause":
                    raise LookupError("the account is busy") from error
                case _:
                    raise ExceptionGroup("both", [error, ValueError("no")]) from None

    shop.handles(handle, retry=Retry.never())
    async with shop.open():
        await shop.receive(7)
        await shop.settled()
    assert (runs, shop.effects()) == (2, [7])
    assert (shop.counters[Event.ATTEMPT_FAILED], shop.tables.count("dead_letters")) == (0, 0)


@pytest.mark.parametrize("fault", SURVIVED)
async def test_swallowed_fault_counts_no_attempt_without_a_savepoint(shop: Shop, fault: str) -> None:
    runs = 0

    async def handle(order: Placed, session: AsyncSession) -> None:
        nonlocal runs
        runs += 1
        await shop.write(session, order.number)
        if runs == 1:
            with pytest.raises(DBAPIError):
                await session.execute(text(FAULTS[fault]))

    shop.handles(handle, retry=Retry.never())
    async with shop.open():
        await shop.receive(7)
        await shop.settled()
    assert (runs, shop.effects()) == (2, [7])
    assert (shop.counters[Event.ATTEMPT_FAILED], shop.tables.count("dead_letters")) == (0, 0)


async def test_conflict_after_a_survived_shortage_is_no_shortage(shop: Shop) -> None:
    """Python chains the two, and the savepoint has survived the first alone."""
    runs = 0

    def handle(order: Placed, session: Session) -> None:
        nonlocal runs
        runs += 1
        try:
            within_a_savepoint_of_the_session(session, "full disk")
        except DBAPIError:
            session.execute(text(FAULTS["deadlock"]))

    shop.handles(handle, retry=Retry.never())
    async with shop.open():
        await shop.receive(1)
        await eventually(lambda: shop.tables.count("dead_letters"), what="a dead letter")
    assert runs == 21


@pytest.mark.parametrize("told", ["as it is", "in other words"])
@pytest.mark.parametrize(
    ("kind", "listened"),
    [
        *((kind, listened) for kind in ("async", "sync", "group") for listened in ("before_flush", "before_commit")),
        *(("no session", listened) for listened in ("after_begin", "before_commit")),
    ],
)
async def test_exhausted_pool_counts_as_an_attempt_when_a_listener_waits(
    shop: Shop, kind: str, listened: str, told: str
) -> None:
    """An audit trail on an engine of its own, one of whose connections has leaked."""
    runs = 0
    audit = create_engine(
        shop.tables.url.replace("postgresql:", "postgresql+psycopg:"), pool_size=1, max_overflow=0, pool_timeout=0.05
    )

    def keep_a_trail(*_: object) -> None:
        nonlocal runs
        runs += 1
        try:
            audit.connect().close()
        except PoolTimeout as error:
            if told == "in other words":
                raise LookupError("no audit trail") from error
            raise

    async def handle(order: Placed, session: AsyncSession) -> None:
        session.sync_session.add(Once(number=order.number))

    def handle_in_a_thread(order: Placed, session: Session) -> None:
        session.add(Once(number=order.number))

    async def handle_without_a_session(order: Placed) -> None:
        pass

    handlers: dict[str, Callable[..., object]] = {"sync": handle_in_a_thread, "no session": handle_without_a_session}
    shop.handles(handlers.get(kind, handle), retry=Retry(immediate=1, delays=[]), max_batch=2 if kind == "group" else 1)
    with audit.connect(), listening(listened, keep_a_trail):
        async with shop.open():
            await shop.receive(1, 2, partition_key="k")
            await shop.settled()
    audit.dispose()
    assert (shop.inbox(), shop.tables.count("dead_letters")) == ([], 2)
    assert runs == 4 + (kind == "group")


@contextmanager
def listening(name: str, listener: Callable[..., None]) -> Iterator[None]:
    event.listen(Session, name, listener)
    try:
        yield
    finally:
        event.remove(Session, name, listener)


async def test_error_object_is_not_taken_for_an_old_outage(shop: Shop) -> None:
    """A constant of a module, which was raised from a lost connection once."""
    constant = LookupError("no such order")
    constant.__cause__ = StorageUnavailable("the database cannot be used: an hour ago")
    runs = 0

    def fail(_: Session) -> None:
        raise constant

    async def handle(order: Placed, session: AsyncSession) -> None:
        nonlocal runs
        runs += 1
        await shop.write(session, order.number)
        event.listen(session.sync_session, "before_commit", fail)

    shop.handles(handle, retry=Retry(immediate=2, delays=[]))
    async with shop.open():
        await shop.receive(1)
        await shop.settled()
    assert runs == 3
    assert shop.tables.rows("SELECT reason FROM durable.dead_letters") == ["no such order"]
