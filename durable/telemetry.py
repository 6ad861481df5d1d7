"""The names of what happens: for the logs, and counted by the agents.

Log messages are constant, with %-arguments; ids always, bodies and secrets never.

Each agent is given the counters of its subject when it is made, and adds to them once a batch or an attempt. All of
it happens in the event loop, so there is no lock.

    Counters of the process --of(DESTINATION, "tcp://...")--> those of one declared destination
                            --of(DESTINATION, OTHER)--> those of all other addresses together
                            --of(MESSAGE_TYPE, "orders.order-placed")--> those of one handler
                            --of(ENDPOINT, "orders")--> those of one listener's key
                            --of(RECOVERY, "recovery")--> those of recovery

Counters are never dropped, and never begin anew: monitors take a falling count for a restart of the process.
"""

from __future__ import annotations

import logging
import traceback
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

from durable.envelope import Envelope
from durable.redaction import printable, redacted, shown

log = logging.getLogger("durable")


def _show(record: logging.LogRecord) -> bool:
    """Make each argument one line without secrets: names and reasons of peers must not write lines of their own."""
    if isinstance(record.args, tuple):
        record.args = tuple(map(_shown, record.args))
    elif isinstance(record.args, Mapping):
        record.args = {name: _shown(value) for name, value in record.args.items()}
    if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
        record.exc_text = _lines("".join(traceback.format_exception(*record.exc_info)))
    return True


def _lines(trace: str) -> str:
    """Return a traceback without secrets, each line indented: no text of an error must look like a line of the log."""
    return "\n".join(f"  {printable(line, len(line))}" for line in redacted(trace).rstrip("\n").split("\n"))


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    return shown(value) if isinstance(value, str) else _Shown(value)


class _Shown:
    """Value whose text is computed when a line is written, as logging does."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return shown(str(self._value))

    def __repr__(self) -> str:
        return shown(repr(self._value))


log.addFilter(_show)
messages_log = logging.getLogger("durable.messages")
messages_log.addFilter(_show)


class Event(StrEnum):
    SENT = "sent"
    SEND_FAILED = "send_failed"
    BUSY = "busy"
    REJECTED = "rejected"
    LATCHED = "latched"
    UNLATCHED = "unlatched"
    RECEIVED = "received"
    DUPLICATE = "duplicate"
    QUARANTINED = "quarantined"
    HANDLED = "handled"
    ATTEMPT_FAILED = "attempt_failed"
    RETRIED = "retried"
    DEAD_LETTERED = "dead_lettered"
    EXPIRED = "expired"
    PARKED = "parked"
    LEASE_LOST = "lease_lost"
    CLAIMED = "claimed"
    RECOVERED = "recovered"
    PROMOTED = "promoted"
    RECURRED = "recurred"
    FORGOTTEN = "forgotten"
    CIRCUIT_OPENED = "circuit_opened"
    CIRCUIT_CLOSED = "circuit_closed"
    LOOP_BLOCKED = "loop_blocked"


class Subject(StrEnum):
    """Subject of an event."""

    DESTINATION = "destination"
    MESSAGE_TYPE = "message_type"
    ENDPOINT = "endpoint"
    RECOVERY = "recovery"


OTHER: Final = "other"
"""Name under which subjects are counted together that the application has not declared: there is no end of them."""

BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the buckets in which durations are counted, in seconds."""


class Distribution(NamedTuple):
    """Distribution of durations over the buckets of BOUNDS, one more for those above, and their sum in seconds."""

    counts: Sequence[int]
    total_seconds: float


class Histogram:
    """Counts durations by their size."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._total += seconds

    def snapshot(self) -> Distribution:
        return Distribution(tuple(self._counts), self._total)


class BatchSpans(Protocol):
    """Spans of batches: each batch is sent, or stored, inside such a block."""

    def sending(self, destination: str, batch: Sequence[Envelope]) -> AbstractContextManager[object]: ...

    def receiving(self, endpoint: str, batch: Sequence[Envelope]) -> AbstractContextManager[object]: ...


class Tally(NamedTuple):
    """Counts of one subject, and durations of its batches or attempts."""

    counts: Mapping[Event, int]
    durations: Distribution


class Counters:
    """Counters of events since the process started, of one subject or of all."""

    def __init__(self) -> None:
        self.durations = Histogram()
        self._counts: Counter[Event] = Counter()
        self._parts: dict[tuple[Subject, str], Counters] = {}

    def of(self, subject: Subject, name: str) -> Counters:
        """Return the counters of one subject; they count in these, too."""
        part = self._parts.get((subject, name))
        if part is None:
            part = self._parts[subject, name] = Counters()
        return part

    def add(self, event: Event, count: int = 1) -> None:
        self._counts[event] += count

    def __getitem__(self, event: Event) -> int:
        return self._counts[event] + sum(part[event] for part in self._parts.values())

    def snapshot(self) -> Mapping[str, int]:
        return {event.value: self[event] for event in Event}

    def tallies(self, subject: Subject) -> dict[str, Tally]:
        """Return the tally of each subject of this kind, by name."""
        return {
            name: Tally(dict(part._counts), part.durations.snapshot())
            for (kind, name), part in self._parts.items()
            if kind is subject
        }
