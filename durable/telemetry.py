"""The names of what happens: for the logs, and counted by the agents.

Log messages are constant, with %-arguments; ids always, bodies and secrets never.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

log = logging.getLogger("durable")


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
    RETRIED = "retried"
    DEAD_LETTERED = "dead_lettered"
    EXPIRED = "expired"
    LEASE_LOST = "lease_lost"
    CLAIMED = "claimed"
    RECOVERED = "recovered"
    PROMOTED = "promoted"
    RECURRED = "recurred"
    FORGOTTEN = "forgotten"
    CIRCUIT_OPENED = "circuit_opened"
    CIRCUIT_CLOSED = "circuit_closed"


class Counters:
    """How often each event happened since the process started."""

    def __init__(self) -> None:
        self._counts: Counter[Event] = Counter()

    def add(self, event: Event, count: int = 1) -> None:
        self._counts[event] += count

    def __getitem__(self, event: Event) -> int:
        return self._counts[event]

    def snapshot(self) -> Mapping[str, int]:
        return {event.value: self._counts[event] for event in Event}
