"""`durable-agent describe`: its tables and documents, and the comparison with an earlier description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from durable.description.document import read
from tests.support.asyncapi import refuse_invalid
from tests.support.command import Agent

DESCRIBED = """
from durable.calls import service

@service("inventory", version="VERSION")
class Inventory:
    async def reserve(self, sku: str, count: TYPE = 1) -> int: ...

@bus.handles(OrderPlaced)
async def place(placed: OrderPlaced) -> None: ...

bus.listen("tcp://127.0.0.1:2304")
bus.listen("http://127.0.0.1:2306")
bus.route(OrderShipped, to="tcp://127.0.0.1:2305")
bus.offer(Inventory, Inventory())
"""


LOOP = {"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}, "B": {"$ref": "#/$defs/B"}}}


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


def application(agent: Agent, version: str = "1.2", kind: str = "int") -> str:
    return f"{agent.application(DESCRIBED.replace('VERSION', version).replace('TYPE', kind))}:bus"


def test_tables_show_services_and_messages(agent: Agent) -> None:
    ended = agent("describe", application(agent))
    assert ended.code == 0
    assert "reserve(sku: str, count: int = 1) -> int" in ended.out
    assert "tcp://127.0.0.1:2305" in ended.out


def test_tables_show_mounted_receivers_and_kept_answers(agent: Agent) -> None:
    app = agent.application("bus.asgi()\nbus.asgi('web')\nbus.expects(OrderShipped)")
    lines = [line.split() for line in agent("describe", f"{app}:bus").out.splitlines()]

    assert [line for line in lines if line[:1] == ["bus.asgi(),"]] == [
        ["bus.asgi(),", "mounted", name] for name in (app, "web")
    ]
    (kept,) = [line for line in lines if line[:1] == [f"{app}.order-shipped"]]
    assert "bus.expects()" in kept


def test_application_without_declarations_declares_nothing(agent: Agent) -> None:
    ended = agent("describe", f"{agent.application('')}:bus")
    assert (ended.code, ended.out.rstrip().endswith("declares nothing")) == (0, True)


def test_documents_are_valid(agent: Agent) -> None:
    app = application(agent)
    refuse_invalid(json.loads(agent("describe", app, "--asyncapi").out))
    openapi: Any = json.loads(agent("describe", app, "--openapi").out)
    OpenAPIV31SpecValidator(openapi).validate()
    assert openapi["servers"] == [{"url": "http://127.0.0.1:2306"}]
    schemas = openapi["components"]["schemas"]
    assert "inventory.reserve.result" in schemas
    assert "inventory.reserve.arguments-Arguments" in schemas
    read(agent("describe", app, "--json").out.encode(), "new")


def test_description_is_the_same_each_time(agent: Agent) -> None:
    app = application(agent)
    assert agent("describe", app, "--json").out == agent("describe", app, "--json").out


def test_comparison_with_an_earlier_description(agent: Agent, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    app = application(agent)
    old.write_text(agent("describe", app, "--json").out)
    same = agent("describe", app, "--check", str(old))
    assert (same.code, same.out) == (0, "nothing that others see has changed\n")

    text = old.read_text()
    old.write_text(text.replace('"1.2"', '"1.1"'))
    assert agent("describe", app, "--check", str(old)).code == 0

    old.write_text(text.replace('"name": "reserve"', '"name": "release"').replace('"1.2"', '"1.1"'))
    ended = agent("describe", app, "--check", str(old))
    assert ended.code == 1
    assert "incompatible: service inventory: release: is removed; keep it" in ended.out
    assert "compatible: service inventory: reserve: is added" in ended.out

    document = json.loads(agent("describe", app, "--check", str(old), "--json").out)
    assert document["compatible"] is False
    assert document["incompatible_changes"][0]["subject"] == "service inventory: release"


@pytest.mark.parametrize("content", ["", "{}", '{"openapi": "3.1.0"}'])
def test_invalid_description_is_an_error(agent: Agent, tmp_path: Path, content: str) -> None:
    (tmp_path / "old.json").write_text(content)
    ended = agent("describe", application(agent), "--check", str(tmp_path / "old.json"))
    assert ended.code == 2
    assert "is no description" in ended.err


@pytest.mark.parametrize("schema", [3, {"type": 3}, {"$ref": 3}, {"properties": 3}, {"$ref": "#/$defs/A"}, LOOP])
def test_invalid_schema_is_an_error(agent: Agent, tmp_path: Path, schema: object) -> None:
    app = application(agent)
    old = json.loads(agent("describe", app, "--json").out)
    old["messages"][0]["received"] = schema
    (tmp_path / "old.json").write_text(json.dumps(old))
    ended = agent("describe", app, "--check", str(tmp_path / "old.json"))
    assert ended.code in (1, 2)
    assert "--debug" not in ended.err, ended.err


def test_missing_file_is_an_error(agent: Agent, tmp_path: Path) -> None:
    ended = agent("describe", application(agent), "--check", str(tmp_path / "none.json"))
    assert ended.code == 2
    assert "none.json: cannot be read: No such file" in ended.err


def test_options_exclude_each_other(agent: Agent) -> None:
    ended = agent("describe", application(agent), "--asyncapi", "--openapi")
    assert ended.code == 2
    assert "give one of them" in ended.err
