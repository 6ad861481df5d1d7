"""Messages that share a transaction: whatever each of them does, the result is that of handling them one by one.

Each message of a group does one thing to what it shares with its neighbours. The same messages are handled with
`max_batch=1` and in a group; effects, messages that were sent, dead letters and history must be equal.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import Context, Incoming, Middleware, message
from durable.application.middleware import HandleNext, MiddlewareStack
from durable.clock import SystemClock
from durable.embedded import Embedded
from tests.support.one_handler import Billed, Shop, envelope, shop_tables
from tests.support.tables import Tables

HANGS = timedelta(milliseconds=300)
_INSERT = text("INSERT INTO effects (number) VALUES (:number)")
_UNIQUE = text("INSERT INTO taken (number) VALUES (0)")


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
    session.execute(_INSERT, {"number": step.number * 1_000 + step.total})
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


ACTIONS = [
    "succeed", "raise", "roll back", "roll back after a unique violation", "swallow a unique violation", "commit",
    "commit the connection", "roll back the connection", "commit by text", "roll back by text", "leave a savepoint",
    "roll back a savepoint", "leave a savepoint of the connection", "mutate", "mutate and return",
    "change the headers", "change the attempt", "send", "send and raise", "send without a route", "panic", "exit",
    "interrupt", "end the generator", "cancel",
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
        tables.execute("CREATE TABLE taken (number integer UNIQUE)")
        tables.execute("INSERT INTO taken VALUES (0)")
        yield tables


async def result(tables: Tables, actions: list[str], function: Callable[..., Any], **how: Any) -> dict[str, Any]:
    """What is left when each of these was handled."""
    tables.clear()
    tables.execute("TRUNCATE effects, once")
    shop = Shop(tables, SystemClock())
    try:
        shop.handles(function, cls=Step, **how)
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
    assert together == alone
    assert alone["inbox"] == 0
    assert len(alone["history"]) == len(actions)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("does", ACTIONS)
async def test_message_between_others_leaves_its_neighbours_unchanged(database: Tables, kind: str, does: str) -> None:
    await compare(database, kind, ["mutate and return", "send", does, "succeed", "send"])


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
