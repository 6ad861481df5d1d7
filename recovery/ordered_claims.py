"""Claims what comes in an order, for the agents of this node: a key at a time, a run of each (messages.ordering).

hinted    a key got its first row here, or the last that was in memory is finished: claimed at once, by name
looked    the keys that have unowned rows, lane by lane: what other nodes left, what was released, promoted or resumed

    lane: a message type or destination --page--page--page--> its end, or no room --> goes on there at the next look

A look takes a page of each lane in turn, and only of lanes whose agent has room: the keys of a handler that is paused
or full cost nothing, and those of one lane delay no other. Keys found that cannot be claimed are no progress: a look
that has claimed nothing is followed by a rest, which is longer the longer it took.

There may be a destination for each of a service's customers. So the pages of many lanes are read by one statement, and
their keys claimed by another; a look is at no more than a thousand destinations, and the next one goes on behind them.

A hint that comes to nothing is forgotten: a look finds the key. While a lane has more keys than room, hints are not
followed there: the keys that are in memory would be claimed again and again, and the others never.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Final

from sqlalchemy import Connection

from durable.agents.context import AgentContext
from durable.agents.handling import HandlingAgent
from durable.agents.node_agents import NodeAgents
from durable.agents.sending import SendingAgent
from durable.envelope import LeasedEnvelope, NodeId
from durable.recovery.incoming_claims import bury_unknown
from durable.recovery.outgoing_claims import DESTINATIONS, LONGEST_STEP, hand_over
from durable.storage import ordering
from durable.storage.ordering import Claimed, Lane, Turn, Turns
from durable.telemetry import Event

Agent = HandlingAgent | SendingAgent

_CONTESTED_SECONDS: Final = 0.01  # for another node's claim of the same key to be over
_PAGES: Final = 50  # of one lane in a look; the rest is for the next
_REST: Final = 3  # times as long as a look that has claimed nothing
_MOST_HINTS: Final = 10_000  # a look finds what is beyond


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
    round: int = 0
    """The last round over all lanes in which its lane was there."""

    def begin(self, number: int) -> None:
        self.began_at, self.has_turned, self.pages, self.round = self.after, not self.after, 0, number

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
        self._hints: dict[Turn, None] = {}
        self._walks: dict[Lane, _Walk] = {}
        self._round = 0
        self._after = ""
        """The destination behind which the next look goes on."""
        self.hinted = asyncio.Event()
        self.asked = asyncio.Event()
        """Set when a look is due."""

    def hint(self, destination: str | None, key: str) -> None:
        """Note a key that may have unowned rows; call it in the loop. Destination None is the inbox."""
        if destination is not None and self._is_crowded(Lane(destination)):
            return
        if len(self._hints) < _MOST_HINTS:
            self._hints[Turn(key, destination)] = None
            self.hinted.set()
        else:
            self.asked.set()

    # ------------------------------------------------------------------ when it is claimed

    def ask(self, *, there_is_some: bool) -> None:
        """Request a look at the keys, if there are any, or if there were."""
        if there_is_some or self._walks:
            self.asked.set()

    async def claim_hinted(self) -> float:
        """Claim batch by batch of the hinted keys; what is left after a while is for the next time.

        Returns the seconds to rest before that.
        """
        self.hinted.clear()
        hints, self._hints = self._hints, {}
        began, batches, contested = time.monotonic(), _batches(hints, self._batch_size), False
        for batch in batches:
            for turn in await self._claim_hinted(batch):
                self.hint(turn.destination, turn.key)
                contested = True
            if time.monotonic() - began > LONGEST_STEP:
                break
        for turn in chain.from_iterable(batches):
            self.hint(turn.destination, turn.key)
        return _CONTESTED_SECONDS if contested else 0.0

    async def poll(self) -> float:
        """Once round the keys of every lane that has room, or as far as there is room, page by page in turn.

        Returns the seconds to rest before the next look.
        """
        self.asked.clear()
        began, before = time.monotonic(), self._after
        lanes = await self._next_lanes()
        waiting, claimed = deque(lanes), 0
        while waiting:
            claimed_here, goes_on = await self._look_at(self._group(waiting))
            claimed += claimed_here
            for lane in goes_on:
                if self._walk(lane).pages < _PAGES:
                    waiting.append(lane)
                else:
                    self.asked.set()
            if waiting and time.monotonic() - began > LONGEST_STEP:
                if not self._walk(waiting[0]).pages:
                    self._after = lanes[lanes.index(waiting[0]) - 1].destination or before
                self.asked.set()
                break
        if not self._after:
            self._end_round()
        return 0.0 if claimed else _REST * (time.monotonic() - began)

    async def _next_lanes(self) -> Sequence[Lane]:
        """Read the message types, and the next destinations."""
        lanes = await self._database.transaction(ordering.lanes, after=self._after, count=DESTINATIONS)
        destinations = [lane.destination for lane in lanes if lane.destination is not None]
        self._after = destinations[-1] if len(destinations) == DESTINATIONS else ""
        if self._after:
            self.asked.set()
        for lane in lanes:
            self._walk(lane).begin(self._round)
        return lanes

    def _end_round(self) -> None:
        """Forget the walks whose lanes have not been met since the last round."""
        self._walks = {lane: walk for lane, walk in self._walks.items() if walk.round == self._round}
        self._round += 1

    def _group(self, waiting: deque[Lane]) -> Sequence[Lane]:
        """Take the next lanes that are looked at together: of one table, and not more than keys in a batch."""
        group = [waiting.popleft()]
        is_known = self._is_known(group[0])
        while waiting and is_known and len(group) < self._batch_size:
            lane = waiting[0]
            if (lane.destination is None) != (group[0].destination is None) or not self._is_known(lane):
                break
            group.append(waiting.popleft())
        return group

    def _is_known(self, lane: Lane) -> bool:
        return lane.message_type is None or lane.message_type in self._handlers

    async def _look_at(self, group: Sequence[Lane]) -> tuple[int, Sequence[Lane]]:
        """Look at one page of each of these lanes.

        Returns the number of claimed rows, and the lanes at which more can be looked at now. Nodes that are woken
        together look together: the lock of a key whose turn is at another's handler is left to it, and what was
        contested is tried again.
        """
        if not self._is_known(group[0]):
            return 0, [lane for lane in group if await self._bury(lane)]
        agents: dict[str, Agent] = {}
        for lane in group:
            found = self._with_room(self._agents(lane))
            self._walk(lane).is_crowded |= not found
            agents |= found
        calm = [lane for lane in group if (lane.destination or lane.message_type) in agents]
        if not calm:
            return 0, []
        looks = {lane: self._walk(lane).after for lane in calm}
        count = max(1, self._batch_size // len(calm))
        pages = await self._database.transaction(ordering.scan, looks, count=count)
        goes_on: list[Lane] = []
        for lane, page in pages.items():
            walk = self._walk(lane)
            if walk.passed(page, count):
                goes_on.append(lane)
            else:
                walk.is_crowded = False
        turns = [
            Turn(waiting.key, lane.destination)
            for lane, page in pages.items()
            for waiting in page
            if self._is_in_turn(lane, waiting)
        ]
        if not turns:
            return 0, goes_on
        claimed = await self._claim(turns, agents)
        for turn in claimed.contested:
            self.hint(turn.destination, turn.key)
        return len(claimed.leases), goes_on

    def _is_in_turn(self, lane: Lane, waiting: ordering.Waiting) -> bool:
        """Tell whether a message can be claimed for this lane. The type of a held message is None."""
        return waiting.message_type is not None and lane.message_type in (None, waiting.message_type)

    # ------------------------------------------------------------------ claiming

    async def _claim_hinted(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """Claim the rows of these keys of one table. Returns the keys that another node is claiming."""
        is_incoming = turns[0].destination is None
        lanes = [Lane(message_type=name) for name in self._handlers] if is_incoming else _lanes(turns)
        agents: dict[str, Agent] = {}
        for lane in lanes:
            if not (is_incoming and self._is_crowded(lane)):
                agents |= self._agents(lane)
        agents = self._with_room(agents)
        if not is_incoming:
            turns = [turn for turn in turns if turn.destination in agents]
        if turns and agents:
            return (await self._claim(turns, agents, tell_others=is_incoming)).contested
        if is_incoming:
            stopped = [name for name, agent in self._handlers.items() if agent.is_stopped(name)]  # on every node
            await self._database.transaction(ordering.tell, [turn.key for turn in turns], except_types=stopped)
        return []

    async def _claim(self, turns: Sequence[Turn], agents: Mapping[str, Agent], *, tell_others: bool = False) -> Claimed:
        """Claim one batch, of one table. Each of these agents has room for all of it."""
        is_incoming = turns[0].destination is None
        served = {name: self._handlers[name].handler.message_type for name in agents} if is_incoming else {}
        claimed = await self._database.transaction(
            ordering.claim,
            Turns(turns, served),
            batch_size=self._batch_size,
            node=self._context.node,
            tell_others=list(self._handlers) if tell_others else None,
        )
        self._context.counters.add(Event.CLAIMED, len(claimed.leases))
        if not is_incoming:
            await hand_over(claimed.leases, self._agent_for, self._context)
            return claimed
        for name, leases in _by_type(claimed.leases).items():
            agents[name].take(leases)
        return claimed

    def _walk(self, lane: Lane) -> _Walk:
        return self._walks.setdefault(lane, _Walk())

    def _is_crowded(self, lane: Lane) -> bool:
        walk = self._walks.get(lane)
        return walk is not None and walk.is_crowded

    def _agents(self, lane: Lane) -> Mapping[str, Agent]:
        """The agent of this lane, if it may take anything now."""
        if lane.destination is not None:
            sender = self._agent_for(lane.destination)
            return {lane.destination: sender} if sender is not None and sender.sends else {}
        assert lane.message_type is not None
        handler = self._handlers[lane.message_type]
        return {lane.message_type: handler} if handler.takes(lane.message_type) else {}

    def _with_room(self, agents: Mapping[str, Agent]) -> dict[str, Agent]:
        """Return the agents with room for a whole batch; the others report when they have it."""
        for agent in agents.values():
            agent.claim_pending |= agent.buffer.room < self._batch_size
        return {name: agent for name, agent in agents.items() if agent.buffer.room >= self._batch_size}

    async def _bury(self, lane: Lane) -> bool:
        """Dead-letter messages that no node can handle, and whose turn has come. Returns whether there are more."""
        message_type, walk, found = lane.message_type, self._walk(lane), list[ordering.Waiting]()
        assert message_type is not None

        def claim(conn: Connection, schema: str, message_type: str, node: NodeId) -> list[LeasedEnvelope]:
            found[:] = ordering.scan(conn, schema, {lane: walk.after}, count=self._batch_size)[lane]
            keys = [Turn(waiting.key) for waiting in found if self._is_in_turn(lane, waiting)]
            turns = Turns(keys, {message_type: message_type})
            return ordering.claim(conn, schema, turns, batch_size=self._batch_size, node=node).leases

        await bury_unknown(self._context, message_type, claim)
        return walk.passed(found, self._batch_size) and bool(found)


def _lanes(turns: Iterable[Turn]) -> list[Lane]:
    """The destinations of these keys."""
    return [Lane(name) for name in dict.fromkeys(turn.destination for turn in turns)]


def _batches(turns: Iterable[Turn], size: int) -> Iterator[list[Turn]]:
    """Yield these keys in batches of one table, each with a part of every destination that has some left."""
    incoming, outgoing = list[Turn](), list[tuple[int, Turn]]()
    before = Counter[str]()
    for turn in turns:
        if turn.destination is None:
            incoming.append(turn)
        else:
            outgoing.append((before[turn.destination], turn))
            before[turn.destination] += 1
    in_turn = [turn for _, turn in sorted(outgoing, key=itemgetter(0))]
    for begin in range(0, max(len(incoming), len(in_turn)), size):
        yield from filter(None, (incoming[begin : begin + size], in_turn[begin : begin + size]))


def _by_type(claimed: Sequence[LeasedEnvelope]) -> Mapping[str, list[LeasedEnvelope]]:
    found: dict[str, list[LeasedEnvelope]] = {}
    for lease in claimed:
        found.setdefault(lease.envelope.message_type, []).append(lease)
    return found
