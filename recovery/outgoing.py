"""Claims unowned envelopes for the sending agents of this node, as far as they have room."""

from __future__ import annotations

from collections.abc import Callable

from durable.envelope import NodeId
from durable.sending import SendingAgent
from durable.settings import Settings
from durable.storage import leases, outbox
from durable.storage.database import Database
from durable.storage.recovery_statements import OUTGOING
from durable.telemetry import Counters, Event

AgentFor = Callable[[str], SendingAgent | None]
"""The agent of a destination, started if need be; None when no transport knows its scheme."""


async def claim_outgoing(
    database: Database, settings: Settings, node: NodeId, counters: Counters, agent_for: AgentFor
) -> None:
    """Claim for every destination that is not latched. An agent whose room ran out asks again when it has some."""
    for destination in await database.transaction(leases.unowned_groups, OUTGOING):
        agent = agent_for(destination)
        if agent is not None:
            await _claim_for(agent, database, settings, node, counters)


async def _claim_for(
    agent: SendingAgent, database: Database, settings: Settings, node: NodeId, counters: Counters
) -> None:
    while not (agent.circuit.latched or agent.paused):
        batch_size = min(settings.batch_size, agent.buffer.room)
        if not batch_size:
            agent.wants_more = True
            return
        claimed = await database.transaction(
            outbox.claim, destination=agent.destination, batch_size=batch_size, node=node
        )
        counters.add(Event.CLAIMED, len(claimed))
        agent.buffer.force(claimed)
        agent.accept(claimed)
        if len(claimed) < batch_size:
            return
