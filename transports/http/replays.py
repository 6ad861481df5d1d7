"""Signatures that have come already: only its first arrival shows that a client knows the secret.

A signed request that somebody has recorded is good for as long as clocks may differ. Repeated, it brings known
messages; its client stays a stranger.
"""

from __future__ import annotations

from typing import Final

_MOST: Final = 1 << 16


class Signatures:
    """The last requests, `most` of them at least and twice as many at most: some 100 bytes each."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._latest: set[bytes] = set()
        self._before: set[bytes] = set()

    def is_first(self, digest: str) -> bool:
        """Remember this signature. True when it has not come before."""
        seen = bytes.fromhex(digest)
        if seen in self._latest or seen in self._before:
            return False
        if len(self._latest) >= self._most:
            self._before, self._latest = self._latest, set()
        self._latest.add(seen)
        return True
