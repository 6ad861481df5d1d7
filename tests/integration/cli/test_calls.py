"""`durable-agent services` and `durable-agent call`, with a provider in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Agent
from tests.support.providing import providing
from tests.support.root import ROOT

CALLING = """
from dataclasses import dataclass
from decimal import Decimal
from durable.calls import call, service

@dataclass
class Reservation:
    sku: str
    count: int

@service("inventory", version="VERSION")
class Inventory:
    async def reserve(self, sku: str, count: int = 1) -> Reservation: ...
    async def prices(self, *, place: str) -> dict[str, Decimal]: ...
    async def fail(self, text: str) -> None: ...
    async def echo(self, data: bytes) -> bytes: ...
    @call(fire_and_forget=True)
    async def note(self, text: str) -> None: ...

inventory = bus.caller(Inventory, at="ADDRESS")
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where a service answers that all these tests call: none looks at what it keeps."""
    command = [sys.executable, "-m", "tests.support.calling", "tcp://127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def application(agent: Agent, address: str, version: str = "1.2") -> str:
    return f"{agent.application(CALLING.replace('ADDRESS', address).replace('VERSION', version))}:bus"


def test_services_are_shown_as_their_addresses_offer_them(agent: Agent, address: str) -> None:
    ended = agent("services", application(agent, address), "--json")
    (seen,) = json.loads(ended.out)["services"]
    assert (ended.code, seen["service"], seen["offered"], seen["problem"]) == (0, "inventory", "1.2", None)
    assert "fail(text: str) -> None" in seen["methods"]


@pytest.mark.parametrize(("version", "problem"), [("1.3", "older than the caller"), ("2.0", "another first number")])
def test_services_end_with_1_when_one_cannot_be_called(agent: Agent, address: str, version: str, problem: str) -> None:
    ended = agent("services", application(agent, address, version))
    assert ended.code == 1
    assert problem in ended.out


def test_services_end_with_1_when_an_address_is_silent(agent: Agent, tmp_path: Path) -> None:
    ended = agent("services", application(agent, f"unix://{tmp_path}/silent"))
    assert ended.code == 1
    assert "no answer" in ended.out


def test_services_of_an_application_without_any_are_none(agent: Agent) -> None:
    ended = agent("services", f"{agent.application('')}:bus")
    assert (ended.code, ended.out) == (0, "no service is offered or called\n")


@pytest.mark.parametrize(
    ("given", "result"),
    [
        (["Inventory.reserve", '{"sku": "A-1", "count": 3}'], {"sku": "A-1", "count": 3}),
        (["inventory.reserve", '{"sku": "A-1"}'], {"sku": "A-1", "count": 1}),
        (["inventory.prices", '{"place": "north"}', "--timeout", "20s"], {"north": "1.50"}),
        (["inventory.echo", '{"data": "AAE="}'], "AAE="),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_call_prints_the_result(agent: Agent, address: str, given: list[str], result: object) -> None:
    ended = agent("call", application(agent, address), *given, "--json")
    assert (ended.code, json.loads(ended.out)) == (0, result)


@pytest.mark.parametrize(
    ("given", "code", "text"),
    [
        (["Inventory.fail", '{"text": "no A-1 here"}'], 1, "LookupError at "),
        (["Inventory.note", '{"text": ""}'], 1, "nothing to note"),
        (["Inventory.reserve", '{"sku": 3}'], 2, "JSON: the arguments of Inventory.reserve do not fit"),
        (["Inventory.reserve", '{"sku": "A", "place": "x"}'], 2, "JSON: the arguments of Inventory.reserve do not fit"),
        (["Inventory.reserve", '{"sku": "A", "sku": "B"}'], 2, "'sku' stands twice in one object"),
        (["Inventory.reserve", "A"], 2, "JSON: the arguments of Inventory.reserve do not fit"),
        (["Inventory.reserve"], 2, "JSON: the arguments of Inventory.reserve do not fit"),
        (["Inventory.reserv", "{}"], 2, "did you mean 'reserve'"),
        (["Inventry.reserve", "{}"], 2, "did you mean 'Inventory'"),
        (["reserve", "{}"], 2, "is no service of the application"),
        (["Inventory.reserve", '{"sku": "A"}', "--at", "http://127.0.0.1:1"], 1, "no answer at http://127.0.0.1:1"),
        (["Inventory.reserve", '{"sku": "A"}', "--at", "tcp://127.0.0.1:1"], 1, "no answer at tcp://127.0.0.1:1"),
        (["Inventory.reserve", '{"sku": "A"}', "--timeout", "soon"], 2, "--timeout"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_failed_call_ends_with_one_line(agent: Agent, address: str, given: list[str], code: int, text: str) -> None:
    ended = agent("call", application(agent, address), *given)
    assert ended.code == code
    assert text in ended.err
    assert ended.err.count("\n") == 1


SEEKING = """
from durable.calls import service

@service("who", version="VERSION")
class Who:
    async def name(self) -> str: ...
    async def wait(self) -> str: ...

who = bus.caller(Who)
"""


def test_services_lists_the_providers_in_the_registry(
    agent: Agent, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)

    def seeking(version: str) -> str:
        return agent.application(SEEKING.replace("VERSION", version)) + ":bus"

    ended = agent("services", seeking("1.0"))
    assert (ended.code, "no provider is in the registry" in ended.out) == (1, True)
    with providing(database_url, "one", "singleton", "heartbeat_stale=60") as one:
        ended = agent("services", seeking("1.0"), "--json")
        document = json.loads(ended.out)
        (provider,) = document["providers"]
        assert (ended.code, document["problems"]) == (0, [])
        assert (provider["service"], provider["application"], provider["version"]) == ("who", "shop", "1.0")
        assert (provider["addresses"], provider["load"], provider["epoch"]) == ([one.address], 0, 1)
        assert 0 < provider["lease"] <= 60
        shown = agent("services", seeking("1.0")).out
        assert one.address in shown
        assert "held" in shown
        ended = agent("services", seeking("2.0"))
        assert (ended.code, "another first number" in ended.out) == (1, True)
