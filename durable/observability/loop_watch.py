"""Lag of the event loop: a blocking call in a handler delays every agent of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from durable.telemetry import Histogram

_INTERVAL: Final = 0.5  # seconds: a block that is shorter is found now and then, one that is longer every time


class LoopWatch:
    """Sleeps, counts by how much it overslept, and tells each time that the loop is alive."""

    def __init__(self, alive: Callable[[], None]) -> None:
        self.lag = Histogram()
        self._alive = alive

    async def run(self) -> None:
        """Watch the event loop until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL
            await asyncio.sleep(_INTERVAL)
            self.lag.observe(max(0.0, loop.time() - due))
            self._alive()
