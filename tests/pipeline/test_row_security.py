"""Row-level security that may hide rows from a role: whoever counts on every row refuses, and nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

import psycopg
import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Connection, make_url

from durable.bus import Bus
from durable.errors import InvalidSetting
from durable.pipeline.copying import connection
from durable.pipeline.source import consistent, register
from durable.storage import purging, readiness
from tests.support.command import Agent
from tests.support.history import add_history, add_letters, add_old_day
from tests.support.roles import runtime_role

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "archive": ("pipeline", "archive", "--service", "shop"),
    "verify": ("pipeline", "verify"),
    "purge": ("pipeline", "purge", "--keep", "30"),
    "erase": ("pipeline", "erase", "--key", "anna", "--reason", "her wish", "--yes"),
    "survey": ("pipeline", "erase", "--key", "anna", "--reason", "her wish", "--dry-run"),
    "replay": ("pipeline", "replay", "--name", "again", "--all", "--dry-run"),
    "dead-letters": ("dead-letters", "discard", "--all", "--reason", "old", "--yes"),
    "nodes": ("nodes",),
}
JUDGED: Final[Mapping[str, tuple[str, ...]]] = {
    "pipeline status": ("pipeline", "status"),
    "status": ("status",),
    "doctor": ("doctor",),
}
VEILS: Final[Mapping[str, tuple[str, ...]]] = {
    "the parent": ("envelope_history",),
    "a partition": ("envelope_history_{day}",),
    "the letters": ("dead_letters",),
}


def old_day() -> date:
    """A day that is past its retention."""
    return (datetime.now(UTC) - timedelta(days=40)).date()


DROPS: Final[Mapping[str, Callable[[Connection], object]]] = {
    "a day": lambda conn: purging.drop_day(conn, "durable", old_day()),
    "stray rows": lambda conn: purging.drop_stray_rows(conn, "durable", 1 << 40, old_day()),
    "letters": lambda conn: purging.drop_resolved_letters(conn, "durable", 1 << 40, timedelta(0)),
}


@pytest.fixture
def weak(
    agent: Agent, database_url: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A role that owns nothing, whose URL commands use. An old day is archived, and all rows are Anna's."""
    add_old_day(conn, 40, 3)
    add_history(conn, 2, first=11)
    add_letters(conn, 2)
    conn.execute("UPDATE durable.envelope_history SET partition_key = 'anna'")
    assert agent(*COMMANDS["archive"]).code == 0
    with runtime_role(database_url) as url:
        monkeypatch.setenv("DURABLE_DATABASE_URL", url)
        yield url


def veil(conn: psycopg.Connection[Any], tables: tuple[str, ...]) -> list[str]:
    """Hide rows of these tables from everybody but their owner, and return their names."""
    day = conn.execute("SELECT to_char(now() AT TIME ZONE 'UTC' - interval '40 days', 'YYYYMMDD')").fetchone()
    assert day is not None
    named = [table.format(day=day[0]) for table in tables]
    for table in named:
        conn.execute(f"ALTER TABLE durable.{table} ENABLE ROW LEVEL SECURITY".encode())
        conn.execute(
            f"CREATE POLICY part ON durable.{table} USING (message_type <> 'hidden') WITH CHECK (true)".encode()
        )
    return named


def rows(conn: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    """What a command might change: the history, letters and records."""
    return [
        *conn.execute("SELECT id, partition_key FROM durable.envelope_history ORDER BY id"),
        *conn.execute("SELECT letter_id, resolution FROM durable.dead_letters ORDER BY letter_id"),
        *conn.execute("SELECT count(*) FROM durable.erasures"),
    ]


@pytest.mark.parametrize("hidden", VEILS)
@pytest.mark.parametrize("command", COMMANDS)
def test_command_refuses_a_role_with_rows_out_of_sight(
    agent: Agent, weak: str, conn: psycopg.Connection[Any], command: str, hidden: str
) -> None:
    named = veil(conn, VEILS[hidden])
    before = rows(conn)
    ended = agent(*COMMANDS[command])
    assert (ended.code, ended.out) == (2, "")
    assert f"row-level security may hide rows of {', '.join(named)}" in ended.err
    assert f"ALTER ROLE {make_url(weak).username} BYPASSRLS" in ended.err
    assert rows(conn) == before


@pytest.mark.parametrize("hidden", VEILS)
@pytest.mark.parametrize("command", JUDGED)
def test_judging_command_fails_for_rows_out_of_sight(
    agent: Agent, weak: str, conn: psycopg.Connection[Any], command: str, hidden: str
) -> None:
    assert "row-level security may hide" not in agent(*JUDGED[command], "--json").out
    veil(conn, VEILS[hidden])
    ended = agent(*JUDGED[command], "--json")
    assert ended.code == 1
    assert "row-level security may hide rows" in json.dumps(json.loads(ended.out))


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs_for_a_role_above_row_level_security(
    agent: Agent, weak: str, conn: psycopg.Connection[Any], command: str
) -> None:
    conn.execute(f"ALTER ROLE {make_url(weak).username} BYPASSRLS".encode())
    veil(conn, ("envelope_history", "envelope_history_{day}"))
    assert "row-level security" not in agent(*COMMANDS[command]).err


@pytest.mark.parametrize("hidden", VEILS)
async def test_node_refuses_to_start_with_rows_out_of_sight(
    weak: str, conn: psycopg.Connection[Any], hidden: str
) -> None:
    veil(conn, VEILS[hidden])
    bus = Bus("shop", database_url=weak)
    with pytest.raises(InvalidSetting, match="row-level security may hide rows"):
        async with bus:
            pass


@pytest.mark.parametrize("option", ["snapshot", "none"])
def test_source_refuses_a_role_with_rows_out_of_sight(
    spark: SparkSession, weak: str, conn: psycopg.Connection[Any], option: str
) -> None:
    register(spark)
    veil(conn, VEILS["a partition"])
    with consistent(weak) as options:
        given = options if option == "snapshot" else {"url": weak}
        with pytest.raises(Exception, match="row-level security may hide rows"):
            spark.read.format("durable").options(**given).load().count()


@pytest.mark.parametrize("drop", DROPS)
def test_drop_refuses_a_role_with_rows_out_of_sight(weak: str, conn: psycopg.Connection[Any], drop: str) -> None:
    veil(conn, VEILS["the parent"])
    before = rows(conn)
    with connection(weak) as storage, pytest.raises(InvalidSetting, match="row-level security may hide rows"):
        DROPS[drop](storage)
    assert rows(conn) == before


@pytest.mark.parametrize("is_forced", [True, False], ids=["force", "no force"])
def test_owner_refuses_row_level_security_under_force_alone(
    weak: str, conn: psycopg.Connection[Any], is_forced: bool
) -> None:
    name = make_url(weak).username
    (table,) = veil(conn, VEILS["the letters"])
    conn.execute(f"ALTER TABLE durable.{table} OWNER TO {name}".encode())
    conn.execute(f"ALTER TABLE durable.{table} {'FORCE' if is_forced else 'NO FORCE'} ROW LEVEL SECURITY".encode())
    with connection(weak) as storage:
        assert (readiness.veil_of(storage, "durable") is not None) == is_forced
    conn.execute(f"ALTER TABLE durable.{table} OWNER TO CURRENT_USER".encode())
