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
