"""Provider of a node that ends: calls of singletons end with it, and others go on."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec
import pytest

from durable.calls import service
from durable.calls.contract import contract_of
from durable.calls.provider import CallProvider
from durable.calls.singletons import FOREVER, Holding
from durable.settings import load_settings
from durable.testing import eventually
from durable.transports.base import Answer
from durable.transports.frames import Call, Fault, FaultKind, Result


@service("single", version="1.0")
class Single(Protocol):
    async def work(self, name: str) -> str: ...


@service("plain", version="1.0")
class Plain(Protocol):
    async def work(self, name: str) -> str: ...


class Working:
    """Each call waits until it is let go. A stubborn one is not ended by a cancellation."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.cancelled: list[str] = []
        self.go = asyncio.Event()

    async def work(self, name: str) -> str:
        self.began.append(name)
        while not self.go.is_set():
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                if name != "stubborn":
                    raise
        return name


class Bench:
    """A provider that holds `single`, and the answers to its calls."""

    def __init__(self, **own: Any) -> None:
        settings = load_settings(**own)
        self.provider, self.working = CallProvider(lambda: settings), Working()
        self.provider.offer(contract_of(Single), self.working, singleton=True)
        self.provider.offer(contract_of(Plain), self.working)
        self.provider.singletons.hold("single", Holding(1, 0.0, FOREVER))
        self.answers: dict[str, Answer] = {}

    def call(self, of: str, name: str) -> None:
        body = msgspec.msgpack.encode([name])
        self.provider.begin(Call(of, "work", body), None, lambda answer: self.answers.update({name: answer}))

    def faults(self) -> dict[str, FaultKind | None]:
        return {name: each.kind if isinstance(each, Fault) else None for name, each in self.answers.items()}


@pytest.fixture
def bench() -> Bench:
    return Bench(call_concurrency=2)


async def test_closed_singletons_end_their_calls_and_no_others(bench: Bench) -> None:
    bench.call("single", "runs")
    bench.call("plain", "goes on")
    bench.call("single", "waits")
    bench.call("plain", "waits as well")
    await eventually(lambda: bench.working.began == ["runs", "goes on"])
    await bench.provider.close_singletons(5)
    assert bench.faults() == {"waits": FaultKind.SUPERSEDED, "runs": FaultKind.GONE}
    assert bench.answers["waits"] == Fault(FaultKind.SUPERSEDED, "single is given up here")
    assert bench.provider.singletons.is_idle
    bench.call("single", "late")
    assert bench.faults()["late"] is FaultKind.SUPERSEDED
    bench.working.go.set()
    await eventually(lambda: len(bench.answers) == 5)
    assert isinstance(bench.answers["goes on"], Result)
    assert isinstance(bench.answers["waits as well"], Result)
    assert bench.working.cancelled == ["runs"]


async def test_endless_call_keeps_its_singleton(bench: Bench) -> None:
    """The next holder waits: two of them would run."""
    bench.call("single", "stubborn")
    await eventually(lambda: bench.working.began)
    await bench.provider.close_singletons(0.05)
    is_idle = bench.provider.singletons.is_idle
    bench.working.go.set()
    await eventually(lambda: bench.answers)
    assert not is_idle
    await bench.provider.close_singletons(0.05)
    assert bench.provider.singletons.is_idle


def _exit() -> None:
    raise SystemExit(4)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _fail() -> None:
    raise LookupError("no shelf")


class Validated(msgspec.Struct):
    name: str

    def __post_init__(self) -> None:
        if self.name == "interrupt":
            raise KeyboardInterrupt


@service("exiting", version="1.0")
class Exiting(Protocol):
    async def here(self, name: str) -> str: ...
    async def in_task(self, name: str) -> str: ...
    async def validated(self, name: Validated) -> str: ...


class Exits:
    async def here(self, name: str) -> str:
        {"exit": _exit, "interrupt": _interrupt, "fail": _fail}[name]()
        return name

    async def in_task(self, name: str) -> str:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.here(name))
        return name

    async def validated(self, name: Validated) -> str:
        return name.name


@pytest.mark.parametrize(
    ("method", "argument", "error"),
    [
        ("here", "exit", "SystemExit"),
        ("here", "interrupt", "KeyboardInterrupt"),
        ("in_task", "exit", "SystemExit"),
        ("in_task", "fail", "LookupError"),
        ("in_task", "interrupt", "KeyboardInterrupt"),
        ("validated", {"name": "interrupt"}, "KeyboardInterrupt"),
    ],
)
async def test_exit_of_a_method_is_answered_as_its_error(method: str, argument: object, error: str) -> None:
    provider, answers = CallProvider(load_settings), list[Answer]()
    provider.offer(contract_of(Exiting), Exits())
    provider.begin(Call("exiting", method, msgspec.msgpack.encode([argument])), None, answers.append)
    await eventually(lambda: answers)
    assert isinstance(answers[0], Fault)
    assert (answers[0].kind, answers[0].error) == (FaultKind.RAISED, error)
