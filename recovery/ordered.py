"""Claims what comes in an order, for the agents of this node: a key at a time, a run of each (durable.ordering).

hinted    a key got its first row here, or the last that was in memory is finished: claimed at once, by name
looked    the keys that have unowned rows, so many at a time: what other nodes left, what was released, promoted or
          resumed. A look that ends for want of room is gone on with, so that every key has its turn

A hint that comes to nothing is forgotten: a look finds the key. While there are more keys than room, hints are not
followed at all: the keys that are in memory would be claimed again and again, and the others never.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice

from sqlalchemy import Connection

from durable.envelope import Leased, NodeId
from durable.handling import HandlingAgent
from durable.recovery.incoming import bury_unknown
from durable.sending import SendingAgent
from durable.settings import Settings
from durable.storage import ordering
from durable.storage.database import Database
from durable.telemetry import Counters, Event

AgentFor = Callable[[str], SendingAgent | None]
Agent = HandlingAgent | SendingAgent

_CONTESTED_SECONDS = 0.01  # for another node's claim of the same key to be over
_LOOKS_IN_VAIN = 50  # one after another, before other work has its turn


class OrderedClaims:
    """The ordered rows of one node's inbox (destination None) and of its destinations."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        node: NodeId,
        counters: Counters,
        handlers: Mapping[str, HandlingAgent],
        agent_for: AgentFor,
    ) -> None:
        self._database = database
        self._settings = settings
        self._batch_size = min(settings.batch_size, settings.buffer_size)
        self._node = node
        self._counters = counters
        self._handlers = handlers
        self._agent_for = agent_for
        self._hints: dict[str | None, dict[str, None]] = {}
        self._looked_until: dict[str | None, str] = {}
        self._crowded: set[str | None] = set()
        self.hinted = asyncio.Event()

    def hint(self, destination: str | None, key: str) -> None:
        """This key may have rows that nobody has; in the loop."""
        if destination not in self._crowded:
            self._hints.setdefault(destination, {})[key] = None
            self.hinted.set()

    def hint_all(self, keys: Iterable[str]) -> None:
        """These keys of the inbox have."""
        for key in keys:
            self.hint(None, key)

    # ------------------------------------------------------------------ when it is claimed

    async def claim_hinted(self) -> None:
        self.hinted.clear()
        hints, self._hints = self._hints, {}
        contested = False
        for destination, keys in hints.items():
            waiting = iter(keys)
            while chunk := list(islice(waiting, self._batch_size)):
                for key in await self._claim(destination, chunk, tell_others=True):
                    self.hint(destination, key)
                    contested = True
        if contested:
            await asyncio.sleep(_CONTESTED_SECONDS)

    async def look(self) -> None:
        """Once round all keys, or as far as there is room."""
        for destination in (None, *await self._database.transaction(ordering.destinations)):
            start = self._looked_until.pop(destination, "")
            if await self._look(destination, start) and start:
                await self._look(destination, "")

    async def _look(self, destination: str | None, after: str) -> bool:
        """From this key to the last one; False when it ended before.

        Nodes that are woken together look together: the lock of a key whose turn is at another's handler is left to it,
        and what was contested is tried again.
        """
        in_vain = 0
        contested: list[str] = []
        while in_vain < _LOOKS_IN_VAIN:
            found = await self._database.transaction(
                ordering.look, destination=destination, after=after, count=self._batch_size
            )
            keys = [waiting.key for waiting in found if self._can_take(destination, waiting.message_type)]
            if keys:
                contested += await self._claim(destination, keys)
            if destination is None:
                await self._bury_unknown(found)
            if len(found) < self._batch_size:
                self._crowded.discard(destination)
                for key in contested:
                    self.hint(destination, key)
                return True
            after = found[-1].key
            in_vain = 0 if keys else in_vain + 1
            if not self._agents_with_room(destination):
                break
        self._looked_until[destination] = after
        self._crowded.add(destination)
        return False

    # ------------------------------------------------------------------ claiming

    async def _claim(self, destination: str | None, keys: Sequence[str], *, tell_others: bool = False) -> list[str]:
        """Returns the keys that somebody else is claiming."""
        agents = self._agents_with_room(destination)
        if not agents:
            if tell_others and destination is None:
                await self._database.transaction(ordering.tell, keys)
            return []
        claimed, contested = await self._database.transaction(
            ordering.claim,
            destination=destination,
            keys=keys,
            message_types=[] if destination else list(agents),
            batch_size=self._batch_size,
            node=self._node,
            tell_others=list(self._handlers) if tell_others and destination is None else None,
        )
        self._counters.add(Event.CLAIMED, len(claimed))
        for name, leases in _by_agent(claimed, destination).items():
            agents[name].buffer.force(leases)
            agents[name].accept(leases)
        return contested

    def _can_take(self, destination: str | None, message_type: str | None) -> bool:
        """Does the turn of a key come to an agent here? None: to nobody, because it is held."""
        return message_type is not None and (destination is not None or message_type in self._handlers)

    def _agents_with_room(self, destination: str | None) -> Mapping[str, Agent]:
        """Those that take a whole batch, by message type or destination; the others say when they do."""
        agents: dict[str, Agent] = {}
        if destination is None:
            agents.update((name, agent) for name, agent in self._handlers.items() if agent.takes(name))
        elif (sender := self._agent_for(destination)) is not None and not (sender.circuit.latched or sender.paused):
            agents[destination] = sender
        for agent in agents.values():
            agent.wants_more |= agent.buffer.room < self._batch_size
        return {name: agent for name, agent in agents.items() if agent.buffer.room >= self._batch_size}

    async def _bury_unknown(self, found: Collection[ordering.Waiting]) -> None:
        """Keys whose turn is at a message that no node can handle."""
        unknown = {waiting.message_type for waiting in found} - self._handlers.keys() - {None}
        for message_type in unknown:
            keys = [waiting.key for waiting in found if waiting.message_type == message_type]

            def claim(
                conn: Connection, schema: str, message_type: str, node: NodeId, keys: Sequence[str] = keys
            ) -> list[Leased]:
                return ordering.claim(
                    conn,
                    schema,
                    destination=None,
                    keys=keys,
                    message_types=[message_type],
                    batch_size=self._batch_size,
                    node=node,
                ).leases

            if message_type is not None:
                await bury_unknown(self._database, self._settings, message_type, self._node, self._counters, claim)


def _by_agent(claimed: Sequence[Leased], destination: str | None) -> Mapping[str, list[Leased]]:
    by_agent: dict[str, list[Leased]] = {}
    for lease in claimed:
        by_agent.setdefault(destination or lease.envelope.message_type, []).append(lease)
    return by_agent
