"""The composition root: what a running node consists of, in which order it starts, and how it ends.

    start   join the nodes -> handlers, senders, receiving -> listeners -> recovery
    stop    listeners -> receiving -> handlers -> senders: drain, each within drain_timeout; then release what is
            left and leave
    lost    the membership is gone: everything in memory is dropped (others have the rows), and a new node starts

The only module that builds concrete transports.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from durable.clock import Clock, SystemClock
from durable.composing import Composer
from durable.envelope import ANY_NODE, Envelope, Leased, NodeId
from durable.errors import InvalidSetting, StorageUnavailable
from durable.failpoints import failpoint
from durable.handlers import Handler
from durable.handling import HandlingAgent, Lanes
from durable.receiving import ReceivingAgent
from durable.recovery.agent import RecoveryAgent
from durable.recovery.membership import Membership
from durable.routing import LOCAL, Routes
from durable.sending import SendingAgent
from durable.sessions import Sessions
from durable.settings import Settings, suggestion
from durable.storage import leases, migrator, statements
from durable.storage.database import Database
from durable.storage.outbox import Sent
from durable.telemetry import Counters, log
from durable.transports.base import Listener, Transport
from durable.transports.tcp import TcpTransport
from durable.unit_of_work import Scope

_LONGEST_PAUSE = 30.0  # seconds before a node that failed starts again


class Listening(NamedTuple):
    """A declared listener: its URI and the stable key of what it stores."""

    uri: str
    endpoint: str


@dataclass
class Application:
    """What an application has declared."""

    service: str
    routes: Routes = field(default_factory=Routes)
    handlers: dict[str, Handler] = field(default_factory=dict)
    listeners: list[Listening] = field(default_factory=list)
    transports: list[Transport] = field(default_factory=list)


class Transports:
    """The transports of this process by URI scheme."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._by_scheme = {scheme: transport for transport in transports for scheme in transport.schemes}

    def of(self, uri: str) -> Transport:
        """The transport of this URI; raises InvalidSetting for a scheme that none understands."""
        scheme, separator, _ = uri.partition("://")
        transport = self._by_scheme.get(scheme)
        if transport is None or not separator:
            known = ", ".join(f"{name}://" for name in self._by_scheme)
            raise InvalidSetting(
                f"{uri}: no transport has this scheme{suggestion(scheme, self._by_scheme)}; known: {known}"
            )
        transport.check(uri)
        return transport


class Runtime:
    """A process of a service: one node after another, and what units of work need of it."""

    def __init__(
        self, application: Application, settings: Settings, scope: Scope, *, clock: Clock | None = None, **engines: Any
    ) -> None:
        self.application = application
        self.settings = settings
        self.counters = Counters()
        self.clock = clock or SystemClock()
        self._transports: Transports | None = None
        self.composer = Composer(
            application.service,
            application.routes,
            settings,
            self.clock,
            check_destination=lambda uri: self.transports().of(uri),
        )
        self.sessions = Sessions(settings, self.composer, self, scope, **engines)
        self.node: Node | None = None
        self._stopping = asyncio.Event()
        self._living: asyncio.Task[None] | None = None
        self._database: Database | None = None

    @property
    def database(self) -> Database:
        if self._database is None:
            self._database = Database(self.settings)
        return self._database

    def transports(self) -> Transports:
        if self._transports is None:
            tcp = TcpTransport(self.settings, service=self.application.service, node=lambda: self.node_id)
            self._transports = Transports([tcp, *self.application.transports])
        return self._transports

    @property
    def node_id(self) -> NodeId:
        return self.node.node_id if self.node is not None else ANY_NODE

    # ------------------------------------------------------------------ its life

    async def check(self) -> None:
        """Raise WiringError when this application must not start on this database."""
        transports = self.transports()
        for uri in [*self.destinations(), *(listening.uri for listening in self.application.listeners)]:
            transports.of(uri)
        horizon = max((handler.retry.horizon for handler in self.application.handlers.values()), default=None)
        if horizon is not None and horizon >= self.settings.dedupe_window:
            raise InvalidSetting(
                f"dedupe_window: {self.settings.dedupe_window} is not longer than the retries go on ({horizon}); "
                "a message could come again after its id was forgotten"
            )
        await self.database.transaction(migrator.check_version, self.database.schema)

    async def start(self) -> None:
        """Check the wiring, join the nodes and start the agents; raises when the first node cannot start."""
        await self.check()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._living = asyncio.create_task(self._live(started), name=f"durable {self.application.service}")
        await started

    async def stop(self) -> None:
        """Drain, release, leave, and close the connections."""
        self._stopping.set()
        if self._living is not None:
            await self._living
        if self._database is not None:
            await self._database.close()
        await self.sessions.close()

    async def wait(self) -> None:
        """Until the node stops."""
        if self._living is not None:
            await asyncio.shield(self._living)

    async def _live(self, started: asyncio.Future[None]) -> None:
        pause = 1.0
        while not self._stopping.is_set():
            self.node = Node(self)
            began = time.monotonic()
            try:
                await self.node.run(self._stopping, started)
            except Exception as error:
                if not started.done():
                    started.set_exception(error)
                    return
                unavailable = isinstance(error, StorageUnavailable)
                log.error("the node failed and starts again: %s", error, exc_info=not unavailable)
            finally:
                self.node = None
            pause = 1.0 if time.monotonic() - began > _LONGEST_PAUSE else min(_LONGEST_PAUSE, pause * 2)
            if not self._stopping.is_set():
                await _until(self._stopping, pause / 2)

    def destinations(self) -> list[str]:
        """Every remote destination that is declared, once each."""
        declared = self.application.routes.destinations().values()
        return sorted({uri for uris in declared for uri in uris if uri != LOCAL})

    # ------------------------------------------------------------------ for units of work: the Dispatcher

    def reserve(self, envelopes: Sequence[Envelope]) -> list[NodeId]:
        node = self.node
        return [node.reserve(envelope) for envelope in envelopes] if node else [ANY_NODE] * len(envelopes)

    def committed(self, sent: Sequence[Sent]) -> None:
        if node := self.node:
            node.in_loop(node.deliver, sent)

    def abandoned(self, sent: Sequence[Sent]) -> None:
        if node := self.node:
            node.give_back(sent)


class Node:
    """Everything that lives as long as one membership."""

    def __init__(self, runtime: Runtime) -> None:
        self.node_id = ANY_NODE
        self._runtime = runtime
        self._settings = runtime.settings
        self._database = runtime.database
        self._counters = runtime.counters
        self._transports = runtime.transports()
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self.senders: dict[str, SendingAgent] = {}
        self.handlers: dict[str, HandlingAgent] = {}
        self.listeners: list[Listener] = []
        self._lanes = Lanes(self.handlers)
        self._sending: list[asyncio.Task[None]] = []
        self._tasks: asyncio.TaskGroup

    async def run(self, stopping: asyncio.Event, started: asyncio.Future[None]) -> None:
        """Live until `stopping` is set or the membership is lost. `started` is done once the agents run."""
        application = self._runtime.application
        membership = Membership(
            application.service, self._settings, message_types=list(application.handlers), wake=self._woken.set
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
        receiving = self._build(node_id)
        recovery = RecoveryAgent(
            database=self._database,
            settings=self._settings,
            node=node_id,
            counters=self._counters,
            woken=self._woken,
            senders=self.senders,
            agent_for=self.agent_for,
            handlers=self.handlers,
        )
        await self._listen(receiving)  # first: an address that is taken is an error of its own, not one of a group's
        async with asyncio.TaskGroup() as self._tasks:
            storing = self._tasks.create_task(receiving.run(), name="receiving")
            handling = [
                self._tasks.create_task(agent.run(), name=f"handling {message_type}")
                for message_type, agent in self.handlers.items()
            ]
            self.node_id = node_id
            for destination in self._runtime.destinations():
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
            await self._drain("senders", self._sending)

    async def _listen(self, receiving: ReceivingAgent) -> None:
        for uri, endpoint in self._runtime.application.listeners:
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
        schema = self._database.schema
        try:
            for table in (statements.OUTGOING, statements.INCOMING):
                await self._database.transaction(leases.release_all, schema, table, node_id)
        except StorageUnavailable as error:
            log.warning("node %d leaves its rows to the others: %s", node_id, error)

    def _build(self, node_id: NodeId) -> ReceivingAgent:
        suspects = asyncio.Lock()
        for message_type, handler in self._runtime.application.handlers.items():
            self.handlers[message_type] = HandlingAgent(
                handler,
                database=self._database,
                sessions=self._runtime.sessions,
                node=node_id,
                settings=self._settings,
                clock=self._runtime.clock,
                counters=self._counters,
                has_room=self._woken.set,
                suspects=suspects,
            )
        return ReceivingAgent(
            database=self._database,
            node=node_id,
            settings=self._settings,
            clock=self._runtime.clock,
            intake=self._lanes,
            counters=self._counters,
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
            counters=self._counters,
            has_room=self._woken.set,
        )
        self._sending.append(self._tasks.create_task(agent.run(), name=f"sending to {destination}"))
        return agent

    def reserve(self, envelope: Envelope) -> NodeId:
        if envelope.execution_time is not None:
            return ANY_NODE
        if envelope.destination == LOCAL:
            return self._lanes.reserve(envelope)
        sender = self.senders.get(envelope.destination)
        return self.node_id if sender is not None and sender.reserve(envelope) else ANY_NODE

    def deliver(self, sent: Sequence[Sent]) -> None:
        """Hand committed envelopes to their agents; in the loop."""
        failpoint("C4")
        by_destination: dict[str, list[Leased]] = {}
        for envelope, endpoint, owner in sent:
            if owner == self.node_id != ANY_NODE:
                lease = Leased(envelope, endpoint=endpoint or envelope.destination)
                by_destination.setdefault(envelope.destination, []).append(lease)
        for destination, group in by_destination.items():
            if destination == LOCAL:
                self._lanes.accept(group)
            else:
                self.senders[destination].accept(group)
        if any(owner == ANY_NODE for _, _, owner in sent):
            self._woken.set()

    def give_back(self, sent: Sequence[Sent]) -> None:
        """Their transaction came to nothing; from any thread."""
        for envelope, endpoint, owner in sent:
            if owner != self.node_id or owner == ANY_NODE:
                continue
            if endpoint == LOCAL:
                self._lanes.abandon([envelope])
            else:
                self.senders[envelope.destination].abandon([envelope])

    def in_loop(self, function: Callable[[Sequence[Sent]], None], sent: Sequence[Sent]) -> None:
        """Call it now when this is the loop's own thread, and soon when it is another."""
        if asyncio._get_running_loop() is self._loop:
            function(sent)
        else:
            self._loop.call_soon_threadsafe(function, sent)


async def _until(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set, or this time has passed."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
