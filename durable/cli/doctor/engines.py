"""Checks of the engines that the application passes; durable never changes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from durable.bus import Bus
from durable.cli.doctor.checks import Check, attempted, fail, ok, warn
from durable.storage.engines import is_pooled
from durable.storage.outages import LOST_STATEMENTS, sqlstate
from durable.storage.sql import housekeeping

_ROUNDS = 12  # psycopg prepares a statement when it is executed for the sixth time
_UNPREPARED = (
    "asyncpg: connect_args={'statement_cache_size': 0, 'prepared_statement_cache_size': 0, "
    "'prepared_statement_name_func': lambda: ''}; psycopg: connect_args={'prepare_threshold': None}"
)
_LIMITS = (
    "set statement_timeout and idle_in_transaction_session_timeout for the engine, the server or the role: "
    "a lost connection keeps its locks until then"
)


def engine_checks(bus: Bus) -> list[Check]:
    """Check the engines of the application; none when durable creates them."""
    given, given_sync = bus.runtime.sessions.given, bus.runtime.sessions.given_sync
    checks = []
    if given is not None:
        checks.append(attempted("engine", lambda: asyncio.run(_async_check(given)), "correct the engine of Bus(...)"))
    if given_sync is not None:
        checks.append(attempted("sync_engine", lambda: _sync_check(given_sync), "correct sync_engine of Bus(...)"))
    return checks


async def _async_check(engine: AsyncEngine) -> Check:
    async with engine.connect() as conn:
        check = await conn.run_sync(lambda sync: _check("engine", sync))
    await engine.dispose()
    return check


def _sync_check(engine: Engine) -> Check:
    with engine.connect() as conn:
        return _check("sync_engine", conn)


def _check(name: str, conn: Connection) -> Check:
    dbapi_connection = conn.connection.dbapi_connection
    assert dbapi_connection is not None
    pooled = is_pooled(dbapi_connection)
    if pooled and _prepares(conn):
        return fail(name, "prepares statements, and goes through a pooler that loses them", _UNPREPARED)
    place = "through a pooler, without prepared statements" if pooled else "direct"
    if unset := ", ".join(_unlimited(conn)):
        return warn(name, f"{place}; without {unset}", _LIMITS)
    return ok(name, place)


def _prepares(conn: Connection) -> bool:
    """Find out by running statements, which holds for every driver and configuration."""
    try:
        found = [conn.execute(housekeeping.COUNT_PREPARED.within("")).scalar_one() for _ in range(_ROUNDS)]
    except DBAPIError as error:  # another client of the pooler has taken the name
        if sqlstate(error) not in LOST_STATEMENTS:
            raise
        found = [1]
    conn.rollback()
    return any(found)


def _unlimited(conn: Connection) -> Iterator[str]:
    for setting in ("statement_timeout", "idle_in_transaction_session_timeout"):
        if conn.execute(housekeeping.READ_SERVER_SETTING.within(""), {"name": setting}).scalar_one() == "0":
            yield setting
    conn.rollback()
