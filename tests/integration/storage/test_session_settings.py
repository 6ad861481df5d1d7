"""Limits that a role or a database has by default, and connections of durable that work in spite of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus
from durable.agents.waking import Waker
from durable.calls.singletons import Singletons
from durable.cli.doctor.database import transaction_limit
from durable.embedded import Embedded
from durable.envelope import NodeId
from durable.recovery.membership import Membership
from durable.settings import Settings, load_settings
from durable.storage.database import Database
from tests.support.tables import Tables, shared_tables

DEFAULTS = {
    "idle_session_timeout": "41s",
    "statement_timeout": "42s",
    "idle_in_transaction_session_timeout": "43s",
    "transaction_timeout": "44s",
}
NODE = {
    "idle_session_timeout": "0",
    "statement_timeout": "9s",
    "idle_in_transaction_session_timeout": "9s",
    "transaction_timeout": "0",
}
AGENTS = NODE | {"idle_in_transaction_session_timeout": "5s", "transaction_timeout": "44s"}
WAKER = AGENTS | {"statement_timeout": "3s"}
SESSIONS = AGENTS | {"statement_timeout": "65s", "idle_in_transaction_session_timeout": "65s"}
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
        message_types=[],
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


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize(
    ("read", "expected"),
    [(of_node, NODE), (of_agents, AGENTS), (of_waker, WAKER), (of_unit_of_work, SESSIONS)],
)
async def test_session_has_its_own_limits_for_those_of_the_role(
    tables: Tables, read: Callable[..., Any], expected: dict[str, str], driver: str
) -> None:
    with_defaults(tables, **DEFAULTS)
    found = await read(tables, driver)
    assert {name: value.replace("1min5s", "65s") for name, value in found.items()} == expected


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
