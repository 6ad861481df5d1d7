"""Claims unowned messages for the handlers of this node, as far as they have room."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from sqlalchemy import Connection

from durable.envelope import Leased, NodeId
from durable.handling import HandlingAgent
from durable.settings import Settings
from durable.storage import inbox, leases, nodes, statements
from durable.storage.database import Database
from durable.storage.rows import Letter
from durable.telemetry import Counters, Event, log

ClaimOfType = Callable[[Connection, str, str, NodeId], list[Leased]]
"""Claims messages of this type, for the node."""


async def claim_incoming(
    database: Database, settings: Settings, node: NodeId, counters: Counters, agents: Mapping[str, HandlingAgent]
) -> None:
    """Claim for every message type that has a handler here; what no node can handle becomes a dead letter."""
    for message_type in await database.transaction(leases.unowned_groups, statements.INCOMING):
        agent = agents.get(message_type)
        if agent is not None:
            await _claim_for(agent, message_type, database, settings, node, counters)
        else:
            await bury_unknown(database, message_type, node, counters, _claim_any)


async def _claim_for(
    agent: HandlingAgent,
    message_type: str,
    database: Database,
    settings: Settings,
    node: NodeId,
    counters: Counters,
) -> None:
    while not agent.paused and (batch_size := min(settings.batch_size, agent.buffer.room)):
        claimed = await database.transaction(inbox.claim, message_type=message_type, batch_size=batch_size, node=node)
        counters.add(Event.CLAIMED, len(claimed))
        agent.buffer.force(claimed)
        agent.accept(claimed)
        if len(claimed) < batch_size:
            return
    agent.wants_more = not agent.paused


async def bury_unknown(
    database: Database, message_type: str, node: NodeId, counters: Counters, claim: ClaimOfType
) -> None:
    """Make dead letters of what was claimed so, unless another node has a handler for it."""
    if await database.transaction(_nobody_handles, message_type):
        dead = await database.transaction(_dead_letter_unknown, message_type, node, claim)
        counters.add(Event.DEAD_LETTERED, dead)
        log.error("no node has a handler for %s: %d messages became dead letters", message_type, dead)


def _nobody_handles(conn: Connection, schema: str, message_type: str) -> bool:
    """While a deploy is under way, nodes with newer code may know a type that this one does not."""
    known = (json.loads(node.capabilities).get("message_types", []) for node in nodes.read(conn, schema))
    return not any(message_type in types for types in known)


def _claim_any(conn: Connection, schema: str, message_type: str, node: NodeId) -> list[Leased]:
    return inbox.claim(conn, schema, message_type=message_type, batch_size=100, node=node)


def _dead_letter_unknown(conn: Connection, schema: str, message_type: str, node: NodeId, claim: ClaimOfType) -> int:
    letter = Letter.because(f"no node has a handler for {message_type}", "unknown message type")
    claimed = claim(conn, schema, message_type, node)
    return sum(inbox.dead_letter(conn, schema, node, lease, letter, counted=0) for lease in claimed)
