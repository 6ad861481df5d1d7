"""Messages that share a transaction: whatever each of them does, the result is that of handling them one by one.

Each message of a group does one thing to what it shares with its neighbours. The same messages are handled with
`max_batch=1`, in a group of all, and with "auto"; effects, messages that were sent, dead letters and history must be
equal.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event, func, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from durable import Context, Incoming, Middleware, message
from durable.application.middleware import HandleNext, MiddlewareStack
from durable.application.retry import Retry
from durable.clock import SystemClock
from durable.embedded import Embedded
from durable.errors import NoUnitOfWork, TransactionEnded
from durable.settings import load_settings
from tests.support.one_handler import Billed, Shop, envelope, shop_tables
from tests.support.tables import Tables

HANGS = timedelta(milliseconds=300)
SHORT = 0.0001  # seconds
_INSERT = text("INSERT INTO effects (number) VALUES (:number)")
_UNIQUE = text("INSERT INTO taken (number) VALUES (0)")
_KEEP = text(
    "DO $$ BEGIN CREATE TEMP TABLE IF NOT EXISTS scratch (n int) ON COMMIT DROP; "
    "INSERT INTO scratch VALUES (30); END $$"
)
_REFUSE = (
    "CREATE OR REPLACE FUNCTION refuse(code text) RETURNS void LANGUAGE plpgsql "
    "AS $$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = code; END $$"
)
_TAKE = text("INSERT INTO effects (number) SELECT 1000 * :number + n FROM scratch")


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "effects"
    effect: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]


class Taken(Base):
    __tablename__ = "taken"
    number: Mapped[int] = mapped_column(primary_key=True)
    reads: Mapped[int] = mapped_column(default=0)


READ: list[Taken] = []
_TELL = text(
    "INSERT INTO effects (number) SELECT :number + 40 + coalesce(nullif(current_setting('app.tenant', true), ''), '0')"
    "::integer + (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND (locktype = 'advisory' OR relation = "
    "'taken'::regclass)) * 10 + (to_regclass('pg_' || 'temp.mine') IS NOT "
    "NULL)::integer * 200 + (SELECT count(*) FROM pg_cursors WHERE name = 'mine') * 400"
)


class Panic(BaseException):
    """What an extension raises that is no Exception."""


@message("groups.step")
class Step(msgspec.Struct):
    """A message that is told what to do, in a class that can be changed."""

    number: int
    does: str
    total: int = 100
    notes: list[str] = []


def act(step: Step, session: Session, ctx: Context) -> Billed | None:
    """What a message does with what it shares, but for hanging. `session` is the sync one, in any kind of handler."""
    session.connection().execute(_INSERT, {"number": step.number * 1_000 + step.total})  # flushes nothing
    match step.does:
        case "raise":
            raise LookupError
        case "roll back":
            session.rollback()
        case "roll back after a unique violation":
            with pytest.raises(IntegrityError):
                session.execute(_UNIQUE)
            session.rollback()
        case "swallow a unique violation":
            with pytest.raises(IntegrityError):
                session.execute(_UNIQUE)
        case "commit":
            session.commit()
        case "commit the connection":
            session.connection().commit()
        case "roll back the connection":
            session.connection().rollback()
        case "commit by text":
            session.execute(text("  commit work"))
        case "roll back by text":
            session.connection().exec_driver_sql("/* never mind */ ROLLBACK")
        case "leave a savepoint":
            session.begin_nested()
            session.execute(_INSERT, {"number": step.number * 1_000 + 1})
            ctx.send(Billed(step.number * 1_000))
        case "roll back a savepoint":
            savepoint = session.get_nested_transaction()
            if savepoint is None:
                savepoint = session.begin_nested()
                session.execute(_INSERT, {"number": step.number * 1_000 + 2})
            savepoint.rollback()
        case "leave a savepoint of the connection":
            session.connection().begin_nested()
            session.execute(_INSERT, {"number": step.number * 1_000 + 3})
        case "add an object":
            session.add(Effect(number=step.number * 1_000 + 6))
        case "add an object that is refused":
            session.add(Taken(number=0))
        case "read an object":
            taken = session.get_one(Taken, 0)
            session.execute(_INSERT, {"number": step.number * 1_000 + 20 + taken.reads})
            session.execute(text("UPDATE taken SET reads = reads + 1"))
            READ.append(taken)  # what is kept nowhere, a session forgets by itself
        case "set a setting":
            session.execute(text("SET LOCAL app.tenant = '7'"))
        case "set a setting by a function":
            session.execute(text("SELECT pg_catalog.Set_Config(:name, '7', true)"), {"name": "app.tenant"})
        case "set a setting in a block":
            session.execute(text("DO $$ BEGIN SET LOCAL app.tenant = '7'; END $$"))
        case "set a setting by a view":
            session.execute(text("UPDATE pg_settings SET setting = '4096' WHERE name = 'work_mem'"))
        case "keep rows in a block":
            session.execute(_KEEP)
            session.execute(_TAKE, {"number": step.number})
        case "make a temporary view":
            session.execute(text("CREATE OR REPLACE TEMP VIEW mine AS SELECT 1"))
        case "run a text":
            session.execute(text("DO $$ BEGIN EXECUTE 'SE' || 'T LOCAL app.tenant = 7'; END $$"))
        case "set a setting, swallow a unique violation":
            session.execute(text("/* as all do */ set local app.tenant = '7'"))
            with pytest.raises(IntegrityError), session.begin_nested():
                session.execute(_UNIQUE)
        case "defer constraints":
            session.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
        case "make a temporary table":
            session.execute(text("CREATE TEMPORARY TABLE mine (number integer) ON COMMIT DROP"))
        case "make a temporary table of a query":
            session.execute(text("create local temp table mine on commit drop as select 1"))
        case "notify":
            session.execute(text("NOTIFY changed"))
        case "declare a cursor":
            session.execute(text("DECLARE mine CURSOR FOR SELECT 1"))
        case "lock a table":
            session.execute(text("LOCK TABLE taken IN SHARE MODE"))
        case "lock by a number":
            session.execute(text("SELECT pg_advisory_xact_lock(4711)"))
        case "mute autoflush":
            session.autoflush = False
        case "keep info":
            session.info["reads"] = session.info.get("reads", 0) + 1
            session.execute(_INSERT, {"number": step.number * 1_000 + session.info["reads"]})
        case "listen to flushes":
            event.listen(session, "before_flush", lambda *_: READ.append(Taken(number=step.number)))
            session.add(Effect(number=step.number * 1_000 + len(READ)))
            session.flush()
            session.execute(_INSERT, {"number": step.number * 1_000 + len(READ)})
        case "translate schemas":
            session.connection().execution_options(schema_translate_map={"shop": "public"})
        case "tell of settings and locks":
            session.add(Effect(number=step.number * 1_000 + 7))
            seen = session.scalars(select(func.count()).where(Effect.number == step.number * 1_000 + 7)).one()
            session.execute(_INSERT, {"number": step.number * 1_000 + 8 + seen})
            options = session.connection().get_execution_options()
            session.execute(_INSERT, {"number": step.number * 1_000 + 10 + ("schema_translate_map" in options)})
            session.execute(_TELL, {"number": step.number * 1_000})
        case "expunge all objects":
            session.expunge_all()
        case "roll back a flush in a savepoint of the connection":
            of_connection = session.connection().begin_nested()
            session.flush()
            of_connection.rollback()
        case "roll back a flush in a savepoint as text":
            session.connection().execute(text("SAVEPOINT flushed"))
            session.flush()
            session.connection().execute(text("ROLLBACK TO flushed"))
        case "mutate":
            step.total += 10
            step.notes.append("seen")
            raise LookupError
        case "mutate and return":
            step.total += 10
            step.notes.append("seen")
        case "change the headers":
            ctx.headers["tenant"] = "other"  # type: ignore[index]
        case "change the attempt":
            ctx.attempt = 99  # type: ignore[misc]
        case "roll back to a savepoint of another":
            session.execute(text("ROLLBACK TO SAVEPOINT left_open"))
        case "leave a savepoint as text":
            session.execute(text("SAVEPOINT left_open"))
            session.execute(_INSERT, {"number": step.number * 1_000 + 4})
        case "roll back a savepoint as text":
            session.execute(text('savepoint "Left_Open"'))
            session.execute(_INSERT, {"number": step.number * 1_000 + 5})
            session.execute(text('ROLLBACK WORK TO "Left_Open"'))
        case "roll back to a savepoint of another by a doubtful name":
            with pytest.raises(DBAPIError):
                session.execute(text("SELECT 1 / 0; SAVEPOINT left_open"))
            session.execute(text("ROLLBACK TO left_open"))
        case "release a savepoint of another":
            session.execute(text("RELEASE left_open"))
        case "roll back to a savepoint of another behind a released one":
            session.execute(text("SAVEPOINT left_open"))
            session.execute(text("RELEASE left_open"))
            session.execute(text("ROLLBACK TO left_open"))
        case "roll back to a savepoint of another behind one of the session":
            with session.begin_nested():
                session.execute(text("SAVEPOINT left_open"))
            session.execute(text("ROLLBACK TO left_open"))
        case "roll back to a savepoint of another behind an outer one":
            for sql in ("SAVEPOINT outer", "SAVEPOINT left_open", "ROLLBACK TO outer", "ROLLBACK TO left_open"):
                session.execute(text(sql))
        case "roll back to a savepoint of a failed text":
            with pytest.raises(DBAPIError):
                session.execute(text("SAVEPOINT own; SELECT 1 / 0"))
            session.execute(text("ROLLBACK TO own"))
        case "swallow a refusal":
            session.execute(text("SAVEPOINT own"))
            with pytest.raises(TransactionEnded):
                session.execute(text("ROLLBACK TO gone"))
            ctx.send(Billed(step.number))
        case "swallow a refusal by the database":
            with pytest.raises(DBAPIError), session.begin_nested():
                session.execute(text("SAVEPOINT own; ROLLBACK TO own; SELECT 1 / 0"))
            ctx.send(Billed(step.number))
        case "commit behind a comment in a comment":
            session.connection().exec_driver_sql("/* a /* b */ c */ COMMIT")
        case "roll back behind a comment":
            session.connection().exec_driver_sql("-- a\rROLLBACK")
        case "send":
            ctx.send(Billed(step.number))
            return Billed(step.number + 500)
        case "send and raise":
            ctx.send(Billed(step.number))
            raise LookupError
        case "send without a route":
            ctx.send(Step(1, "succeed"))
        case "panic":
            raise Panic("called unwrap() on a None value")
        case "exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "end the generator":
            raise GeneratorExit
        case "cancel":
            raise asyncio.CancelledError
        case _:  # "succeed", and what async and sync handlers do each in their way
            pass
    if step.notes not in ([], ["seen"]) or ctx.attempt != 1:
        raise AssertionError("another attempt has left something here")
    return None


REACHING = [  # the objects of others, unless these are flushed
    "expunge all objects", "roll back a flush in a savepoint of the connection",
    "roll back a flush in a savepoint as text",
]  # fmt: skip
ACTIONS = [
    "succeed", "raise", "roll back", "roll back after a unique violation", "swallow a unique violation", "commit",
    "commit the connection", "roll back the connection", "commit by text", "roll back by text", "leave a savepoint",
    "roll back a savepoint", "leave a savepoint of the connection", "leave a savepoint as text",
    "roll back a savepoint as text", "roll back to a savepoint of another", "release a savepoint of another",
    "roll back to a savepoint of another behind a released one",
    "roll back to a savepoint of another behind one of the session",
    "roll back to a savepoint of another behind an outer one",
    "roll back to a savepoint of another by a doubtful name",
    "roll back to a savepoint of a failed text", "add an object", "add an object that is refused", *REACHING,
    "swallow a refusal", "swallow a refusal by the database", "commit behind a comment in a comment",
    "roll back behind a comment", "mutate", "mutate and return", "change the headers", "change the attempt",
    "send", "send and raise", "send without a route", "panic", "exit", "interrupt", "end the generator", "cancel",
    "read an object",
]  # fmt: skip
LASTING = [  # to the end of the transaction
    "set a setting", "set a setting by a function", "set a setting in a block",
    "set a setting, swallow a unique violation", "defer constraints", "make a temporary table",
    "make a temporary table of a query", "declare a cursor", "notify", "lock a table", "lock by a number",
    "set a setting by a view", "keep rows in a block", "make a temporary view", "run a text",
    "mute autoflush", "keep info", "listen to flushes", "translate schemas",
]  # fmt: skip


class Passing(Middleware):
    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        return await call_next(incoming)


async def handle(step: Step, session: AsyncSession, ctx: Context) -> Billed | None:
    if step.does == "hang":
        await asyncio.Event().wait()
    return await session.run_sync(lambda sync_session: act(step, sync_session, ctx))


def handle_sync(step: Step, session: Session, ctx: Context) -> Billed | None:
    if step.does == "hang":
        threading.Event().wait(HANGS.total_seconds() * 3)
    return act(step, session, ctx)


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shop_tables(servers(18)) as tables:
        tables.execute("ALTER TABLE effects ADD transaction text DEFAULT pg_current_xact_id()")
        tables.execute("CREATE TABLE taken (number integer UNIQUE, reads integer NOT NULL DEFAULT 0)")
        tables.execute("INSERT INTO taken VALUES (0)")
        yield tables


def learn(shop: Shop, seconds: float = SHORT) -> None:
    """Let the handler have run many messages of so many seconds before."""
    for _ in range(20):
        shop.agent._delivery._size.took(seconds)


async def result(tables: Tables, actions: list[str], function: Callable[..., Any], **how: Any) -> dict[str, Any]:
    """What is left when each of these was handled."""
    tables.clear()
    tables.execute("TRUNCATE effects, once")
    tables.execute("UPDATE taken SET reads = 0")
    READ.clear()
    seconds = how.pop("seconds", SHORT)
    settings = {"group_time": how.pop("group_time", 60), "max_batch": how.pop("setting", 1)}
    if "driver" in how:
        settings["database_url"] = tables.url.replace("postgresql:", f"postgresql+{how.pop('driver')}:")
    shop = Shop(tables, SystemClock(), **settings)
    try:
        shop.handles(function, cls=Step, **how)
        learn(shop, seconds)
        bodies = [msgspec.json.encode(Step(number, does)) for number, does in enumerate(actions)]
        changes = [{"body": body, "headers": {"tenant": "one"}} for body in bodies]
        async with shop.open():
            await shop.receive_all([envelope(number, **change) for number, change in enumerate(changes)])
            await shop.all_settled()
        numbers = "(convert_from(body, 'UTF8')::json->>'number')::integer"
        return {
            "effects": sorted(shop.effects()),
            "sent": shop.sent(),
            "inbox": len(shop.inbox()),
            "letters": tables.rows(
                f"SELECT {numbers}, exception_type, attempts, headers->>'tenant' FROM durable.dead_letters ORDER BY 1"
            ),
            "history": sorted(tables.rows("SELECT outcome FROM durable.envelope_history")),
        }
    finally:
        await shop.close()


KINDS: dict[str, tuple[Callable[..., Any], bool]] = {
    "async": (handle, False),
    "async-middleware": (handle, True),
    "sync": (handle_sync, False),
    "sync-middleware": (handle_sync, True),
}


async def compare(tables: Tables, kind: str, actions: list[str]) -> None:
    function, has_middleware = KINDS[kind]
    how: dict[str, Any] = {"timeout": HANGS if "hang" in actions else timedelta(seconds=30)}

    def onion() -> MiddlewareStack:
        made = MiddlewareStack()
        if has_middleware:
            made.use(Passing(), "core")
        return made

    alone = await result(tables, actions, function, max_batch=1, onion=onion(), **how)
    together = await result(tables, actions, function, max_batch=len(actions), onion=onion(), **how)
    by_itself = await result(tables, actions, function, max_batch="auto", onion=onion(), **how)
    assert together == alone
    assert by_itself == alone
    assert alone["inbox"] == 0
    assert len(alone["history"]) == len(actions)


async def test_messages_share_transactions_as_long_as_their_time_allows(database: Tables) -> None:
    numbers = "SELECT count(DISTINCT transaction) FROM effects"
    await result(database, ["succeed"] * 50, handle, max_batch="auto")
    assert database.rows(numbers) == [1]
    await result(database, ["succeed"] * 50, handle, max_batch="auto", group_time=0)
    assert database.rows(numbers) == [50]


def test_setting_of_groups_is_auto_when_not_given(database: Tables) -> None:
    assert load_settings(database_url=database.url).max_batch == "auto"


async def test_messages_of_a_sync_handler_are_alone(database: Tables) -> None:
    """What a thread waits for cannot be seen."""
    await result(database, ["succeed"] * 10, handle_sync, max_batch="auto")
    assert database.rows("SELECT count(DISTINCT transaction) FROM effects") == [10]


@pytest.mark.parametrize("does", LASTING)
async def test_group_ends_when_a_message_leaves_traces_in_the_transaction(database: Tables, does: str) -> None:
    actions = ["tell of settings and locks", "succeed", does, "tell of settings and locks", "read an object", does]
    how: dict[str, Any] = {"timeout": timedelta(seconds=30)}
    alone = await result(database, actions, handle, max_batch=1, **how)
    assert await result(database, actions, handle, max_batch="auto", **how) == alone
    assert database.rows("SELECT count(DISTINCT transaction) FROM effects") == [1 + 3]
    assert not alone["letters"]


@pytest.mark.parametrize("max_batch", [1, 5, "auto"])
@pytest.mark.parametrize("kind", KINDS)
async def test_context_variables_of_a_message_end_with_its_attempt(database: Tables, kind: str, max_batch: Any) -> None:
    tenant: ContextVar[int | None] = ContextVar("tenant", default=None)
    seen: list[int | None] = []

    class Tenants(Middleware):
        async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
            seen.append(tenant.get())
            tenant.set(7)
            return await call_next(incoming)

    async def look(step: Step, session: AsyncSession) -> None:
        seen.append(tenant.get())
        tenant.set(step.number)
        await session.execute(text("SELECT 1"))
        assert tenant.get() == step.number

    def look_in_thread(step: Step, session: Session) -> None:
        seen.append(tenant.get())
        tenant.set(step.number)

    onion, (function, has_middleware) = MiddlewareStack(), KINDS[kind]
    if has_middleware:
        onion.use(Tenants(), "core")
    look_around = look if function is handle else look_in_thread
    found = await result(database, ["succeed"] * 5, look_around, max_batch=max_batch, onion=onion)
    assert not found["letters"]
    assert seen == ([None, 7] if has_middleware else [None]) * 5


WAITS: dict[str, Callable[[AsyncSession], Awaitable[object]]] = {
    "a turn of the loop": lambda _: asyncio.sleep(0),
    "a pause": lambda _: asyncio.sleep(0.001),
    "a thread": lambda _: asyncio.to_thread(int),
    "a task": lambda _: asyncio.ensure_future(asyncio.sleep(0)),
    "several tasks": lambda _: asyncio.gather(asyncio.sleep(0), asyncio.sleep(0)),
    "a connection of its own": lambda session: own_connection(session),
}
STATEMENTS: dict[str, Callable[[AsyncSession], Awaitable[object]]] = {
    "a statement": lambda session: session.execute(text("SELECT 1")),
    "a slow statement": lambda session: session.execute(text("SELECT pg_sleep(0.001)")),
    "a row": lambda session: session.get(Taken, 0, with_for_update=True),
    "a savepoint": lambda session: savepoint(session),
    "a failed statement": lambda session: failed_statement(session),
    "a flush": lambda session: flushed(session),
    "a statement of its connection": lambda session: of_connection(session),
}


MARKS: dict[str, Callable[[AsyncSession], Awaitable[object]]] = {
    "the session": lambda session: marked(session),
    "the sync session": lambda session: marked(session.sync_session),
    "its transaction": lambda session: marked(session.sync_session.get_transaction()),
    "its connection": lambda session: with_connection(session, marked),
    "the driver's connection": lambda session: with_connection(session, listen_to_notices),
    "a listener of its connection": lambda session: with_connection(session, listen_to_statements),
    "a table of another engine": lambda session: bound_elsewhere(session),
}


async def marked(thing: object) -> None:
    thing.tenant = 7  # type: ignore[attr-defined]


async def with_connection(session: AsyncSession, do: Callable[[Any], Awaitable[None]]) -> None:
    await do((await session.connection()).sync_connection)


async def listen_to_notices(connection: Connection) -> None:
    driver = connection.connection.driver_connection
    assert driver is not None
    listen = getattr(driver, "add_log_listener", None) or driver.add_notice_handler
    listen(print)


async def listen_to_statements(connection: Connection) -> None:
    event.listen(connection, "before_cursor_execute", lambda *_: None)


async def bound_elsewhere(session: AsyncSession) -> None:
    session.bind_mapper(Taken, create_async_engine("postgresql+asyncpg://"))


async def own_connection(session: AsyncSession) -> None:
    async with AsyncEngine(session.get_bind().engine).connect() as conn:
        await conn.execute(text("SELECT 1"))


async def savepoint(session: AsyncSession) -> None:
    async with session.begin_nested():
        await session.execute(_INSERT, {"number": 1})


async def failed_statement(session: AsyncSession) -> None:
    with pytest.raises(DBAPIError):
        async with session.begin_nested():
            await session.execute(text("SELECT 1 / 0"))


async def flushed(session: AsyncSession) -> None:
    session.add(Effect(number=2))
    await session.flush()


async def of_connection(session: AsyncSession) -> None:
    await (await session.connection()).execute(text("SELECT 1"))


async def transactions_of(tables: Tables, wait: Callable[[AsyncSession], Awaitable[object]], **how: Any) -> int:
    """Return in how many transactions ten messages are handled, when the third waits for this."""

    async def handle(step: Step, session: AsyncSession) -> None:
        await session.execute(_INSERT, {"number": step.number})
        if step.number == 2:
            await wait(session)

    how = {"max_batch": "auto", "timeout": timedelta(seconds=30)} | how
    found = await result(tables, ["succeed"] * 10, handle, **how)
    assert not found["letters"]
    count: int = tables.rows("SELECT count(DISTINCT transaction) FROM effects")[0]
    return count


@pytest.mark.parametrize("what", WAITS)
async def test_group_ends_when_a_message_waits_beside_its_session(database: Tables, what: str) -> None:
    assert await transactions_of(database, WAITS[what]) == 1 + 7


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("what", MARKS)
async def test_group_ends_when_a_message_leaves_something_on(database: Tables, what: str, driver: str) -> None:
    assert await transactions_of(database, MARKS[what], driver=driver) == 1 + 7


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("what", STATEMENTS)
async def test_group_goes_on_when_a_message_waits_for_its_session(database: Tables, what: str, driver: str) -> None:
    assert await transactions_of(database, STATEMENTS[what], driver=driver) == 1


@pytest.mark.parametrize(("max_batch", "transactions"), [(None, 1), (1, 50), (50, 1)])
async def test_handler_without_max_batch_shares_transactions_as_the_setting_says(
    database: Tables, max_batch: Any, transactions: int
) -> None:
    await result(database, ["succeed"] * 50, handle, max_batch=max_batch, setting="auto")
    assert database.rows("SELECT count(DISTINCT transaction) FROM effects") == [transactions]


async def test_group_ends_when_its_time_is_over(database: Tables) -> None:
    async def linger(step: Step, session: AsyncSession) -> None:
        await session.execute(_INSERT, {"number": step.number})
        time.sleep(0.03)  # noqa: ASYNC251  # the event loop stands, and with it the timer of the group

    await result(database, ["succeed"] * 4, linger, max_batch="auto", group_time=0.02)
    assert database.rows("SELECT count(DISTINCT transaction) FROM effects") == [4]


async def test_messages_behind_a_long_one_are_handled_by_another_worker(database: Tables) -> None:
    others = asyncio.Event()
    calls: list[int] = []

    async def wait(step: Step, session: AsyncSession) -> None:
        calls.append(step.number)
        if len(calls) == 10:
            others.set()
        if step.number == 0:
            await others.wait()

    how: dict[str, Any] = {"concurrency": 2, "timeout": timedelta(seconds=60)}
    found = await result(database, ["succeed"] * 10, wait, max_batch="auto", group_time=0.05, **how)
    assert (found["letters"], sorted(calls)) == ([], list(range(10)))


async def test_long_messages_keep_no_other_one_waiting(database: Tables) -> None:
    """As many as there may be transactions at once."""
    others = asyncio.Event()
    calls: list[int] = []

    async def wait(step: Step, session: AsyncSession) -> None:
        calls.append(step.number)
        if len(calls) == 12:
            others.set()
        if step.number < 2:
            await others.wait()

    how: dict[str, Any] = {"concurrency": 4, "timeout": timedelta(seconds=10)}
    found = await result(database, ["succeed"] * 12, wait, max_batch="auto", group_time=0.05, **how)
    assert (found["letters"], sorted(calls)) == ([], list(range(12)))


async def test_messages_of_a_backlog_are_alone_with_two_workers_at_first(database: Tables) -> None:
    """Eight would share the loop, and the time of each would tell nothing about that of a message in a group."""
    begun, running, most = 0, 0, 0

    async def note(step: Step, session: AsyncSession) -> None:
        nonlocal begun, running, most
        begun, running = begun + 1, running + 1
        if begun <= 3:
            most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    how: dict[str, Any] = {"concurrency": 8, "timeout": timedelta(seconds=10), "group_time": 1, "seconds": 2}
    found = await result(database, ["succeed"] * 20, note, max_batch="auto", **how)
    assert (found["letters"], most) == ([], 2)


async def test_last_messages_of_a_backlog_are_handled_side_by_side(database: Tables) -> None:
    last = asyncio.Barrier(3)

    async def meet(step: Step, session: AsyncSession) -> None:
        if step.number >= 37:
            await last.wait()

    how: dict[str, Any] = {"concurrency": 4, "timeout": timedelta(seconds=10)}
    found = await result(database, ["succeed"] * 40, meet, max_batch="auto", **how)
    assert found["letters"] == []


async def test_messages_of_a_group_commit_before_a_long_one_ends(
    database: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    """A long statement keeps those before it for ten times the time of a group at most."""
    seen: list[int] = []
    calls: list[int] = []

    async def linger(step: Step, session: AsyncSession) -> None:
        calls.append(step.number)
        await session.execute(_INSERT, {"number": step.number})
        if step.number == 2:
            await session.execute(text("SELECT pg_sleep(6)"))
            seen.append(database.one("SELECT count(*) FROM effects"))

    how: dict[str, Any] = {"concurrency": 2, "timeout": timedelta(seconds=30)}
    with caplog.at_level(logging.INFO, "durable"):
        found = await result(database, ["succeed"] * 6, linger, max_batch="auto", group_time=0.4, **how)
    assert (found["effects"], found["letters"]) == (list(range(6)), [])
    assert seen == [5]
    assert calls.count(2) == 2
    assert "it has awaited" not in caplog.text


async def test_group_releases_its_rows_when_a_message_waits_for_another_one(database: Tables) -> None:
    """The third message of a group waits for a lock of the process, whose owner waits for a row of the first one."""
    lock, updated, has_lock = asyncio.Lock(), asyncio.Event(), asyncio.Event()
    attempts: list[int] = []
    update = text("UPDATE taken SET reads = reads + 1")

    async def handle(step: Step, session: AsyncSession) -> None:
        attempts.append(step.number)
        if step.number == 0:
            await session.execute(update)
            updated.set()
        elif step.number == 1:
            while not has_lock.is_set():  # statements alone, so that the group goes on
                await session.execute(text("SELECT pg_sleep(0.001)"))
        elif step.number == 2:
            async with lock:
                await session.execute(_INSERT, {"number": 2})

    async def other() -> None:
        await updated.wait()
        async with lock:
            has_lock.set()
            await asyncio.to_thread(database.execute, "UPDATE taken SET reads = reads + 10")

    owner = asyncio.create_task(other())
    how: dict[str, Any] = {"timeout": timedelta(seconds=20)}
    found = await result(database, ["succeed"] * 3, handle, max_batch="auto", group_time=0.4, **how)
    await owner
    assert (found["effects"], found["letters"], found["inbox"]) == ([2], [], 0)
    assert sorted(attempts) == [0, 0, 1, 1, 2, 2]
    assert database.one("SELECT reads FROM taken") == 11


async def swallow(work: Awaitable[object]) -> bool:
    """Tell whether the work was cancelled."""
    try:
        await work
    except BaseException:
        return True
    return False


async def swallow_for_a_helper(work: Awaitable[object]) -> bool:
    """End a helper that cleans up for long, and take another cancellation for its own."""

    async def help_out() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await work

    helper = asyncio.create_task(help_out())
    await asyncio.sleep(0)
    helper.cancel()
    with suppress(asyncio.CancelledError):
        await helper
    return helper.cancelling() > 1


async def swallow_behind_a_shield(work: Awaitable[object]) -> bool:
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        return True
    return False


Send = Callable[[Shop, AsyncSession, Context], object]
SENDS: dict[str, Send] = {
    "by its context": lambda _shop, _session, ctx: ctx.send(Billed(7)),
    "by the bus": lambda shop, _session, _ctx: shop.sessions.scope.outbox.send(Billed(7)),
    "by its session": lambda shop, session, _ctx: shop.sessions.outbox(session).send(Billed(7)),
    "as a result": lambda _shop, _session, ctx: ctx.cascade(Billed(7)),
}


async def in_thread(work: Callable[[], object]) -> None:
    """Run this in a thread that knows no context variables."""
    await asyncio.get_running_loop().run_in_executor(None, work)


async def in_task(work: Callable[[], object]) -> None:
    work()


async def senders_of(
    database: Tables, send: Send, place: Callable[..., Awaitable[None]], *, is_left: bool
) -> tuple[list[int], list[type[Exception]]]:
    """Let a task of the second of three messages send, during its message or the next one. Return the numbers of the
    messages that have caused what was sent, and the errors of the task.
    """
    database.clear()
    shop = Shop(database, SystemClock(), group_time=60)
    waiting = [envelope(number, body=msgspec.json.encode(Step(number, "succeed"))) for number in range(3)]
    numbers = {each.id: number for number, each in enumerate(waiting)}
    begins = asyncio.Event()
    errors: list[type[Exception]] = []
    tasks: list[asyncio.Task[None]] = []

    async def work(session: AsyncSession, ctx: Context) -> None:
        await begins.wait()
        try:
            await place(lambda: send(shop, session, ctx))
        except Exception as error:
            errors.append(type(error))

    async def leave(step: Step, session: AsyncSession, ctx: Context) -> None:
        if step.number == 1:
            tasks.append(asyncio.create_task(work(session, ctx)))
            if not is_left:
                begins.set()
        elif step.number == 2:
            begins.set()
        if tasks and begins.is_set():
            while not tasks[0].done():
                await session.execute(text("SELECT pg_sleep(0.001)"))

    try:
        shop.handles(leave, cls=Step, max_batch=3)
        await shop.receive_all(waiting)
        async with shop.open():
            await shop.settled()
        causes = database.rows("SELECT causation_id FROM durable.outgoing_envelopes")
        return [numbers[cause] for cause in causes], errors
    finally:
        await shop.close()
        database.clear()


@pytest.mark.parametrize(
    ("place", "send"),
    [(place, send) for place in (in_task, in_thread) for send in SENDS if (place, send) != (in_thread, "by the bus")],
)
async def test_task_sends_by_its_own_message(
    database: Tables, place: Callable[..., Awaitable[None]], send: str
) -> None:
    assert await senders_of(database, SENDS[send], place, is_left=False) == ([1], [])


@pytest.mark.parametrize("send", SENDS)
async def test_task_left_behind_by_a_message_sends_nothing_in_the_next_one(database: Tables, send: str) -> None:
    assert await senders_of(database, SENDS[send], in_task, is_left=True) == ([], [NoUnitOfWork])


@pytest.mark.parametrize("send", ["by its context", "as a result"])
async def test_thread_left_behind_by_a_message_sends_nothing_in_the_next_one(database: Tables, send: str) -> None:
    assert await senders_of(database, SENDS[send], in_thread, is_left=True) == ([], [NoUnitOfWork])


async def test_flush_behind_a_message_sends_with_its_cause(database: Tables) -> None:
    database.clear()
    shop = Shop(database, SystemClock(), group_time=60)
    waiting = [envelope(number, body=msgspec.json.encode(Step(number, "succeed"))) for number in range(3)]

    async def add(step: Step, session: AsyncSession) -> None:
        if step.number == 1:
            send = shop.sessions.scope
            event.listen(session.sync_session, "before_flush", lambda *_: send.outbox.send(Billed(7)), once=True)
            session.add(Effect(number=1))

    try:
        shop.handles(add, cls=Step, max_batch=3)
        await shop.receive_all(waiting)
        async with shop.open():
            await shop.settled()
        assert database.rows("SELECT causation_id FROM durable.outgoing_envelopes") == [waiting[1].id]
    finally:
        await shop.close()
        database.clear()


SWALLOWS = [swallow, swallow_for_a_helper, swallow_behind_a_shield]
CANCELLED = 500


def paying(seconds: float, swallows: Callable[[Awaitable[object]], Awaitable[bool]]) -> Callable[..., Any]:
    """Return a handler whose third message waits so long, and notes as an effect whether it was cancelled meanwhile."""

    async def pay(step: Step, session: AsyncSession) -> None:
        is_cancelled = step.number == 2 and await swallows(asyncio.sleep(seconds))
        await session.execute(_INSERT, {"number": step.number + CANCELLED * is_cancelled})

    return pay


@pytest.mark.parametrize("swallows", SWALLOWS)
@pytest.mark.parametrize("max_batch", [1, 5, "auto"])
async def test_swallowed_timeout_counts_as_raised(
    database: Tables, swallows: Callable[..., Any], max_batch: Any
) -> None:
    pay = paying(1, swallows)
    found = await result(database, ["succeed"] * 5, pay, max_batch=max_batch, timeout=timedelta(milliseconds=300))
    assert (found["effects"], found["inbox"]) == ([0, 1, 3, 4], 0)
    assert found["letters"] == [(2, "TimeoutError", 1, "one")]


@pytest.mark.parametrize("swallows", SWALLOWS)
async def test_group_rolls_back_when_a_long_message_swallows_its_cancellation(
    database: Tables, swallows: Callable[..., Any]
) -> None:
    pay = paying(0.6, swallows)
    how: dict[str, Any] = {"group_time": 0.02, "timeout": timedelta(seconds=30)}
    found = await result(database, ["succeed"] * 5, pay, max_batch="auto", **how)
    assert (found["effects"], found["letters"], found["inbox"]) == (list(range(5)), [], 0)


@pytest.mark.parametrize("swallows", SWALLOWS)
async def test_swallowed_end_of_the_node_commits_nothing(database: Tables, swallows: Callable[..., Any]) -> None:
    database.clear()
    database.execute("TRUNCATE effects")
    shop, is_waiting = Shop(database, SystemClock()), asyncio.Event()

    async def waits(payment: Awaitable[object]) -> bool:
        is_waiting.set()
        return bool(await swallows(payment))

    try:
        shop.handles(paying(30, waits), cls=Step)
        await shop.receive_all([envelope(2, body=msgspec.json.encode(Step(2, "succeed")))])
        running = asyncio.create_task(shop.agent.run())
        await asyncio.wait_for(is_waiting.wait(), 10)
        await asyncio.sleep(0)  # the handler waits, too
        running.cancel()
        await asyncio.wait([running], timeout=10)
        assert (running.cancelled(), shop.effects(), len(shop.inbox())) == (True, [], 1)
    finally:
        await shop.close()
        database.clear()


@pytest.mark.parametrize("max_batch", [10, "auto"])
async def test_no_message_of_a_group_begins_after_its_handler_has_paused(database: Tables, max_batch: Any) -> None:
    database.clear()
    shop = Shop(database, SystemClock(), group_time=60)
    calls: list[int] = []

    async def pause(step: Step, session: AsyncSession, ctx: Context) -> None:
        calls.append(step.number)
        if step.number == 2:
            ctx.circuit.open(for_=3_600, reason="quota used up")

    try:
        shop.handles(pause, cls=Step, max_batch=max_batch)
        learn(shop)
        bodies = [msgspec.json.encode(Step(number, "succeed")) for number in range(10)]
        await shop.receive_all([envelope(number, body=body) for number, body in enumerate(bodies)])
        async with shop.open():
            await shop.settled()
        assert (calls, len(shop.inbox())) == ([0, 1, 2], 7)
    finally:
        await shop.close()
        database.clear()


@pytest.mark.parametrize(
    ("code", "is_for_good"), [("40P01", True), ("55P03", True), ("40001", False), ("23505", False), ("P0001", False)]
)
async def test_handler_stays_alone_for_a_while_or_for_good_by_the_error_of_its_group(
    database: Tables, code: str, is_for_good: bool
) -> None:
    database.clear()
    shop = Shop(database, SystemClock(), group_time=60)
    database.execute(_REFUSE)
    errors = [text(f"SELECT refuse('{code}')")]

    async def fail_once(step: Step, session: AsyncSession) -> None:
        if errors:
            await session.execute(errors.pop())

    try:
        shop.handles(fail_once, cls=Step, max_batch="auto", retry=Retry(immediate=1))
        learn(shop)
        bodies = [msgspec.json.encode(Step(number, "succeed")) for number in range(3)]
        await shop.receive_all([envelope(number, body=body) for number, body in enumerate(bodies)])
        async with shop.open():
            await shop.settled()
        for _ in range(100):
            learn(shop)
        assert (shop.agent._delivery.at_most(1_000) == 1) is is_for_good
    finally:
        await shop.close()
        database.clear()


@pytest.mark.parametrize(
    ("fails_as", "is_for_good"), [("its own error", False), ("its own timeout", False), ("the timeout", True)]
)
async def test_handler_stays_alone_for_good_when_its_group_met_the_timeout(
    database: Tables, caplog: pytest.LogCaptureFixture, fails_as: str, is_for_good: bool
) -> None:
    database.clear()
    shop = Shop(database, SystemClock(), group_time=60)
    fails = [fails_as]

    async def fail_once(step: Step, session: AsyncSession) -> None:
        if step.number == 1 and fails:
            match fails.pop():
                case "the timeout":
                    await session.execute(text("SELECT pg_sleep(5)"))
                case "its own timeout":
                    raise TimeoutError("the supplier was late")
                case _:
                    raise LookupError

    try:
        shop.handles(fail_once, cls=Step, max_batch="auto", timeout=HANGS, retry=Retry(immediate=1))
        learn(shop)
        bodies = [msgspec.json.encode(Step(number, "succeed")) for number in range(3)]
        await shop.receive_all([envelope(number, body=body) for number, body in enumerate(bodies)])
        with caplog.at_level(logging.INFO, "durable"):
            async with shop.open():
                await shop.settled()
        for _ in range(100):
            learn(shop)
        assert (shop.agent._delivery.at_most(1_000) == 1) is is_for_good
        assert is_for_good or "alone from now on" not in caplog.text
    finally:
        await shop.close()
        database.clear()


async def test_rollback_of_a_single_message_is_not_told_as_one_of_a_group(
    database: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "durable"):
        await result(database, ["raise", "succeed"], handle, max_batch="auto")
        assert "a group of" not in caplog.text
        await result(database, ["succeed", "raise"], handle, max_batch="auto")
        assert "a group of 2 rolled back" in caplog.text


async def test_handler_stays_alone_when_its_group_met_a_lock(database: Tables) -> None:
    database.clear()
    shop = Shop(database, SystemClock(), group_time=60)

    async def lock(step: Step, session: AsyncSession) -> None:
        await session.execute(text("SELECT number FROM taken FOR UPDATE NOWAIT"))

    try:
        shop.handles(lock, cls=Step, max_batch="auto")
        learn(shop)
        bodies = [msgspec.json.encode(Step(number, "succeed")) for number in range(3)]
        await shop.receive_all([envelope(number, body=body) for number, body in enumerate(bodies)])
        with psycopg.connect(database.url) as conn:
            conn.execute("SELECT number FROM taken FOR UPDATE")
            async with shop.open():
                await shop.settled()
        for _ in range(100):
            learn(shop)
        assert shop.agent._delivery.at_most(1_000) == 1
    finally:
        await shop.close()
        database.clear()


async def test_message_runs_alone_when_failed_or_interrupted_before(database: Tables) -> None:
    database.clear()
    database.execute("TRUNCATE effects")
    shop = Shop(database, SystemClock(), group_time=60)

    async def write(step: Step, session: AsyncSession) -> None:
        await session.execute(_INSERT, {"number": step.number})

    try:
        shop.handles(write, cls=Step, max_batch="auto")
        learn(shop)
        bodies = [msgspec.json.encode(Step(number, "succeed")) for number in range(6)]
        waiting = [envelope(number, body=body) for number, body in enumerate(bodies)]
        await shop.receive_all(waiting[:1], attempts=1)
        await shop.receive_all(waiting[1:2], interruptions=1)
        await shop.receive_all(waiting[2:])
        async with shop.open():
            await shop.settled()
        assert database.rows("SELECT count(*) FROM effects GROUP BY transaction ORDER BY 1") == [1, 1, 4]
    finally:
        await shop.close()


async def test_messages_not_yet_begun_leave_a_group_when_rolled_back(database: Tables) -> None:
    calls: list[int] = []

    async def count(step: Step, session: AsyncSession, ctx: Context) -> None:
        calls.append(step.number)
        await handle(step, session, ctx)

    await result(database, ["succeed", "succeed", "raise", "succeed", "succeed"], count, max_batch="auto")
    assert sorted(calls) == [0, 0, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("does", ACTIONS)
async def test_message_between_others_leaves_its_neighbours_unchanged(database: Tables, kind: str, does: str) -> None:
    await compare(database, kind, ["mutate and return", "send", does, "succeed", "send"])


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_message_cannot_reach_a_savepoint_of_its_neighbour(database: Tables, kind: str) -> None:
    for reach in (each for each in ACTIONS if "a savepoint of another" in each):
        await compare(database, kind, ["leave a savepoint as text", "send", "succeed", reach, "succeed"])


async def test_message_may_roll_back_to_its_savepoint_of_a_failed_text(database: Tables) -> None:
    """psycopg sends the statements of a text together: the savepoint is there, although the text has failed."""
    actions = ["leave a savepoint as text", "roll back to a savepoint of a failed text"]
    found = await result(database, actions, handle_sync, max_batch=len(actions))
    assert (found["effects"], found["letters"]) == ([4, 100, 1_100], [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("does", REACHING)
async def test_objects_of_a_message_are_flushed_before_the_next_one(database: Tables, kind: str, does: str) -> None:
    await compare(database, kind, ["add an object", does, "succeed"])
    await compare(database, kind, ["add an object", "add an object that is refused", "succeed", does])


@pytest.mark.parametrize("kind", KINDS)
async def test_objects_of_a_message_are_read_anew_by_the_next_one(database: Tables, kind: str) -> None:
    await compare(database, kind, ["read an object", "roll back a savepoint", "read an object", "read an object"])


@pytest.mark.parametrize("kind", KINDS)
async def test_hanging_message_leaves_its_neighbours_unchanged(database: Tables, kind: str) -> None:
    await compare(database, kind, ["succeed", "hang", "send"])


@pytest.mark.parametrize("kind", KINDS)
@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=7))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_group_equals_its_messages_one_by_one(database: Tables, kind: str, actions: list[str]) -> None:
    asyncio.run(compare(database, kind, actions))
