"""Directories on their way: split into frames that the peer takes, and put together again.

A directory is told as a whole after each change, in one frame as long as it fits. Parts arrive in order, the last one
says that there are no more; what the last directory said counts until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from durable.errors import ProtocolViolation
from durable.transports.frames import MAX_LISTINGS, Directory, Listing

MOST_PART_BYTES: Final = 1 << 20
"""Bytes of a part, at most: results of calls go between two of them."""

_FRAME_BYTES: Final = 64  # of a frame besides its listings

_encode: Final = msgspec.msgpack.Encoder(uuid_format="bytes").encode


def parts_of(listings: Sequence[Listing], most_bytes: int) -> list[Directory]:
    """Return the parts of a directory, each within a frame of so many bytes; at least one.

    Listings that are larger, or beyond MAX_LISTINGS, are left out, and counted in the last part.
    """
    room = min(most_bytes, MOST_PART_BYTES) - _FRAME_BYTES
    parts: list[list[Listing]] = [[]]
    taken_bytes = left_out = 0
    for listing in listings[:MAX_LISTINGS]:
        size_bytes = len(_encode(listing))
        if size_bytes > room:
            left_out += 1
            continue
        if taken_bytes + size_bytes > room:
            parts.append([])
            taken_bytes = 0
        parts[-1].append(listing)
        taken_bytes += size_bytes
    left_out += max(0, len(listings) - MAX_LISTINGS)
    return [*(Directory(part, more=True) for part in parts[:-1]), Directory(parts[-1], left_out=left_out)]


class Assembly:
    """Puts the parts of directories together. It holds at most so many bytes of one."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._listings: list[Listing] = []
        self._bytes = 0

    def add(self, part: Directory, size_bytes: int) -> list[Listing] | None:
        """Return the directory when it is whole, None while there is more. Raises ProtocolViolation for too much."""
        self._bytes += size_bytes
        self._listings += part.listings
        if len(self._listings) > MAX_LISTINGS:
            raise ProtocolViolation(
                f"a directory has more than {MAX_LISTINGS:,} listings; count the others as left_out"
            )
        if self._bytes > self._most_bytes:
            raise ProtocolViolation(f"a directory has more than {self._most_bytes:,} bytes; raise buffer_bytes")
        if part.more:
            return None
        whole, self._listings, self._bytes = self._listings, [], 0
        return whole
