"""Size of groups: how many waiting messages of a handler may share a transaction, with `max_batch="auto"`.

    alone --messages take little time--> groups that fit into the budget, while more wait than there are workers
      ^                                    |
      +---- a rollback, a long message ----+          for good: a deadlock, a lock that is not to be had, a timeout,
                                                      and whatever the next message of a transaction could notice

A group saves most of a short message: BEGIN, completion and COMMIT are done once for all. A rollback runs its messages
again, so each doubles the number of messages that run alone afterwards, and each commit of a group halves it again, as
Ethernet backs off (IEEE 802.3, truncated binary exponential backoff).
"""

from __future__ import annotations

import math
from typing import Final

MOST: Final = 100
"""Messages of a group at most: beyond a batch of rows, a commit for each message costs next to nothing."""

_FIRST: Final = 16  # messages that run alone at first, and after a single rollback
_LAST: Final = 16_384
_LONG: Final = 5  # budgets: a message that takes longer would keep its neighbours waiting
_WEIGHT: Final = 0.1  # of the last message in the mean


class GroupSize:
    """The rule for one handler. `budget` is the time of a group in seconds; 0: each message is alone."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._mean: float | None = None
        self._alone: float = _FIRST  # messages
        self._spell = _FIRST

    def at_most(self, waiting: int, workers: int) -> int:
        """Return the number of messages that a worker may take, when so many wait for so many workers."""
        if self._alone or self._mean is None or self._budget <= 0:
            return 1
        share = -(-waiting // workers)
        fit = MOST if self._mean * MOST <= self._budget else int(self._budget / self._mean)
        return max(1, min(share, fit, MOST))

    def took(self, seconds: float) -> None:
        """Note the time of one message in its handler."""
        self._mean = seconds if self._mean is None else self._mean + (seconds - self._mean) * _WEIGHT
        self._alone = max(0, self._alone - 1)
        if seconds > self._budget * _LONG:
            self._alone = max(self._alone, self._spell)

    def committed(self) -> None:
        """Note the commit of a group."""
        self._spell = max(_FIRST, self._spell // 2)

    def rolled_back(self) -> None:
        """Note the rollback of a group: its messages are run again, each alone."""
        self._alone = max(self._alone, self._spell)
        self._spell = min(2 * self._spell, _LAST)

    @property
    def stays_alone(self) -> bool:
        """True if every message is alone for good."""
        return math.isinf(self._alone)

    def stay_alone(self) -> None:
        """Let every message of this handler be alone, from now on."""
        self._alone = math.inf
