"""Floors: where the looks for work begin, while rows that nobody can remove make its queues long.

    handled rows, which an open transaction keeps from vacuum          waiting rows
    ----------------------------------------------------------|--------------------
    a full look passes all of them, to see that nothing waits        a short look begins here

A dump or a report that takes ten minutes keeps all that is handled meanwhile. So a full look that takes long is
followed by short ones for ten times as long. They begin at the rows that were claimed a second ago. What appears below,
from a transaction that committed late or a node that has handed it back, is found by the next full look; so is what no
agent of this node has to do with. A lane in which a full look has found something is claimed from its beginning, now or
as soon as there is room for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import Final

from durable.envelope import LeasedEnvelope

SLOW: Final = 0.005  # seconds; a look that takes less passes few rows
_TIMES: Final = 10  # as long: full looks take a tenth of the time at most
_LONGEST: Final = 5.0  # seconds without a full look
_LATE: Final = 1.0  # seconds by which commits may be out of order, for a short look
_MOST: Final = 900  # lanes of a short look: each is a step of its own


class Looks:
    """The looks for work of a node: some are short, and begin at the floors of each table."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now`: seconds on a clock that does not go back."""
        self.destinations = Floors(now)
        self.types = Floors(now)
        self.is_short = False
        """True for the look that has begun, and for the claims that follow it."""
        self._now = now
        self._until = 0.0
        self._spent = 0.0
        self._found: list[str] = []

    @property
    def are_slow(self) -> bool:
        """True while each look passes many handled rows: claims begin where the last look has ended."""
        return self.destinations.is_slow or self.types.is_slow

    def begin(self) -> None:
        """Begin a look, and the claims that follow it."""
        self.is_short = self._now() < self._until
        self.destinations.begin()
        self.types.begin()

    def looked(
        self,
        seconds: float,
        destinations: Sequence[str],
        types: Collection[str],
        senders: Collection[str],
        handlers: Collection[str],
        *,
        goes_on: bool,
    ) -> None:
        """Note the time that the database has spent on a full look, in which of the lanes something waited, and which
        lanes have an agent here. `goes_on`: there may be more destinations, for the next look.
        """
        self._spent += seconds
        self._found += destinations
        is_slow = self._spent > SLOW
        self.types.found([name for name in types if name in handlers], is_slow=is_slow)
        self.destinations.found(destinations, is_slow=is_slow)
        if goes_on:
            return
        if is_slow:
            self.types.passed(types, handlers)
            self.destinations.passed(self._found, senders)
            self._until = self._now() + min(_TIMES * self._spent, _LONGEST)
        self._spent, self._found = 0.0, []

    def end(self) -> None:
        """Let the next look be a full one: rows have come back, somewhere in their queues."""
        self._until = 0.0

    def full_in(self) -> timedelta | None:
        """Return the time until a full look is to follow this short one; None when it is a full one."""
        return timedelta(seconds=max(self._until - self._now(), 0.0)) if self.is_short else None


class Floors:
    """The floors of one table, by lane: a message type, or a destination."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now`: seconds on a clock that does not go back."""
        self.is_slow = False
        """True when the last full look has taken long."""
        self._now = now
        self._highest = 0
        self._claimed: dict[str, deque[tuple[float, int]]] = {}  # times and places; the last lane was claimed last
        self._owed: dict[str, int] = {}
        self._last: dict[str, int] = {}

    @property
    def owed(self) -> Sequence[str]:
        """The lanes that are to be claimed from the beginning: there was no room for all that waited."""
        return list(self._owed)

    def begin(self) -> None:
        self._last.clear()

    def of(self, lane: str) -> int:
        """Return the place in the queue at which a claim begins; 0: at its beginning. The next claim of a slow look
        begins where the last one has ended.
        """
        begins = self._owed[lane] if lane in self._owed else self._floor(lane)
        return max(begins, self._last.get(lane, 0))

    def lanes(self, own: Iterable[str]) -> dict[str, int]:
        """Return the lanes of a short look, each with its floor: those that were claimed last, then all that have an
        agent here. What is owed need not be looked for.
        """
        return {lane: self._floor(lane) for lane in islice(self._not_owed(own), _MOST)}

    def claimed(self, lane: str, leases: Sequence[LeasedEnvelope], most: int) -> None:
        """Note the rows that were claimed, in their order, when there was room for so many."""
        last = leases[-1].seq if leases else 0
        self._highest = max(self._highest, last)
        if not self.is_slow:
            return
        if lane in self._owed:
            self._owed[lane] = last
            if len(leases) < most or 0 < self._floor(lane) <= last:
                del self._owed[lane]
        if leases:
            self._last[lane] = last
            self._claimed[lane] = self._claimed.pop(lane, deque())
            self._note(lane, last)

    def found(self, lanes: Iterable[str], *, is_slow: bool) -> None:
        """Note that something waits in these lanes, wherever. A look that was not slow needs no floors."""
        self.is_slow = is_slow
        if is_slow:
            self._owed |= dict.fromkeys(lanes, 0)
        else:
            self._claimed.clear()
            self._owed.clear()
            self._last.clear()

    def passed(self, found: Collection[str], own: Collection[str]) -> None:
        """Note that nothing waits but in the lanes that were found. Others without an agent here are forgotten: there
        may be a destination for each of many customers.
        """
        kept = {*found, *own}
        self._claimed = {lane: places for lane, places in self._claimed.items() if lane in kept}
        self._owed = {lane: place for lane, place in self._owed.items() if lane in kept}
        for lane in kept.difference(found):
            self._note(lane, self._highest)

    def _not_owed(self, own: Iterable[str]) -> Iterator[str]:
        lanes = dict.fromkeys([*reversed(self._claimed), *own])
        return (lane for lane in lanes if lane not in self._owed)

    def _note(self, lane: str, place: int) -> None:
        places = self._claimed.setdefault(lane, deque())
        self._floor(lane)  # drops the places that nothing needs
        if not places or places[-1][1] < place:
            places.append((self._now(), place))

    def _floor(self, lane: str) -> int:
        """Return the last row that was claimed long enough ago."""
        places = self._claimed.get(lane, deque())
        while len(places) > 1 and places[1][0] <= self._now() - _LATE:
            places.popleft()
        return places[0][1] if places and places[0][0] <= self._now() - _LATE else 0
