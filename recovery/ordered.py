"""Claims what comes in an order, for the agents of this node: a key at a time, a run of each (messages.ordering).

hinted    a key got its first row here, or the last that was in memory is finished: claimed at once, by name
looked    the keys that have unowned rows, lane by lane: what other nodes left, what was released, promoted or resumed

    lane: a message type or destination --page--page--page--> its end, or no room --> goes on there at the next look

A look takes a page of each lane in turn, and only of lanes whose agent has room: the keys of a handler that is paused
or full cost nothing, and those of one lane delay no other. Keys found that cannot be claimed are no progress: a look
that has claimed nothing is followed by a rest, which is longer the longer it took.

A hint that comes to nothing is forgotten: a look finds the key. While a lane has more keys than room, hints are not
followed there: the keys that are in memory would be claimed again and again, and the others never.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from sqlalchemy import Connection

from durable.agents.context import AgentContext
from durable.agents.handling import HandlingAgent
from durable.agents.node_agents import NodeAgents
from durable.agents.sending import SendingAgent
from durable.envelope import LeasedEnvelope, NodeId
from durable.recovery.incoming import bury_unknown
from durable.storage import ordering
from durable.storage.ordering import Lane
from durable.telemetry import Event

Agent = HandlingAgent | SendingAgent

_CONTESTED_SECONDS: Final = 0.01  # for another node's claim of the same key to be over
_PAGES: Final = 50  # of one lane in a look; the rest is for the next
_LONGEST_LOOK: Final = 10.0  # seconds; a step that stands for step_timeout is taken for stuck
_REST: Final = 3  # times as long as a look that has claimed nothing
_MOST_HINTS: Final = 10_000  # of a destination, or of the inbox; a look finds what is beyond


@dataclass(slots=True)
class _Walk:
    """Progress through a lane: the next look goes on behind this key."""

    after: str = ""
    began_at: str = ""
    has_turned: bool = False
    """Did it come to the last key, and go on with the first?"""
    is_crowded: bool = False
    """Did it end for want of room?"""
    pages: int = 0

    def begin(self) -> None:
        self.began_at, self.has_turned, self.pages = self.after, not self.after, 0

    def passed(self, found: Sequence[ordering.Waiting], count: int) -> bool:
        """Note this page. False when it was the last: then it has been once round."""
        self.pages += 1
        if len(found) == count:
            self.after = found[-1].key
            return not (self.has_turned and self.began_at and self.after >= self.began_at)
        is_last, self.has_turned, self.after = self.has_turned, True, ""
        return not is_last


class OrderedClaims:
    """The ordered rows of one node's inbox, by message type (`handlers`), and of its destinations."""

    def __init__(self, context: AgentContext, agents: NodeAgents) -> None:
        self._context = context
        self._database = context.database
        self._batch_size = min(context.settings.batch_size, context.settings.buffer_size)
        self._handlers = agents.by_type
        self._agent_for = agents.agent_for
        self._hints: dict[str | None, dict[str, None]] = {}
        self._walks: dict[Lane, _Walk] = {}
        self._next: Lane | None = None
        self.hinted = asyncio.Event()
        self.asked = asyncio.Event()
        """Set when a look is due."""

    def hint(self, destination: str | None, key: str) -> None:
        """Note a key that may have unowned rows; call it in the loop. Destination None is the inbox."""
        if destination is not None and self._is_crowded(Lane(destination)):
            return
        hints = self._hints.setdefault(destination, {})
        if len(hints) < _MOST_HINTS:
            hints[key] = None
            self.hinted.set()
        else:
            self.asked.set()

    # ------------------------------------------------------------------ when it is claimed

    async def claim_hinted(self) -> None:
        """A batch of each destination, and of the inbox, in turn."""
        self.hinted.clear()
        hints, self._hints = self._hints, {}
        waiting = deque((destination, iter(keys)) for destination, keys in hints.items())
        contested = False
        while waiting:
            destination, keys = waiting.popleft()
            if chunk := list(islice(keys, self._batch_size)):
                waiting.append((destination, keys))
                for key in await self._claim_hinted(destination, chunk):
                    self.hint(destination, key)
                    contested = True
        if contested:
            await asyncio.sleep(_CONTESTED_SECONDS)

    async def poll(self) -> None:
        """Once round the keys of every lane that has room, or as far as there is room, page by page in turn.

        There may be any number of lanes, one for each address: a look has an end, and the next one goes on there.
        """
        self.asked.clear()
        began = time.monotonic()
        lanes = await self._database.transaction(ordering.lanes)
        if self._next in lanes:
            begin = lanes.index(self._next)
            lanes = [*lanes[begin:], *lanes[:begin]]
        self._next = None
        self._walks = {lane: self._walks.get(lane) or _Walk() for lane in lanes}
        for walk in self._walks.values():
            walk.begin()
        waiting, claimed = deque(lanes), 0
        while waiting:
            lane = waiting.popleft()
            claimed_here, goes_on = await self._look_at(lane, self._walks[lane])
            claimed += claimed_here
            if goes_on and self._walks[lane].pages < _PAGES:
                waiting.append(lane)
            elif goes_on:
                self.asked.set()
            if waiting and time.monotonic() - began > _LONGEST_LOOK:
                self._next = waiting[0]
                self.asked.set()
                break
        if not claimed:
            await asyncio.sleep(_REST * (time.monotonic() - began))

    async def _look_at(self, lane: Lane, walk: _Walk) -> tuple[int, bool]:
        """Look at one page of a lane. Returns the number of claimed rows, and whether more can be looked at now.

        Nodes that are woken together look together: the lock of a key whose turn is at another's handler is left to it,
        and what was contested is tried again.
        """
        if lane.message_type is not None and lane.message_type not in self._handlers:
            return 0, await self._bury(lane, lane.message_type, walk)
        agents = self._with_room(self._agents(lane))
        if not agents:
            walk.is_crowded = True
            return 0, False
        found = await self._database.transaction(ordering.scan, lane, after=walk.after, count=self._batch_size)
        keys = [waiting.key for waiting in found if self._is_in_turn(lane, waiting)]
        goes_on = walk.passed(found, self._batch_size)
        walk.is_crowded = walk.is_crowded and goes_on
        if not keys:
            return 0, goes_on
        claimed, contested = await self._claim(lane.destination, keys, agents)
        for key in contested:
            self.hint(lane.destination, key)
        return claimed, goes_on

    def _is_in_turn(self, lane: Lane, waiting: ordering.Waiting) -> bool:
        """Tell whether a message can be claimed for this lane. The type of a held message is None."""
        return waiting.message_type is not None and lane.message_type in (None, waiting.message_type)

    # ------------------------------------------------------------------ claiming

    async def _claim_hinted(self, destination: str | None, keys: Sequence[str]) -> Sequence[str]:
        """Claim the rows of these keys. Returns the keys that another node is claiming."""
        if destination is not None:
            agents = self._with_room(self._agents(Lane(destination)))
        else:
            lanes = [Lane(message_type=name) for name in self._handlers]
            calm = [lane for lane in lanes if not self._is_crowded(lane)]
            agents = self._with_room({name: agent for lane in calm for name, agent in self._agents(lane).items()})
        if agents:
            return (await self._claim(destination, keys, agents, tell_others=destination is None))[1]
        if destination is None:
            stopped = [name for name, agent in self._handlers.items() if agent.is_stopped(name)]  # on every node
            await self._database.transaction(ordering.tell, keys, except_types=stopped)
        return []

    async def _claim(
        self, destination: str | None, keys: Sequence[str], agents: Mapping[str, Agent], *, tell_others: bool = False
    ) -> tuple[int, Sequence[str]]:
        """Claim one batch. Returns the number of claimed rows, and the keys that another node is claiming."""
        served = {} if destination else {name: self._handlers[name].handler.message_type for name in agents}
        claimed, contested = await self._database.transaction(
            ordering.claim,
            ordering.Turns(keys, destination, served),
            batch_size=self._batch_size,
            node=self._context.node,
            tell_others=list(self._handlers) if tell_others else None,
        )
        self._context.counters.add(Event.CLAIMED, len(claimed))
        for name, leases in _by_agent(claimed, destination).items():
            agents[name].buffer.reserve_unchecked(leases)
            agents[name].accept(leases)
        return len(claimed), contested

    def _is_crowded(self, lane: Lane) -> bool:
        walk = self._walks.get(lane)
        return walk is not None and walk.is_crowded

    def _agents(self, lane: Lane) -> Mapping[str, Agent]:
        """The agent of this lane, if it may take anything now."""
        if lane.destination is not None:
            sender = self._agent_for(lane.destination)
            stopped = sender is None or sender.circuit.latched or sender.paused
            return {} if sender is None or stopped else {lane.destination: sender}
        assert lane.message_type is not None
        handler = self._handlers[lane.message_type]
        return {lane.message_type: handler} if handler.takes(lane.message_type) else {}

    def _with_room(self, agents: Mapping[str, Agent]) -> Mapping[str, Agent]:
        """Return the agents with room for a whole batch; the others report when they have it."""
        for agent in agents.values():
            agent.claim_pending |= agent.buffer.room < self._batch_size
        return {name: agent for name, agent in agents.items() if agent.buffer.room >= self._batch_size}

    async def _bury(self, lane: Lane, message_type: str, walk: _Walk) -> bool:
        """Dead-letter messages that no node can handle, and whose turn has come. Returns whether there are more."""
        found: list[ordering.Waiting] = []

        def claim(conn: Connection, schema: str, message_type: str, node: NodeId) -> list[LeasedEnvelope]:
            found[:] = ordering.scan(conn, schema, lane, after=walk.after, count=self._batch_size)
            keys = [waiting.key for waiting in found if self._is_in_turn(lane, waiting)]
            turns = ordering.Turns(keys, handlers={message_type: message_type})
            return ordering.claim(conn, schema, turns, batch_size=self._batch_size, node=node).leases

        await bury_unknown(self._context, message_type, claim)
        return walk.passed(found, self._batch_size) and bool(found)


def _by_agent(claimed: Sequence[LeasedEnvelope], destination: str | None) -> Mapping[str, list[LeasedEnvelope]]:
    by_agent: dict[str, list[LeasedEnvelope]] = {}
    for lease in claimed:
        by_agent.setdefault(destination or lease.envelope.message_type, []).append(lease)
    return by_agent
