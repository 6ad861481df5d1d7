"""The recurring schedules of a bus in memory: every occurrence that the clock passes runs, in order.

`ask`, `reschedule`, `pause` and `resume` do what the functions of these names do in durable.storage; what they do to
circuits of other kinds is left to those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from durable.clock import Clock
from durable.composing import Composer
from durable.envelope import Envelope
from durable.schedules import Schedule
from durable.storage.circuits import Kind
from durable.testing.circuits import MemoryCircuits

_MOST_AT_ONCE: Final = 10_000


class MemorySchedules:
    """What is due of these schedules, from the time on at which it was made."""

    def __init__(self, schedules: Mapping[str, Schedule], clock: Clock, circuits: MemoryCircuits) -> None:
        self._schedules = schedules
        self._clock = clock
        self._circuits = circuits
        self._began = clock.now()
        self._looked: dict[str, datetime] = {}
        self._moved: dict[str, tuple[datetime, datetime]] = {}
        self._asked: list[str] = []
        self._paused: dict[str, datetime | None] = {}

    def due(self, composer: Composer) -> list[Envelope]:
        """The messages of the occurrences since the last look; raises what a factory raises."""
        envelopes: list[Envelope] = []
        for name, schedule in self._schedules.items():
            for at in list(self._passed(schedule)):
                if not self._is_paused(name, at):
                    envelopes += schedule.envelopes(composer, at)
        now, asked, self._asked = self._clock.now(), self._asked, []
        for name in asked:
            envelopes += self._schedules[name].envelopes(composer, now, asked_for=True)
        return envelopes

    def _passed(self, schedule: Schedule) -> Iterator[datetime]:
        now = self._clock.now()
        for _ in range(_MOST_AT_ONCE):
            occurrence, due = self._next(schedule)
            if due > now:
                return
            self._moved.pop(schedule.name, None)
            self._looked[schedule.name] = occurrence
            yield occurrence
        raise AssertionError(
            f"schedule {schedule.name!r} has had more than {_MOST_AT_ONCE:,} occurrences: advance less, and drain()"
        )

    def _next(self, schedule: Schedule) -> tuple[datetime, datetime]:
        """The occurrence, and when it is due."""
        occurrence = schedule.cron.after(self._looked.get(schedule.name, self._began))
        return self._moved.get(schedule.name, (occurrence, occurrence))

    def _is_paused(self, name: str, at: datetime) -> bool:
        return name in self._paused and ((until := self._paused[name]) is None or at < until)

    # ------------------------------------------------------------------ what people do

    def ask(self, name: str, *, actor: str) -> bool:
        if name in self._schedules and name not in self._asked:
            self._asked.append(name)
        return name in self._schedules

    def reschedule(self, name: str, *, at: datetime, actor: str) -> bool:
        if name in self._schedules:
            occurrence, _ = self._next(self._schedules[name])
            self._moved[name] = (occurrence, at)
        return name in self._schedules

    def pause(self, kind: Kind, key: str, *, reason: str, actor: str, duration: timedelta | None) -> None:
        if kind is Kind.SCHEDULE:
            self._paused[key] = None if duration is None else self._clock.now() + duration
        else:
            self._circuits.pause(kind, key, reason=reason, actor=actor, duration=duration)

    def resume(self, kind: Kind, key: str) -> bool:
        if kind is not Kind.SCHEDULE:
            return self._circuits.resume(kind, key)
        if key in self._schedules:
            list(self._passed(self._schedules[key]))  # what came while it was paused
        missing: Any = object()
        return self._paused.pop(key, missing) is not missing
