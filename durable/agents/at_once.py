"""Number of shared transactions that a handler has open at once: as many as handle most messages a second.

    2 --a while--> rate --> try 1, or 4, for a while --> keep the one with the higher rate --> try again, less often

Transactions wait for the database, and while they do others compute. But those of one node share its event loop: where
they compute more than they wait, each message only takes longer among more of them, and fewer fit into the time of a
group. So what is best is tried out, by steps of twice or half as many (hill climbing).
"""

from __future__ import annotations

from typing import Final

_FIRST: Final = 2
_WHILE: Final = 0.25  # seconds of a measurement
_BETTER: Final = 1.1  # more of them hold more locks and connections: so much faster they must be
_PATIENCE: Final = 64  # measurements between two attempts, at most


class AtOnce:
    """The number for one handler, of `most` at most. Times are seconds of any clock that never goes back."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = min(_FIRST, most)
        self._rate: float | None = None
        """Messages a second with the best number so far; None until it was measured."""
        self._best = self.count
        self._tries_more = True
        self._pause = self._spell = 1
        self._began: float | None = None
        self._messages = 0

    def rest(self) -> None:
        """Note that too few messages wait: what was measured until now tells nothing."""
        self._began = None

    def handled(self, messages: int, now: float) -> None:
        """Note the commit of so many messages while others wait."""
        if self._began is None:
            self._began, self._messages = now, 0
            return
        self._messages += messages
        if now - self._began >= _WHILE:
            self._measured(self._messages / (now - self._began))
            self._began, self._messages = now, 0

    def _measured(self, rate: float) -> None:
        if self.count == self._best:
            self._rate = rate
            self._pause -= 1
            if self._pause <= 0:
                self.count = self._neighbour()
        elif self._rate is not None and rate > self._rate * (_BETTER if self.count > self._best else 1):
            self._best, self._rate = self.count, rate
            self._pause = self._spell = 1
        else:
            self.count = self._best
            self._tries_more = not self._tries_more
            self._spell = min(2 * self._spell, _PATIENCE)
            self._pause = self._spell

    def _neighbour(self) -> int:
        more, fewer = min(2 * self._best, self._most), max(self._best // 2, 1)
        if self._best in (more, fewer):
            return more if fewer == self._best else fewer
        return more if self._tries_more else fewer
