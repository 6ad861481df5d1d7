"""Bytes that all connections of one listener may have under way, taken in the order in which they are asked for."""

from __future__ import annotations

import asyncio
from collections import deque


class Budget:
    """Bytes under way. What is larger than the whole budget goes alone."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._taken_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size_bytes: int) -> None:
        """Wait until these bytes may be under way, and those that were asked for before."""
        if not self._waiting and self._fits(size_bytes):
            self._taken_bytes += size_bytes
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # granted and cancelled in one moment
                self.give_back(size_bytes)
            else:
                self._grant()  # those behind it, should it have been the first
            raise

    def give_back(self, size_bytes: int) -> None:
        self._taken_bytes -= size_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][1].cancelled():
            self._waiting.popleft()
        while self._waiting and self._fits(self._waiting[0][0]):
            size_bytes, granted = self._waiting.popleft()
            if not granted.cancelled():
                self._taken_bytes += size_bytes
                granted.set_result(None)

    def _fits(self, size_bytes: int) -> bool:
        return not self._taken_bytes or self._taken_bytes + size_bytes <= self._most_bytes
