"""Bytes of the bodies of all requests under way, which are bounded together; those of strangers apart.

Who signs a request is known when its body is whole. Until then its bytes are in the room of strangers, unless its
client has proved already, on this connection, who it is. When that room is full, the oldest body in it gives way: it
arrives slowly, while a peer's is whole within milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Room:
    """Bytes under way. What is larger than all the room is taken alone."""

    def __init__(self, most_bytes: int, *, displaces: bool = False) -> None:
        self._most_bytes = most_bytes
        self._displaces = displaces
        self._taken_bytes = 0
        self._shares: dict[Share, None] = {}

    @contextmanager
    def share(self) -> Iterator[Share]:
        """Give a share to one request; it is given back at the end."""
        share = Share(self)
        self.enter(share)
        try:
            yield share
        finally:
            share.leave()

    def enter(self, share: Share) -> None:
        """Keep an empty share in this room."""
        self._shares[share] = None

    def take(self, share: Share, size_bytes: int) -> bool:
        """Take more for this share. False when there is no room."""
        while not self._fits(share, size_bytes):
            if not self._displaces or not self._displace(share):
                return False
        share.size_bytes += size_bytes
        self._taken_bytes += size_bytes
        return True

    def forget(self, share: Share) -> None:
        """Take back all of a share."""
        del self._shares[share]
        self._taken_bytes -= share.size_bytes
        share.size_bytes = 0

    def _fits(self, share: Share, size_bytes: int) -> bool:
        return self._taken_bytes <= share.size_bytes or self._taken_bytes + size_bytes <= self._most_bytes

    def _displace(self, newcomer: Share) -> bool:
        """Break off the body that has been arriving for the longest time."""
        for share in self._shares:
            if share is not newcomer and share.limit is not None:
                share.limit.reschedule(asyncio.get_running_loop().time())
                share.leave()
                return True
        return False


class Share:
    """Share of one request. `limit` is that of its body's arrival, while it arrives."""

    def __init__(self, room: Room) -> None:
        self.size_bytes = 0
        self.limit: asyncio.Timeout | None = None
        self._room: Room | None = room

    def take(self, size_bytes: int) -> bool:
        """Take more. False when there is no room."""
        return self._room is not None and self._room.take(self, size_bytes)

    def move(self, room: Room) -> bool:
        """Move to another room. False when there is no room."""
        size_bytes = self.size_bytes
        self.leave()
        self._room = room
        room.enter(self)
        return self.take(size_bytes)

    def leave(self) -> None:
        """Give all of it back; no more can be taken."""
        if self._room is not None:
            self._room.forget(self)
        self._room = self.limit = None
