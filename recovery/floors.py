"""Floors: where the looks for work begin, while rows that nobody can remove make its queues long.

    handled rows, which an open transaction keeps from vacuum          waiting rows
    ----------------------------------------------------------|--------------------
    a full look passes all of them, to see that nothing waits        a short look begins here

A dump or a report that takes ten minutes keeps all that is handled meanwhile. So a full look that takes long is
followed by short ones for ten times as long. They begin at the rows that were claimed a second ago. What appears below,
from a transaction that committed late or a node that has handed it back, is found by the next full look; so is what no
agent of this node has to do with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from durable.envelope import LeasedEnvelope

SLOW: Final = 0.005  # seconds; a look that takes less passes few rows
_TIMES: Final = 10  # as long: full looks take a tenth of the time at most
_LONGEST: Final = 5.0  # seconds without a full look
_LATE: Final = 1.0  # seconds by which commits may be out of order, for a short look
_MOST: Final = 900  # lanes of a short look; below the number of destinations that a look goes through at once


class Floors:
    """The floors of one table, by lane: a message type, or a destination."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now`: seconds on a clock that does not go back."""
        self.is_short = False
        """True for the look that has begun, and for the claims that follow it."""
        self._now = now
        self._until = 0.0
        self._is_slow = False
        self._claimed: dict[str, deque[tuple[float, int]]] = {}
        self._last: dict[str, int] = {}

    def begin(self) -> None:
        """Begin a look, and the claims that follow it."""
        self.is_short = self._now() < self._until
        self._last.clear()

    def of(self, lane: str) -> int:
        """Return the place in the queue at which a claim begins; 0: at its beginning. The next claim of a slow look
        begins where the last one has ended.
        """
        if not self._is_slow:
            return 0
        return max(self._floor(lane) if self.is_short else 0, self._last.get(lane, 0))

    def lanes(self, own: Iterable[str]) -> dict[str, int]:
        """Return the lanes of a short look, each with its floor: those with rows, and those that have an agent here."""
        return {lane: self._floor(lane) for lane in islice(dict.fromkeys([*own, *self._claimed]), _MOST)}

    def claimed(self, lane: str, leases: Sequence[LeasedEnvelope]) -> None:
        """Note the rows that were claimed, in their order."""
        if leases:
            self._last[lane] = leases[-1].seq
            self._claimed.setdefault(lane, deque()).append((self._now(), leases[-1].seq))

    def looked(self, seconds: float, lanes: Iterable[str]) -> None:
        """Note the time that the database has spent on a full look, and the lanes in which something waited, or that
        have an agent here. The others are forgotten: there may be a destination for each of many customers.
        """
        self._is_slow = seconds > SLOW
        if not self._is_slow:
            self._claimed.clear()
            return
        self._claimed = {lane: self._claimed.get(lane, deque()) for lane in lanes}
        self._until = self._now() + min(_TIMES * seconds, _LONGEST)

    def end(self) -> None:
        """Let the next look be a full one."""
        self._until = 0.0

    def _floor(self, lane: str) -> int:
        """Return the last row that was claimed long enough ago."""
        claimed = self._claimed.get(lane, deque())
        while len(claimed) > 1 and claimed[1][0] <= self._now() - _LATE:
            claimed.popleft()
        return claimed[0][1] if claimed and claimed[0][0] <= self._now() - _LATE else 0
