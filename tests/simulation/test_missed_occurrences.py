"""Generated lives of one schedule: hours pass, nodes look at it or do not, its function fails or takes its time, always
or for some occurrences, people pause, resume and run it. By the statements in memory:

each misfire    an occurrence runs if its function has succeeded, and none of a pause does; one that has not been tried
                is not taken for one that has failed; a run by hand is tried at the next look
all             each occurrence outside of all pauses runs, in order, as far as the first that fails
once            an occurrence that fails is tried twice at least
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given

from durable import message
from durable.application.cron import Misfire
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
from tests.simulation.rows import NodeRow, Schedule
from tests.simulation.stores import Memory

NAME = "ticks"
SOME_TIME = timedelta(minutes=2)
"""Longer than the pause before a run that failed is tried again."""

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("passes"), st.integers(1, 150)),
        st.tuples(st.just("is_paused"), st.sampled_from([None, 1, 50, 150])),
        st.tuples(st.just("is_slow_once"), st.sampled_from([1, 40, 90])),
        st.tuples(st.sampled_from(["is_looked_at", "is_looked_at", "breaks", "is_mended", "is_resumed", "is_run"])),
    ),
    max_size=25,
)
FAILURES = st.dictionaries(st.integers(1, 12), st.sampled_from([1, 2, 3, 100]), max_size=4)
"""The occurrences whose function fails, by their numbers, and how often."""


@message("missed.tick")
class Tick(msgspec.Struct):
    at: str


class Life:
    """Life of a schedule of each hour; a step has the name of a method, and its minutes."""

    def __init__(self, misfire: Misfire, failures: Mapping[int, int]) -> None:
        self.clock = ManualClock(datetime(2030, 5, 4, 0, 30, 7, tzinfo=UTC))
        self.began_at = self.clock.now()
        self.misfire = misfire
        self.fails = False
        self.failures = Counter({self._hour(number): times for number, times in failures.items()})
        self.takes = timedelta(0)
        self.has_been_slow = False
        self.tried = Counter[datetime]()
        self.made = set[datetime]()
        self.pauses: list[tuple[datetime, datetime | None]] = []
        self.memory = Memory(self.clock.now)
        at = self.began_at
        self.memory.store.tables["nodes"].rows[1] = NodeRow(
            node_id=1, service="tests", capabilities="{}", started_at=at, heartbeat_at=at
        )
        hourly = declare("0 * * * *", self._make, name=NAME, tz="UTC", misfire=misfire, to="sim://b", options={})
        context = SimpleNamespace(database=self, node=NodeId(1), counters=Counters())
        envelope_factory = EnvelopeFactory("tests", Routes(), load_settings(), self.clock)
        self.recurring = Recurring(cast(Any, context), {NAME: hourly}, envelope_factory)

    def _make(self, at: datetime) -> Tick:
        self.tried[at] += 1
        self.clock.advance(self.takes)
        self.takes = timedelta(0)
        if self.fails or self.tried[at] <= self.failures[at]:
            raise LookupError("the rates are not out yet")
        self.made.add(at)
        return Tick(at.isoformat())

    def _hour(self, number: int) -> datetime:
        return self.began_at.replace(minute=0, second=0) + timedelta(hours=number)

    async def transaction(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        return self.memory.run(work, *args, **kwargs)

    # ------------------------------------------------------------------ steps

    async def passes(self, minutes: int) -> None:
        self.clock.advance(timedelta(minutes=minutes))

    async def is_looked_at(self) -> None:
        looked_at = self.clock.now()
        await self.recurring.poll()
        row = self.row
        assert row.asked_at is None or row.asked_at > looked_at
        assert row.failing_since is None or row.occurrence_at in self.tried
        if self.misfire == "all" and not self._is_paused():
            left = [hour for hour in self.wanted() if hour <= looked_at and hour not in self.ran()]
            assert all(self.tried[hour] for hour in left[:1])

    async def breaks(self) -> None:
        self.fails = True

    async def is_mended(self) -> None:
        self.fails, self.takes = False, timedelta(0)
        self.failures.clear()

    async def is_slow_once(self, minutes: int) -> None:
        """Let its next run take so long."""
        self.takes, self.has_been_slow = timedelta(minutes=minutes), True

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

    @property
    def row(self) -> Schedule:
        return cast(Schedule, self.memory.store.tables["schedules"].rows[NAME])

    def wanted(self) -> list[datetime]:
        return [
            hour
            for hour in map(self._hour, range(1, 100))
            if hour <= self.clock.now()
            and not any(since <= hour and (until is None or hour < until) for since, until in self.pauses)
        ]

    def sent(self) -> list[datetime]:
        """The times of all messages, also of runs by hand."""
        bodies = [
            msgspec.json.decode(row.body, type=Tick) for row in self.memory.store.tables["outgoing"].rows.values()
        ]
        return sorted(datetime.fromisoformat(body.at) for body in bodies)

    def ran(self) -> list[datetime]:
        return [moment for moment in self.sent() if moment.minute == moment.second == 0]

    def given_up(self) -> set[datetime]:
        """The occurrences that were tried, have not run, and are not waited for."""
        return set(self.tried) - set(self.sent()) - {self.row.occurrence_at, self.row.asked_at}


@pytest.mark.parametrize("misfire", ["once", "all", "skip"])
@given(steps=STEPS, failures=FAILURES)
@example(steps=[("passes", 150), ("is_looked_at",)], failures={2: 1})
@example(steps=[("passes", 40), ("is_looked_at",), ("passes", 60), ("is_looked_at",)], failures={1: 1, 2: 1})
@example(steps=[("passes", 40), ("is_looked_at",), ("passes", 60), ("is_looked_at",)], failures={1: 2})
@example(steps=[("passes", 40), ("is_slow_once", 90), ("is_looked_at",)], failures={1: 1})
async def test_each_occurrence_outside_of_pauses_runs_and_none_of_a_pause(
    misfire: Misfire, steps: list[tuple[Any, ...]], failures: dict[int, int]
) -> None:
    life = Life(misfire, failures)
    await life.is_looked_at()
    for step, *minutes in steps:
        await getattr(life, step)(*minutes)
        assert set(life.ran()) <= set(life.wanted())
        assert life.made <= set(life.sent())
    if misfire == "once" and not life.has_been_slow:
        assert all(life.tried[at] > 1 for at in life.given_up() if at.minute == 0)
    await life.is_mended()
    await life.is_resumed()
    for _ in range(2):
        life.clock.advance(SOME_TIME)
        await life.is_looked_at()
    assert life.row.error is None
    assert life.row.due_at > life.clock.now()
    if misfire == "all":
        assert life.ran() == life.wanted()
