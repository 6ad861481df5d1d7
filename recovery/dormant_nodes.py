"""Finds nodes that are dead or paused and hands their work back."""

from __future__ import annotations

import time
from datetime import datetime

from sqlalchemy import Connection

from durable.agents.context import AgentContext
from durable.envelope import NodeId
from durable.failpoints import failpoint
from durable.grammar import several
from durable.recovery.policy import BackwardSteps, DormancyPolicy, NodeFacts
from durable.storage import leases, nodes
from durable.storage.locks import Job, try_lock
from durable.storage.sql.recovery import INCOMING, OUTGOING
from durable.telemetry import Event, log


class DormantNodes:
    """The sweep. Every node runs it; the lock lets one of them at a time, and each keeps its own suspects."""

    def __init__(self, context: AgentContext) -> None:
        settings = context.settings
        self._database = context.database
        self._counters = context.counters
        self._batch_size = settings.recovery_batch_size
        self._policy = DormancyPolicy(grace=settings.dormant_grace, stale=settings.heartbeat_stale)
        self._steps = BackwardSteps()

    async def sweep(self) -> int:
        """Release the rows of every dormant node and strike it off. Returns how many rows."""
        released = 0
        for node in await self._database.transaction(self._find):
            released += await self._release(node)
        return released

    def _find(self, conn: Connection, schema: str) -> list[NodeId]:
        """The dormant nodes. Strikes them off at once, so that a paused one hears of it when it wakes."""
        if not try_lock(conn, schema, Job.SWEEP):
            return []
        # Owners before live nodes: a node that registers in between owns nothing that was seen here.
        owners = leases.owners(conn, schema, OUTGOING) | leases.owners(conn, schema, INCOMING)
        registered = {node.node_id: node.heartbeat_at for node in nodes.read(conn, schema)}
        locked = nodes.locked(conn, schema)
        facts = [NodeFacts(node, node in locked, registered.get(node)) for node in owners | registered.keys()]
        started_at = self._read_times(conn, schema)
        dormant = self._policy.dormant(facts, server_started_at=started_at, now=time.monotonic())
        for node in dormant:
            nodes.remove(conn, schema, node)
        return dormant

    def _read_times(self, conn: Connection, schema: str) -> datetime:
        """Read when the server has started. Tells of a clock that was set back: what is due by it waits, in silence."""
        begun = time.monotonic()
        times = nodes.server_times(conn, schema)
        if step := self._steps.step(times.now, begun=begun, ended=time.monotonic()):
            log.warning(
                "the database's clock was set back by %.0f s: delayed messages, retries and schedules wait for as long",
                step.total_seconds(),
            )
        return times.started_at

    async def _release(self, node: NodeId) -> int:
        """Bounded batches, each in a transaction of its own, so that nothing waits for a long one."""
        total = 0
        for table in (OUTGOING, INCOMING):
            most = released = self._batch_size
            while released == most:
                released = await self._database.transaction(leases.release_dormant, table, node, most)
                total += released
                failpoint("C21")
        if total:
            log.warning("node %d is dormant: %s released", node, several(total, "envelopes"))
        else:
            log.info("node %d is dormant: it owned nothing and is struck off", node)
        self._counters.add(Event.RECOVERED, total)
        return total
