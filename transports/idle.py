"""Connections to destinations that nothing is sent to now. A service may have a destination for each customer.

used --> the newest of all        more than there may be --> the oldest is closed, unless a batch is under way
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Protocol


class Closable(Protocol):
    """A sender with a connection, or with some."""

    def close_if_idle(self) -> bool:
        """Close what is open; False when something is under way."""
        ...


class IdleConnections:
    """The senders of a transport in the order of their last use; of those that are idle, `most` keep a connection."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._senders: OrderedDict[Closable, None] = OrderedDict()

    def used(self, sender: Closable) -> None:
        """Note that this sender has used its connection, which is open, and close others in exchange."""
        self._senders[sender] = None
        self._senders.move_to_end(sender)
        for other in list(islice(self._senders, max(0, len(self._senders) - self._most))):
            if other.close_if_idle():
                del self._senders[other]

    def forget(self, sender: Closable) -> None:
        """Note that this sender has no connection any more."""
        self._senders.pop(sender, None)
