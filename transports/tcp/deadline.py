"""Deadline of something that is awaited again and again, such as the next bytes of a connection.

`asyncio.timeout()` makes a timer each time, and cancels it. This one has a timer for all: it is left where it is while
the deadline only moves on, and when it rings too early it is set anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """Deadlines of one task, one after the other. Close it, or the timer keeps it until it rings."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._due = 0.0
        self._is_over = False

    async def keep(self, due: float, work: Awaitable[T]) -> T:
        """Await this until the loop's time is `due`; then it is cancelled, and TimeoutError raised."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        cancelled_before = task.cancelling()
        self._task, self._due, self._is_over = task, due, False
        if self._timer is None or due < self._timer.when():
            self._set(due)
        try:
            return await work
        except asyncio.CancelledError as error:
            if self._is_over and task.uncancel() <= cancelled_before:
                raise TimeoutError from error
            raise
        finally:
            self._task = None

    def close(self) -> None:
        """Set no timer any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._loop.time() < self._due:
            self._set(self._due)
            return
        self._is_over = True
        self._task.cancel()
