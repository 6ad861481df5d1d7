"""What is read again and again in a long run, and the judgement: does it grow?

A gauge of a process is judged within the life of one process at a time: a fault ends it, and the next one begins small.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import psycopg
from sqlalchemy import Connection, NullPool, create_engine

from durable.envelope import NodeId
from durable.storage import inbox
from tests.chaos.fleet import SERVICES
from tests.chaos.stage import Stage

_WORK: Final = ("incoming_envelopes", "outgoing_envelopes")
_SIZES: Final = """
SELECT sum(pg_table_size(c.oid)) / 1048576.0, sum(pg_indexes_size(c.oid)) / 1048576.0
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'durable' AND c.relname = ANY(%s)
"""
_SESSIONS: Final = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
WAITING: Final = (
    "SELECT (SELECT count(*) FROM durable.incoming_envelopes) + (SELECT count(*) FROM durable.outgoing_envelopes)"
)

SPARE: Final = 1.1
"""The last third of the readings may be so many times the middle third."""
_FEWEST: Final = 12


@dataclass(frozen=True)
class Reading:
    at: float
    """Seconds since the beginning."""
    value: float
    life: int = 0
    """The process that it is of, 0 for a database."""


@dataclass
class Gauge:
    """Readings of one thing. What is below `slack` is no growth: it is within what a process or table has at rest."""

    name: str
    unit: str
    slack: float
    readings: list[Reading] = field(default_factory=list)

    def grows(self) -> bool:
        """Tell whether the last third is above the middle third, of all readings or of those of the longest life."""
        middle, last = self.thirds()
        return last > SPARE * middle and last > middle + self.slack

    def thirds(self) -> tuple[float, float]:
        """Return the medians of the middle and of the last third; level ones where there are too few readings."""
        own = [each.value for each in longest_life(self.readings)]
        third = len(own) // 3
        if len(own) < _FEWEST:
            return median(own or [0.0]), median(own or [0.0])
        return median(own[third : 2 * third]), median(own[2 * third :])

    def shown(self, value: float) -> str:
        return f"{value:,.4g} {self.unit}".strip()


def longest_life(readings: Sequence[Reading]) -> Sequence[Reading]:
    lives: dict[int, list[Reading]] = {}
    for each in readings:
        lives.setdefault(each.life, []).append(each)
    return max(lives.values(), key=len, default=[])


class Gauges:
    """Gauges of a run, by their names."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._began = time.monotonic()
        self.all: dict[str, Gauge] = {}

    def read(self) -> None:
        """Read all that can be read now: a server may be away, and a process stopped."""
        for member in self._stage.fleet.members.values():
            with suppress(OSError):
                self._note(f"{member.name} memory", "MiB", 8, resident(member.pid), member.pid)
                self._note(f"{member.name} open files", "", 100, len(os.listdir(f"/proc/{member.pid}/fd")), member.pid)
        for service in SERVICES:
            with suppress(psycopg.Error), self._stage.server_of(service).connect(service) as conn:
                for name, unit, slack, value in _of_database(conn, self._stage.server_of(service).target, service):
                    self._note(f"{service} {name}", unit, slack, value)

    def _note(self, name: str, unit: str, slack: float, value: float, life: int = 0) -> None:
        gauge = self.all.setdefault(name, Gauge(name, unit, slack))
        gauge.readings.append(Reading(time.monotonic() - self._began, float(value), life))


def resident(pid: int) -> float:
    """Return the resident memory of a process, MiB. Raises OSError when it is gone."""
    with open(f"/proc/{pid}/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _of_database(conn: psycopg.Connection[Any], target: str, service: str) -> Iterator[tuple[str, str, float, float]]:
    tables, indexes = conn.execute(_SIZES, (list(_WORK),)).fetchone() or (0, 0)
    (sessions,) = conn.execute(_SESSIONS).fetchone() or (0,)
    (waiting,) = conn.execute(WAITING).fetchone() or (0,)
    yield "work tables", "MiB", 4, tables
    yield "indexes of work tables", "MiB", 4, indexes
    yield "sessions", "", 6, sessions
    yield "rows of work", "", 2_000, waiting
    yield "claim", "ms", 10, _claim_milliseconds(target, service)


def _claim_milliseconds(target: str, service: str) -> float:
    """The time of a claim, which is rolled back."""
    folder = target.removeprefix("unix://").rpartition("/")[0]
    engine = create_engine(f"postgresql+psycopg://postgres@/{service}?host={folder}&port=5432", poolclass=NullPool)
    with engine.connect() as conn:
        began = time.perf_counter()
        _claim(conn)
        seconds = time.perf_counter() - began
        conn.rollback()
    return seconds * 1_000


def _claim(conn: Connection) -> None:
    inbox.claim(conn, "durable", message_type="soak.passing", batch_size=100, node=NodeId(2**31 - 1))
