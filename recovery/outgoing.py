"""Claims unowned envelopes for the sending agents of this node, as far as they have room."""

from __future__ import annotations

import math
from collections.abc import Callable

from durable.agents.context import AgentContext
from durable.agents.sending import SendingAgent
from durable.settings import Settings
from durable.storage import leases, outbox
from durable.storage.sql.recovery import OUTGOING
from durable.telemetry import Event

AgentFor = Callable[[str], SendingAgent | None]
"""The agent of a destination, started if need be; None when no transport knows its scheme."""


async def claim_outgoing(context: AgentContext, agent_for: AgentFor) -> bool:
    """Claim for every destination that is not latched, a batch each in turn.

    An agent whose room ran out asks again when it has some. Returns whether there may be more: an agent that sends as
    fast as it is given must not keep everything else waiting.
    """
    destinations = await context.database.transaction(leases.unowned_groups, OUTGOING)
    found = [agent_for(destination) for destination in destinations]
    waiting = [agent for agent in found if agent is not None]
    for _ in range(rounds(context.settings)):
        waiting = [agent for agent in waiting if await _claim_batch(agent, context)]
    return bool(waiting)


def rounds(settings: Settings) -> int:
    """Return the number of batches that fill an empty buffer: the most claimed for one destination or type in a row."""
    return math.ceil(settings.buffer_size / settings.batch_size)


async def _claim_batch(agent: SendingAgent, context: AgentContext) -> bool:
    """False when that was all of it, or all that there is room for."""
    if agent.circuit.latched or agent.paused:
        return False
    batch_size = agent.buffer.room_for_claim(context.settings.batch_size)
    if not batch_size:
        agent.claim_pending = True
        return False
    claimed = await context.database.transaction(
        outbox.claim, destination=agent.destination, batch_size=batch_size, node=context.node
    )
    context.counters.add(Event.CLAIMED, len(claimed))
    agent.buffer.reserve_unchecked(claimed)
    agent.accept(claimed)
    return len(claimed) == batch_size
