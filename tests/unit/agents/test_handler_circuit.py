"""Circuit of a handler: what was read before it opened does not close it; other pauses make no reading old."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from durable.agents.context import AgentContext
from durable.agents.handler_circuit import HandlerCircuit
from durable.application.circuit_breaker import CircuitBreaker
from durable.application.context import PauseRequest
from durable.clock import SystemClock
from durable.envelope import LeasedEnvelope, NodeId
from durable.settings import load_settings
from durable.storage.circuits import CircuitKind
from durable.storage.database import Database
from durable.telemetry import Counters
from tests.failure.leftovers import envelope


class SlowDatabase:
    """A database that commits when it is let."""

    def __init__(self) -> None:
        self.commits = asyncio.Event()

    async def transaction_with_retry(self, work: Callable[..., Any], *_: object, **__: object) -> None:
        await self.commits.wait()


async def test_reading_from_before_or_during_the_write_of_an_opening_is_old_news() -> None:
    database = SlowDatabase()
    context = AgentContext(cast(Database, database), NodeId(1), load_settings(), SystemClock(), Counters())
    circuit = HandlerCircuit("orders.placed", CircuitBreaker(failure_rate=0.1, at_least=1), context)
    before = circuit.generation.number
    opening = asyncio.create_task(circuit.failed(LeasedEnvelope(envelope(1), 0, "shop", 0, 0), ValueError("x")))
    await asyncio.sleep(0)
    assert circuit.is_open
    meanwhile = circuit.generation.number
    assert not circuit.generation.is_current(before)
    assert not circuit.generation.is_current(meanwhile)  # it may have been read before the COMMIT
    database.commits.set()
    await opening
    assert not circuit.generation.is_current(before)
    assert not circuit.generation.is_current(meanwhile)
    assert circuit.generation.is_current(circuit.generation.number)


@pytest.mark.parametrize(("kind", "is_current"), [(CircuitKind.DESTINATION, True), (CircuitKind.HANDLER, False)])
async def test_pause_of_a_destination_leaves_readings_of_the_handler_current(
    kind: CircuitKind, is_current: bool
) -> None:
    database = SlowDatabase()
    context = AgentContext(cast(Database, database), NodeId(1), load_settings(), SystemClock(), Counters())
    circuit = HandlerCircuit("orders.placed", None, context)
    before = circuit.generation.number
    pausing = asyncio.create_task(circuit.pause([PauseRequest(kind, "tcp://stock", None, "full")]), name="pause")
    await asyncio.sleep(0)
    assert circuit.generation.is_current(circuit.generation.number) is is_current
    database.commits.set()
    assert await pausing is not is_current
    assert circuit.generation.is_current(before) is is_current
