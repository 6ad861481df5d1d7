"""Telemetry of calls: what became of them, how long they took, and their traces.

    server    a call that came in: from its arrival to its answer, waiting included
    client    a call that was made: from its beginning to its result, or its error

Nothing is kept of a call but its outcome and its duration, by method. `spans` and `record` are set when somebody wants
traces, or OpenTelemetry's own histograms; until then nothing is paid for them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from durable.calls.unheard_failures import Unheard
from durable.errors import (
    CallExpired,
    CallFailed,
    CallTimeout,
    IncompatibleService,
    InvalidCall,
    NoProvider,
    Overloaded,
    ProviderGone,
    ProviderSuperseded,
    RemoteError,
)
from durable.statistics import CallSide, CallStatistics
from durable.telemetry import BOUNDS, Histogram
from durable.transports.base import Answer
from durable.transports.frames import Call, Fault, Result

OK: Final = "ok"
CANCELLED: Final = "cancelled"

TRAFFIC: Final = "durable.traffic"
"""Service that each provider answers itself: the traffic of its services, for `durable-agent services`."""

_OUTCOMES: Final[dict[type[CallFailed], str]] = {
    NoProvider: "no_provider",
    IncompatibleService: "incompatible",
    InvalidCall: "invalid",
    Overloaded: "overloaded",
    CallExpired: "expired",
    RemoteError: "raised",
    CallTimeout: "timeout",
    ProviderGone: "gone",
    ProviderSuperseded: "superseded",
}
_MOST_METHODS: Final = 10_000
"""Methods that are counted for themselves; those beyond are counted together."""
_OTHER: Final = "other"
_TURN: Final = 30.0  # seconds: traffic is that of this turn and the one before
_RECENT: Final = 60.0  # seconds for which a call without a provider is a problem
_PERCENTILE: Final = 0.99

Record = Callable[[CallSide, str, str, str, float], None]
"""Called with side, service, method, outcome and seconds of each call."""


class TraceContext(NamedTuple):
    """W3C trace context."""

    traceparent: str = ""
    tracestate: str = ""


class CallSpans(Protocol):
    """Spans of calls."""

    def calling(self, service: str, method: str, at: str) -> AbstractContextManager[TraceContext]:
        """Span of a call that is made: its error is that of the block. Yields what travels with the call."""
        ...

    def called(self, call: Call) -> AbstractContextManager[Callable[[Answer], None]]:
        """Span of a call that came in. Yields a function that is told its answer."""
        ...


class Traffic(Struct, frozen=True):
    """Calls of a service that came in within so many seconds. `p99` is an upper bound, in seconds."""

    service: str
    seconds: float
    calls: int
    failed: int
    p99: float | None


class Tally:
    """Counts of one method, on one side."""

    __slots__ = ("durations", "ended_at", "last", "method", "outcomes", "service", "side")

    def __init__(self, side: CallSide, service: str, method: str) -> None:
        self.side = side
        self.service = service
        self.method = method
        self.outcomes: Counter[str] = Counter()
        self.durations = Histogram()
        self.last = OK
        self.ended_at = 0.0


class CallTelemetry:
    """Telemetry of a bus: its provider and its callers share it. All of it happens in the event loop."""

    def __init__(self) -> None:
        self.spans: CallSpans | None = None
        self.record: Record | None = None
        self.unheard = Unheard()
        self._tallies: dict[tuple[CallSide, str, str], Tally] = {}
        self._recent: dict[str, _Recent] = {}

    def of(self, side: CallSide, service: str, method: str) -> Tally:
        """Return the tally of a method."""
        key = side, service, method
        found = self._tallies.get(key)
        if found is None:
            if len(self._tallies) >= _MOST_METHODS and service != _OTHER:
                return self.of(side, _OTHER, _OTHER)
            found = self._tallies[key] = Tally(side, service, method)
        return found

    def ended(self, tally: Tally, began: float, outcome: str) -> None:
        """Count a call that began at this monotonic time."""
        now = time.monotonic()
        seconds = now - began
        tally.outcomes[outcome] += 1
        tally.durations.observe(seconds)
        tally.last, tally.ended_at = outcome, now
        if tally.side is CallSide.SERVER:
            recent = self._recent.get(tally.service)
            if recent is None:
                recent = self._recent[tally.service] = _Recent(now)
            recent.add(now, seconds, outcome not in (OK, CANCELLED))
        if self.record is not None:
            self.record(tally.side, tally.service, tally.method, outcome, seconds)

    def statistics(self) -> list[CallStatistics]:
        """Return what was counted, by side, service and method."""
        return [
            CallStatistics(*key, outcomes=dict(each.outcomes), durations=each.durations.snapshot())
            for key, each in sorted(self._tallies.items())
        ]

    def unprovided(self) -> list[str]:
        """Return the services whose last call, not long ago, found no provider."""
        latest: dict[str, Tally] = {}
        for each in self._tallies.values():
            if each.side is CallSide.CLIENT and each.ended_at >= latest.get(each.service, each).ended_at:
                latest[each.service] = each
        now = time.monotonic()
        return sorted(
            name
            for name, each in latest.items()
            if each.last == _OUTCOMES[NoProvider] and now - each.ended_at < _RECENT
        )

    def told(self, call: Call) -> Result | None:
        """Return the answer to a question for traffic; None for any other call."""
        if call.service != TRAFFIC:
            return None
        now = time.monotonic()
        return Result(msgspec.msgpack.encode([each.traffic(name, now) for name, each in sorted(self._recent.items())]))


class _Recent:
    """Calls of a service in this turn, and in the one before."""

    __slots__ = ("_before", "_began", "_now", "_turned")

    def __init__(self, now: float) -> None:
        self._began = self._turned = now
        self._now, self._before = _Turn(), _Turn()

    def add(self, now: float, seconds: float, is_failed: bool) -> None:
        self._turn(now)
        self._now.durations.observe(seconds)
        self._now.failed += is_failed

    def traffic(self, service: str, now: float) -> Traffic:
        self._turn(now)
        counts = [sum(pair) for pair in zip(self._now.counts, self._before.counts, strict=True)]
        seconds = min(now - self._began, now - self._turned + _TURN)
        failed = self._now.failed + self._before.failed
        return Traffic(service, max(seconds, 1.0), sum(counts), failed, percentile(counts, _PERCENTILE))

    def _turn(self, now: float) -> None:
        if (passed := now - self._turned) >= _TURN:
            self._before = self._now if passed < 2 * _TURN else _Turn()
            self._now = _Turn()
            self._turned += passed // _TURN * _TURN


class _Turn:
    __slots__ = ("durations", "failed")

    def __init__(self) -> None:
        self.durations = Histogram()
        self.failed = 0

    @property
    def counts(self) -> Sequence[int]:
        return self.durations.snapshot().counts


def percentile(counts: list[int], part: float) -> float | None:
    """Return the upper end of the bucket that holds this part of all; None without any, or beyond the last bucket."""
    wanted, seen = sum(counts) * part, 0
    if not wanted:
        return None
    for count, end in zip(counts, BOUNDS, strict=False):
        seen += count
        if seen >= wanted:
            return end
    return None


def outcome_of(error: BaseException) -> str:
    """Return the outcome of a call that ended with this error."""
    return next((name for kind, name in _OUTCOMES.items() if isinstance(error, kind)), "error")


def outcome_in(answer: Answer) -> str:
    """Return the outcome of a call with this answer."""
    return answer.kind.value if isinstance(answer, Fault) else OK
