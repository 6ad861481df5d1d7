"""Claims for fair handlers: of each tenant as much as its weight says, one after another, round and round."""

from __future__ import annotations

import random
from collections.abc import Mapping

from sqlalchemy import Connection

from durable.envelope import Leased, NodeId
from durable.handling import HandlingAgent
from durable.recovery.incoming import bury_unknown
from durable.recovery.outgoing import rounds
from durable.settings import Settings
from durable.storage import ordering
from durable.storage.database import Database
from durable.telemetry import Counters, Event


class Shares:
    """Remembers for each message type whose turn it is."""

    def __init__(self, database: Database, settings: Settings, node: NodeId, counters: Counters) -> None:
        self._database = database
        self._settings = settings
        self._batch_size = settings.batch_size
        self._node = node
        self._counters = counters
        self._next: dict[str, str] = {}

    async def claim(self, agents: Mapping[str, HandlingAgent]) -> bool:
        """Claim for every type that has unowned work in shares, also when its handler is fair no more.

        The types take turns, a batch each: an agent may serve several versions, and none of them must take all the
        room. Which of them is the first is chance. Returns whether there may be more.
        """
        found = await self._database.transaction(ordering.shared_types)
        waiting: list[str] = []
        for message_type in found:
            if message_type in agents:
                waiting.append(message_type)
            else:
                await bury_unknown(self._database, self._settings, message_type, self._node, self._counters, _claim_any)
        random.shuffle(waiting)
        for _ in range(rounds(self._settings)):
            waiting = [name for name in waiting if await self._claim_batch(agents[name], name)]
        return bool(waiting)

    async def _claim_batch(self, agent: HandlingAgent, message_type: str) -> bool:
        """False when that was all of it, or all that there is room for."""
        if not agent.takes(message_type):
            return False
        if not (batch_size := min(self._batch_size, agent.buffer.room)):
            agent.wants_more = True
            return False
        start = self._next.get(message_type, "")
        claimed, self._next[message_type] = await self._database.transaction(
            ordering.claim_shares,
            message_type=message_type,
            handler=agent.handler.message_type,
            start=start,
            weights=agent.handler.weights,
            batch_size=batch_size,
            node=self._node,
        )
        self._counters.add(Event.CLAIMED, len(claimed))
        agent.buffer.force(claimed)
        agent.accept(claimed)
        return bool(claimed or start)  # otherwise once round from the first tenant, and nothing was there


def _claim_any(conn: Connection, schema: str, message_type: str, node: NodeId) -> list[Leased]:
    return ordering.claim_shares(
        conn, schema, message_type=message_type, start="", weights={}, batch_size=100, node=node
    )[0]
