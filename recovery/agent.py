"""The recovery agent: when each story of recovery runs. It decides nothing itself."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Final, TypeVar

from durable.agents.context import AgentContext
from durable.agents.handling import HandlingAgent
from durable.agents.node_agents import NodeAgents
from durable.agents.pace import Pace
from durable.agents.sending import SendingAgent
from durable.envelope import LeaseKey
from durable.recovery.dormant_nodes import DormantNodes
from durable.recovery.due_rows import expire, promote_due
from durable.recovery.fair_claims import Shares
from durable.recovery.floors import Looks
from durable.recovery.forgotten_rows import Forgotten
from durable.recovery.idle_addresses import IdleAddresses
from durable.recovery.incoming_claims import claim_incoming, claim_trials, unhandled
from durable.recovery.maintenance import maintain
from durable.recovery.ordered_claims import OrderedClaims
from durable.recovery.outgoing_claims import DESTINATIONS, LONGEST_STEP, OutgoingClaims
from durable.recovery.recurring_schedules import Recurring
from durable.recovery.troubles import Troubles
from durable.storage import agenda, parked
from durable.storage.agenda import Agenda, Lanes
from durable.storage.circuits import CircuitKind, OpenCircuit
from durable.storage.leases import Burials
from durable.storage.new_work import NewWork
from durable.storage.sql.recovery import INCOMING, OUTGOING
from durable.storage.trials import Looked
from durable.tasks.cancelling import raise_if_cancelled
from durable.tasks.crew import Crew
from durable.telemetry import log

T = TypeVar("T")
Story = Callable[[], Awaitable[None]]

_MAINTENANCE_SECONDS: Final = 3_600.0  # it may have much to drop, a step at a time
_BETWEEN_LOOKS: Final = timedelta(seconds=2)  # for messages whose encryption key has come
_BETWEEN_ADDRESSES: Final = timedelta(seconds=10)  # between looks at idle addresses, of which there may be many
_CLAIM_NEW: Final = "claim new work"
_SHORTEST_WAIT: Final = 0.005  # seconds: what is due within so little goes in one round


class RecoveryAgent:
    """Runs recovery for one node until it is cancelled."""

    def __init__(
        self,
        context: AgentContext,
        agents: NodeAgents,
        *,
        idle: IdleAddresses,
        recurring: Recurring,
        ordered: OrderedClaims,
        burials: Burials,
    ) -> None:
        self._burials = burials
        self._context = context
        self._database = context.database
        self._settings = context.settings
        self._agents = agents
        self._woken = agents.woken
        self._idle = idle
        self._recurring = recurring
        self.pace = Pace("recovery", context.settings.step_timeout.total_seconds())
        self._due_at: list[float] = []  # on the clock of the loop
        self._ordered = ordered
        self._claims: Sequence[tuple[str, Story]] = [
            ("look for work", self._look),
            ("claim outgoing work", self._claim_outgoing),
            ("claim incoming work", self._claim_incoming),
            ("claim outgoing shares", self._claim_outgoing_shares),
            ("claim shares", self._claim_shares),
            ("claim trials", self._claim_trials),
            ("ask for ordered work", self._ask_for_ordered),
        ]
        self._times: Sequence[tuple[str, Story]] = [
            ("run schedules", self._run_schedules),
            ("promote due work", self._promote),
            ("expire work", self._expire),
        ]
        self._agenda = Agenda()
        self._is_due = False
        """True when work has become due since the claims: they are made again."""
        self._troubles = Troubles(often=[name for name, _ in (*self._claims, *self._times)])
        self._looked_for_trials: dict[str, Looked] = {}
        self._looks = Looks(asyncio.get_running_loop().time)
        self._outgoing = OutgoingClaims(context, agents.agent_for, agents.senders, self._looks.destinations)
        self._shares = Shares(context, agents.agent_for)
        self._dormant = DormantNodes(context)
        self._forgotten = [
            Forgotten(context, OUTGOING, _held_by(agents.senders)),
            Forgotten(context, INCOMING, _held_by(agents.by_type)),
        ]

    async def run(self) -> None:
        settings = self._settings
        async with Crew() as tasks:
            tasks.create_task(self._claim_when_woken(), name="claim work")
            tasks.create_task(self._claim_ordered_when_hinted(), name="claim ordered work")
            tasks.create_task(self._look_for_ordered_when_asked(), name="look for ordered work")
            for name, story, interval, bound in (
                ("sweep dormant nodes", self._sweep, settings.sweep_interval, None),
                ("release parked messages", self._release_parked, _BETWEEN_LOOKS, None),
                ("release forgotten work", self._look_for_forgotten, settings.forgotten_after / 2, None),
                ("forget idle addresses", self._forget_idle, min(settings.address_idle / 4, _BETWEEN_ADDRESSES), None),
                ("maintain partitions", self._maintain, settings.maintenance_interval, _MAINTENANCE_SECONDS),
            ):
                tasks.create_task(self._repeat(name, story, interval.total_seconds(), bound), name=name)

    async def _claim_when_woken(self) -> None:
        while True:
            self._woken.clear()
            self._due_at = []
            await self._run_round()
            await self._until_next_round()

    async def _until_next_round(self) -> None:
        """Claim what was stored in lanes that are told, without a look for it."""
        now = asyncio.get_running_loop().time
        ends = now() + self._longest_wait()
        while (left := ends - now()) > 0 and await self._claim_new(await self._woken.new_work(left)):
            pass

    async def _run_round(self) -> None:
        """Claim first: what another process has stored waits for nothing else."""
        await self._run(self._claims)
        self._is_due = False
        await self._run(self._times)
        if self._is_due:
            await self._run(self._claims)

    async def _run(self, stories: Sequence[tuple[str, Story]]) -> None:
        """Each on its own: one that fails takes no other along."""
        for name, story in stories:
            await self._surviving(name, story)

    def _longest_wait(self) -> float:
        """Return the seconds until the next look: until the next poll, or until a row is due before that."""
        poll = self._settings.poll_interval.total_seconds() * random.uniform(0.8, 1.2)
        now = asyncio.get_running_loop().time()
        return max(_SHORTEST_WAIT, min([poll, *(due - now for due in self._due_at)]))

    async def _claim_new(self, new: NewWork) -> bool:
        """Claim this work; False when it takes a round to find it. Anybody may have named these lanes, many that hold
        nothing: of types that no node handles, a look finds those with messages.
        """
        looks, by_type = self._looks, self._agents.by_type
        if new.is_anywhere or looks.are_slow:
            return False

        async def claim() -> bool:
            self._go_on(await self._outgoing.claim_named(list(new.destinations)))
            own = new.message_types & by_type.keys()
            self._go_on(await claim_incoming(self._context, by_type, list(own), looks.types))
            return not await unhandled(self._context, new.message_types - own)

        return await self._surviving(_CLAIM_NEW, claim) or False

    def _look_again_in(self, wait: timedelta | None) -> None:
        if wait is not None:
            self._due_at.append(asyncio.get_running_loop().time() + wait.total_seconds())

    async def _run_schedules(self) -> None:
        looked = await self._recurring.poll()
        self._is_due |= looked.has_run
        self._look_again_in(looked.next_in)

    async def _promote(self) -> None:
        if self._agenda.is_due:
            promoted = await promote_due(self._context)
            self._is_due |= any(promoted)
            if any(promoted):
                self._looks.end()
            self._go_on(max(promoted) == self._settings.recovery_batch_size)

    async def _expire(self) -> None:
        if self._agenda.is_late:
            self._go_on(await expire(self._context, self._burials))

    async def _claim_outgoing(self) -> None:
        self._go_on(await self._outgoing.claim(self._agenda.destinations))

    async def _claim_trials(self) -> None:
        await claim_trials(self._context, self._agents.by_type, self._looked_for_trials)

    async def _claim_incoming(self) -> None:
        types = self._agenda.message_types
        self._go_on(await claim_incoming(self._context, self._agents.by_type, types, self._looks.types))

    async def _claim_shares(self) -> None:
        self._go_on(await self._shares.claim(self._agents.by_type, self._agenda.shared_types))

    async def _claim_outgoing_shares(self) -> None:
        self._go_on(await self._shares.claim_outgoing(self._agenda.shared_destinations))

    def _go_on(self, there_is_more: bool) -> None:
        """Request the next round at once, if so: each round has a bound, so that all stories have their turn."""
        if there_is_more:
            self._woken.set()

    async def _ask_for_ordered(self) -> None:
        """Let another task look: however many keys there are, nothing else waits for them."""
        self._ordered.ask(there_is_some=self._agenda.is_ordered)

    async def _claim_ordered_when_hinted(self) -> None:
        while True:
            await self._ordered.hinted.wait()
            rest = await self._surviving("claim ordered work", self._ordered.claim_hinted)
            await asyncio.sleep(rest or 0)

    async def _look_for_ordered_when_asked(self) -> None:
        while True:
            await self._ordered.asked.wait()
            rest = await self._surviving("look for ordered work", self._ordered.poll)
            await asyncio.sleep(rest or 0)

    async def _look(self) -> None:
        """Read the agenda. An agent that has opened or closed its circuit meanwhile knows better."""
        senders = self._agents.senders
        generations = {destination: agent.generation.number for destination, agent in senders.items()}
        handlers = {agent: agent.circuit.generation.number for agent in self._agents.by_type.values()}
        self._agenda = Agenda()
        self._agenda = await self._read_agenda()
        self._look_again_in(self._agenda.next_due_in)
        self._look_again_in(self._looks.full_in())
        self._obey(self._agenda.circuits, generations, handlers)

    async def _read_agenda(self) -> Agenda:
        """Read it in full, or, for a while after that has taken long, where the last claims have ended."""
        looks, senders, handlers = self._looks, self._agents.senders, self._agents.by_type
        looks.begin()
        known = Lanes(looks.destinations.lanes(senders), looks.types.lanes(handlers)) if looks.is_short else None
        found = await self._database.transaction(
            agenda.read,
            after=self._outgoing.after,
            count=DESTINATIONS,
            known=known,
        )
        if known is not None:
            return found._replace(
                destinations=[*looks.destinations.owed, *found.destinations],
                message_types=[*looks.types.owed, *found.message_types],
            )
        self._outgoing.looked(found.destinations)
        looks.looked(
            found.took.total_seconds(),
            found.destinations,
            found.message_types,
            senders,
            handlers,
            goes_on=bool(self._outgoing.after),
        )
        return found

    def _obey(
        self, rows: Sequence[OpenCircuit], generations: Mapping[str, int], handlers: Mapping[HandlingAgent, int]
    ) -> None:
        senders = self._agents.senders
        probing = {(row.kind, row.key): row.probing for row in rows}
        stopped = {row.key: row.probing for row in rows if row.kind == CircuitKind.HANDLER and not row.parked}
        parked = {row.order for row in rows if row.order is not None}
        for handler, generation in handlers.items():
            handler.observe_circuits(stopped, generation)
            handler.observe_parked(parked)
        receiver = self._agents.receiver
        assert receiver is not None
        receiver.observe_circuits({key for kind, key in probing if kind == CircuitKind.LISTENER})
        destinations = {key: latched for (kind, key), latched in probing.items() if kind == CircuitKind.DESTINATION}
        latched = {key for key, is_latched in destinations.items() if is_latched}
        paused = destinations.keys() - latched
        for destination in latched - senders.keys():
            self._agents.agent_for(destination)  # somebody must ping it, also when its last sender has died
        for destination, agent in list(senders.items()):
            generation = generations.get(destination, agent.generation.number)
            agent.observe_circuit(destination in latched, generation)
            agent.observe_pause(destination in paused)

    async def _sweep(self) -> None:
        if await self._dormant.sweep():
            self._looks.end()
            self._woken.set()

    async def _look_for_forgotten(self) -> None:
        for forgotten in self._forgotten:
            if await forgotten.poll():
                self._looks.end()
                self._woken.set()

    async def _release_parked(self) -> None:
        """Let messages go on whose encryption keys are here by now; what is left after a while is for the next look."""
        key_ids, most = list(self._context.ring.key_ids()), self._settings.recovery_batch_size
        began, released = time.monotonic(), most
        while released == most:
            released = await self._database.transaction(parked.release, key_ids, most)
            if released:
                log.info("parked messages released, because their encryption key is here: %d", released)
                self._looks.end()
                self._woken.set()
            if time.monotonic() - began > LONGEST_STEP:
                break

    async def _forget_idle(self) -> None:
        await self._idle.poll()

    async def _maintain(self) -> None:
        await maintain(self._database, self._settings)

    async def _repeat(self, name: str, story: Story, seconds: float, bound: float | None) -> None:
        while True:
            await self._surviving(name, story, bound)
            await asyncio.sleep(seconds * random.uniform(0.9, 1.1))

    async def _surviving(self, name: str, story: Callable[[], Awaitable[T]], bound: float | None = None) -> T | None:
        """Run a story, which takes at most `bound` seconds; recovery outlives any failure of it.

        Returns its result; None when it failed. A rest is no part of it, or it would count as standing.
        """
        try:
            with self.pace.step(name, bound):
                result = await story()
            self._troubles.overcome(name)
            return result
        except BaseException as error:
            raise_if_cancelled(error)
            self._troubles.meet(name, error)
            return None


def _held_by(agents: Mapping[str, SendingAgent] | Mapping[str, HandlingAgent]) -> Callable[[], set[LeaseKey]]:
    """Return the ids of the rows that these agents work on, at the time of each call."""
    return lambda: set(chain.from_iterable(agent.held() for agent in agents.values()))
