"""The recurring schedules of a bus in memory: every occurrence that the clock passes runs, in order.

`names`, `ask`, `reschedule`, `pause_each` and `resume_each` do what the functions of these names do in durable.storage;
what they do to circuits of other kinds is left to those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from durable.application.cron import Pause
from durable.application.schedules import Schedule
from durable.clock import Clock
from durable.envelope import Envelope
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.storage.circuits import CircuitKind, Resumed, together
from durable.testing.circuits import MemoryCircuits

_MOST_AT_ONCE: Final = 10_000
_NEVER: Final = datetime.max.replace(tzinfo=UTC)


class MemorySchedules:
    """Due occurrences of these schedules, from the time of creation on."""

    def __init__(self, schedules: Mapping[str, Schedule], clock: Clock, circuits: MemoryCircuits) -> None:
        self._schedules = schedules
        self._clock = clock
        self._circuits = circuits
        self._began = clock.now()
        self._looked: dict[str, datetime] = {}
        self._moved: dict[str, tuple[datetime, datetime]] = {}
        self._asked: dict[str, datetime] = {}
        self._last_asked: dict[str, datetime] = {}
        self._pauses: dict[str, list[Pause]] = {}

    def due(self, envelope_factory: EnvelopeFactory) -> Iterator[list[Envelope]]:
        """The messages of each run since the last look. Raises the errors of a factory: that run is left out then, and
        the next look goes on behind it.
        """
        for name, schedule in self._schedules.items():
            for at, due in list(self._passed(schedule)):
                self._moved.pop(name, None)
                self._looked[name] = at
                if not self._is_paused(name, due):
                    yield schedule.envelopes(envelope_factory, at)
        for name in list(self._asked):
            yield self._schedules[name].envelopes(envelope_factory, self._asked.pop(name), asked_for=True)

    def _passed(self, schedule: Schedule) -> Iterator[tuple[datetime, datetime]]:
        """The occurrences, and when they were due."""
        now = self._clock.now()
        occurrence, due = self._next(schedule)
        for _ in range(_MOST_AT_ONCE):
            if due > now:
                return
            yield occurrence, due
            occurrence = due = schedule.cron.after(occurrence)
        raise AssertionError(
            f"schedule {schedule.name!r} has had more than {_MOST_AT_ONCE:,} occurrences: advance less, and drain()"
        )

    def _next(self, schedule: Schedule) -> tuple[datetime, datetime]:
        """The occurrence, and when it is due."""
        occurrence = schedule.cron.after(self._looked.get(schedule.name, self._began))
        return self._moved.get(schedule.name, (occurrence, occurrence))

    def _is_paused(self, name: str, due: datetime) -> bool:
        return any(pause.covers(due) for pause in self._pauses.get(name, ()))

    # ------------------------------------------------------------------ what people do

    def names(self) -> list[str]:
        return sorted(self._schedules)

    def ask(self, name: str, *, actor: str) -> bool:
        if name in self._schedules and name not in self._asked:
            moment, last = self._clock.now(), self._last_asked.get(name)
            if last is not None and last >= moment:  # the clock stands still, and each run is another message
                moment = last + timedelta(microseconds=1)
            self._asked[name] = self._last_asked[name] = moment
        return name in self._schedules

    def reschedule(self, name: str, *, at: datetime, actor: str) -> bool:
        if name in self._schedules:
            occurrence, _ = self._next(self._schedules[name])
            self._moved[name] = (occurrence, at)
        return name in self._schedules

    def pause_each(
        self, named: Sequence[tuple[CircuitKind, str]], *, reason: str, actor: str, duration: timedelta | None
    ) -> None:
        for kind, key in named:
            if kind is CircuitKind.SCHEDULE:
                now = self._clock.now()
                self._end_pause(key, now)
                self._pauses.setdefault(key, []).append(Pause(now, _NEVER if duration is None else now + duration))
            else:
                self._circuits.pause(kind, key, reason=reason, actor=actor, duration=duration)

    def resume_each(self, named: Sequence[tuple[CircuitKind, str]]) -> Resumed:
        return together([self._resume(kind, key) for kind, key in named])

    def _resume(self, kind: CircuitKind, key: str) -> Resumed:
        if kind is not CircuitKind.SCHEDULE:
            return self._circuits.resume(kind, key)
        return Resumed(self._end_pause(key, self._clock.now()))

    def _end_pause(self, name: str, now: datetime) -> bool:
        """False when it is not paused now."""
        was_paused = self._is_paused(name, now)
        if was_paused:
            self._pauses[name].append(Pause(self._pauses[name].pop().since, now))
        return was_paused
