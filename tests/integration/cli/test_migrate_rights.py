"""migrate by roles of few rights: it changes nothing where nothing is due, and names who can do what is due."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import make_url

from tests.support.command import Agent
from tests.support.roles import runtime_role
from tests.support.tables import Tables


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.fixture
def role(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A role with the rights of a node, whose URL commands use."""
    with runtime_role(tables.url) as url:
        monkeypatch.setenv("DURABLE_DATABASE_URL", url)
        yield str(make_url(url).username)


@pytest.fixture
def other_schema(tables: Tables) -> Iterator[str]:
    name = f"other_{uuid4().hex[:8]}"
    yield name
    tables.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")


@pytest.mark.usefixtures("role")
def test_migrate_changes_nothing_when_the_schema_is_up_to_date(agent: Agent) -> None:
    ended = agent("migrate")
    assert (ended.code, ended.err) == (0, "")
    assert "is up to date" in ended.out


def test_migrate_names_the_right_to_make_a_schema(agent: Agent, role: str, other_schema: str) -> None:
    ended = agent("migrate", "--schema", other_schema)
    assert ended.code == 1
    assert "GRANT CREATE ON DATABASE" in ended.err
    assert f"TO {role}; or run migrate as the owner" in ended.err
    assert "--grant-to" not in ended.err


def test_migrate_names_the_owner_of_the_schema(agent: Agent, tables: Tables, role: str, other_schema: str) -> None:
    tables.execute(f"CREATE SCHEMA {other_schema}")
    tables.execute(f"GRANT USAGE ON SCHEMA {other_schema} TO {role}")
    with psycopg.connect(tables.url) as conn:
        owner = conn.info.user
    ended = agent("migrate", "--schema", other_schema)
    assert ended.code == 1
    assert f"run migrate as {owner}, who owns the schema {other_schema}" in ended.err
    assert "--grant-to" not in ended.err


def test_owner_of_a_schema_needs_no_right_to_make_one(
    agent: Agent, tables: Tables, role: str, other_schema: str
) -> None:
    tables.execute(f"CREATE SCHEMA {other_schema} AUTHORIZATION {role}")
    ended = agent("migrate", "--schema", other_schema)
    assert (ended.code, ended.err) == (0, "")
