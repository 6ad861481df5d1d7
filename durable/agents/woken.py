"""The event that recovery waits for: there is work to claim."""

from __future__ import annotations

import asyncio

from durable.storage.new_work import ANYWHERE, NOTHING, NewWork
from durable.tasks.waiting import is_set_within


class Woken:
    """An event that knows the lanes in which the new work is."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._new = NOTHING

    def set(self) -> None:
        """Request a look for work in all lanes."""
        self.hear(ANYWHERE)

    def hear(self, new: NewWork) -> None:
        """Add what a NOTIFY has told."""
        self._new = self._new.and_of(new)
        self._event.set()

    def clear(self) -> None:
        """Forget what was heard: a look for all work begins."""
        self._new = NOTHING
        self._event.clear()

    async def new_work(self, seconds: float) -> NewWork:
        """Wait for work for so many seconds at most, and take what was heard; ANYWHERE when that was nothing."""
        if not await is_set_within(self._event, seconds):
            return ANYWHERE
        new = self._new
        self.clear()
        return new
