"""Rule: which tasks have kept the event loop from its turn, by looks at the task that the loop is in.

    tick --> due --met--> nothing
              |
           overdue: look, look, ... each gives its time to the task that it sees --> tick: tasks with LIMIT or more

A loop that is overdue has finished no turn, so a task that is seen again is in the same step. Time without a look is
nobody's: the process was suspended, unless the thread of the loop was computing. Then it was one call of C, which keeps
all other threads out, and its task is not known: others may have had a step before the next look.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from enum import Enum
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

LIMIT: Final = 0.5
"""Seconds in one step of a task that are told; looks at a loop that is overdue come sooner one after another."""
_LATE: Final = 0.5  # seconds; a look that is later than planned by so much saw nothing of the time before


class Unseen(Enum):
    """Stands for the task of a computation that let no other thread look."""

    COMPUTATION = "computation"


class Standstill(Generic[T]):
    """Time for which the loop has been overdue, by what it was in. Times are monotonic seconds."""

    def __init__(self, due: float) -> None:
        self._due = self._seen = due
        self._accounted = 0.0
        self._seconds: dict[T, float] = {}

    def look(self, now: float, at: T | None, *, late_by: float) -> None:
        """Give the time since the last look to what the loop is in now; `late_by`: seconds since this look was due."""
        seconds, self._seen = now - self._seen, now
        if late_by >= _LATE:
            return
        self._accounted += seconds
        if at is not None:
            self._seconds[at] = self._seconds.get(at, 0.0) + seconds

    def found(self, now: float, computed: float) -> Mapping[T | Unseen, float]:
        """Return the seconds of each that has kept the loop for as long as is told; `computed`: seconds of CPU that the
        thread of the loop has had.
        """
        found: dict[T | Unseen, float] = {at: seconds for at, seconds in self._seconds.items() if seconds >= LIMIT}
        unseen = min(now - self._due, computed) - self._accounted  # so much of it was no suspension
        if unseen >= LIMIT:
            found[Unseen.COMPUTATION] = unseen
        return found
