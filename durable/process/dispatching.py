"""The way of messages of units of work to the agents of this process, and to other nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from durable.agents.waking import Waker
from durable.clock import Clock
from durable.envelope import ANY_NODE, Envelope, NodeId
from durable.node import Node
from durable.outbox.transactions import Ending
from durable.settings import Settings
from durable.storage.outbox import Sent, lanes_of
from durable.telemetry import log


class AgentsDispatcher:
    """A `durable.outbox.outbox.Dispatcher` for the agents of this process's node of the moment, and for other nodes."""

    def __init__(self, node: Callable[[], Node | None], waker: Waker, clock: Clock, settings: Settings) -> None:
        self._node = node
        self._waker = waker
        self._clock = clock
        self._settings = settings
        self._has_told = False

    def reserve(self, envelopes: Sequence[Envelope]) -> list[NodeId]:
        node = self._node()
        return [node.agents.reserve(envelope) for envelope in envelopes] if node else [ANY_NODE] * len(envelopes)

    def committed(self, sent: Sequence[Sent]) -> None:
        """Tell the agents. Never raises: to its caller the COMMIT would seem to have failed."""
        try:
            self._hand_over(sent)
        except Exception as error:
            log.log(
                logging.DEBUG if self._has_told else logging.ERROR,
                "committed messages were not handed to the agents of this process, and are left to other nodes",
                exc_info=error,
            )
            self._has_told = True

    def _hand_over(self, sent: Sequence[Sent]) -> None:
        if node := self._node():
            node.in_loop(node.agents.deliver, sent)
        if for_others := [each for each in sent if self._is_for_others(each)]:
            self._waker.wake(lanes_of(for_others))

    def committing(self, ending: Ending, sent: Sequence[Sent]) -> None:
        self.abandoned(sent)  # whoever claims them then sees whether they are there
        self._waker.wake_after(ending)

    def abandoned(self, sent: Sequence[Sent]) -> None:
        if node := self._node():
            node.agents.give_back(sent)

    def _is_for_others(self, sent: Sent) -> bool:
        """Tell whether other nodes must look: a node claims ordered rows itself, as soon as it hears of the commit."""
        if sent.owner != ANY_NODE or (self._node() is not None and sent.place.ordering_key is not None):
            return False
        due = sent.envelope.execution_time
        return due is None or due - self._clock.now() < self._settings.poll_interval
