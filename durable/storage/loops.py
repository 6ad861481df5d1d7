"""The event loop to which the pooled connections of an async engine belong: no other one may use them.

    first use    the running loop is the home of the engine's pool, until it is closed or the engine is disposed of
    elsewhere    WiringError, while that loop is open: no connection is opened, and none is taken
    afterwards   connections of a closed loop are cut, and the pool is made anew
    check-out    a connection of another loop, or amid a transaction, is given up, and the pool opens another

A connection that is used in another loop is never done with it: its transaction stays open, and what the next unit of
work does there is rolled back with it, although its commit returns. All this holds for each engine, whoever made it and
however many buses use it. A NullPool shares no connections.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from asyncio.trsock import TransportSocket
from contextlib import suppress
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Dialect, Engine
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, Pool

from durable.errors import WiringError
from durable.storage.first_connections import FirstConnection
from durable.storage.left_in_use import watch
from durable.storage.sharing import refuse_shared, renew_in_children

_LOOP: Final = "durable.loop"
_WAS_IN_USE: Final = "durable.was_in_use"

_homes: Final[WeakKeyDictionary[Pool, asyncio.AbstractEventLoop]] = WeakKeyDictionary()
_opened: Final[dict[asyncio.AbstractEventLoop, WeakSet[Any]]] = {}
"""The drivers' connections by the loop in which they were opened, until it is found closed."""
_guarded: Final[WeakSet[Dialect]] = WeakSet()
_entering = threading.Lock()  # loops of several threads may come at once


def another_loop() -> WiringError:
    """The error for code in an event loop to which the bus, or its engine, does not belong."""
    return WiringError(
        "the bus, or its engine, belongs to another event loop, in which it runs or was used first: use it there, as by"
        " asyncio.run_coroutine_threadsafe(), or give this loop a Bus, and an engine, of its own"
    )


# ---------------------------------------------------------------- engines


def enter(*engines: AsyncEngine) -> None:
    """Note the running loop as the home of all these engines that have none.

    Raises WiringError, and changes nothing, when one of them has an open home elsewhere, or a pool that shares its
    connections.
    """
    running = asyncio._get_running_loop()
    if running is None or all(_is_home(engine, running) for engine in engines):
        return
    with _entering:
        if not all(is_free(engine) for engine in engines):
            raise another_loop()
        for engine in engines:
            refuse_shared(engine.sync_engine.pool)
        for engine in engines:
            if not _is_home(engine, running):
                _settle(engine, running)


def enter_with(session: AsyncSession) -> None:
    """Enter the engine of a session, unless each of its classes has another. Raises WiringError as enter() does."""
    bind = session.bind
    engine = bind.engine if isinstance(bind, AsyncConnection) else bind
    if isinstance(engine, AsyncEngine):
        enter(engine)


def is_free(engine: AsyncEngine) -> bool:
    """Tell whether the engine may be used here: in its home, and anywhere while it has none that is open."""
    return _is_open_to_this_loop(engine.sync_engine.pool)


async def close(engine: AsyncEngine) -> None:
    """Close the connections of an engine, unless it has an open home elsewhere."""
    home = _homes.get(engine.sync_engine.pool)
    if home in (None, asyncio._get_running_loop()):
        await engine.dispose()
    elif is_free(engine):
        _leave(engine)


def _is_home(engine: AsyncEngine, running: asyncio.AbstractEventLoop) -> bool:
    pool = engine.sync_engine.pool
    return _homes.get(pool) is running or isinstance(pool, NullPool)


def _settle(engine: AsyncEngine, running: asyncio.AbstractEventLoop) -> None:
    guard(engine)
    if engine.sync_engine.pool in _homes or not _has_bound(engine.sync_engine.pool):
        _leave(engine)
        _has_bound(engine.sync_engine.pool)
    _homes[engine.sync_engine.pool] = running


def _has_bound(pool: Pool) -> bool:
    """Bind the pool's queue to the running loop: that of the first which waits for a connection may be another's.

    False when it was bound elsewhere already.
    """
    queue = getattr(getattr(pool, "_pool", None), "_queue", None)
    try:
        return not isinstance(queue, asyncio.Queue) or queue._get_loop() is not None  # type: ignore[attr-defined]
    except RuntimeError:
        return False


def _leave(engine: AsyncEngine) -> None:
    """Make the pool anew: its queue, and the count of its connections in use, are those of the closed loop."""
    _cut_those_of_closed_loops()
    engine.sync_engine.dispose(close=False)


# ---------------------------------------------------------------- connections


def guard(engine: AsyncEngine) -> None:
    """Check the connections of an engine when they are opened, and at each check-out. Does no harm when repeated."""
    if engine.dialect in _guarded:
        return
    watch(engine.sync_engine)
    if isinstance(engine.sync_engine.pool, NullPool):
        _guarded.add(engine.dialect)
        FirstConnection(engine)
        return
    guards_itself(engine)
    _Given(engine.sync_engine)
    renew_in_children(engine.sync_engine)


class _Given:
    """Listens to the events of an engine that the application made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        event.listen(engine, "connect", self._connected, insert=True)
        event.listen(engine, "checkout", self._checked_out, insert=True)  # before those which execute statements
        event.listen(engine, "checkin", self._checked_in)

    def _connected(self, connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
        opened(entry, _driver(connection))

    def _checked_out(self, connection: DBAPIConnection, entry: ConnectionPoolEntry, _: object) -> None:
        """A fresh connection may be amid the transaction of a listener that has set it up."""
        driver = _driver(connection)
        check(self._engine, entry, driver)
        if _WAS_IN_USE in entry.info and not _is_at_rest(driver):
            raise DisconnectionError("a pooled connection has ended, or is amid a transaction that nobody has ended")

    def _checked_in(self, _: DBAPIConnection | None, entry: ConnectionPoolEntry) -> None:
        entry.info[_WAS_IN_USE] = True


def guards_itself(engine: AsyncEngine) -> None:
    """Refuse to open connections in other loops than the home. The engine's maker calls opened() and check()."""
    _guarded.add(engine.dialect)
    given = engine.sync_engine

    @event.listens_for(given, "do_connect", insert=True)
    def _connecting(*_: object) -> None:
        _refuse_strangers(given)


def opened(entry: ConnectionPoolEntry, driver: Any) -> None:
    """Note that the connection belongs to the running loop."""
    loop = entry.info[_LOOP] = asyncio.get_running_loop()
    if loop not in _opened:
        _cut_those_of_closed_loops()
    _opened.setdefault(loop, WeakSet()).add(driver)


def check(engine: Engine, entry: ConnectionPoolEntry, driver: Any) -> None:
    """Give up a connection of another loop, or of one that is not known.

    Raises WiringError while the engine has its home elsewhere, else DisconnectionError: then the pool opens another.
    """
    # That of asyncpg knows its loop, also when it was opened before the engine was guarded.
    loop = entry.info.get(_LOOP) or getattr(driver, "_loop", None)
    if loop is asyncio._get_running_loop():
        return
    if loop is None or loop.is_closed():
        _cut(driver)
    else:
        _break_off(driver)
    _refuse_strangers(engine)
    raise DisconnectionError("a pooled connection belongs to another event loop")


def _refuse_strangers(engine: Engine) -> None:
    if not _is_open_to_this_loop(engine.pool):
        raise another_loop()


def _is_open_to_this_loop(pool: Pool) -> bool:
    home = _homes.get(pool)
    return home is None or home is asyncio._get_running_loop() or home.is_closed()


def _cut_those_of_closed_loops() -> None:
    """Close them without a goodbye to their servers: the garbage collector comes late."""
    for loop in [each for each in list(_opened) if each.is_closed()]:
        for driver in _opened.pop(loop, WeakSet()):
            _cut(driver)


def _cut(driver: Any) -> None:
    """Close the socket of a connection whose loop was closed."""
    if hasattr(driver, "pgconn"):  # of psycopg
        driver.pgconn.finish()
    elif (transport := getattr(driver, "_transport", None)) is not None:  # of asyncpg
        found = transport.get_extra_info("socket")
        with suppress(RuntimeError):  # it tells the loop
            driver.terminate()
        if isinstance(found, TransportSocket):  # uvloop has closed it with the loop
            found._sock.close()  # type: ignore[attr-defined]


def _break_off(driver: Any) -> None:
    """Close a connection whose loop is open, from outside of it: the loop finds it lost."""
    if hasattr(driver, "pgconn"):  # of psycopg
        if not driver.lock.locked():  # amid a statement, that would end the process
            driver.pgconn.finish()
    elif (transport := getattr(driver, "_transport", None)) is not None:  # of asyncpg
        driver._aborted = True  # no other loop says goodbye
        if (found := transport.get_extra_info("socket")) is not None:
            with suppress(OSError), socket.socket(fileno=os.dup(found.fileno())) as copy:
                copy.shutdown(socket.SHUT_RDWR)


def _is_at_rest(driver: Any) -> bool:
    """Tell whether the connection is open, and in no transaction: yes of a driver that cannot be asked."""
    if hasattr(driver, "pgconn"):
        return not driver.pgconn.transaction_status
    if hasattr(driver, "is_in_transaction"):
        return not driver.is_closed() and not driver.is_in_transaction()
    return True


def _driver(connection: Any) -> Any:
    return getattr(connection, "driver_connection", connection)


def _begin_anew() -> None:
    """A forked process has none of the loops."""
    global _entering
    _entering = threading.Lock()
    _homes.clear()
    _opened.clear()


os.register_at_fork(after_in_child=_begin_anew)
