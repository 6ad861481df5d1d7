"""Rights and names: a node's role can do what a node does and no more, and durable calls no function of others."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors

from durable.cli.doctor.database import rights
from durable.cli.target import connection
from durable.settings import load_settings
from durable.storage import horizons, status
from durable.storage.database import Database
from tests.support.command import Agent
from tests.support.roles import runtime_role

STAGED = f"staged_{17:032x}_1"


@pytest.fixture
def role_url(database_url: str) -> Iterator[str]:
    with runtime_role(database_url) as url:
        yield url


@pytest.fixture
def conn(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as conn:
        yield conn


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE durable.alembic_version SET version_num = '9999'",
        "DELETE FROM durable.alembic_version",
        "INSERT INTO durable.alembic_version VALUES ('9999')",
        "CREATE TABLE durable.mine (x int)",
        "TRUNCATE durable.nodes",
        f"SELECT durable.make_staging('{STAGED}', 'public')",
        f"SELECT durable.make_staging('{STAGED}', 'pg_monitor')",
        f"SELECT durable.make_staging('{STAGED}', 'no such role')",
    ],
)
def test_the_role_of_a_node_may_not(role_url: str, statement: str) -> None:
    with (
        psycopg.connect(role_url) as conn,
        pytest.raises((errors.InsufficientPrivilege, errors.RaiseException, errors.UndefinedObject)),
    ):
        conn.execute(statement.encode())


def test_the_role_of_a_node_may_stage_for_itself(role_url: str) -> None:
    with psycopg.connect(role_url) as conn:
        conn.execute(f"SELECT durable.make_staging('{STAGED}', CAST(current_user AS text))".encode())
        assert conn.execute("SELECT version_num FROM durable.alembic_version").fetchone() is not None


def test_hidden_transaction_of_another_role_leaves_the_completeness_unknown(database_url: str, role_url: str) -> None:
    """A role that does not see when a transaction began must not claim that all rows up to now are there."""

    def complete_until(url: str) -> datetime | None:
        with connection(load_settings(database_url=url)) as asked:
            return horizons.running(asked, "durable").complete_until(horizons.horizon(asked, "durable"))

    with psycopg.connect(database_url) as writing:
        began = writing.execute("SELECT now(), pg_current_xact_id()").fetchone()
        assert began is not None
        assert complete_until(database_url) == began[0]
        assert complete_until(role_url) is None
    assert complete_until(role_url) is not None


def test_a_new_partition_is_not_for_everybody(conn: psycopg.Connection[Any]) -> None:
    conn.execute("GRANT SELECT ON durable.envelope_history TO PUBLIC")
    conn.execute("SELECT durable.make_partition('envelope_history', CAST('2090-01-01' AS date))")
    found = conn.execute(
        "SELECT count(*) FROM pg_class CROSS JOIN aclexplode(relacl) WHERE relname LIKE 'envelope_history_2090%' "
        "AND grantee = 0"
    ).fetchone()
    assert found == (0,)


def test_doctor_tells_of_too_wide_rights(database_url: str, role_url: str, conn: psycopg.Connection[Any]) -> None:
    def told(url: str) -> tuple[str, str]:
        with connection(load_settings(database_url=url)) as asked:
            check = rights(asked, "durable")
        return check.verdict, check.detail

    assert told(role_url)[0] == "ok"
    verdict, detail = told(database_url)
    assert (verdict, "superuser" in detail) == ("warn", True)
    conn.execute("GRANT SELECT ON durable.outgoing_envelopes TO PUBLIC")
    conn.execute("GRANT USAGE ON SCHEMA durable TO PUBLIC")
    verdict, detail = told(role_url)
    assert verdict == "warn"
    assert "PUBLIC has SELECT on outgoing_envelopes" in detail
    assert "PUBLIC has USAGE on the schema" in detail
    conn.execute("REVOKE ALL ON SCHEMA durable FROM PUBLIC")
    conn.execute("REVOKE ALL ON durable.outgoing_envelopes FROM PUBLIC")
    role = role_url.partition("://")[2].partition(":")[0]
    conn.execute(f"GRANT UPDATE ON durable.alembic_version TO {role}".encode())
    assert told(role_url) == ("warn", "wider than a node needs: this role may UPDATE alembic_version")


async def test_no_function_of_others_is_called(
    conn: psycopg.Connection[Any],
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A schema that comes before pg_catalog, with functions of the names that durable calls."""
    conn.execute("CREATE SCHEMA evil")
    conn.execute("CREATE TABLE evil.calls (name text)")
    for name, result in (("clock_timestamp", "timestamptz"), ("now", "timestamptz"), ("pg_backend_pid", "int")):
        body = f"INSERT INTO evil.calls VALUES ('{name}'); SELECT pg_catalog.{name}()"
        conn.execute(f"CREATE FUNCTION evil.{name}() RETURNS {result} LANGUAGE sql AS $$ {body} $$".encode())
    name = conn.info.dbname
    conn.execute(f'ALTER DATABASE "{name}" SET search_path = evil, pg_catalog, public'.encode())
    for driver in ("postgresql+asyncpg", "postgresql+psycopg"):
        database = Database(load_settings(database_url=database_url.replace("postgresql", driver, 1)))
        await database.transaction(status.clock)
        await database.transaction(status.read)
        await database.close()
    with connection(load_settings(database_url=database_url)) as own:
        status.clock(own, "durable")
        status.server(own, "durable")
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    Agent(tmp_path, monkeypatch, capsys)("status", "--json")
    assert conn.execute("SELECT DISTINCT name FROM evil.calls").fetchall() == []
