"""Commits of a bus in memory: what was sent is told of, and kept for no agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from durable.envelope import ANY_NODE, Envelope, NodeId
from durable.outbox.transactions import Ending
from durable.storage.outbox import Sent


class MemoryDispatcher:
    """A `durable.outbox.outbox.Dispatcher`; `when_committed` is given what each commit has sent."""

    def __init__(self, when_committed: Callable[[Sequence[Envelope]], None]) -> None:
        self._when_committed = when_committed
        self._endings: list[tuple[Ending, Sequence[Sent]]] = []

    def reserve(self, envelopes: Sequence[Envelope]) -> list[NodeId]:
        return [ANY_NODE] * len(envelopes)

    def committed(self, sent: Sequence[Sent]) -> None:
        self._when_committed([envelope for envelope, _, _, _ in sent])

    def committing(self, ending: Ending, sent: Sequence[Sent]) -> None:
        self._endings.append((ending, sent))

    def settle_commits(self) -> None:
        """Take over commits of connections whose sessions could not tell of them."""
        over = [each for each in self._endings if each[0].is_over]
        self._endings = [each for each in self._endings if not each[0].is_over]
        for ending, sent in over:
            if not ending.has_failed:
                self.committed(sent)

    def abandoned(self, sent: Sequence[Sent]) -> None:
        pass
