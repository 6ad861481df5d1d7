"""A node: the agents of one membership, in which order they start, and how they end.

start   join the nodes -> listeners -> receiving, handlers, senders -> recovery
stop    listeners -> receiving, handlers -> senders: drain, each within drain_timeout; then release what is left,
        and leave
lost    the membership is gone: everything in memory is dropped, because others have the rows
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from durable.application import Application, Transports
from durable.attempts import Attempts
from durable.clock import Clock
from durable.composing import Composer
from durable.envelope import ANY_NODE, Envelope, Leased, NodeId
from durable.errors import InvalidSetting, StorageUnavailable
from durable.failpoints import failpoint
from durable.handling import HandlingAgent
from durable.lanes import Lanes
from durable.receiving import ReceivingAgent
from durable.recovery.agent import RecoveryAgent
from durable.recovery.idle_addresses import IdleAddresses
from durable.recovery.membership import Membership
from durable.recovery.ordered import OrderedClaims
from durable.recovery.recurring import Recurring
from durable.routing import LOCAL
from durable.sending import SendingAgent
from durable.sessions import Sessions
from durable.settings import Settings
from durable.storage import leases
from durable.storage.database import Database
from durable.storage.outbox import Sent
from durable.storage.recovery_statements import INCOMING, OUTGOING
from durable.telemetry import Counters, Subject, log
from durable.transports.base import Listener


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
    ) -> None:
        self.node_id = ANY_NODE
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
        self._ordered: OrderedClaims | None = None
        self._lanes = Lanes(self._by_type)
        self._sending: set[asyncio.Task[None]] = set()
        self._tasks: asyncio.TaskGroup

    async def run(self, stopping: asyncio.Event, started: asyncio.Future[None]) -> None:
        """Live until `stopping` is set or the membership is lost. `started` is done once the agents run."""
        application = self._application
        membership = Membership(
            application.service, self._settings, message_types=list(application.by_type()), wake=self._woken.set
        )
        node_id = await membership.join()
        log.info("node %d of %s joined", node_id, application.service)
        ticking = asyncio.create_task(membership.tick(), name="show that the loop is alive")
        working = asyncio.create_task(self._work(node_id, stopping, started), name=f"node {node_id}")
        lost = asyncio.create_task(membership.lost.wait(), name="watch the membership")
        try:
            await asyncio.wait([working, lost], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
        finally:
            self.node_id = ANY_NODE  # from here on rows are left to any node
            for task in (working, lost, ticking):
                task.cancel()
            await asyncio.gather(working, lost, ticking, return_exceptions=True)
            for listener in self.listeners:  # closed already, unless the membership was lost: the next node binds them
                await listener.close()
            if not membership.lost.is_set():
                await self._release_everything(node_id)
            await membership.leave()
        log.info("node %d of %s left", node_id, application.service)

    async def _work(self, node_id: NodeId, stopping: asyncio.Event, started: asyncio.Future[None]) -> None:
        """Start the agents in order; when told to stop, drain them from the outside in."""
        ordered = self._ordered = OrderedClaims(
            self._database, self._settings, node_id, self._counters, self._by_type, self.agent_for
        )
        receiving = self.receiver = self._build(node_id, ordered)
        recovery = RecoveryAgent(
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
        )
        await self._listen(receiving)  # first: an address that is taken is an error of its own, not one of a group's
        async with asyncio.TaskGroup() as self._tasks:
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
            closing = [self._tasks.create_task(listener.close(), name="close") for listener in self.listeners]
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

    async def _release_everything(self, node_id: NodeId) -> None:
        """What is still in memory goes back to any node."""
        try:
            for table in (OUTGOING, INCOMING):
                await self._database.transaction(leases.release_all, table, node_id)
        except StorageUnavailable as error:
            log.warning("node %d leaves its rows to the others: %s", node_id, error)

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
        except InvalidSetting as error:
            log.error("envelopes for %s stay in the outbox: %s", destination, error)
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
