"""What is reported: a row for each comparison, and what was counted for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, event
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.benchmarks.costs.comparing import MessageCost
from tests.benchmarks.processors import Taken

_LITTLE = 0.05  # seconds


@dataclass
class Counts:
    statements: int = 0
    commits: int = 0


@dataclass
class Row:
    """One comparison: messages per second of durable and of the floor, and what each message cost durable.

    `computed`: seconds of this process's CPU for each message, where both run in one process.
    """

    name: str
    floor_name: str
    floor: float = 0.0
    ours: float = 0.0
    floor_computed: float = math.inf
    ours_computed: float = math.inf
    statements_per_message: float = 0.0
    commits_per_message: float = 0.0

    @property
    def ratio(self) -> float:
        return self.ours / self.floor

    def cost(self, counts: Counts, messages: int) -> None:
        self.statements_per_message = counts.statements / messages
        self.commits_per_message = counts.commits / messages


@dataclass
class Cost:
    """What something adds to each message, in microseconds: the best of each, without it and with it."""

    name: str
    without: float = math.inf
    within: float = math.inf

    @property
    def added(self) -> float:
        return self.within - self.without

    def measured(self, without: float, within: float) -> None:
        self.without = min(self.without, without)
        self.within = min(self.within, within)


@dataclass
class Timing:
    """One comparison of bulk work, in seconds: the best of durable and of the floor, and what the processors took."""

    name: str
    floor_name: str
    floor: float = math.inf
    ours: float = math.inf
    floor_processor: Mapping[str, float] = field(default_factory=dict)
    ours_processor: Mapping[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How many times as long durable takes."""
        return self.ours / self.floor

    def measured(self, floor: Taken, ours: Taken) -> None:
        if floor.seconds < self.floor:
            self.floor, self.floor_processor = floor.seconds, floor.processor
        if ours.seconds < self.ours:
            self.ours, self.ours_processor = ours.seconds, ours.processor


@dataclass
class Speed:
    """One comparison of calls, in seconds for each: by the clock, and of what the caller's process computes."""

    name: str
    floor_name: str
    floor: float = math.inf
    ours: float = math.inf
    floor_computed: float = math.inf
    ours_computed: float = math.inf

    @property
    def ratio(self) -> float:
        """How many times as long durable takes."""
        return self.ours / self.floor


@dataclass
class Latency:
    """One comparison of the time from commit to effect, in seconds: what half, 99 % and 99.9 % do not exceed."""

    name: str
    pace: str
    floor_name: str
    samples: int
    p50: float
    p99: float
    p999: float
    floor_p50: float
    floor_p99: float

    @property
    def ratio(self) -> float:
        """How many times as long durable takes, in the median."""
        return self.p50 / self.floor_p50


@dataclass
class Relation:
    """One quantity of durable, beside the same under less load."""

    name: str
    base_name: str
    unit: str
    base: float
    ours: float

    @property
    def ratio(self) -> float:
        return self.ours / self.base


@contextmanager
def counting(engine: AsyncEngine) -> Iterator[Counts]:
    """Count what this engine executes and commits."""
    counts = Counts()
    sync: Engine = engine.sync_engine

    def executed(*_: object) -> None:
        counts.statements += 1

    def committed(*_: object) -> None:
        counts.commits += 1

    event.listen(sync, "after_cursor_execute", executed)
    event.listen(sync, "commit", committed)
    try:
        yield counts
    finally:
        event.remove(sync, "after_cursor_execute", executed)
        event.remove(sync, "commit", committed)


def show(rows: Sequence[Row], title: str) -> None:
    table = Table(title=title)
    counted = ("computed, μs", "floor, μs", "statements/msg", "commits/msg")
    for column in ("durable", "floor", "floor/s", "durable/s", "ratio", *counted):
        table.add_column(column, justify="left" if column in ("durable", "floor") else "right")
    for row in rows:
        table.add_row(
            row.name,
            row.floor_name,
            f"{row.floor:,.0f}",
            f"{row.ours:,.0f}",
            f"{row.ratio:.2f}",
            *(f"{each * 1e6:,.0f}" if each < math.inf else "" for each in (row.ours_computed, row.floor_computed)),
            f"{row.statements_per_message:.3f}",
            f"{row.commits_per_message:.3f}",
        )
    _print(table)


def show_costs(costs: Sequence[Cost], title: str) -> None:
    table = Table(title=title)
    for column in ("durable", "without", "with", "added"):
        table.add_column(column, justify="left" if column == "durable" else "right")
    for cost in costs:
        table.add_row(cost.name, f"{cost.without:.2f}", f"{cost.within:.2f}", f"{cost.added:.2f}")
    _print(table)


def show_timings(timings: Sequence[Timing], title: str) -> None:
    table = Table(title=title)
    computed = ("processors, floor, s", "processors, durable, s")
    for column in ("durable", "floor", "floor, s", "durable, s", "times as long", *computed):
        table.add_column(column, justify="left" if column in ("durable", "floor", *computed) else "right")
    for timing in timings:
        clock = f"{timing.floor:.2f}", f"{timing.ours:.2f}", f"{timing.ratio:.2f}"
        processors = _parts(timing.floor_processor), _parts(timing.ours_processor)
        table.add_row(timing.name, timing.floor_name, *clock, *processors)
    _print(table)


def _parts(processor: Mapping[str, float]) -> str:
    return ", ".join(f"{of} {seconds:.1f}" for of, seconds in processor.items() if seconds >= _LITTLE)


def show_speeds(speeds: Sequence[Speed], title: str) -> None:
    table = Table(title=title)
    columns = ("durable", "beside", "times as long", "durable, μs", "beside, μs", "durable, μs computed", "beside")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right")
    for speed in speeds:
        seconds = speed.ours, speed.floor, speed.ours_computed, speed.floor_computed
        table.add_row(speed.name, speed.floor_name, f"{speed.ratio:.2f}", *(f"{each * 1e6:,.0f}" for each in seconds))
    _print(table)


def show_latencies(latencies: Sequence[Latency], title: str) -> None:
    table = Table(title=title)
    texts = ("durable", "beside")
    for column in ("durable", "p50, ms", "p99, ms", "p99.9, ms", "beside", "p50, ms", "p99, ms", "times as long"):
        table.add_column(column, justify="left" if column in texts else "right")
    for each in latencies:
        ours, floors = (each.p50, each.p99, each.p999), (each.floor_p50, each.floor_p99)
        table.add_row(each.name, *map(_ms, ours), each.floor_name, *map(_ms, floors), f"{each.ratio:.2f}")
    _print(table)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"


def show_relations(relations: Sequence[Relation], title: str) -> None:
    table = Table(title=title)
    columns = ("durable", "beside", "unit", "durable", "beside", "ratio")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 3 else "right")
    for each in relations:
        figures = _shown(each.ours), _shown(each.base), f"{each.ratio:.2f}"
        table.add_row(each.name, each.base_name, each.unit, *figures)
    _print(table)


def show_message_costs(costs: Sequence[MessageCost], title: str) -> None:
    table = Table(title=title)
    for column in ("durable", "statements/msg", "commits/msg", "round trips/msg", "bytes of WAL/msg"):
        table.add_column(column, justify="left" if column == "durable" else "right")
    for cost in costs:
        counts = (f"{count:.3f}" for count in (cost.statements, cost.commits, cost.round_trips))
        table.add_row(cost.name, *counts, f"{cost.wal_bytes:,.0f}")
    _print(table)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _print(table: Table) -> None:
    if table.rows:
        Console(width=150).print(table)
