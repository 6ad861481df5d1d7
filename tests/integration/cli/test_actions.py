"""`durable-agent actions`, and what the other commands record."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

import pytest

from tests.failure import leftovers
from tests.integration.cli.test_scheduled import declare, wait
from tests.support import letters
from tests.support.command import Agent
from tests.support.tables import Tables

ME = f"{getpass.getuser()}@{socket.gethostname()}"
TOLD = "SELECT actor, verb, target, reason, changed FROM durable.actions"


@pytest.fixture
def tables(shared: Tables, monkeypatch: pytest.MonkeyPatch) -> Tables:
    """Of a database that the environment names."""
    shared.clear()
    monkeypatch.setenv("DURABLE_DATABASE_URL", shared.url)
    return shared


@pytest.fixture
def agent(tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


def fail(tables: Tables, count: int) -> None:
    with leftovers.transaction(tables.url) as conn:
        letters.incoming(conn, [letters.envelope(number) for number in range(count)])


def scene(tables: Tables) -> None:
    """Two dead letters, a delayed message, and two schedules, one of which no node declares."""
    fail(tables, 2)
    wait(tables, 60)
    declare(tables)


@pytest.mark.parametrize(
    ("command", "recorded"),
    [
        ("pause --key tenant-7 --anyway --reason new --by ada", ("ada", "pause", "key tenant-7", "new", 1)),
        ("pause --handler orders.Placed --anyway", (ME, "pause", "handler orders.Placed", "paused by an operator", 1)),
        ("dead-letters replay --type letters.placed", (ME, "replay", "message_type=letters.placed", None, 2)),
        ("dead-letters replay --text TEST", (ME, "replay", "text=...", None, 2)),
        ("dead-letters discard --all --yes --reason no --by ada", ("ada", "discard", "all", "no", 2)),
        ("dead-letters edit {letter} --body {{}} --reason mended", (ME, "edit", "letters={letter}", "mended", 1)),
        ("scheduled cancel --all --yes --reason no", (ME, "cancel", "delayed messages: all", "no", 1)),
        ("scheduled run-now --all --yes", (ME, "run-now", "delayed messages: all", None, 1)),
        ("scheduled reschedule --all --yes --at 2h", (ME, "reschedule", "delayed messages: all", None, 1)),
        ("scheduled reschedule nightly --at 2h", (ME, "reschedule", "schedule nightly", None, 1)),
        ("scheduled cancel nightly", (ME, "cancel", "schedule nightly", None, 1)),
        ("scheduled pause nightly --reason new", (ME, "pause", "schedule nightly", "new", 1)),
    ],
)
def test_command_is_recorded(
    agent: Agent, tables: Tables, command: str, recorded: tuple[str, str, str, str | None, int]
) -> None:
    scene(tables)
    if command == "scheduled cancel nightly":
        tables.execute("DELETE FROM durable.nodes")
    letter = tables.one("SELECT min(letter_id) FROM durable.dead_letters")
    assert agent(*command.format(letter=letter).split()).code == 0
    actor, verb, target, reason, changed = recorded
    (row,) = tables.rows(TOLD)
    assert (row[0], row[1], row[3], row[4]) == (actor, verb, reason, changed)
    assert target.format(letter=letter) in row[2]


@pytest.mark.parametrize(
    "command",
    ["resume --key tenant-7", "dead-letters discard --type none --reason no", "scheduled run-now nightly"],
)
def test_command_without_effect_is_not_recorded(agent: Agent, tables: Tables, command: str) -> None:
    scene(tables)
    tables.execute("DELETE FROM durable.nodes")
    assert agent(*command.split()).code != 0
    assert tables.rows(TOLD) == []


def test_listing_obeys_its_filters_and_pages(agent: Agent, tables: Tables) -> None:
    for key in ("one", "two", "three"):
        assert agent("pause", "--key", key, "--anyway", "--by", "ada").code == 0
    assert agent("resume", "--key", "two", "--by", "bob").code == 0

    def targets(*options: str) -> list[str]:
        return [each["target"] for each in json.loads(agent("actions", *options, "--json").out)["actions"]]

    assert targets() == ["key two", "key three", "key two", "key one"]
    assert targets("--by", "bob") == targets("--verb", "resume") == ["key two"]
    assert targets("--target", "three") == ["key three"]
    assert targets("--until", "1h") == []
    page = json.loads(agent("actions", "--limit", "3", "--json").out)
    assert len(page["actions"]) == 3
    assert targets("--before", str(page["before"])) == ["key one"]
    assert "older ones: --before" in agent("actions", "--limit", "3").out
    assert agent("actions", "--since", "yesterday").code == 2
