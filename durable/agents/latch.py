"""The latch of a sending agent, as a rule: facts in, a decision out.

                 batch_failed() x failures_to_latch in a row
        CLOSED ------------------------------------------------> LATCHED
           ^        (or latch(): another node has latched it)       |
           |                                                        |
           +------------- ping_succeeded() or unlatch() ------------+

Several batches in flight on one connection fail together when it breaks: that is one failure, not several. So a batch
takes a `ticket` when it is sent, and its failure counts only if none was counted since.

While latched nothing is sent but pings. Only a ping unlatches: a late success of a batch may be from before the
outage. Failures are counted in a row, not in total: a success starts the count again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum


class State(Enum):
    CLOSED = "closed"
    LATCHED = "latched"


class Latch:
    """Latch of one destination.

    >>> circuit = Latch(failures_to_latch=3)
    >>> [circuit.batch_failed() for _ in range(3)]
    [False, False, True]
    """

    def __init__(self, failures_to_latch: int) -> None:
        self._failures_to_latch = failures_to_latch
        self.state = State.CLOSED
        self.failures_in_a_row = 0
        self._failures = 0

    @property
    def latched(self) -> bool:
        return self.state is State.LATCHED

    def batch_succeeded(self) -> None:
        self.failures_in_a_row = 0

    @property
    def ticket(self) -> int:
        """Return a ticket: to be taken when a batch is sent, and shown when the batch fails."""
        return self._failures

    def batch_failed(self, ticket: int | None = None) -> bool:
        """Count a failure, unless one was counted since this ticket was taken. True when it is the one that latches."""
        if ticket is not None and ticket != self._failures:
            return False
        self._failures += 1
        self.failures_in_a_row += 1
        if self.latched or self.failures_in_a_row < self._failures_to_latch:
            return False
        self.latch()
        return True

    def latch(self) -> None:
        self.state = State.LATCHED

    def ping_succeeded(self) -> bool:
        """True when this ping unlatches."""
        was_latched = self.latched
        self.unlatch()
        return was_latched

    def unlatch(self) -> None:
        self.state = State.CLOSED
        self.failures_in_a_row = 0


class Generation:
    """Generation of what a node has written of a circuit: a reading is old news when it began before, or meanwhile.

    >>> generation = Generation()
    >>> before = generation.number
    >>> with generation.writing():
    ...     meanwhile = generation.number
    ...     is_current = generation.is_current(meanwhile)
    >>> is_current, generation.is_current(before), generation.is_current(meanwhile)
    (False, False, False)
    """

    def __init__(self) -> None:
        self.number = 0
        """To be taken when a reading begins, and shown when it is applied."""
        self._writers = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write within this block: nobody can tell whether a reading that begins in it sees that."""
        self._writers += 1
        try:
            yield
        finally:
            self._writers -= 1
            self.number += 1

    def is_current(self, number: int) -> bool:
        """Tell whether nothing was written since this number was taken, and nothing is being written."""
        return number == self.number and not self._writers
