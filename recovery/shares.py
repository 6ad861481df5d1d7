"""Claims for fair handlers: of each tenant as much as its weight says, one after another, round and round."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection

from durable.envelope import Leased, NodeId
from durable.handling import HandlingAgent
from durable.recovery.incoming import bury_unknown
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

    async def claim(self, agents: Mapping[str, HandlingAgent]) -> None:
        """Claim for every type that has unowned work in shares, also when its handler is fair no more."""
        for message_type in await self._database.transaction(ordering.shared_types):
            agent = agents.get(message_type)
            if agent is not None:
                await self._claim_for(agent, message_type)
            else:
                await bury_unknown(self._database, self._settings, message_type, self._node, self._counters, _claim_any)

    async def _claim_for(self, agent: HandlingAgent, message_type: str) -> None:
        while agent.takes(message_type) and (batch_size := min(self._batch_size, agent.buffer.room)):
            start = self._next.get(message_type, "")
            claimed, self._next[message_type] = await self._database.transaction(
                ordering.claim_shares,
                message_type=message_type,
                start=start,
                weights=agent.handler.weights,
                batch_size=batch_size,
                node=self._node,
            )
            self._counters.add(Event.CLAIMED, len(claimed))
            agent.buffer.force(claimed)
            agent.accept(claimed)
            if not claimed and not start:  # once round from the first tenant, and nothing was there
                return
        agent.wants_more = not agent.circuit.is_open


def _claim_any(conn: Connection, schema: str, message_type: str, node: NodeId) -> list[Leased]:
    return ordering.claim_shares(
        conn, schema, message_type=message_type, start="", weights={}, batch_size=100, node=node
    )[0]
