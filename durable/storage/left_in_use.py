"""Connections that come back, or are closed, while a task or a thread that was left behind is in a statement of them.

    check-out    the connection has another user; the cursors made from now on are those of that user
    check-in     amid a statement or a transaction: ended. Otherwise it has no user
    ROLLBACK     amid a statement, or before one that waits its turn. asyncpg: the connection is ended. psycopg: waits
    COMMIT       in its turn among the statements
    statement    refused to the cursor of a user who has given the connection back: the next user would commit it
    close        asyncpg: at once, without a goodbye. psycopg: when its statement has ended, which the server cancels

psycopg's library ends the process when a connection is closed amid a statement. Only a COMMIT waits here: a
cancellation that arrived while a connection comes back, or is closed, would take its place from the pool, for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from threading import Thread
from typing import Any, Final
from weakref import WeakSet

from sqlalchemy import Engine, event
from sqlalchemy.engine import Dialect
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.util import await_only

from durable.telemetry import log

_USER: Final = "_durable_user"  # among the attributes of psycopg's connections
_CANCELLED_WITHIN: Final = 5.0  # seconds; then the statement ends when it ends
_IDLE, _CLOSED = 0, 4  # values of psycopg.pq.TransactionStatus

_watched: Final = WeakSet[Dialect]()
_closing: Final[set[asyncio.Task[None]]] = set()

Act = Callable[[Any], None]


def watch(engine: Engine) -> None:
    """Watch the connections of an engine. Does no harm when repeated."""
    dialect: Any = engine.dialect
    if dialect in _watched:
        return
    _watched.add(dialect)
    if dialect.driver == "asyncpg":
        dialect.do_terminate = _terminate
        dialect.do_rollback = partial(_roll_back_or_terminate, dialect.do_rollback)
        dialect.do_commit = partial(_in_turn, dialect.do_commit)
        event.listen(engine.pool, "checkin", _returned_to_asyncpg)
    elif dialect.driver == "psycopg":
        close = _close_in_loop if dialect.is_async else _close_beside_threads
        dialect.do_close = partial(close, dialect.do_close)
        event.listen(engine.pool, "checkout", _taken, insert=True)  # before those which execute statements
        event.listen(engine.pool, "checkin", _returned)


def _end(entry: ConnectionPoolEntry) -> None:
    """Let the server end the transaction of a connection: nothing of it goes back to the pool."""
    _tell()
    entry.invalidate()


def _tell() -> None:
    log.warning(
        "a connection cannot be rolled back, and is ended: a task or a thread that was left behind may be in a "
        "statement of it"
    )


# ---------------------------------------------------------------- asyncpg


def _roll_back_or_terminate(roll_back: Act, connection: Any) -> None:
    """The driver refuses a ROLLBACK amid a statement, upon which SQLAlchemy would keep the connection, and its place
    in the pool, for as long as anything refers to the task whose statement it is.
    """
    adapted = _adapted(connection)
    if adapted.driver_connection.is_closed():  # with its transaction
        return
    if not _is_in_use(adapted):
        try:
            _in_turn(roll_back, adapted)
            return
        except adapted.dbapi.InterfaceError:
            if adapted.driver_connection.is_closed():
                raise
    _tell()
    _terminate(adapted)


def _in_turn(end: Act, connection: Any) -> None:
    """End a transaction as one of the statements of its connection.

    SQLAlchemy ends it beside them: a statement that waited meanwhile would find it still begun, and commit by itself.
    """
    adapted = _adapted(connection)
    await_only(adapted._execute_mutex.acquire())
    try:
        end(adapted)
    finally:
        adapted._execute_mutex.release()


def _adapted(connection: Any) -> Any:
    """Return SQLAlchemy's connection, once for all: the pool's, which stands for it, loses it at its end."""
    return getattr(connection, "dbapi_connection", connection)


def _is_in_use(connection: Any) -> bool:
    """Tell whether a task is in a statement, or a BEGIN, of this connection, or waits for its turn."""
    mutex = connection._execute_mutex
    return bool(mutex.locked() or mutex._waiters)


def _returned_to_asyncpg(connection: Any, entry: ConnectionPoolEntry) -> None:
    """SQLAlchemy gives it back as it is, whoever has ended the transaction."""
    if connection is None:
        return
    if connection.driver_connection.is_closed():
        entry.invalidate()
        return
    if _is_in_use(connection) or connection.driver_connection.is_in_transaction():
        _end(entry)


def _terminate(connection: Any) -> None:
    connection.driver_connection.terminate()


# ---------------------------------------------------------------- psycopg


def _taken(connection: Any, _: ConnectionPoolEntry, __: object) -> None:
    driver = _driver(connection)
    if not hasattr(driver, _USER):
        driver.cursor_factory = _of_one_user(driver.cursor_factory)
        driver.server_cursor_factory = _of_one_user(driver.server_cursor_factory)
    setattr(driver, _USER, object())


def _returned(connection: Any, entry: ConnectionPoolEntry) -> None:
    if connection is not None and not _is_given_up(_driver(connection)):
        _end(entry)


def _is_given_up(driver: Any) -> bool:
    """Take the connection from its user, unless it is amid a statement or a transaction."""
    if isinstance(driver.lock, asyncio.Lock):
        return not driver.lock.locked() and _is_at_rest_without_user(driver)
    if not driver.lock.acquire(blocking=False):
        return False
    try:
        return _is_at_rest_without_user(driver)
    finally:
        driver.lock.release()


def _is_at_rest_without_user(driver: Any) -> bool:
    setattr(driver, _USER, None)
    return driver.pgconn.transaction_status in (_IDLE, _CLOSED)


def _close_beside_threads(close: Act, connection: Any) -> None:
    if not connection.lock.acquire(blocking=False):
        with suppress(RuntimeError):  # the process ends
            Thread(target=_close_after_statement, args=(close, connection), name="close", daemon=True).start()
        return
    try:
        close(connection)
    finally:
        connection.lock.release()


def _close_after_statement(close: Act, connection: Any) -> None:
    with suppress(Exception):
        connection.cancel_safe(timeout=_CANCELLED_WITHIN)
    with connection.lock:
        close(connection)


def _close_in_loop(close: Act, connection: Any) -> None:
    driver = _driver(connection)
    if not driver.lock.locked():
        close(connection)
        return
    closing = asyncio.get_running_loop().create_task(_close_after_statement_of_task(driver), name="close")
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)


async def _close_after_statement_of_task(driver: Any) -> None:
    with suppress(Exception):
        await driver.cancel_safe(timeout=_CANCELLED_WITHIN)
    with suppress(RuntimeError):  # of another loop: the collection of garbage closes it
        async with driver.lock:
            await driver.close()


class _OfOneUser:
    """Part of a cursor: executes nothing once its user has given the connection back."""

    _conn: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        base: Any = super()
        base.__init__(*args, **options)
        self._durable_user = getattr(self._conn, _USER)

    def _start_query(self, query: Any = None) -> Any:
        """Psycopg calls this under the lock of the connection, before each statement."""
        base: Any = super()
        if getattr(self._conn, _USER) is not self._durable_user:
            raise self._conn.ProgrammingError(
                "the connection was given back to its pool before this statement began: end the tasks and threads of "
                "a session before it ends"
            )
        return base._start_query(query)


@cache
def _of_one_user(kind: type) -> type:
    return type(kind.__name__, (_OfOneUser, kind), {})


def _driver(connection: Any) -> Any:
    """Sync psycopg's connection is the driver's own; the others are wrapped by SQLAlchemy."""
    return getattr(connection, "driver_connection", connection)
