"""Forgets addresses that were used once: where answers went, or what code has named with `to=`.

    used --nothing held, nothing waits in the outbox, for address_idle--> its agent ends, its latch is closed
                                                     or a thousand others are idle for a shorter time

A declared destination keeps its agent. So what a node holds of addresses is bounded by what is in use, and a peer that
is gone for good is pinged for as long as something waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from durable.agents.context import AgentContext
from durable.agents.node_agents import NodeAgents
from durable.storage import circuits, outbox
from durable.storage.circuits import CircuitKind
from durable.telemetry import log

_MOST_IDLE: Final = 1_000


class IdleAddresses:
    """Looks at the agents of one node at intervals."""

    def __init__(
        self,
        context: AgentContext,
        agents: NodeAgents,
        declared: Callable[[], Collection[str]],
    ) -> None:
        self._database = context.database
        self._idle_seconds = context.settings.address_idle.total_seconds()
        self._agents = agents
        self._declared = declared
        self._unused_since: dict[str, tuple[int, float]] = {}
        """For each address, the accepted envelopes of its agent at the last change, and the time of that change."""

    async def poll(self) -> None:
        """Forget every address that has been idle for long enough."""
        now = time.monotonic()
        declared = self._declared()
        seen = {name: agent.accepted_count for name, agent in self._agents.senders.items() if name not in declared}
        before = self._unused_since
        self._unused_since = {
            name: before[name] if name in before and before[name][0] == count else (count, now)
            for name, count in seen.items()
        }
        by_age = sorted(self._unused_since.items(), key=lambda each: -each[1][1])  # the newest first
        idle = [name for name, (_, since) in by_age[:_MOST_IDLE] if now - since >= self._idle_seconds]
        idle += [name for name, (_, since) in by_age[_MOST_IDLE:] if since < now]
        if idle:
            waited_for = await self._database.transaction(outbox.waited_for, idle)
            forgotten = [name for name in set(idle) - waited_for if await self._forget(name)]
            if forgotten:
                log.info("destinations forgotten, idle and not declared: %d, such as %s", len(forgotten), forgotten[0])

    async def _forget(self, address: str) -> bool:
        is_latched = self._agents.senders[address].circuit.latched
        if not self._agents.retire(address):
            return False
        if is_latched:
            await self._database.transaction(circuits.close_circuit, CircuitKind.DESTINATION, address)
        return True
