"""Limits that a role or a database has by default, and connections of durable that work in spite of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, date, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus
from durable.agents.waking import Waker
from durable.calls.singletons import Singletons
from durable.cli import main
from durable.cli.doctor.database import transaction_limit
from durable.cli.target import schema_connection
from durable.embedded import Embedded
from durable.envelope import NodeId
from durable.pipeline import copying
from durable.pipeline.origin import locked
from durable.recovery.membership import Membership
from durable.settings import Settings, load_settings
from durable.storage.database import Database
from durable.storage.migrator import migrate_online
from durable.storage.slices import exported_snapshot, joined
from durable.testing import eventually
from tests.support.command import logging_put_back
from tests.support.one_handler import Billed
from tests.support.pooler import pooler
from tests.support.root import ROOT
from tests.support.tables import Tables, shared_tables

DEFAULTS = {
    "idle_session_timeout": "41s",
    "statement_timeout": "42s",
    "idle_in_transaction_session_timeout": "43s",
    "transaction_timeout": "44s",
    "lock_timeout": "45s",
}
NONE = dict.fromkeys(DEFAULTS, "0")
NODE = NONE | {"statement_timeout": "9s", "idle_in_transaction_session_timeout": "9s"}
AGENTS = NODE | {"idle_in_transaction_session_timeout": "5s", "transaction_timeout": "44s"}
WAKER = AGENTS | {"statement_timeout": "3s"}
COMMANDS = AGENTS | {"statement_timeout": "14s", "idle_in_transaction_session_timeout": "14s"}
SESSIONS = AGENTS | {
    "statement_timeout": "65s",
    "idle_in_transaction_session_timeout": "65s",
    "lock_timeout": "45s",
}
SHOW = "SELECT " + ", ".join(f"current_setting('{name}')" for name in DEFAULTS)


@pytest.fixture
def tables(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


def with_defaults(tables: Tables, **defaults: str) -> None:
    name = tables.one("SELECT current_database()")
    for setting, value in defaults.items():
        tables.execute(f"ALTER DATABASE \"{name}\" SET {setting} = '{value}'")


def settings_of(tables: Tables, driver: str = "psycopg", **options: Any) -> Settings:
    url = tables.url.replace("postgresql:", f"postgresql+{driver}:")
    return load_settings(database_url=url, statement_timeout=9, **options)


def shown(conn: Connection, _: str = "") -> dict[str, str]:
    return dict(zip(DEFAULTS, conn.execute(text(SHOW)).one(), strict=True))


class Shown(Membership):
    """One that remembers the settings of its session."""

    session: dict[str, str]

    def _stay(self, conn: Connection, node: NodeId) -> None:
        self.session = shown(conn)
        super()._stay(conn, node)


def membership_of(settings: Settings) -> Shown:
    return Shown(
        "billing",
        settings,
        handlers={},
        wake=lambda new: None,
        singletons=Singletons(),
        registry_changed=lambda: None,
    )


async def of_node(tables: Tables, driver: str) -> dict[str, str]:
    membership = membership_of(settings_of(tables))
    await membership.join()
    await membership.leave()
    return membership.session


async def of_agents(tables: Tables, driver: str) -> dict[str, str]:
    database = Database(settings_of(tables, driver))
    found = await database.transaction(shown)
    await database.close()
    return found


async def of_waker(tables: Tables, driver: str) -> dict[str, str]:
    engine = Waker(settings_of(tables))._make_engine()
    with engine.connect() as conn:
        found = shown(conn)
    engine.dispose()
    return found


async def of_unit_of_work(tables: Tables, driver: str) -> dict[str, str]:
    async with Bus("billing", settings=settings_of(tables, driver)) as bus, bus.unit_of_work() as uow:
        assert isinstance(uow.session, AsyncSession)
        return await (await uow.session.connection()).run_sync(shown)


async def of_command(tables: Tables, driver: str) -> dict[str, str]:
    with schema_connection(settings_of(tables)) as conn:
        return shown(conn)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (of_node, NODE),
        (of_agents, AGENTS),
        (of_waker, WAKER),
        (of_unit_of_work, SESSIONS),
        (of_command, COMMANDS),
    ],
)
async def test_session_has_its_own_limits_for_those_of_the_role(
    tables: Tables, read: Callable[..., Any], expected: dict[str, str], driver: str
) -> None:
    with_defaults(tables, **DEFAULTS)
    found = await read(tables, driver)
    assert {name: value.replace("1min5s", "65s") for name, value in found.items()} == expected


def of_driver(url: str) -> dict[str, str]:
    with copying.connection(url) as conn:
        return shown(conn)


def of_lock(url: str) -> dict[str, str]:
    with copying.opened(url) as engine, locked(engine, "durable") as conn:
        return shown(conn)


def of_snapshot(url: str) -> dict[str, str]:
    with copying.opened(url) as engine, exported_snapshot(engine) as snapshot, joined(engine, snapshot) as conn:
        return shown(conn)


def of_arrow(url: str) -> dict[str, str]:
    with copying.arrow_connection(url) as conn, conn.cursor() as cursor:
        cursor.execute(SHOW)
        (row,) = cursor.fetchall()
        return dict(zip(DEFAULTS, row, strict=True))


class Migrating:
    """Alembic's environment, whose migrations look at their session alone."""

    session: dict[str, str]

    def configure(self, *, connection: Connection, **_: Any) -> None:
        self.session = shown(connection)

    def begin_transaction(self) -> nullcontext[None]:
        return nullcontext()

    def run_migrations(self) -> None:
        """Change nothing."""


def of_migration(url: str) -> dict[str, str]:
    migrating = Migrating()
    migrate_online(migrating, url.replace("postgresql:", "postgresql+psycopg:"), "durable")
    return migrating.session


UNLIMITED = (of_driver, of_snapshot, of_arrow)
MIGRATIONS = NONE | {"lock_timeout": DEFAULTS["lock_timeout"]}


@pytest.mark.parametrize("read", [*UNLIMITED, of_lock])
def test_pipeline_has_no_limits_of_the_role(tables: Tables, read: Callable[[str], Any]) -> None:
    with_defaults(tables, **DEFAULTS)
    assert read(tables.url) == NONE


def test_migrations_have_the_limit_of_the_role_for_locks_alone(tables: Tables) -> None:
    with_defaults(tables, **DEFAULTS)
    assert of_migration(tables.url) == MIGRATIONS


@pytest.mark.parametrize("read", [*UNLIMITED, of_migration])
def test_sessions_through_a_pooler_have_the_same_limits(tables: Tables, read: Callable[[str], Any]) -> None:
    with_defaults(tables, **DEFAULTS)
    with pooler(tables.url) as url:
        assert read(url) == (MIGRATIONS if read is of_migration else NONE)
        with psycopg.connect(url) as other:
            assert other.execute(SHOW.encode()).fetchone() == tuple(DEFAULTS.values())


@pytest.mark.parametrize("read", [*UNLIMITED, of_lock, of_migration])
def test_limits_of_the_url_stay(tables: Tables, read: Callable[[str], Any]) -> None:
    given = f"{tables.url}{'&' if '?' in tables.url else '?'}options=-c%20lock_timeout%3D7s"
    assert read(given) == NONE | {"lock_timeout": "7s"}


def test_pipeline_has_no_limits_of_the_role_on_every_server(every_server: Embedded) -> None:
    """Only a newer Postgres has each of them."""
    with shared_tables(every_server) as tables:
        names = [name for name in DEFAULTS if tables.one(f"SELECT current_setting('{name}', true)") is not None]
        with_defaults(tables, **{name: DEFAULTS[name] for name in names})
        shown_there = "SELECT " + ", ".join(f"current_setting('{name}')" for name in names)
        with copying.connection(tables.url) as conn:
            assert set(conn.exec_driver_sql(shown_there).one()) == {"0"}
        with copying.arrow_connection(tables.url) as arrow, arrow.cursor() as cursor:
            cursor.execute(shown_there)
            assert {value for row in cursor.fetchall() for value in row} == {"0"}


MAKERS = {
    "demo/observer.py",  # of the databases that the demo makes
    "demo/stage.py",
    "pipeline/copying.py",
    "recovery/membership.py",
    "storage/answering.py",  # called by engines and membership
    "storage/engines.py",
    "storage/migrator.py",
}
CONNECTS = re.compile(r"(?:psycopg|asyncpg|Psycopg\w*|adbc_driver_postgresql)\.connect\(|create_(?:async_)?engine\(")


def test_connections_are_made_where_their_limits_are_examined() -> None:
    root = ROOT / "durable"
    rooms = [root, *(ROOT / name for name in ("recovery", "transports", "migrations"))]
    found = {
        (room.name if room != root else "", path.relative_to(room).as_posix(), path.read_text("utf-8"))
        for room in rooms
        for path in room.rglob("*.py")
    }
    assert {f"{room}/{name}".lstrip("/") for room, name, text in found if CONNECTS.search(text)} == MAKERS


async def test_member_stays_one_when_idle_sessions_are_ended(tables: Tables) -> None:
    with_defaults(tables, idle_session_timeout="100ms")
    membership = membership_of(settings_of(tables, heartbeat_interval=5, heartbeat_stale=20))
    await membership.join()
    await asyncio.sleep(1)
    assert not membership.lost.is_set()
    await membership.leave()


@pytest.mark.parametrize(("limit", "advises"), [("0", False), ("500ms", True), ("59s", True), ("1h", False)])
async def test_limit_of_transactions_is_examined(tables: Tables, limit: str, advises: bool) -> None:
    with_defaults(tables, transaction_timeout=limit)
    settings = settings_of(tables)
    database = Database(settings)
    check = await database.transaction(transaction_limit, settings)
    await database.close()
    assert (bool(check.advice), "transaction_timeout" in check.detail) == (advises, advises)


ODD_FORMATS = {"DateStyle": "SQL, DMY", "IntervalStyle": "iso_8601"}
TIMES = (
    "SELECT timestamptz '2026-11-27 12:00Z', interval '1 day 2 s', date '03/04/2026', current_setting('IntervalStyle')"
)


def times(conn: Connection, _: str = "") -> tuple[Any, ...]:
    return tuple(conn.execute(text(TIMES)).one())[:3]


EXPECTED = (datetime(2026, 11, 27, 12, tzinfo=UTC), timedelta(days=1, seconds=2), date(2026, 4, 3))


@pytest.mark.parametrize("is_pooled", [False, True], ids=["direct", "pooled"])
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_times_are_read_in_every_format_of_the_database(tables: Tables, driver: str, is_pooled: bool) -> None:
    """The order of day and month is left to the application."""
    intervals = "postgres" if is_pooled and driver == "psycopg" else "postgres_verbose"  # not every pooler keeps it
    with_defaults(tables, DateStyle="SQL, DMY", IntervalStyle=intervals)
    with pooler(tables.url) if is_pooled else nullcontext(tables.url) as url:
        database = Database(load_settings(database_url=url.replace("postgresql:", f"postgresql+{driver}:")))
        for _ in range(3):
            assert await database.transaction(times) == EXPECTED
        await database.close()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_node_runs_with_every_format_of_the_database(tables: Tables, driver: str) -> None:
    with_defaults(tables, **ODD_FORMATS)
    tables.execute("CREATE TABLE effects (number integer)")
    bus = Bus("billing", settings=settings_of(tables, driver))

    @bus.handles(Billed)
    async def bill(billed: Billed, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": billed.number})

    async with bus:
        async with bus.unit_of_work():
            bus.send(Billed(1))
            bus.send(Billed(2), delay=0.1)
        await eventually(lambda: tables.one("SELECT count(*) FROM effects") == 2, what="both effects")

    def looked(database: str) -> int:
        with pytest.raises(SystemExit) as ended, logging_put_back():
            main(["status", "--database", database, "--json"])
        return int(str(ended.value.code))

    assert await asyncio.to_thread(looked, tables.url) == 0
