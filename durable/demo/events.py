"""Events of the nodes and the broker, told at once, and kept for the plots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Event:
    time: datetime
    what: str
    """Such as `killed airline/0 (node 1, pid 7041)`."""


class Events:
    """Events in the order in which they happened."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.seen: list[Event] = []
        self._tell = tell

    def happened(self, what: str, details: str = "") -> None:
        """The details are told, and not kept."""
        self.seen.append(Event(datetime.now(UTC), what))
        self._tell(what + details)
