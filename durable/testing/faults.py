"""Faults that a test asks for: rules over message types, with no I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass
class Fault:
    """The next `times` attempts to handle a message fail with `error`: before the handler, or after its return."""

    error: Exception | type[Exception]
    times: int
    after_handling: bool

    def use(self) -> None:
        self.times -= 1

    def happen(self) -> None:
        raise self.error


class Faults:
    """The faults that are still to happen, by message type."""

    def __init__(self) -> None:
        self._faults: dict[str, list[Fault]] = {}
        self._duplicates: Counter[str] = Counter()

    def fail(self, message_type: str, fault: Fault) -> None:
        self._faults.setdefault(message_type, []).append(fault)

    def duplicate(self, message_type: str, times: int) -> None:
        self._duplicates[message_type] += times

    def next(self, message_type: str) -> Fault | None:
        """The fault of this type's next attempt; faults happen in the order in which they were asked for."""
        return next((fault for fault in self._faults.get(message_type, ()) if fault.times > 0), None)

    def arrivals(self, message_type: str) -> int:
        """Return how often the next message of this type arrives: twice where a test has asked for it."""
        if not self._duplicates[message_type]:
            return 1
        self._duplicates[message_type] -= 1
        return 2
