"""A node's place among the nodes, without its thread. The real one, durable.recovery.membership, is in tests/failure.

The id, the lock, the heartbeat and the wake-ups are those of the simulated server; nothing is offered there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from durable.calls.singletons import Singletons
from durable.envelope import NodeId
from durable.errors import StorageUnavailable
from durable.settings import Settings
from durable.storage import nodes
from durable.storage.new_work import NewWork
from tests.simulation.loop import State
from tests.simulation.process import current
from tests.simulation.rows import NodeRow
from tests.simulation.tables import Transaction, Waits

_NOTICES = 0.2  # seconds until the thread notices that its connection has ended


class SimulatedMembership:
    """Joins the nodes of a service, stays one, and leaves."""

    def __init__(
        self,
        service: str,
        settings: Settings,
        *,
        handlers: Mapping[str, str],
        wake: Callable[[NewWork], None],
        singletons: Singletons,
        registry_changed: Callable[[], None],
    ) -> None:
        self.lost = asyncio.Event()
        self.node = NodeId(0)
        self._process = current()
        self._server = self._process.server
        self._service = service
        self._handlers = handlers
        self._wake = wake
        self._interval = settings.heartbeat_interval.total_seconds()
        self._has_left = False

    async def join(self) -> NodeId:
        self._process.at("join the nodes")
        await asyncio.sleep(self._server.latency())
        if not self._server.is_up:
            raise StorageUnavailable("cannot join the nodes: the server is away")
        self.node = NodeId(self._server.store.next("node_ids"))
        row = NodeRow(
            node_id=self.node,
            service=self._service,
            capabilities=nodes.capabilities(self._handlers),
            started_at=self._server.now(),
            heartbeat_at=self._server.now(),
        )
        self._write(row)
        self._server.join(self.node, self._woken, self._told)
        self._process.membership = self
        self._process.call(self._beat, delay=self._interval)
        return self.node

    async def leave(self) -> None:
        self._has_left = True
        self._server.leave(self.node)
        if self._server.is_up:
            self._write(None)

    async def tick(self) -> None:
        await asyncio.Event().wait()

    def dropped(self) -> None:
        """The server notices that the node's own connection is gone."""
        self._server.leave(self.node)
        if self._process.state is not State.DEAD:
            self._process.call(self._lose)

    def _write(self, row: NodeRow | None) -> bool:
        transaction = Transaction(self._server.store)
        try:
            if row is None:
                transaction.delete("nodes", self.node)
            else:
                transaction.put("nodes", self.node, row)
        except Waits:
            transaction.rollback()
            return False
        transaction.commit()
        return True

    def _woken(self, payload: str) -> None:
        self._process.call(self._wake, NewWork.of(payload), delay=self._server.latency())

    def _told(self, reason: str) -> None:
        self._process.call(self._lose, delay=self._server.rng.uniform(0, _NOTICES))

    def _lose(self) -> None:
        if not self._has_left:
            self.lost.set()

    def _beat(self) -> None:
        if self._has_left or self.lost.is_set():
            return
        row = self._server.store.tables["nodes"].rows.get(self.node)
        if not self._server.is_up or row is None or self.node not in self._server.store.node_locks:
            self._lose()
            return
        self._write(replace(row, heartbeat_at=self._server.now()))
        self._process.call(self._beat, delay=self._interval)
