"""Claims unowned messages for the handlers of this node, as far as they have room."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping

from sqlalchemy import Connection

from durable.agents.handling import HandlingAgent
from durable.envelope import LeasedEnvelope, NodeId
from durable.recovery.outgoing import rounds
from durable.settings import Settings
from durable.storage import inbox, leases, nodes, trials
from durable.storage.database import Database
from durable.storage.rows import Letter
from durable.storage.sql.recovery import INCOMING
from durable.telemetry import Counters, Event, log

ClaimOfType = Callable[[Connection, str, str, NodeId], list[LeasedEnvelope]]
"""Claims messages of this type, for the node."""


async def claim_incoming(
    database: Database, settings: Settings, node: NodeId, counters: Counters, agents: Mapping[str, HandlingAgent]
) -> bool:
    """Claim for every message type that has a handler here; what no node can handle becomes a dead letter.

    Returns whether there may be more: a handler that is as fast as the claims must not keep everything else waiting.
    """
    waiting: list[str] = []
    for message_type in await database.transaction(leases.unowned_groups, INCOMING):
        if message_type in agents:
            waiting.append(message_type)
        else:
            await bury_unknown(database, settings, message_type, node, counters, _claim_any)
    random.shuffle(waiting)  # where there is room for a part only, it is not always the same version's
    for _ in range(
        rounds(settings)
    ):  # in turn: an agent may serve several versions, and one of them must not take all the room
        waiting = [
            message_type
            for message_type in waiting
            if await _claim_batch(agents[message_type], message_type, database, settings, node, counters)
        ]
    return bool(waiting)


async def _claim_batch(
    agent: HandlingAgent, message_type: str, database: Database, settings: Settings, node: NodeId, counters: Counters
) -> bool:
    """False when that was all of it, or all that there is room for."""
    if agent.is_paused(message_type):
        return False
    batch_size = min(settings.batch_size, agent.buffer.room)
    if agent.rests or not batch_size:
        agent.claim_pending = not agent.rests
        return False
    claimed = await database.transaction(
        inbox.claim,
        message_type=message_type,
        handler=agent.handler.message_type,
        batch_size=batch_size,
        node=node,
    )
    counters.add(Event.CLAIMED, len(claimed))
    agent.buffer.reserve_unchecked(claimed)
    agent.accept(claimed)
    return len(claimed) == batch_size


async def claim_trials(
    database: Database,
    settings: Settings,
    node: NodeId,
    agents: Mapping[str, HandlingAgent],
    looked: dict[str, trials.Looked],
) -> None:
    """Give those whose handler is to be tried a message for that, if it is for this node to try it now.

    `looked` keeps, of each type, how far its keys and tenants were looked through.
    """
    for message_type, agent in agents.items():
        if agent.tries(message_type):
            trial = await database.transaction(
                trials.claim_trial,
                handler=agent.handler.message_type,
                message_type=message_type,
                node=node,
                lease=settings.handler_timeout + settings.settling_time,
                looked=looked.get(message_type, trials.Looked()),
            )
            looked[message_type] = trial.looked
            if trial.lease is not None:
                agent.probe(trial.lease)


async def bury_unknown(
    database: Database, settings: Settings, message_type: str, node: NodeId, counters: Counters, claim: ClaimOfType
) -> None:
    """Make dead letters of what was claimed so, unless another node has a handler for it."""
    if await database.transaction(_nobody_handles, message_type):
        keep_body = settings.history_bodies
        dead = await database.transaction(_dead_letter_unknown, message_type, node, claim, keep_body=keep_body)
        counters.add(Event.DEAD_LETTERED, dead)
        log.error("no node has a handler for %s: %d messages became dead letters", message_type, dead)


def _nobody_handles(conn: Connection, schema: str, message_type: str) -> bool:
    """While a deploy is under way, nodes with newer code may know a type that this one does not."""
    known = (json.loads(node.capabilities).get("message_types", []) for node in nodes.read(conn, schema))
    return not any(message_type in types for types in known)


def _claim_any(conn: Connection, schema: str, message_type: str, node: NodeId) -> list[LeasedEnvelope]:
    return inbox.claim(conn, schema, message_type=message_type, batch_size=100, node=node)


def _dead_letter_unknown(
    conn: Connection, schema: str, message_type: str, node: NodeId, claim: ClaimOfType, *, keep_body: bool
) -> int:
    letter = Letter.because(f"no node has a handler for {message_type}", "unknown message type")
    claimed = claim(conn, schema, message_type, node)
    return sum(
        inbox.dead_letter(conn, schema, node, lease, letter, counted=0, keep_body=keep_body) for lease in claimed
    )
