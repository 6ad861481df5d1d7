"""Generated lives of one schedule: hours pass, nodes look at it or do not, its function fails, people pause, resume and
run it. Each occurrence outside of all pauses runs, and none of a pause, by the statements in memory.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import hypothesis.strategies as st
import msgspec
from hypothesis import given

from durable import message
from durable.application.schedules import declare
from durable.envelope import NodeId
from durable.messages.routing import Routes
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.recovery.recurring_schedules import Recurring
from durable.settings import load_settings
from durable.storage import circuits, schedules
from durable.storage.circuits import CircuitKind
from durable.telemetry import Counters
from durable.testing.clock import ManualClock
from tests.simulation.rows import NodeRow
from tests.simulation.stores import Memory

NAME = "ticks"
SOME_TIME = timedelta(minutes=2)
"""Longer than the pause before a run that failed is tried again."""

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("passes"), st.integers(1, 150)),
        st.tuples(st.just("is_paused"), st.sampled_from([None, 1, 50, 150])),
        st.tuples(st.sampled_from(["is_looked_at", "is_looked_at", "breaks", "is_mended", "is_resumed", "is_run"])),
    ),
    max_size=25,
)


@message("missed.tick")
class Tick(msgspec.Struct):
    at: str


class Life:
    """Life of a schedule of each hour with misfire="all"; a step has the name of a method, and its minutes."""

    def __init__(self) -> None:
        self.clock = ManualClock(datetime(2030, 5, 4, 0, 30, 7, tzinfo=UTC))
        self.began_at = self.clock.now()
        self.fails = False
        self.pauses: list[tuple[datetime, datetime | None]] = []
        self.memory = Memory(self.clock.now)
        at = self.began_at
        self.memory.store.tables["nodes"].rows[1] = NodeRow(
            node_id=1, service="tests", capabilities="{}", started_at=at, heartbeat_at=at
        )
        hourly = declare("0 * * * *", self._make, name=NAME, tz="UTC", misfire="all", to="sim://b", options={})
        context = SimpleNamespace(database=self, node=NodeId(1), counters=Counters())
        envelope_factory = EnvelopeFactory("tests", Routes(), load_settings(), self.clock)
        self.recurring = Recurring(cast(Any, context), {NAME: hourly}, envelope_factory)

    def _make(self, at: datetime) -> Tick:
        if self.fails:
            raise LookupError("the rates are not out yet")
        return Tick(at.isoformat())

    async def transaction(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        return self.memory.run(work, *args, **kwargs)

    # ------------------------------------------------------------------ steps

    async def passes(self, minutes: int) -> None:
        self.clock.advance(timedelta(minutes=minutes))

    async def is_looked_at(self) -> None:
        await self.recurring.poll()

    async def breaks(self) -> None:
        self.fails = True

    async def is_mended(self) -> None:
        self.fails = False

    async def is_paused(self, minutes: int | None) -> None:
        """Pause it, unless an earlier pause has ended that no node has looked at: only the last one is known then."""
        is_open = self._is_paused()
        if not is_open:
            await self.is_looked_at()
            if self.memory.store.tables["circuits"].rows:
                return
        duration = None if minutes is None else timedelta(minutes=minutes)
        since = self.pauses.pop()[0] if is_open else self.clock.now()
        self.pauses.append((since, None if duration is None else self.clock.now() + duration))
        await self.transaction(
            circuits.pause, CircuitKind.SCHEDULE, NAME, reason="month end", actor="ada", duration=duration
        )

    async def is_resumed(self) -> None:
        if self._is_paused():
            self.pauses.append((self.pauses.pop()[0], self.clock.now()))
        await self.transaction(circuits.resume, CircuitKind.SCHEDULE, NAME)

    async def is_run(self) -> None:
        await self.transaction(schedules.ask, NAME, actor="ada")

    # ------------------------------------------------------------------ its occurrences

    def _is_paused(self) -> bool:
        return bool(self.pauses) and (self.pauses[-1][1] is None or self.pauses[-1][1] > self.clock.now())

    def wanted(self) -> list[datetime]:
        hours = (self.began_at.replace(minute=0, second=0) + timedelta(hours=hour) for hour in range(1, 100))
        return [
            hour
            for hour in hours
            if hour <= self.clock.now()
            and not any(since <= hour and (until is None or hour < until) for since, until in self.pauses)
        ]

    def ran(self) -> list[datetime]:
        bodies = [
            msgspec.json.decode(row.body, type=Tick) for row in self.memory.store.tables["outgoing"].rows.values()
        ]
        moments = sorted(datetime.fromisoformat(body.at) for body in bodies)
        return [moment for moment in moments if moment.minute == moment.second == 0]


@given(steps=STEPS)
async def test_each_occurrence_outside_of_pauses_runs_and_none_of_a_pause(steps: list[tuple[Any, ...]]) -> None:
    life = Life()
    await life.is_looked_at()
    for step, *minutes in steps:
        await getattr(life, step)(*minutes)
        assert set(life.ran()) <= set(life.wanted())
    await life.is_mended()
    await life.is_resumed()
    for _ in range(2):
        life.clock.advance(SOME_TIME)
        await life.is_looked_at()
    assert life.ran() == life.wanted()
