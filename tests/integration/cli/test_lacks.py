"""Commands on a database where a table, a column or a right of durable is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import make_url

from tests.support.command import Agent
from tests.support.roles import runtime_role
from tests.support.tables import Tables

COMMANDS = [
    ("status",),
    ("nodes",),
    ("circuits",),
    ("doctor",),
    ("scheduled", "list"),
    ("keys", "list"),
    ("dead-letters", "list"),
    ("dead-letters", "groups"),
    ("dead-letters", "replay", "--all"),
    ("actions",),
]
LACKS = {
    "a table": (
        "ALTER TABLE durable.{table} RENAME TO renamed",
        "ALTER TABLE durable.renamed RENAME TO {table}",
        'relation "durable.{table}" does not exist',
    ),
    "a right": (
        "REVOKE ALL ON durable.{table} FROM {role}",
        "GRANT ALL ON durable.{table} TO {role}",
        "permission denied for table {table}",
    ),
}
"""Statements that take something away and give it back, and how commands name it."""
TABLES = ("incoming_envelopes", "outgoing_envelopes", "dead_letters", "circuits", "nodes", "actions", "schedules")


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("lack", LACKS)
def test_command_names_a_lack_in_one_line_with_its_advice(
    agent: Agent, tables: Tables, monkeypatch: pytest.MonkeyPatch, table: str, lack: str
) -> None:
    takes, gives_back, named = LACKS[lack]
    with runtime_role(tables.url) as url:
        monkeypatch.setenv("DURABLE_DATABASE_URL", url)
        words = {"table": table, "role": make_url(url).username}
        tables.execute(takes.format(**words))
        try:
            said = [ended.out + ended.err for ended in (agent(*command) for command in COMMANDS)]
        finally:
            tables.execute(gives_back.format(**words))
    lacking = [each for each in said if named.format(**words) in each]
    assert lacking
    for each in lacking:
        assert "run: durable-agent migrate" in each
        assert "check that Postgres runs" not in each
    for each in said:
        assert "LINE " not in each
        assert "Traceback" not in each


def test_doctor_makes_its_other_checks_without_a_table(
    agent: Agent, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", tables.url)
    tables.execute("ALTER TABLE durable.nodes RENAME TO renamed")
    try:
        ended = agent("doctor")
    finally:
        tables.execute("ALTER TABLE durable.renamed RENAME TO nodes")
    assert ended.code == 1
    assert "ok    partitions" in ended.out
    assert 'fail  services: relation "durable.nodes" does not exist\n      -> run: durable-agent migrate' in ended.out


@pytest.mark.parametrize("command", ["doctor", "status"])
@pytest.mark.parametrize("is_on", [True, False])
def test_command_tells_of_a_read_only_database(
    agent: Agent, tables: Tables, monkeypatch: pytest.MonkeyPatch, command: str, is_on: bool
) -> None:
    with runtime_role(tables.url) as url:
        monkeypatch.setenv("DURABLE_DATABASE_URL", url)
        setting = "on" if is_on else "off"
        tables.execute(f"ALTER ROLE {make_url(url).username} SET default_transaction_read_only = {setting}")
        ended = agent(command)
    assert ("name the primary" in ended.out) == is_on
    assert ended.code == 1 or not is_on
