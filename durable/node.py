"""A node: the agents of one membership, in which order they start, and how they end.

start   join the nodes -> listeners -> receiving, handlers, senders -> recovery
stop    listeners -> receiving, handlers -> senders: drain, each within drain_timeout; then release what is left,
        and leave
lost    the membership is gone: everything in memory is dropped, because others have the rows
stands  an agent has stood still for too long: as if it were lost, and the lock is given up
stuck   something does not end although it is cancelled again and again: see durable.process.life
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from durable.agents.attempts import Attempts
from durable.agents.dispatcher import Lanes
from durable.agents.handling import HandlingAgent
from durable.agents.pace import Standing
from durable.agents.receiving import ReceivingAgent
from durable.agents.sending import SendingAgent
from durable.agents.stuck_threads import StuckThreads
from durable.application.application import Application, Transports
from durable.clock import Clock
from durable.envelope import ANY_NODE, Envelope, Leased, NodeId
from durable.errors import InvalidSetting, StorageUnavailable, said
from durable.failpoints import failpoint
from durable.messages.routing import LOCAL
from durable.outbox.envelope_factory import Composer
from durable.outbox.sessions import Sessions
from durable.recovery.agent import RecoveryAgent
from durable.recovery.former import Memberships
from durable.recovery.idle_addresses import IdleAddresses
from durable.recovery.membership import Membership
from durable.recovery.ordered import OrderedClaims
from durable.recovery.recurring import Recurring
from durable.settings import Settings
from durable.storage import leases, placements
from durable.storage.database import Database, answer
from durable.storage.outbox import Sent
from durable.storage.sql.recovery import INCOMING, OUTGOING
from durable.tasks.crew import BrokeOff, Crew, Stuck, contained, end, raise_if_cancelled
from durable.telemetry import Counters, Subject, log
from durable.transports.base import Listener

_LOOK_SECONDS: Final = 0.5  # between looks whether an agent stands
_LONGEST_ENDING: Final = 5.0  # seconds for what was cancelled to end
DRAINS: Final = 3  # of listeners, of handlers, of senders


class Node:
    """Everything that lives as long as one membership."""

    def __init__(
        self,
        application: Application,
        *,
        settings: Settings,
        database: Database,
        sessions: Sessions,
        transports: Transports,
        composer: Composer,
        clock: Clock,
        counters: Counters,
        memberships: Memberships,
        stuck: StuckThreads,
    ) -> None:
        self.node_id = ANY_NODE
        self._memberships = memberships
        self._stuck = stuck
        self._ending_seconds = min(_LONGEST_ENDING, settings.drain_timeout.total_seconds())
        self._application = application
        self._settings = settings
        self._database = database
        self._sessions = sessions
        self._transports = transports
        self._composer = composer
        self._clock = clock
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self.senders: dict[str, SendingAgent] = {}
        self.handlers: dict[str, HandlingAgent] = {}
        self._by_type: dict[str, HandlingAgent] = {}
        """With the older types that they serve, too."""
        self.listeners: list[Listener] = []
        self.receiver: ReceivingAgent | None = None
        self._recovery: RecoveryAgent | None = None
        self._ordered: OrderedClaims | None = None
        self._lanes = Lanes(self._by_type)
        self._unknown: dict[str, str] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._tasks: Crew

    async def run(self, stopping: asyncio.Event, started: asyncio.Future[None]) -> None:
        """Live until `stopping` is set or the membership is lost. `started` is done once the agents run.

        Raises StorageUnavailable when it cannot join, Stuck when an agent stands or does not end, and what has ended an
        agent.
        """
        application = self._application
        membership = Membership(
            application.service, self._settings, message_types=list(application.by_type()), wake=self._woken.set
        )
        await self._answers()
        node_id = await membership.join()
        log.info("node %d of %s joined", node_id, application.service)
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
            self.node_id = ANY_NODE  # from here on rows are left to any node
            await self._end(membership, working, watches)
        log.info("node %d of %s left", node_id, application.service)

    async def _answers(self) -> None:
        """Raise StorageUnavailable when `database_url` does not work, whatever the connection of the lock does.

        Otherwise each try would be a node under an id of its own, which ends as soon as it begins to work.
        """
        try:
            await self._database.transaction(answer)
        except StorageUnavailable as error:
            raise StorageUnavailable(f"cannot join the nodes: {error}") from error

    async def _end(
        self, membership: Membership, working: asyncio.Task[None], watches: Sequence[asyncio.Task[Any]]
    ) -> None:
        """See that nothing of this membership goes on, give its rows back, and leave.

        Raises what has ended the agents, if it was not asked for, and Stuck for what cannot be ended.
        """
        errors = [task.exception() for task in (working, *watches) if task.done() and not task.cancelled()]
        asked = not working.done()
        left = await end([working, *watches], within=self._ending_seconds)
        if working.cancelled() and not asked:
            errors.append(BrokeOff("an agent or a listener broke off"))
        # Closed already, unless the membership was lost: the next node binds them.
        left = [*left, *await self._close_listeners()]
        node_id = membership.node
        if left:
            self._memberships.died(node_id)
        elif (
            self._memberships.may_own(node_id)
            and not membership.lost.is_set()
            and await self._release_everything(node_id)
        ):
            self._memberships.released(node_id)
        await membership.leave()
        if left:
            raise Stuck(", ".join(task.get_name() for task in left), left)
        for error in errors:
            if error is not None and not (membership.lost.is_set() and isinstance(error, StorageUnavailable)):
                raise error

    async def _close_listeners(self) -> Sequence[asyncio.Task[None]]:
        """Close them all, whatever becomes of one. Returns what does not end."""
        closing = [
            asyncio.create_task(contained(_close(listener)), name=f"close {listener.address}")
            for listener in self.listeners
        ]
        if not closing:
            return []
        patience = self._settings.drain_timeout.total_seconds() + self._ending_seconds
        await asyncio.wait(closing, timeout=patience)
        left = list(await end(closing, within=self._ending_seconds))
        for task in closing:
            if task.done() and not task.cancelled() and isinstance(stuck := task.exception(), Stuck):
                left += stuck.tasks
        return left

    async def _watch_agents(self) -> None:
        """Raise Stuck when an agent has stood for too long: the lock is given up, and others have its rows."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if (slowest := self.slowest_step()) is not None and slowest.share >= 1:
                self._memberships.died(self.node_id)
                threads = [task for agent in self.handlers.values() if (task := agent.stuck()) is not None]
                raise Stuck(f"{slowest.name} has stood for {slowest.seconds:.0f} s", threads)

    def problems(self) -> list[str]:
        """What health is told of."""
        return [problem for agent in self.handlers.values() for problem in agent.problems()]

    async def _stop_in_time(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        await asyncio.sleep(DRAINS * self._settings.drain_timeout.total_seconds() + self._ending_seconds)

    def slowest_step(self) -> Standing | None:
        """The step of an agent that is nearest to its bound."""
        paces = [agent.pace for agent in self.senders.values()]
        paces += [agent.pace for agent in (self.receiver, self._recovery) if agent is not None]
        found = [pace.slowest() for pace in paces] + [agent.slowest() for agent in self.handlers.values()]
        steps = [step for step in found if step is not None]
        return max(steps, key=lambda step: step.share, default=None)

    async def _work(self, node_id: NodeId, stopping: asyncio.Event, started: asyncio.Future[None]) -> None:
        """Start the agents in order; when told to stop, drain them from the outside in."""
        ordered = self._ordered = OrderedClaims(
            self._database, self._settings, node_id, self._counters, self._by_type, self.agent_for
        )
        await self._memberships.take_back(self._database, self._counters.of(Subject.RECOVERY, "recovery"))
        await self._database.transaction(placements.declare, self._application.placements())
        self._memberships.owns(node_id)
        receiving = self.receiver = self._build(node_id, ordered)
        recovery = self._recovery = RecoveryAgent(
            database=self._database,
            settings=self._settings,
            node=node_id,
            counters=self._counters.of(Subject.RECOVERY, "recovery"),
            woken=self._woken,
            senders=self.senders,
            agent_for=self.agent_for,
            idle=IdleAddresses(
                self._database, self._settings, self.senders, self._application.destinations, self.retire
            ),
            handlers=self._by_type,
            receiving=receiving,
            recurring=Recurring(self._database, node_id, self._application.schedules, self._composer, self._counters),
            ordered=ordered,
            burials=self._application.burials(self._settings.on_expiry),
        )
        await self._listen(receiving)  # first: an address that is taken is an error of its own, not one of a group's
        async with Crew() as self._tasks:
            storing = self._tasks.create_task(receiving.run(), name="receiving")
            handling = [
                self._tasks.create_task(agent.run(), name=f"handling {agent.handler.message_type}")
                for agent in self.handlers.values()
            ]
            self.node_id = node_id
            for destination in self._application.destinations():
                self.agent_for(destination)
            recovering = self._tasks.create_task(recovery.run(), name="recovery")
            if not started.done():
                started.set_result(None)
            await stopping.wait()
            recovering.cancel()
            closing = [self._tasks.create_task(_close(each), name=f"close {each.address}") for each in self.listeners]
            await self._drain("listeners", closing)
            receiving.stop()
            for agent in self.handlers.values():
                agent.stop()
            await self._drain("handlers", [storing, *handling])
            for sender in self.senders.values():
                sender.stop()
            await self._drain("senders", list(self._sending))

    async def _listen(self, receiving: ReceivingAgent) -> None:
        for uri, endpoint in self._application.listeners:
            listener = self._transports.of(uri).listener(uri, endpoint)
            await listener.serve(receiving)
            self.listeners.append(listener)
            log.info("listening on %s", listener.address)

    async def _drain(self, what: str, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for these to end by themselves, for drain_timeout; then cancel the rest."""
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=self._settings.drain_timeout.total_seconds())
        for task in late:
            log.warning("%s: %s did not end within drain_timeout and is cancelled", what, task.get_name())
            task.cancel()

    async def _release_everything(self, node_id: NodeId) -> bool:
        """Give back what is still in memory to any node. False when that is left to the next membership."""
        try:
            async with asyncio.timeout(self._ending_seconds):
                for table in (OUTGOING, INCOMING):
                    await self._database.transaction(leases.release_all, table, node_id)
        except (StorageUnavailable, TimeoutError) as error:
            raise_if_cancelled(error)
            log.warning("node %d leaves its rows to the others: %s", node_id, str(error) or "the database is too slow")
            return False
        return True

    def _build(self, node_id: NodeId, ordered: OrderedClaims) -> ReceivingAgent:
        suspects = asyncio.Lock()
        for message_type, handler in self._application.handlers.items():
            self.handlers[message_type] = HandlingAgent(
                handler,
                Attempts(
                    handler,
                    sessions=self._sessions,
                    node=node_id,
                    settings=self._settings,
                    onion=self._application.onion,
                    stuck=self._stuck,
                ),
                policy=self._application.policy(handler),
                database=self._database,
                node=node_id,
                settings=self._settings,
                clock=self._clock,
                counters=self._counters.of(Subject.MESSAGE_TYPE, message_type),
                has_room=self._woken.set,
                suspects=suspects,
                key_is_free=partial(ordered.hint, None),
            )
        served = self._application.by_type().items()
        self._by_type.update({name: self.handlers[handler.message_type] for name, handler in served})
        return ReceivingAgent(
            database=self._database,
            node=node_id,
            settings=self._settings,
            clock=self._clock,
            intake=self._lanes,
            counters=self._counters,
            spans=self._application.batch_spans,
            places=self._application.routes.places,
            ordered_stored=ordered.hint_all,
        )

    # ------------------------------------------------------------------ for recovery and units of work

    def agent_for(self, destination: str) -> SendingAgent | None:
        """The sending agent of this destination, started if need be; None when no transport understands it."""
        agent = self.senders.get(destination)
        if agent is not None:
            return agent
        try:
            sender = self._transports.of(destination).sender(destination)
        except BaseException as error:  # the address is unknown here, or the transport is the application's
            raise_if_cancelled(error)
            self._tell_unknown(destination, error)
            return None
        agent = self.senders[destination] = SendingAgent(
            destination,
            sender,
            database=self._database,
            node=self.node_id,
            settings=self._settings,
            counters=self._counters.of(Subject.DESTINATION, destination),
            has_room=self._woken.set,
            clock=self._clock,
            spans=self._application.batch_spans,
            key_is_free=partial(self._ordered.hint, destination) if self._ordered else lambda key: None,
            fairness=self._application.routes.places.fair_destinations.get(destination),
        )
        sending = self._tasks.create_task(agent.run(), name=f"sending to {destination}")
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        return agent

    def retire(self, destination: str) -> bool:
        """End the agent of an address that nobody uses; False when it has something after all."""
        agent = self.senders.get(destination)
        if agent is None or not agent.retire():
            return False
        del self.senders[destination]
        self._counters.forget(Subject.DESTINATION, destination)
        return True

    def _tell_unknown(self, destination: str, error: BaseException) -> None:
        """Once, however often its envelopes are met."""
        if self._unknown.get(destination) != said(error):
            self._unknown[destination] = said(error)
            trace = None if isinstance(error, InvalidSetting) else error
            log.error("envelopes for %s stay in the outbox: %s", destination, said(error), exc_info=trace)

    def reserve(self, envelope: Envelope) -> NodeId:
        if envelope.execution_time is not None:
            return ANY_NODE
        if envelope.deliver_by is not None and envelope.is_late(self._clock.now()):
            return ANY_NODE  # it expires where it lies
        if envelope.destination == LOCAL:
            return self._lanes.reserve(envelope)
        sender = self.senders.get(envelope.destination)
        return self.node_id if sender is not None and sender.reserve(envelope) else ANY_NODE

    def deliver(self, sent: Sequence[Sent]) -> None:
        """Hand committed envelopes to their agents; in the loop."""
        failpoint("C4")
        by_destination: dict[str, list[Leased]] = {}
        for envelope, endpoint, owner, place in sent:
            if place.ordering_key is not None:
                if envelope.execution_time is None and self._ordered is not None:
                    self._ordered.hint(None if endpoint else envelope.destination, place.ordering_key)
            elif owner == self.node_id != ANY_NODE:
                lease = Leased(envelope, endpoint=endpoint or envelope.destination)
                by_destination.setdefault(envelope.destination, []).append(lease)
        for destination, group in by_destination.items():
            if destination == LOCAL:
                self._lanes.accept(group)
            else:
                self.senders[destination].accept(group)
        if any(each.owner == ANY_NODE and each.place.ordering_key is None for each in sent):
            self._woken.set()

    def give_back(self, sent: Sequence[Sent]) -> None:
        """Their transaction came to nothing; from any thread."""
        for envelope, endpoint, owner, _ in sent:
            if owner != self.node_id or owner == ANY_NODE:
                continue
            if endpoint == LOCAL:
                self._lanes.abandon([envelope])
            else:
                self.senders[envelope.destination].abandon([envelope])

    def listener_statistics(self) -> dict[str, Mapping[str, int]]:
        """What each listener has counted, by its address."""
        return {listener.address: listener.statistics() for listener in self.listeners}

    def in_loop(self, function: Callable[[Sequence[Sent]], None], sent: Sequence[Sent]) -> None:
        """Call it now when this is the loop's own thread, and soon when it is another."""
        if asyncio._get_running_loop() is self._loop:
            function(sent)
        else:
            self._loop.call_soon_threadsafe(function, sent)


async def _close(listener: Listener) -> None:
    """Close it; what is not acknowledged is delivered again. Raises nothing but Stuck."""
    try:
        await listener.close()
    except Stuck:
        raise
    except BaseException as error:
        raise_if_cancelled(error)
        log.exception("%s broke off", listener.address)
