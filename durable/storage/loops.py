"""The event loop to which the pooled connections of an async engine belong: no other one may use them.

    first use    the running loop is the home of the engine's pool, until it is closed or the engine is disposed of
    elsewhere    WiringError, while that loop is open
    afterwards   connections of a closed loop are cut, and the pool is made anew
    check-out    a connection of another open loop is refused; one of a closed loop, or amid a transaction, is given up

A connection that is used in another loop is never done with it: its transaction stays open, and what the next unit of
work does there is rolled back with it, although its commit returns. All this holds for each engine, whoever made it and
however many buses use it. A NullPool shares no connections.
"""

from __future__ import annotations

import asyncio
import os
import threading
from asyncio.trsock import TransportSocket
from contextlib import suppress
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Dialect
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, Pool

from durable.errors import WiringError
from durable.storage.first_connections import FirstConnection
from durable.storage.sharing import refuse_shared

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
    home = _homes.get(engine.sync_engine.pool)
    return home is None or home is asyncio._get_running_loop() or home.is_closed()


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
    if engine.sync_engine.pool in _homes:
        _leave(engine)
    _homes[engine.sync_engine.pool] = running


def _leave(engine: AsyncEngine) -> None:
    """Make the pool anew: its queue, and the count of its connections in use, are those of the closed loop."""
    _cut_those_of_closed_loops()
    engine.sync_engine.dispose(close=False)


# ---------------------------------------------------------------- connections


def guard(engine: AsyncEngine) -> None:
    """Check the connections of an engine at each check-out. Does no harm when repeated."""
    if engine.dialect in _guarded:
        return
    _guarded.add(engine.dialect)
    if isinstance(engine.sync_engine.pool, NullPool):
        FirstConnection(engine)
        return
    event.listen(engine.sync_engine, "connect", _connected, insert=True)
    event.listen(engine.sync_engine, "checkout", _checked_out, insert=True)  # before those which execute statements
    event.listen(engine.sync_engine, "checkin", _checked_in)


def guards_itself(engine: AsyncEngine) -> None:
    """Note an engine whose maker calls opened() and check()."""
    _guarded.add(engine.dialect)


def opened(entry: ConnectionPoolEntry, driver: Any) -> None:
    """Note that the connection belongs to the running loop."""
    loop = entry.info[_LOOP] = asyncio.get_running_loop()
    if loop not in _opened:
        _cut_those_of_closed_loops()
    _opened.setdefault(loop, WeakSet()).add(driver)


def check(entry: ConnectionPoolEntry, driver: Any) -> None:
    """Raise WiringError for a connection of another open loop, and DisconnectionError for one of a closed loop: then
    the pool opens another.
    """
    # That of asyncpg knows its loop, also when it was opened before the engine was guarded.
    loop = entry.info.get(_LOOP) or getattr(driver, "_loop", None)
    if loop is None or loop is asyncio._get_running_loop():
        return
    if not loop.is_closed():
        raise another_loop()
    _cut(driver)
    raise DisconnectionError("a pooled connection belongs to an event loop that was closed")


def _connected(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
    opened(entry, _driver(connection))


def _checked_out(connection: DBAPIConnection, entry: ConnectionPoolEntry, _: object) -> None:
    """A fresh connection may be amid the transaction of a listener that has set it up."""
    driver = _driver(connection)
    check(entry, driver)
    if _WAS_IN_USE in entry.info and _is_amid_transaction(driver):
        raise DisconnectionError("a pooled connection is amid a transaction that nobody has ended")


def _checked_in(_: DBAPIConnection | None, entry: ConnectionPoolEntry) -> None:
    entry.info[_WAS_IN_USE] = True


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


def _is_amid_transaction(driver: Any) -> bool:
    """Tell whether a transaction is open, or the connection is broken."""
    if hasattr(driver, "pgconn"):
        return bool(driver.pgconn.transaction_status)
    return bool(driver.is_in_transaction()) if hasattr(driver, "is_in_transaction") else False


def _driver(connection: Any) -> Any:
    return getattr(connection, "driver_connection", connection)


def _begin_anew() -> None:
    """A forked process has none of the loops."""
    global _entering
    _entering = threading.Lock()
    _homes.clear()
    _opened.clear()


os.register_at_fork(after_in_child=_begin_anew)
