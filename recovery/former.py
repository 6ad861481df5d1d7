"""The memberships that this process has had: what they left owned goes back as soon as the process is a node again.

    joined    its rows are to be taken back, unless it released them itself in good order
    died      an agent of it stood, or did not end: what it owned counts as interrupted, and a message that does this
              again and again is found (durable.handling)

The others need not wait for its heartbeat to grow old: this process knows that it has given up that id. Whatever goes
on under it all the same cannot commit, since every row that is taken back gets a new epoch.
"""

from __future__ import annotations

from durable.envelope import NodeId
from durable.storage import leases, nodes
from durable.storage.database import Database
from durable.storage.recovery_statements import INCOMING, OUTGOING
from durable.telemetry import Counters, Event, log

_RELEASE_AT_ONCE = 1_000


class Memberships:
    """The ids under which this process was a node, and still may own rows."""

    def __init__(self) -> None:
        self._has_died: dict[NodeId, bool] = {}
        self._current: NodeId | None = None

    def joined(self, node: NodeId) -> None:
        self._current = node
        self._has_died[node] = False

    def died(self, node: NodeId) -> None:
        if node in self._has_died:
            self._has_died[node] = True

    def released(self, node: NodeId) -> None:
        self._has_died.pop(node, None)

    async def take_back(self, database: Database, counters: Counters) -> None:
        """Release the rows of the former ones, and strike these off."""
        former = {node: died for node, died in self._has_died.items() if node != self._current}
        for node, has_died in former.items():
            count = await self._release(database, node, has_died)
            await database.transaction(nodes.remove, node)
            self.released(node)
            log.info("took back %d envelopes of node %d, which this process was before", count, node)
            counters.add(Event.RECOVERED, count)

    async def _release(self, database: Database, node: NodeId, has_died: bool) -> int:
        """A row that is locked is left to the sweep: its statement comes to nothing, but nothing waits for it here."""
        release = leases.release_dormant if has_died else leases.release_former
        total = 0
        for table in (OUTGOING, INCOMING):
            released = _RELEASE_AT_ONCE
            while released == _RELEASE_AT_ONCE:
                released = await database.transaction(release, table, node, _RELEASE_AT_ONCE)
                total += released
        return total
