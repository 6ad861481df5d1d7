"""Patience with outages at the end of a message's attempts: how long they are not counted as its fault.

    outage      the database is away, or ends the connection       twice in a row: the handler may break it
    shortage    it has no room, memory, connections (SQLSTATE 53)  for 15 minutes of pauses, 0.1 s to 5 s each

Before each further attempt the database has to take what any attempt ends with, which waits as long as it must. So the
pauses count only while it takes that and refuses this message: then a trigger may have a number of its own for it.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final

from durable.agents.runner import Outage, Shortage

_OUTAGES: Final = 2
_FIRST_PAUSE: Final = 0.1  # seconds; each is twice as long as the one before
_LONGEST_PAUSE: Final = 5.0
LONGEST: Final = 900.0  # seconds of pauses


class Patience:
    """Patience with the outages of one message, in a row."""

    def __init__(self) -> None:
        self._outages = 0
        self._paused = 0.0
        self._pause = 0.0

    def bears(self, error: Outage) -> bool:
        """Tell whether this attempt is repeated without counting."""
        if isinstance(error, Shortage):
            return self._paused < LONGEST
        self._outages += 1
        return self._outages <= _OUTAGES

    async def pause(self, error: Outage) -> None:
        """Give the database time to have room again."""
        if isinstance(error, Shortage):
            self._pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * self._pause))
            self._paused += self._pause
            await asyncio.sleep(self._pause * random.uniform(0.8, 1.0))

    def renew(self) -> None:
        """Begin anew after an attempt that counts. A message for which there was no room counts from now on."""
        self._outages = 0
