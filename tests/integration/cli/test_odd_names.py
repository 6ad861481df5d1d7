"""Roles, databases and schemas whose names Postgres writes in quotes, or that look like something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, message
from durable.cli.doctor.checks import Verdict
from durable.cli.doctor.database import database_checks
from durable.database_url import parse
from durable.settings import load_settings
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK
from tests.support.command import Agent
from tests.support.roles import runtime_role

NAMES = [
    "svc@lab.iam",
    "hosp node",
    'Odd "Role',
    '"quoted"',
    "Hosp",
    "hosp-node",
    "select",
    "current_user",
    "ärzte",
    "lab.msgs",
    "it's",
    "back\\slash",
    "per%cent %s %(x)s",
    "co:lon :name",
    "{schema}",
    "a/b?c#d&e=f",
    "17",
    "$user",
    "x" * 63,
    " ",
]
SCHEMAS = ["select", "user", "order", "table", "_", "a" * 63, "public"]


@message("odd-names.placed")
@dataclass
class Placed:
    number: int


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.fixture(params=NAMES)
def odd_url(request: pytest.FixtureRequest, make_database: Callable[[str], str]) -> Iterator[str]:
    """The URL of a database and a role of the same odd name."""
    name: str = request.param
    plain = parse(make_database("odd"))
    odd = replace(plain, database=name)

    def rename(old: str | None, new: str | None) -> None:
        with psycopg.connect(replace(plain, database="postgres").libpq(), autocommit=True) as conn:
            statement = sql.SQL("ALTER DATABASE {} RENAME TO {}")
            conn.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", [old])
            conn.execute(statement.format(sql.Identifier(old or ""), sql.Identifier(new or "")))

    rename(plain.database, name)
    try:
        with runtime_role(odd.libpq(), name) as url:
            yield url
    finally:
        rename(name, plain.database)


def test_commands_take_a_role_and_database_of_an_odd_name(
    agent: Agent, odd_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", odd_url)
    checks = database_checks(load_settings())
    assert {check.name for check in checks if check.verdict is Verdict.FAIL} == set(), checks
    assert [check.detail for check in checks if check.name == "rights"] == ["this role has all that a node needs"]
    for command in (("migrate",), ("migrate", "--status"), ("status",), ("dead-letters", "list")):
        ended = agent(*command)
        assert "error" not in ended.err, (command, ended.err)
    role, database = parse(odd_url).user, parse(odd_url).database
    monkeypatch.setenv("DURABLE_DATABASE_URL", replace(parse(odd_url), user="postgres", password=None).libpq())
    ended = agent("migrate", "--grant-to", str(role))
    assert (ended.code, ended.err) == (0, ""), database


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_node_works_as_a_role_of_an_odd_name(odd_url: str, driver: str) -> None:
    bus = Bus("odd", odd_url.replace("postgresql:", f"postgresql+{driver}:", 1), **QUICK)
    seen: list[str] = []

    @bus.handles(Placed)
    async def handle(placed: Placed, session: AsyncSession) -> None:
        seen.append((await session.execute(text("SELECT current_user"))).scalar_one())

    async with bus:
        async with bus.unit_of_work() as uow:
            uow.send(Placed(1))
        await eventually(lambda: seen == [parse(odd_url).user])


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_schema_may_have_the_name_of_a_word_of_sql(
    agent: Agent, make_database: Callable[[str], str], schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make_database("words")
    monkeypatch.setenv("DURABLE_DATABASE_URL", url)
    monkeypatch.setenv("DURABLE_DB_SCHEMA", schema)
    assert agent("migrate").code == 0
    seen: list[int] = []
    bus = Bus("odd", **QUICK)

    @bus.handles(Placed)
    async def handle(placed: Placed) -> None:
        seen.append(placed.number)

    async with bus:
        async with bus.unit_of_work() as uow:
            uow.send(Placed(1))
        await eventually(lambda: seen == [1])
        checks = database_checks(load_settings())
        assert {check.name for check in checks if check.verdict is Verdict.FAIL} == set(), checks
    assert "error" not in agent("dead-letters", "list").err
