"""Failures of calls for whose results nobody waits, in the log: one line for each method and interval.

the first of a method ----------> a line at once
more within the interval -------> one line at its end, with their number and the last error
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from durable.telemetry import log

INTERVAL: Final = 10.0
"""Seconds."""


@dataclass(slots=True)
class _Interval:
    timer: asyncio.TimerHandle
    began: float
    count: int = 0
    last: Exception | None = None


class Unheard:
    """Failures of the calls of a bus. All of it happens in the event loop."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self._seconds = interval
        self._intervals: dict[str, _Interval] = {}

    def tell(self, method: str, error: Exception) -> None:
        """Hear that a call of this method has failed."""
        found = self._intervals.get(method)
        if found is None or time.monotonic() > found.began + 2 * self._seconds:  # the loop of its timer was closed
            log.warning("call failed, for whose result nobody waits: %s", error)
            self._begin(method)
            return
        found.count += 1
        found.last = error

    def flush(self) -> None:
        """Tell of all that was not told yet."""
        for method in list(self._intervals):
            self._end(method)

    def _begin(self, method: str) -> None:
        timer = asyncio.get_running_loop().call_later(self._seconds, self._elapse, method)
        self._intervals[method] = _Interval(timer, time.monotonic())

    def _elapse(self, method: str) -> None:
        if self._end(method):
            self._begin(method)

    def _end(self, method: str) -> bool:
        ended = self._intervals.pop(method)
        ended.timer.cancel()
        if ended.count:
            log.warning(
                "calls of %s failed, for whose results nobody waits: %d more within %g s, the last one: %s",
                method,
                ended.count,
                self._seconds,
                ended.last,
            )
        return bool(ended.count)
