"""Errors of commands: a document with --json, a warning of secrets in arguments, no accident with --all."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from durable.cli.app import command_line
from durable.redaction import keep_secret
from tests.integration.cli.test_dead_letters import dead, unresolved
from tests.integration.cli.test_scheduled import wait
from tests.support.command import Agent
from tests.support.letters import envelope
from tests.support.tables import Tables

NOWHERE = "postgresql://app@127.0.0.1:1/orders"


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Commands with --json."""
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from leaves(each, (*path, name))
    elif any("--json" in option.opts for option in command.params):
        yield path


COMMANDS = sorted(leaves(command_line()))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.fixture
def database(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", tables.url)


def test_all_commands_were_found() -> None:
    assert {("status",), ("dead-letters", "discard"), ("scheduled", "cancel"), ("pipeline", "archive")} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("options", [(), ("--no-such-option",), ("no-such-module:bus",)], ids=str)
def test_json_is_printed_for_an_error_too(
    agent: Agent, command: tuple[str, ...], options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", NOWHERE)
    monkeypatch.setenv("DURABLE_CONNECT_TIMEOUT", "1")
    ended = agent(*command, *(options or (["--flights", "0"] if command == ("demo",) else [])), "--json")
    document = json.loads(ended.out)
    assert ended.code
    assert document.get("exit_code", ended.code) == ended.code
    if "error" in document:
        assert ended.err == f"error: {document['error']}\n"


def test_a_document_is_followed_by_no_other(agent: Agent, database: None) -> None:
    ended = agent("dead-letters", "list", "--type", "no.such-type", "--json")
    assert ended.code == 1
    assert json.loads(ended.out) == {"letters": [], "before": None}


ASKING: dict[tuple[str, ...], tuple[str, ...]] = {
    ("dead-letters", "discard"): ("--all", "--reason", "x"),
    ("scheduled", "cancel"): ("--all",),
    ("scheduled", "reschedule"): ("--all", "--at", "in 2h"),
    ("scheduled", "run-now"): ("--all",),
}
"""Commands that destroy something of many messages at once, with options to do so."""

ERASE = ("pipeline", "erase")
"""This one, too; as it needs Spark, the tests of the pipeline run it."""
REPLAY = ("dead-letters", "replay")
"""It asks on a terminal alone."""

HARMLESS = {
    ("demo",): "its database is its own",
    REPLAY: "letters stay, with what they held",
    ("pipeline", "replay"): "adds messages",
    ("pipeline", "compact"): "the rows stay",
    ("pipeline", "vacuum"): "removes files that others have replaced",
    ("pipeline", "purge"): "drops rows that it has found in the lake",
}
"""Commands that take --all, or sound as if they destroyed something."""

DESTROYING = {"cancel", "compact", "delete", "discard", "drop", "erase", "prune", "purge", "remove", "reset", "vacuum"}


def test_table_names_every_bulk_command() -> None:
    every = dict(_every_command(command_line()))
    bulk = {path for path, options in every.items() if {"--all", "--yes"} & options or DESTROYING & set(path)}
    assert bulk == {ERASE} | ASKING.keys() | HARMLESS.keys()
    assert {path for path, options in every.items() if "--yes" in options} == {ERASE, REPLAY} | ASKING.keys()


def _every_command(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from _every_command(each, (*path, name))
    else:
        yield path, {text for option in command.params for text in option.opts}


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
@pytest.mark.parametrize("options", [(), ("--json",)], ids=str)
def test_bulk_command_wants_yes_off_a_terminal(
    agent: Agent, database: None, tables: Tables, command: tuple[str, ...], options: tuple[str, ...]
) -> None:
    dead(tables, envelope(1), envelope(2))
    wait(tables, 60)
    wait(tables, 60, to="tcp://127.0.0.1:1")
    before = state(tables)
    refused = agent(*command, *ASKING[command], *options)
    assert (refused.code, "give --yes" in refused.err, state(tables)) == (2, True, before)
    assert agent(*command, *ASKING[command], "--yes", *options).code == 0
    assert state(tables) != before


def state(tables: Tables) -> list[Any]:
    """All that these commands change."""
    waiting = "SELECT id, execution_time FROM durable.{}_envelopes ORDER BY id"
    letters = "SELECT letter_id, resolved_at, body FROM durable.dead_letters ORDER BY letter_id"
    return [tables.rows(query) for query in (letters, waiting.format("incoming"), waiting.format("outgoing"))]


@pytest.mark.parametrize(("answer", "left"), [(b"n\n", 1), (b"y\n", 0)])
def test_discard_of_everything_asks_on_a_terminal(
    agent: Agent, database: None, tables: Tables, answer: bytes, left: int
) -> None:
    dead(tables, envelope(1))
    keyboard, terminal = os.openpty()
    try:
        streams = {"stdin": terminal, "stdout": subprocess.DEVNULL}
        with agent.process("dead-letters", "discard", "--all", "--reason", "x", **streams) as process:
            os.write(keyboard, answer)
            assert process.wait(60) == left
            assert process.stderr is not None
            assert b"discard all these letters?" in process.stderr.read()
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert len(unresolved(tables)) == left


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--database", "postgresql://app:hunter2x@127.0.0.1:1/orders"),
        ("status", "--database=postgresql://127.0.0.1:1/orders?password=hunter2x"),
        ("run", "no-such-module:bus", "--shared-secret", "hunter2xhunter2x"),
        ("run", "no-such-module:bus", "--amqp-url", "amqp://app:hunter2x@127.0.0.1:1/"),
    ],
)
def test_a_secret_on_the_command_line_is_warned_of(agent: Agent, arguments: tuple[str, ...]) -> None:
    ended = agent.as_given(*arguments)
    assert ended.err.startswith("warning: a password or secret in the command line is readable by every user")
    assert "hunter2x" not in ended.err + ended.out


@pytest.mark.parametrize("url", [NOWHERE, "postgresql://app:@/orders?host=/nowhere", "mysql://root@localhost/orders"])
def test_a_url_without_a_password_is_not_warned_of(agent: Agent, url: str) -> None:
    keep_secret(["nowhere", "orders"])  # as words, they are no secrets of this command line
    assert "warning" not in agent.as_given("status", "--database", url).err


def test_failing_run_leaves_no_log_handler_behind(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURABLE_DATABASE_URL", raising=False)
    root = logging.getLogger()
    before = [*root.handlers], root.level, logging.getLogger("durable").level
    ended = agent("run", f"{agent.application()}:bus", "--json", "--log-level", "debug")
    assert (ended.code, "database_url" in ended.err) == (2, True)
    assert ([*root.handlers], root.level, logging.getLogger("durable").level) == before
