"""A node: the agents of one membership, in which order they start, and how they end.

start   join the nodes -> listeners -> receiving, handlers, senders -> recovery, registry
stop    offers are taken back -> listeners -> receiving, handlers -> senders: drain, each within drain_timeout; calls
        of singletons in this process, within that of the stop; then release what is left, and leave
lost    the membership is gone: everything in memory is dropped, because others have the rows; services that are
        offered can still be called
stands  an agent has stood still for too long: as if it were lost, and the lock is given up
stuck   something does not end although it is cancelled again and again: see durable.process.life
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy.exc import DBAPIError

from durable.agents.context import AgentContext
from durable.agents.doors import Doors, Relay, close, close_together
from durable.agents.node_agents import NodeAgents
from durable.agents.pace import Standing
from durable.agents.receiving import ReceivingAgent
from durable.application.application import Application
from durable.envelope import ANY_NODE, LeasedEnvelope, NodeId
from durable.errors import BrokeOff, StorageUnavailable, leaves_of, said
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.recovery.agent import RecoveryAgent
from durable.recovery.former_memberships import Memberships
from durable.recovery.idle_addresses import IdleAddresses
from durable.recovery.membership import Membership
from durable.recovery.ordered_claims import OrderedClaims
from durable.recovery.recurring_schedules import Recurring
from durable.recovery.registering import LONGEST_LEAVING, Registering
from durable.storage import leases, nodes, placements
from durable.storage.database import answer
from durable.storage.outbox import Sent
from durable.storage.sql.recovery import INCOMING, OUTGOING
from durable.tasks.cancelling import is_cancelled, raise_if_cancelled
from durable.tasks.crew import Crew, Stuck, contained, end, wait
from durable.tasks.waiting import is_set_within
from durable.telemetry import Subject, log
from durable.transports.base import Listener

_LOOK_SECONDS: Final = 0.5  # between looks whether an agent stands
_SHORTEST_ENDING: Final = 3.0  # seconds for what was cancelled to end: closing a connection without answer takes two
_LONGEST_ENDING: Final = 5.0
DRAINS: Final = 3  # of listeners, of handlers, of senders


class Node:
    """Node of this process: the parts that live as long as one membership."""

    def __init__(
        self,
        application: Application,
        context: AgentContext,
        agents: NodeAgents,
        *,
        envelope_factory: EnvelopeFactory,
        memberships: Memberships,
        registering: Registering,
        doors: Doors,
    ) -> None:
        self.agents = agents
        self.listeners: list[Listener] = []
        self._context = context
        self._settings = context.settings
        self._database = context.database
        self._application = application
        self._envelope_factory = envelope_factory
        self._memberships = memberships
        self._registering = registering
        self._doors = doors
        self._has_worked = False
        self._relays: dict[str, tuple[Listener, Relay]] = {}  # by the address that was declared
        drain_seconds = context.settings.drain_timeout.total_seconds()
        self._ending_seconds = min(_LONGEST_ENDING, max(_SHORTEST_ENDING, drain_seconds))
        self._has_left_registry = asyncio.Event()
        self._has_left_registry.set()
        self._recovery: RecoveryAgent | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def node_id(self) -> NodeId:
        """ANY_NODE unless its agents run."""
        return self.agents.node_id

    async def run(self, stopping: asyncio.Event, started: asyncio.Future[None]) -> None:
        """Live until `stopping` is set or the membership is lost. `started` is done once the agents run.

        Raises StorageUnavailable when it cannot join, Stuck when an agent stands or does not end, and what has ended an
        agent.
        """
        application = self._application
        singletons = application.offers.singletons
        singletons.open()
        membership = Membership(
            application.service,
            self._settings,
            handlers=application.handler_types(),
            wake=self.agents.woken.hear,
            singletons=singletons,
            registry_changed=self._registering.woken.set,
        )
        await self._answers()
        node_id = await membership.join()
        try:
            await self._live(membership, stopping, started)
        finally:
            singletons.close()
            await membership.leave()
        log.info("node %d of %s left", node_id, application.service)

    async def _live(self, membership: Membership, stopping: asyncio.Event, started: asyncio.Future[None]) -> None:
        node_id = membership.node
        log.info("node %d of %s joined", node_id, self._application.service)
        working = asyncio.create_task(contained(self._work(node_id, stopping, started)), name=f"node {node_id}")
        watches = [
            asyncio.create_task(membership.tick(), name="show that the loop is alive"),
            asyncio.create_task(membership.lost.wait(), name="watch the membership"),
            asyncio.create_task(self._watch_agents(), name="watch the agents"),
            asyncio.create_task(self._stop_in_time(stopping), name="watch the end"),
        ]
        try:
            await asyncio.wait([working, *watches], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.agents.node_id = ANY_NODE  # from here on rows are left to any node
            await self._end(membership, working, watches, stopping)

    async def _answers(self) -> None:
        """Raise StorageUnavailable when `database_url` does not work, whatever the connection of the lock does.

        Otherwise each try would be a node under an id of its own, which ends as soon as it begins to work.
        """
        try:
            await self._database.transaction(answer)
        except StorageUnavailable as error:
            raise StorageUnavailable(f"cannot join the nodes: {error}") from error

    async def _end(
        self,
        membership: Membership,
        working: asyncio.Task[None],
        watches: Sequence[asyncio.Task[Any]],
        stopping: asyncio.Event,
    ) -> None:
        """See that nothing of this membership goes on, and give its rows back.

        Raises what has ended the agents, if it was not asked for, and Stuck for what cannot be ended.
        """
        errors = [task.exception() for task in (working, *watches) if task.done() and not task.cancelled()]
        asked, is_cut_off = not working.done(), is_cancelled()
        if membership.lost.is_set():  # another node may hold its singletons soon
            await self._application.offers.close_singletons(self._ending_seconds)
        left = await end([working, *watches], within=self._ending_seconds)
        if working.cancelled() and not asked:
            errors.append(BrokeOff("node: an agent or a listener broke off"))
        is_cut_off = is_cut_off or any(_is_accident(error) for error in errors)
        if self._has_worked and not left and not stopping.is_set():
            self._keep_doors()
        # Closed already, unless the node was lost: the next one binds them.
        patience = 0.0 if stopping.is_set() else self._settings.drain_timeout.total_seconds()
        left = [*left, *await self._close_listeners(patience)]
        await self._application.offers.close_singletons(self._ending_seconds)
        node_id = membership.node
        if left:
            self._memberships.died(node_id)
        elif (
            self._memberships.may_own(node_id)
            and not membership.lost.is_set()
            and await self._release_everything(node_id, self._interrupted() if is_cut_off else ())
        ):
            self._memberships.released(node_id)
        if left:
            raise Stuck(", ".join(task.get_name() for task in left), left)
        for error in errors:
            if error is not None and not (membership.lost.is_set() and isinstance(error, StorageUnavailable)):
                raise error

    def _keep_doors(self) -> None:
        """Leave the listeners to the next node, if services are offered at them: calls need no database."""
        if self._application.offers.contracts:
            for uri, (listener, relay) in self._relays.items():
                if listener in self.listeners and self._doors.keep(uri, listener, relay):
                    self.listeners.remove(listener)

    async def _close_listeners(self, patience: float) -> Sequence[asyncio.Task[None]]:
        """Close all listeners, also after a failure of one. Returns those that do not end."""
        return await close_together(self.listeners, patience=patience, ending_seconds=self._ending_seconds)

    async def _watch_agents(self) -> None:
        """Raise Stuck when an agent has stood for too long: the lock is given up, and others have its rows."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if (slowest := self.slowest_step()) is not None and slowest.share >= 1:
                self._memberships.died(self.node_id)
                threads = [task for agent in self.agents.handlers.values() if (task := agent.stuck()) is not None]
                raise Stuck(f"{slowest.name} has stood for {slowest.seconds:.0f} s", threads)

    async def _stop_in_time(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        # The drains begin after it, and have all of their time then; see Life.stop_seconds.
        await is_set_within(self._has_left_registry, 2 * self._ending_seconds + LONGEST_LEAVING)
        await asyncio.sleep(DRAINS * self._settings.drain_timeout.total_seconds() + self._ending_seconds)

    def slowest_step(self) -> Standing | None:
        """The step of an agent that is nearest to its bound."""
        return self.agents.slowest_step(self._recovery.pace.slowest() if self._recovery is not None else None)

    async def _work(self, node_id: NodeId, stopping: asyncio.Event, started: asyncio.Future[None]) -> None:
        """Start the agents in order; when told to stop, drain them from the outside in."""
        agents, of_recovery = self.agents, self._context.at(node_id).of(Subject.RECOVERY, "recovery")
        ordered = OrderedClaims(self._context.at(node_id), agents)
        await self._tell_of_other_services()
        await self._memberships.take_back(self._database, of_recovery.counters)
        await self._database.transaction(placements.declare, self._application.placements())
        self._memberships.owns(node_id)
        receiving = agents.make(node_id, ordered.hint)
        recovery = self._recovery = RecoveryAgent(
            of_recovery,
            agents,
            idle=IdleAddresses(of_recovery, agents, self._application.destinations),
            recurring=Recurring(self._context.at(node_id), self._application.schedules, self._envelope_factory),
            ordered=ordered,
            burials=self._application.burials(self._settings.on_expiry),
        )
        await self._listen(receiving)  # first: an address that is taken is an error of its own, not one of a group's
        async with Crew() as tasks:
            agents.tasks = tasks
            storing = tasks.create_task(receiving.run(), name="receiving")
            handling = [
                tasks.create_task(agent.run(), name=f"handling {agent.handler.message_type}")
                for agent in agents.handlers.values()
            ]
            agents.node_id, self._has_worked = node_id, True
            for destination in self._application.destinations():
                agents.agent_for(destination)
            recovering = tasks.create_task(recovery.run(), name="recovery")
            await self._registering.join(node_id)
            self._has_left_registry.clear()
            registering = tasks.create_task(self._registering.run(stopping), name="registry")
            if not started.done():
                started.set_result(None)
            await stopping.wait()
            drained_by = self._loop.time() + self._settings.drain_timeout.total_seconds()
            tasks.cancel(recovering)
            await self._end_registering(registering)  # before its listeners close: callers go elsewhere
            reading = tasks.create_task(self._registering.run(asyncio.Event()), name="registry, to read")
            closing = [tasks.create_task(close(each), name=f"close {each.address}") for each in self.listeners]
            await self._drain("listeners", closing)
            receiving.stop()
            for agent in agents.handlers.values():
                agent.stop()
            await self._drain("handlers", [storing, *handling])
            for sender in agents.senders.values():
                sender.stop()
            await self._drain("senders", list(agents.sending))
            await self._application.offers.drain_singletons(drained_by - self._loop.time())
            tasks.cancel(reading)

    async def _end_registering(self, registering: asyncio.Task[None]) -> None:
        """Take back the offers, once those that are on their way are written."""
        self._registering.woken.set()
        await wait([registering], within=self._ending_seconds)
        self.agents.tasks.cancel(registering)
        await wait([registering], within=self._ending_seconds)
        await self._registering.leave()
        self._has_left_registry.set()

    async def _tell_of_other_services(self) -> None:
        found = await self._database.transaction(nodes.services)
        if others := [name for name in found if name != self._application.service]:
            log.warning(
                "service %s shares the tables of schema %s with %s, and each handles messages of the other: "
                "give every service a schema of its own (db_schema)",
                self._application.service,
                self._settings.db_schema,
                ", ".join(others),
            )

    async def _listen(self, receiving: ReceivingAgent) -> None:
        for uri, endpoint in self._application.listeners:
            if (kept := self._doors.take(uri)) is not None:
                listener, relay = kept
            else:
                listener, relay = self.agents.transports.of(uri).listener(uri, endpoint), Relay()
                await listener.serve(relay)
            relay.lead_to(receiving)
            self._relays[uri] = listener, relay
            self.listeners.append(listener)
            log.info("listening on %s", listener.address)

    async def _drain(self, what: str, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for these to end by themselves, for drain_timeout; then cancel the rest."""
        for task in await wait(tasks, within=self._settings.drain_timeout.total_seconds()):
            log.warning("task cancelled, which did not end within drain_timeout: %s (%s)", task.get_name(), what)
            self.agents.tasks.cancel(task)

    def _interrupted(self) -> Sequence[LeasedEnvelope]:
        """Return the messages whose handlers were running when something other than a stop ended this node."""
        found = [(agent.handler.name, lease) for agent in self.agents.handlers.values() for lease in agent.cut_off()]
        if found:
            log.error(
                "the event loop or its tasks were ended while handlers ran, which counts as a death of the node for "
                "their messages: %s",
                ", ".join(f"handler {name} on message {lease.envelope.id}" for name, lease in found),
            )
        return [lease for _, lease in found]

    async def _release_everything(self, node_id: NodeId, interrupted: Sequence[LeasedEnvelope]) -> bool:
        """Give rows in memory back to any node. False when that is left to the next membership."""
        try:
            async with asyncio.timeout(self._ending_seconds):
                if interrupted:
                    keys = [lease.key for lease in interrupted]
                    await self._database.transaction(leases.release, INCOMING, node_id, keys, is_interrupted=True)
                for table in (OUTGOING, INCOMING):
                    await self._database.transaction(leases.release_all, table, node_id)
        except (StorageUnavailable, TimeoutError, DBAPIError) as error:
            raise_if_cancelled(error)
            log.warning("node %d leaves its rows to the others: %s", node_id, said(error))
            return False
        return True

    def listener_statistics(self) -> dict[str, Mapping[str, int]]:
        """Return the counters of each listener, by its address."""
        return {listener.address: listener.statistics() for listener in self.listeners}

    def in_loop(self, function: Callable[[Sequence[Sent]], None], sent: Sequence[Sent]) -> None:
        """Call it now when this is the loop's own thread, and soon when it is another."""
        if asyncio._get_running_loop() is self._loop:
            function(sent)
        else:
            self._loop.call_soon_threadsafe(function, sent)


def _is_accident(error: BaseException | None) -> bool:
    """Tell whether tasks of a node were cancelled by another than the node."""
    return error is not None and any(isinstance(each, BrokeOff) for each in leaves_of(error))
