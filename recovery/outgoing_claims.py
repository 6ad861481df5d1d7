"""Claims unowned envelopes for the sending agents of this node, as far as they have room.

There may be a destination for each of a service's customers: a claim is for many of them at once, and a round for a
thousand. The next round goes on behind them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from durable.agents.context import AgentContext
from durable.agents.sending import SendingAgent
from durable.envelope import LeasedEnvelope, LeaseKey
from durable.recovery.floors import Floors
from durable.recovery.unreadable_rows import put_aside
from durable.settings import Settings
from durable.storage import outbox
from durable.storage.leases import release
from durable.storage.outbox import NO_FLOORS
from durable.storage.sql.recovery import OUTGOING
from durable.telemetry import Event

AgentFor = Callable[[str], SendingAgent | None]
"""The agent of a destination, started if need be; None when no transport knows its scheme."""

DESTINATIONS: Final = 1_000  # in a round
LONGEST_STEP: Final = 10.0  # seconds; a step that stands for step_timeout is taken for stuck


class OutgoingClaims:
    """The unowned rows of the outbox, as far as they are neither ordered nor shared out."""

    def __init__(
        self, context: AgentContext, agent_for: AgentFor, senders: Mapping[str, SendingAgent], floors: Floors
    ) -> None:
        self._context = context
        self._floors = floors
        self._batch_size = context.settings.batch_size
        self._agent_for = agent_for
        self._senders = senders
        self.after = ""
        """The destination behind which the next round goes on; '': it begins with the first."""

    def looked(self, names: Sequence[str]) -> None:
        """Note the destinations of a full look."""
        self.after = names[-1] if len(names) == DESTINATIONS else ""

    async def claim(self, names: Sequence[str]) -> bool:
        """Claim for the next destinations, as far as they are not latched, a part of a batch for each in turn.

        An agent whose room ran out asks again when it has some. Returns whether there may be more: an agent that sends
        as fast as it is given must not keep everything else waiting.
        """
        return await self._claim([name for name in names if self._agent_for(name) is not None])

    async def claim_named(self, names: Sequence[str]) -> bool:
        """claim(), for destinations that somebody has named: one has an agent when rows have come for it."""
        return await self._claim(names)

    async def _claim(self, waiting: Sequence[str]) -> bool:
        for _ in rounds(self._context.settings):
            waiting = [
                name
                for begin in range(0, len(waiting), self._batch_size)
                for name in await self._claim_batch(waiting[begin : begin + self._batch_size])
            ]
        return bool(waiting or self.after)

    async def _claim_batch(self, names: Sequence[str]) -> Sequence[str]:
        """Return the destinations for which that was neither all of it, nor all that there is room for."""
        part = max(1, self._batch_size // len(names))
        sizes = {name: min(part, self._room(name)) for name in names}
        sizes = {name: size for name, size in sizes.items() if size}
        if not sizes:
            return []
        database, floors = self._context.database, self._places(sizes)
        claimed = await (database.transaction if floors else database.statement)(
            outbox.claim_alone, sizes, node=self._context.node, floors=floors
        )
        leases = claimed.leases
        self._context.counters.add(Event.CLAIMED, len(leases))
        self._note_floors(leases, sizes)
        await hand_over(leases, self._agent_for, self._context)
        await put_aside(self._context, OUTGOING, claimed)
        counts = Counter(lease.endpoint for lease in leases)
        return [name for name, size in sizes.items() if counts[name] == size and name in self._senders]

    def _room(self, name: str) -> int:
        settings = self._context.settings
        if (agent := self._senders.get(name)) is None:
            return min(self._batch_size, settings.buffer_size)
        if not agent.sends:
            return 0
        room = agent.buffer.room_for_claim(self._batch_size)
        agent.claim_pending |= not room
        return room

    def _places(self, names: Iterable[str]) -> Mapping[str, int]:
        return {name: self._floors.of(name) for name in names} if self._floors.is_slow else NO_FLOORS

    def _note_floors(self, claimed: Sequence[LeasedEnvelope], sizes: Mapping[str, int]) -> None:
        leases: dict[str, list[LeasedEnvelope]] = {name: [] for name in sizes}
        for lease in claimed:
            leases[lease.endpoint].append(lease)
        for name, size in sizes.items():
            self._floors.claimed(name, leases[name], size)


async def hand_over(claimed: Sequence[LeasedEnvelope], agent_for: AgentFor, context: AgentContext) -> None:
    """Give claimed rows to the agents of their destinations, started if need be. Those that no transport here can send
    go back.
    """
    by_destination: dict[str, list[LeasedEnvelope]] = {}
    for lease in claimed:
        by_destination.setdefault(lease.endpoint, []).append(lease)
    left: list[LeaseKey] = []
    for destination, leases in by_destination.items():
        if (agent := agent_for(destination)) is not None:
            agent.take(leases)
        else:
            left += [lease.key for lease in leases]
    if left:
        await context.database.transaction(release, OUTGOING, context.node, left)


def rounds(settings: Settings) -> Iterator[int]:
    """Count the batches that fill an empty buffer, the most claimed for one destination or type in a row; fewer on a
    slow database.
    """
    began = time.monotonic()
    for number in range(math.ceil(settings.buffer_size / settings.batch_size)):
        if time.monotonic() - began > LONGEST_STEP:
            return
        yield number
