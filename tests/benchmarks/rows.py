"""What is reported: a row for each comparison, and what was counted for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, event
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.benchmarks.costs.comparing import MessageCost


@dataclass
class Counts:
    statements: int = 0
    commits: int = 0


@dataclass
class Row:
    """One comparison: messages per second of durable and of the floor, and what each message cost durable."""

    name: str
    floor_name: str
    floor: float = 0.0
    ours: float = 0.0
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
    """One comparison of bulk work, in seconds: the best of durable and of the floor."""

    name: str
    floor_name: str
    floor: float = math.inf
    ours: float = math.inf

    @property
    def ratio(self) -> float:
        """How many times as long durable takes."""
        return self.ours / self.floor

    def measured(self, floor: float, ours: float) -> None:
        self.floor = min(self.floor, floor)
        self.ours = min(self.ours, ours)


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
