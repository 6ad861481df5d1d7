"""Claims for fair handlers and destinations: of each tenant as much as its weight says, one after another."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from sqlalchemy import Connection

from durable.agents.context import AgentContext
from durable.agents.handling import HandlingAgent
from durable.agents.sending import SendingAgent
from durable.envelope import LeasedEnvelope, NodeId
from durable.recovery.incoming_claims import bury_unknown
from durable.recovery.outgoing_claims import AgentFor, hand_over, rounds
from durable.storage import ordering
from durable.telemetry import Event

Claim = Callable[..., tuple[list[LeasedEnvelope], str]]


class Shares:
    """Remembers for each message type, and for each destination, whose turn it is."""

    def __init__(self, context: AgentContext, agent_for: AgentFor) -> None:
        self._context = context
        self._database = context.database
        self._settings = context.settings
        self._agent_for = agent_for
        self._next: dict[tuple[bool, str], str] = {}

    async def claim(self, agents: Mapping[str, HandlingAgent], message_types: Sequence[str]) -> bool:
        """Claim for the types that have unowned work in shares, also when their handlers are fair no more.

        The types take turns, a batch each: an agent may serve several versions, and none of them must take all the
        room. Which of them is the first is chance. Returns whether there may be more.
        """
        waiting: list[str] = []
        for message_type in message_types:
            if message_type in agents:
                waiting.append(message_type)
            else:
                await bury_unknown(self._context, message_type, _claim_any)
        self._remember_only(True, waiting)
        random.shuffle(waiting)
        for _ in rounds(self._settings):
            waiting = [name for name in waiting if await self._claim_batch(agents[name], name)]
        return bool(waiting)

    async def claim_outgoing(self, names: Sequence[str]) -> bool:
        """The same for the destinations that have some."""
        self._remember_only(False, names)
        waiting = [agent for agent in map(self._agent_for, names) if agent is not None]
        for _ in rounds(self._settings):
            waiting = [agent for agent in waiting if await self._claim_to_send(agent)]
        return bool(waiting)

    def _remember_only(self, incoming: bool, names: Collection[str]) -> None:
        self._next = {key: start for key, start in self._next.items() if key[0] != incoming or key[1] in names}

    async def _claim_batch(self, agent: HandlingAgent, message_type: str) -> bool:
        """False when that was all of it, or all that there is room for."""
        if not agent.takes(message_type) or not self._room(agent):
            return False
        claim = partial(ordering.claim_shares, handler=agent.handler.message_type)
        return await self._take(agent, (True, message_type), agent.handler.weights, claim)

    async def _claim_to_send(self, agent: SendingAgent) -> bool:
        if not agent.sends or not self._room(agent):
            return False
        return await self._take(agent, (False, agent.destination), agent.weights, ordering.claim_outgoing_shares)

    def _room(self, agent: HandlingAgent | SendingAgent) -> int:
        """Return the number of rows to claim; an agent without room asks again when it has some."""
        room = agent.buffer.room_for_claim(self._settings.batch_size)
        agent.claim_pending |= not room
        return room

    async def _take(
        self, agent: HandlingAgent | SendingAgent, key: tuple[bool, str], weights: Mapping[str, int], claim: Claim
    ) -> bool:
        start = self._next.get(key, "")
        share = ordering.Share(key[1], start, weights, self._room(agent))
        turn = partial(claim, share=share, node=self._context.node)
        claimed, self._next[key] = await self._database.transaction(turn)
        self._context.counters.add(Event.CLAIMED, len(claimed))
        if isinstance(agent, SendingAgent):
            await hand_over(claimed, self._agent_for, self._context)
        else:
            agent.take(claimed)
        return bool(claimed or start)  # otherwise once round from the first tenant, and nothing was there


def _claim_any(conn: Connection, schema: str, message_type: str, node: NodeId) -> list[LeasedEnvelope]:
    return ordering.claim_shares(conn, schema, ordering.Share(message_type, "", {}, 100), node=node)[0]
