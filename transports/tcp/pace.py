"""Pace of one connection of a listener: its frames hold up nobody else, and ask for no more than they may cost.

After some frames, or milliseconds, of one read, the others have a turn. Questions, whose answers cost more than they
do, and calls of what is not here have a number at once and a rate; a peer beyond it loses the connection, as one with
too many pings does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from durable.errors import ProtocolViolation

MOST_FRAMES: Final = 64
"""Frames that are heard in one turn of the event loop, at most."""

_MOST_SECONDS: Final = 0.005  # in one turn
_ANNOUNCEMENT: Final = 10.0  # questions that an announcement counts as


class Rate:
    """Number of things at once, and in a second."""

    def __init__(self, at_once: float, a_second: float, now: float) -> None:
        self._at_once = self._left = at_once
        self._a_second = a_second
        self._seen_at = now

    def allows(self, count: float, now: float) -> bool:
        """Tell whether these may be as well, and count them then."""
        self._left = min(self._at_once, self._left + (now - self._seen_at) * self._a_second)
        self._seen_at = now
        if count > self._left:
            return False
        self._left -= count
        return True


class Pace:
    """`clock` returns the seconds of the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._questions = Rate(200, 50, clock())
        self._misses = Rate(10_000, 1_000, clock())
        self._frames = 0
        self._began_at = clock()

    def begin(self) -> None:
        """Begin a turn."""
        self._frames, self._began_at = 0, self._clock()

    def is_over(self) -> bool:
        """Tell whether the turn is over before the next frame, which is counted if not."""
        if self._frames >= MOST_FRAMES or self._clock() - self._began_at > _MOST_SECONDS:
            return True
        self._frames += 1
        return False

    def ask(self, *, announces: bool = False) -> None:
        """Count a question. Raises ProtocolViolation for one too many."""
        if not self._questions.allows(_ANNOUNCEMENT if announces else 1.0, self._clock()):
            raise ProtocolViolation("too many questions: LOOKUP, ANNOUNCE and RESET come a few times a second at most")

    def miss(self) -> None:
        """Count a call of what is not here, or not for this peer. Raises ProtocolViolation for one too many."""
        if not self._misses.allows(1.0, self._clock()):
            raise ProtocolViolation("too many calls: their services are not offered here, or not to this peer")
