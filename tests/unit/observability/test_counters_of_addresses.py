"""Counters over the lives of addresses: used, retired, used again, declared while the bus runs."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from durable.agents.context import AgentContext
from durable.agents.node_agents import NodeAgents
from durable.agents.stuck_threads import StuckThreads
from durable.application.application import Application, Transports
from durable.envelope import NodeId
from durable.observability.metrics import process
from durable.observability.metrics.families import MetricKind, declared
from durable.outbox.sessions import Sessions
from durable.settings import load_settings
from durable.storage.database import Database
from durable.tasks.crew import Crew
from durable.telemetry import Distribution, Event, Subject
from durable.transports.memory import MemoryTransport
from tests.unit.observability.test_metrics import NOTHING

SETTINGS = load_settings()
ADDRESSES = [f"memory://{name}" for name in "abc"]
STEPS = st.lists(st.tuples(st.sampled_from(["send", "retire", "declare"]), st.sampled_from(ADDRESSES)), max_size=30)


class _Idle:
    """A crew whose tasks never run."""

    def create_task(self, work: Coroutine[Any, Any, None], name: str) -> _Idle:
        work.close()
        return self

    def add_done_callback(self, callback: object) -> None:
        pass


class Process:
    def __init__(self) -> None:
        self.application = Application("shop")
        self.context = AgentContext(cast(Database, None), NodeId(1), SETTINGS)
        self.agents = NodeAgents(
            self.application,
            self.context,
            sessions=cast(Sessions, None),
            transports=Transports([MemoryTransport(SETTINGS)]),
            stuck=StuckThreads(),
        )
        self.agents.tasks = cast(Crew, _Idle())

    def send(self, address: str) -> None:
        agent = self.agents.agent_for(address)
        assert agent is not None
        agent._counters.add(Event.SENT)
        agent._counters.durations.observe(0.5)

    def retire(self, address: str) -> None:
        self.agents.retire(address)

    def declare(self, address: str) -> None:
        self.application.routes.subscribe("orders.placed", address)

    def counted(self) -> dict[tuple[str, str, object], float]:
        """The counters of destinations as they are shown, those of histograms by their buckets."""
        tallies = {**NOTHING.tallies, Subject.DESTINATION: self.context.counters.tallies(Subject.DESTINATION)}
        shown: dict[tuple[str, str, object], float] = {}
        statistics = replace(NOTHING, tallies=tallies)
        for family in process.families(statistics, declared(self.application), datetime.now(UTC)):
            for labels, value in family.samples:
                if "destination" not in labels or family.kind is MetricKind.GAUGE:
                    continue
                if isinstance(value, Distribution):
                    parts = [*enumerate(value.counts), ("sum", value.total_seconds)]
                    shown |= {(family.name, labels["destination"], part): count for part, count in parts}
                else:
                    shown[family.name, labels["destination"], None] = value
        return shown


@given(STEPS)
def test_counter_never_falls_when_addresses_come_and_go(steps: list[tuple[str, str]]) -> None:
    bus, before = Process(), dict[tuple[str, str, object], float]()
    for number, (step, address) in enumerate(steps):
        getattr(bus, step)(address)
        now = bus.counted()
        fallen = {key: (count, now.get(key)) for key, count in before.items() if now.get(key, -1) < count}
        assert not fallen, f"after step {number}, {step} {address}"
        before = now
    sent = sum(count for (name, _, _), count in before.items() if name == "durable_messages_sent")
    assert sent == sum(step == "send" for step, _ in steps)
    assert bus.context.counters[Event.SENT] == sent
