"""migrate by roles of few rights: it changes nothing where nothing is due, and names who can do what is due."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import make_url

from tests.support.command import Agent
from tests.support.refusals import refusing
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


@pytest.mark.parametrize("command", [("status",), ("doctor",), ("migrate",)], ids=" ".join)
def test_lack_of_the_right_to_connect_is_told_with_its_grant(
    agent: Agent, database_url: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = make_url(database_url).database
    with runtime_role(database_url) as url, refusing(url, "without a right"):
        monkeypatch.setenv("DURABLE_DATABASE_URL", url)
        ended = agent(*command)
    assert ended.code == 1
    assert f'as owner of the database, run: GRANT CONNECT ON DATABASE "{name}" TO ROLE' in ended.out + ended.err
    assert "--grant-to" not in ended.out + ended.err


def test_owner_of_the_database_grants_the_right_to_connect(
    agent: Agent, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    with runtime_role(database_url) as url, refusing(url, "without a right"):
        assert "may not connect" not in agent("migrate", "--grant-to", str(make_url(url).username)).out
        with psycopg.connect(url):
            pass


def test_owner_of_the_schema_names_the_grant_of_the_right_to_connect(
    agent: Agent, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = make_url(database_url).database
    with runtime_role(database_url) as url, runtime_role(database_url) as owner:
        role, its_owner = (make_url(each).username for each in (url, owner))
        with psycopg.connect(database_url, autocommit=True) as conn:
            conn.execute(f"REVOKE CONNECT ON DATABASE {name} FROM PUBLIC".encode())
            conn.execute(f"GRANT CONNECT ON DATABASE {name} TO {its_owner}".encode())
            conn.execute(f"CREATE SCHEMA other AUTHORIZATION {its_owner}".encode())
        monkeypatch.setenv("DURABLE_DATABASE_URL", owner)
        ended = agent("migrate", "--schema", "other", "--grant-to", str(role))
    assert (ended.code, ended.err) == (0, "")
    assert f'as its owner, run: GRANT CONNECT ON DATABASE {name} TO "{role}"' in ended.out
