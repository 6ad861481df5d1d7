"""Claims unowned messages for the handlers of this node, as far as they have room."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from sqlalchemy import Connection

from durable.agents.context import AgentContext
from durable.agents.handling import HandlingAgent
from durable.envelope import LeasedEnvelope, NodeId
from durable.grammar import several
from durable.messages.routing import LOCAL
from durable.messages.scope import listener_of
from durable.recovery.floors import Floors
from durable.recovery.outgoing_claims import rounds
from durable.recovery.unreadable_rows import put_aside
from durable.storage import inbox, leases, nodes, trials
from durable.storage.rows import UNCOUNTED, Letter
from durable.storage.sql.recovery import INCOMING
from durable.telemetry import Event, log

_LEFT_ALONE: Final = 10.0  # seconds between looks at messages of another service: each claims and releases a hundred

ClaimOfType = Callable[[Connection, str, str, NodeId], list[LeasedEnvelope]]
"""Claims messages of this type, for the node."""


async def claim_incoming(
    context: AgentContext, agents: Mapping[str, HandlingAgent], message_types: Sequence[str], floors: Floors
) -> bool:
    """Claim of these message types what has a handler here; what no node can handle becomes a dead letter.

    Returns whether there may be more: a handler that is as fast as the claims must not keep everything else waiting.
    """
    waiting: list[str] = []
    for message_type in message_types:
        if message_type in agents:
            waiting.append(message_type)
        else:
            await bury_unknown(context, message_type, _claim_any)
    random.shuffle(waiting)  # where there is room for a part only, it is not always the same version's
    # In turn: an agent may serve several versions, and one of them must not take all the room.
    for _ in rounds(context.settings):
        waiting = [name for name in waiting if await _claim_batch(agents[name], name, context, floors)]
    return bool(waiting)


async def _claim_batch(agent: HandlingAgent, message_type: str, context: AgentContext, floors: Floors) -> bool:
    """False when that was all of it, or all that there is room for."""
    if agent.is_paused(message_type):
        return False
    batch_size = agent.buffer.room_for_claim(context.settings.batch_size)
    if agent.rests or not batch_size:
        agent.claim_pending = not agent.rests
        return False
    claimed = await context.database.statement(
        inbox.claim_alone,
        message_type=message_type,
        handler=agent.handler.message_type,
        batch_size=batch_size,
        node=context.node,
        floor=floors.of(message_type),
    )
    context.counters.add(Event.CLAIMED, len(claimed.leases))
    floors.claimed(message_type, claimed.leases, batch_size)
    agent.take(claimed.leases)
    await put_aside(context, INCOMING, claimed)
    return len(claimed.leases) + len(claimed.unreadable) == batch_size


async def claim_trials(
    context: AgentContext, agents: Mapping[str, HandlingAgent], looked: dict[str, trials.Looked]
) -> None:
    """Give those whose handler is to be tried a message for that, if it is for this node to try it now.

    `looked` keeps, of each type, how far its keys and tenants were looked through.
    """
    settings = context.settings
    for message_type, agent in agents.items():
        if agent.tries(message_type):
            trial = await context.database.transaction(
                trials.claim_trial,
                handler=agent.handler.message_type,
                message_type=message_type,
                node=context.node,
                lease=(agent.handler.timeout or settings.handler_timeout) + settings.settling_time,
                looked=looked.get(message_type, trials.Looked()),
            )
            looked[message_type] = trial.looked
            if trial.lease is not None:
                agent.probe(trial.lease)


async def bury_unknown(context: AgentContext, message_type: str, claim: ClaimOfType) -> None:
    """Make dead letters of these claimed messages, unless another node has a handler for their type. Those of another
    service wait for its nodes, of which none may run now.
    """
    now = time.monotonic()
    if now < context.left_alone.get(message_type, 0.0):
        return
    if not await unhandled(context, frozenset([message_type])):
        return
    dead, others = await context.database.transaction(_dead_letter_unknown, context, message_type, claim)
    if dead:
        context.counters.add(Event.DEAD_LETTERED, dead)
        log.error("no node has a handler for %s: %s became dead letters", message_type, several(dead, "messages"))
    if others and message_type not in context.left_alone:
        log.error(
            "messages of %s wait here for another service, and this node leaves them alone: %s", message_type, others
        )
    if others:
        context.left_alone[message_type] = now + _LEFT_ALONE


async def unhandled(context: AgentContext, message_types: frozenset[str]) -> frozenset[str]:
    """Return those of these types that no node handles: while a deploy is under way, nodes with newer code may know
    them.
    """
    if not message_types:
        return message_types
    return message_types.difference(*(node.message_types for node in await context.database.transaction(nodes.read)))


def _claim_any(conn: Connection, schema: str, message_type: str, node: NodeId) -> list[LeasedEnvelope]:
    return inbox.claim(conn, schema, message_type=message_type, batch_size=100, node=node)


def _dead_letter_unknown(
    conn: Connection, schema: str, context: AgentContext, message_type: str, claim: ClaimOfType
) -> tuple[int, str]:
    """Return how many became dead letters, and what is to be done about those of another service, if there are some."""
    letter = Letter.because(f"no node has a handler for {message_type}", "unknown message type", message_type)
    node, keep_body = context.node, context.settings.history_bodies
    claimed = claim(conn, schema, message_type, node)
    others = [lease for lease in claimed if not context.is_own(lease)]
    leases.release(conn, schema, INCOMING, node, [lease.key for lease in others])
    dead = sum(
        inbox.dead_letter(conn, schema, node, lease, letter, UNCOUNTED, keep_body=keep_body)
        for lease in claimed
        if context.is_own(lease)
    )
    return dead, _advice(others[0]) if others else ""


def _advice(lease: LeasedEnvelope) -> str:
    """Tell whose a message is, and what to do."""
    apart = "give every service a schema or database of its own (db_schema, database_url)"
    if lease.endpoint == LOCAL:
        source = lease.envelope.source
        return (
            f"they are of the service {source}; {apart}; is it a former name of this one, run it once more under that"
        )
    endpoint = listener_of(lease.endpoint)
    return f"they came to the endpoint {endpoint}; {apart}; was it a listener of this one, declare that again"
