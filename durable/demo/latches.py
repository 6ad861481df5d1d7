"""Circuits that were latched while the demo ran, as the databases showed them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from durable.demo.observer import Observer

LATCHED = """
SELECT key, reason, since, CAST(extract(epoch FROM clock_timestamp() - since) AS double precision)
FROM durable.circuits
"""


@dataclass(frozen=True, slots=True)
class Latch:
    """Row of `circuits`, and its age when it was last seen."""

    service: str
    key: str
    reason: str
    seconds: float


class Latches:
    """Every latch that was seen."""

    def __init__(self, observer: Observer, services: Iterable[str]) -> None:
        self._observer = observer
        self._services = tuple(services)
        self._seen: dict[tuple[str, str, datetime], Latch] = {}

    def poll(self) -> None:
        for service in self._services:
            for key, reason, since, seconds in self._observer.rows(service, LATCHED):
                self._seen[service, key, since] = Latch(service, key, reason, round(seconds, 1))

    @property
    def seen(self) -> list[Latch]:
        """Latches in the order in which they were first seen."""
        return list(self._seen.values())
