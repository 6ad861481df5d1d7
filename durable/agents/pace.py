"""Time that an agent has spent at a single step: an agent whose step takes longer than its bound stands still.

A step has deadlines of its own (a statement, a batch, an attempt). This is the watch over them: an agent that stands
all the same is reported by `health`, and its node ends and joins again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Standing(NamedTuple):
    """A step that is under way, and how much of its bound it has used."""

    name: str
    seconds: float
    share: float


class Pace:
    """The steps of one agent that are under way."""

    def __init__(self, agent: str, bound: float) -> None:
        self._agent = agent
        self._bound = bound
        self._under_way: dict[object, tuple[str, float, float]] = {}

    @contextmanager
    def step(self, what: str, bound: float | None = None) -> Iterator[None]:
        """Watch one step in this block, which takes at most `bound` seconds."""
        key = object()
        self._under_way[key] = what, time.monotonic(), bound or self._bound
        try:
            yield
        finally:
            del self._under_way[key]

    def slowest(self) -> Standing | None:
        """The step that is nearest to its bound, or furthest above it."""
        now = time.monotonic()
        steps = [
            Standing(f"{self._agent}: {what}", now - since, (now - since) / bound)
            for what, since, bound in self._under_way.values()
        ]
        return max(steps, key=lambda step: step.share, default=None)
