"""Lists of commands: bounded, with the number of the rows that are not shown, and whole when so many are asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from durable.listed import SHOWN
from durable.storage.locks import nodes_class
from tests.support.command import Agent
from tests.support.lists import grow
from tests.support.tables import Tables

MANY = SHOWN + 1
MORE = "and 1 more: raise --limit"


@pytest.fixture
def tables(shared: Tables, monkeypatch: pytest.MonkeyPatch) -> Tables:
    """Of a database that the environment names."""
    shared.clear()
    monkeypatch.setenv("DURABLE_DATABASE_URL", shared.url)
    monkeypatch.setenv("DURABLE_DORMANT_GRACE", "0.05")
    return shared


@pytest.fixture
def agent(tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


def document(agent: Agent, *arguments: str) -> Any:
    return json.loads(agent(*arguments, "--json").out)


@pytest.mark.parametrize(
    ("growth", "command", "name"),
    [
        ("keys", "status", "circuits"),
        ("latches", "status", "circuits"),
        ("latches", "status", "needs"),
        ("destinations", "status", "outgoing"),
        ("types", "status", "incoming"),
        ("locked", "status", "parked"),
        ("causes", "status", "dead_letters"),
        ("causes", "dead-letters groups", "groups"),
        ("schedules", "scheduled list", "schedules"),
    ],
)
def test_list_is_bounded(agent: Agent, tables: Tables, growth: str, command: str, name: str) -> None:
    grow(tables, growth, MANY)

    found = document(agent, *command.split())
    assert (len(found[name]), found["not_shown"][name]) == (SHOWN, 1)
    assert name == "needs" or MORE in agent(*command.split()).out

    whole = document(agent, *command.split(), "--limit", str(MANY))
    assert (len(whole[name]), whole["not_shown"]) == (MANY, {})
    assert MORE not in agent(*command.split(), "--limit", str(MANY)).out


@pytest.mark.parametrize(("growth", "command"), [("keys", "circuits"), ("latches", "circuits"), ("nodes", "nodes")])
def test_list_as_a_document_names_the_rest_on_standard_error(
    agent: Agent, tables: Tables, growth: str, command: str
) -> None:
    grow(tables, growth, MANY)

    ended = agent(command, "--json")
    assert (len(json.loads(ended.out)), MORE in ended.err) == (SHOWN, True)
    assert MORE in agent(command).out

    ended = agent(command, "--json", "--limit", str(MANY))
    assert (len(json.loads(ended.out)), ended.err) == (MANY, "")


def test_problems_are_bounded(agent: Agent, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_HEALTH_LATCHED", "0.001")
    grow(tables, "latches", MANY)

    found = document(agent, "status")
    assert (len(found["problems"]), found["not_shown"]["problems"]) == (SHOWN, 1)
    lines = agent("status").out.splitlines()
    assert sum(line.startswith("unhealthy: ") for line in lines) == SHOWN
    assert MORE in lines


def test_needs_beyond_the_bound_are_counted_in_short(agent: Agent, tables: Tables) -> None:
    grow(tables, "latches", MANY)

    assert agent("status").out.splitlines()[-1] == (
        f"healthy by its limits; {MANY} things need you: {MANY} destinations latched"
    )


def test_providers_are_bounded(agent: Agent, tables: Tables) -> None:
    bus = f"{agent.application()}:bus"
    grow(tables, "providers", MANY)

    found = document(agent, "services", bus)
    assert (len(found["providers"]), found["not_shown"]) == (SHOWN, {"providers": 1})
    assert MORE in agent("services", bus).out
    assert len(document(agent, "services", bus, "--limit", str(MANY))["providers"]) == MANY


def test_longest_paused_key_comes_first_with_its_messages(agent: Agent, tables: Tables) -> None:
    grow(tables, "keys", MANY)
    grow(tables, "types", 3)
    tables.execute("UPDATE durable.incoming_envelopes SET ordering_key = 'order-' || %s", MANY)

    [circuit] = document(agent, "circuits", "--limit", "1")
    assert (circuit["key"], circuit["waiting"]) == (f"order-{MANY}", 3)


@pytest.mark.parametrize("kind", ["destination", "handler", "listener"])
def test_paused_keys_hide_no_other_circuit(agent: Agent, tables: Tables, kind: str) -> None:
    grow(tables, "keys", MANY)
    tables.execute("INSERT INTO durable.circuits (kind, key, reason, actor) VALUES (%s, 'x', 'y', 'ada')", kind)

    assert document(agent, "circuits", "--limit", "1")[0]["kind"] == kind


@pytest.mark.parametrize("command", [["nodes"], ["scheduled", "list"]], ids=" ".join)
def test_bounded_list_begins_with_trouble(agent: Agent, tables: Tables, command: list[str]) -> None:
    grow(tables, "nodes", 3)
    grow(tables, "schedules", 3)
    tables.execute("UPDATE durable.schedules SET declared_by = (SELECT min(node_id) FROM durable.nodes)")
    tables.execute("UPDATE durable.schedules SET error = 'fails' WHERE name = 'daily 3'")
    tables.execute("SELECT pg_advisory_lock(%s, node_id) FROM durable.nodes LIMIT 2", nodes_class("durable"))
    try:
        found = document(agent, *command, "--limit", "1")
    finally:
        tables.execute("SELECT pg_advisory_unlock_all()")
    [first] = found["schedules"] if isinstance(found, dict) else found
    assert first["state"] in ("failing", "dead")
