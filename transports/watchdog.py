"""Leases of peers that are connected: the peer chooses how long, within the bounds of the server, and resets in time.

    connected --> running --reset within the bounds--> running
                     |    '--reset out of the bounds: refused, and nothing changes
                     '--elapsed: the connection ends, and all that the peer has announced is forgotten

Times are seconds of a monotonic clock. A process that stood still, because its event loop was blocked or the process
was stopped, is not sure of what it did not read meanwhile: the server lengthens leases by that time, and the client,
which could not reset, does not do so late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LONGEST_PAUSE: Final = 1.0
"""Seconds between two looks of the server, at most."""

_LATE: Final = 0.5  # seconds by which a look is late because the process stood still
_RESETS: Final = 3  # within a lease


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of leases, in seconds."""

    shortest: float
    longest: float

    def refusal(self, lease: float) -> str:
        """Return the reason to refuse this lease; empty where it may be."""
        if self.shortest <= lease <= self.longest:
            return ""
        return f"a lease of {lease:g} s is out of bounds; choose {self.shortest:g} to {self.longest:g} s"

    def nearest(self, lease: float) -> float:
        """Return the lease within the bounds that is nearest to this one."""
        return max(self.shortest, min(self.longest, lease))


class Watchdog:
    """Lease of one client, as the server sees it: the longest one, until the client resets it."""

    def __init__(self, bounds: Bounds, now: float) -> None:
        self.lease = bounds.longest
        self._bounds = bounds
        self._ends_at = now + bounds.longest
        self._look_at = now

    def reset(self, lease: float, now: float) -> str:
        """Begin a lease. Returns the reason why not; empty when it has begun."""
        refusal = self._bounds.refusal(lease)
        if not refusal:
            self.lease, self._ends_at = lease, now + lease
        return refusal

    def pause(self, now: float) -> float:
        """Return the seconds until the next look."""
        seconds = max(0.0, min(LONGEST_PAUSE, self._ends_at - now))
        self._look_at = now + seconds
        return seconds

    def has_elapsed(self, now: float) -> bool:
        """Tell whether the lease is over. A look that comes late lengthens it: resets may have arrived unread."""
        late = now - self._look_at
        if late > _LATE:
            self._ends_at += late
        self._look_at = now
        return now >= self._ends_at


class Keeping:
    """Lease of one client, as the client sees it: reset three times before it is over."""

    def __init__(self, lease: float, now: float) -> None:
        self.lease = lease
        self._reset_at = now

    def pause(self, now: float) -> float:
        """Return the seconds until the next reset."""
        return max(0.0, self._reset_at + self.lease / _RESETS - now)

    def has_lapsed(self, now: float) -> bool:
        """Tell whether the lease is over, because this process stood still: the server has ended the connection, or
        will.
        """
        return now >= self._reset_at + self.lease

    def reset(self, now: float) -> None:
        self._reset_at = now
