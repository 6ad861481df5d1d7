"""The memberships that this process has had: what they left owned goes back as soon as the process is a node again.

    owns      its rows are to be taken back, unless it released them itself in good order; one that ended before is
              forgotten at once
    died      an agent of it stood, or did not end: what it owned counts as interrupted, and a message that does this
              again and again is found (durable.agents.handling)

The others need not wait for its heartbeat to grow old: this process knows that it has given up that id. Whatever goes
on under it all the same cannot commit, since every row that is taken back gets a new epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection

from durable.envelope import NodeId
from durable.grammar import several
from durable.storage import leases, nodes
from durable.storage.database import Database
from durable.storage.sql.recovery import INCOMING, OUTGOING
from durable.telemetry import Counters, Event, log

_RELEASE_AT_ONCE: Final = 1_000
_MOST: Final = 100  # ids that are remembered; the rows of older ones are left to the sweep


class Memberships:
    """The ids under which this process was a node, and still may own rows."""

    def __init__(self) -> None:
        self._has_died: dict[NodeId, bool] = {}

    def owns(self, node: NodeId) -> None:
        """Record the process's current node, which may own rows from here on."""
        self._has_died[node] = False
        while len(self._has_died) > _MOST:
            del self._has_died[min(self._has_died)]

    def may_own(self, node: NodeId) -> bool:
        return node in self._has_died

    def died(self, node: NodeId) -> None:
        if node in self._has_died:
            self._has_died[node] = True

    def released(self, node: NodeId) -> None:
        self._has_died.pop(node, None)

    async def take_back(self, database: Database, counters: Counters) -> None:
        """Release the rows of the former ones, and strike these off."""
        former = dict(self._has_died)
        if not former:
            return
        count, is_all = 0, False
        while not is_all:
            released, is_all = await database.transaction(_release, former)
            count += released
        for node in former:
            self.released(node)
        of_these = ", ".join(map(str, former))
        log.info("took back %s of former memberships of this process: nodes %s", several(count, "envelopes"), of_these)
        counters.add(Event.RECOVERED, count)


def _release(conn: Connection, schema: str, former: Mapping[NodeId, bool]) -> tuple[int, bool]:
    """Release some of their rows; once there are no more, strike them off. Returns how many, and whether it is all.

    A row that is locked is left to the sweep: its statement comes to nothing, but nothing waits for it here.
    """
    total = 0
    for node, has_died in former.items():
        release = leases.release_dormant if has_died else leases.release_former
        for table in (OUTGOING, INCOMING):
            total += release(conn, schema, table, node, _RELEASE_AT_ONCE - total)
            if total >= _RELEASE_AT_ONCE:
                return total, False
    for node in former:
        nodes.remove(conn, schema, node)
    return total, True
