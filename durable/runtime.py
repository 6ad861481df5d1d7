"""The composition root: a process of a service, which is one node after another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from durable.agents import former_names, left_orders
from durable.agents import startup_check as in_flight
from durable.agents.context import AgentContext
from durable.agents.doors import Doors
from durable.agents.handling import HandlingAgent
from durable.agents.node_agents import NodeAgents
from durable.agents.receiving import ReceivingAgent
from durable.agents.stuck_threads import StuckThreads
from durable.agents.waking import Waker
from durable.application.application import Application
from durable.clock import Clock, SystemClock
from durable.envelope import ANY_NODE, NodeId
from durable.errors import WiringError, needs
from durable.node import Node
from durable.observability.loop_watch import LoopWatch
from durable.observability.monitor import Monitor
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.outbox.outbox import Dispatcher
from durable.outbox.scope import Scope
from durable.outbox.sessions import Sessions
from durable.process.calling import Calls
from durable.process.dispatching import AgentsDispatcher
from durable.process.life import Life
from durable.process.starting import once_it_answers
from durable.process.storing import Storing
from durable.process.switchboard import Switchboard
from durable.recovery.former_memberships import Memberships
from durable.requests.outcomes import Outcomes
from durable.requests.watch import Watch
from durable.settings import Settings
from durable.statistics import Statistics
from durable.storage import loops
from durable.storage.connection_names import of_service
from durable.storage.database import Database
from durable.storage.parks import Parks
from durable.storage.readiness import check_ready
from durable.tasks.crew import end, in_time, in_turn
from durable.tasks.own_threads import in_own_thread
from durable.telemetry import Counters, Subject
from durable.transports.base import Receiver

if TYPE_CHECKING:
    from durable.observability.metrics.server import MetricsServer

_CLOSING_SECONDS: Final = 5.0  # for connections that may be broken


class Runtime:
    """Process of a service: one node after another, and the parts that units of work need."""

    def __init__(
        self, application: Application, settings: Settings, scope: Scope, *, clock: Clock | None = None, **engines: Any
    ) -> None:
        self.application = application
        self.settings = settings
        self.counters = Counters()
        self.clock = clock or SystemClock()
        self.envelope_factory = EnvelopeFactory(
            application.service,
            application.routes,
            settings,
            self.clock,
            resolve=lambda uri, message_type: self.transports.resolve(uri, message_type),
            around=application.stack.around_sending,
            ring=application.ring,
        )
        self._waker = Waker(settings, of_service(application.service, "waker"))
        self.dispatcher: Dispatcher = AgentsDispatcher(lambda: self.node, self._waker, self.clock, settings)
        self.sessions = Sessions(settings, self.envelope_factory, self.dispatcher, scope, **engines)
        self._stuck = StuckThreads()
        self._doors = Doors()
        self.calls = Calls(
            application,
            settings,
            database=lambda: self.database,
            node=lambda: self.node,
            transport_of=lambda uri: self.transports.of(uri),
        )
        self.life = Life(settings, self._make_node, self._empty_pools)
        self.watch = Watch(lambda: self.database, settings)
        self._storing = Storing(application, lambda: self._context)
        self._database: Database | None = None
        self._loop_watch = LoopWatch(self.life.alive, self._handling, self.counters)
        self.life.where_loop_stands = self._loop_watch.place
        self._watching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._claiming = threading.Lock()  # loops of several threads may start it at once
        self._metrics: MetricsServer | None = None
        self.monitor = Monitor(
            self.statistics,
            lambda: self.database,
            application,
            settings,
            self.clock,
            is_to_be_node=lambda: self.life.is_running,
            troubles=self._problems,
        )

    def _problems(self) -> Sequence[str]:
        of_node = self.node.agents.problems() if self.node is not None else []
        return [*self._stuck.problems(), *of_node, *self.life.problems(), *self.calls.problems()]

    def _handling(self) -> Collection[HandlingAgent]:
        return self.node.agents.handlers.values() if self.node is not None else ()

    @property
    def database(self) -> Database:
        if self._database is None:
            parks = Parks(lambda: self.application.parked_types(self.settings.on_dead_letter))
            self._database = Database(self.settings, of_service(self.application.service, "agents"), buried=parks)
        return self._database

    @cached_property
    def transports(self) -> Switchboard:
        return Switchboard(
            self.application,
            self.settings,
            node_id=lambda: self.node_id,
            directory=self.calls.hub,
            outcomes=Outcomes(self.watch, lambda: self.database, self.application.ring),
        )

    @property
    def receiver(self) -> Receiver | None:
        """Return the receiver that can store arrivals now; None while this process is not ready."""
        return self.node.agents.receiver if self.node is not None else self._storing.receiver

    @property
    def is_running(self) -> bool:
        """Tell whether the runtime was started, and not stopped since."""
        return self._loop is not None

    @property
    def is_used(self) -> bool:
        """Tell whether it holds anything that is open."""
        is_open = self.is_running or self._database is not None or bool(self.sessions.pools())
        return is_open or self._waker.is_used

    def check_loop(self) -> None:
        """Raise WiringError while it runs in another event loop than this code."""
        if self.loop not in (None, asyncio._get_running_loop()):
            raise loops.another_loop()

    @property
    def node(self) -> Node | None:
        """The node that this process is now, if it is one: none without an event loop."""
        return None if self.is_left_behind else self.life.node

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that it runs in; None while it does not run."""
        return self._loop

    @property
    def is_left_behind(self) -> bool:
        """Tell whether its event loop was closed before it was stopped."""
        return self._loop is not None and self._loop.is_closed()

    @property
    def is_of_another_loop(self) -> bool:
        """Tell whether it runs in another event loop; or, when it does not run, is used in one that is open."""
        if self._loop is not None:
            return self._loop is not asyncio._get_running_loop()
        database = None if self._database is None else self._database.engine
        used = [engine for engine in (self.sessions.engine_in_use, database) if engine is not None]
        return not all(map(loops.is_free, used))

    @property
    def metrics_address(self) -> str | None:
        """Address of /metrics and /health; None where they are not served."""
        return self._metrics.address if self._metrics is not None else None

    @property
    def node_id(self) -> NodeId:
        return self.node.node_id if self.node is not None else ANY_NODE

    def statistics(self) -> Statistics:
        """Return the counters of this process since it started. Call it in the event loop."""
        node, receiver = self.node, self.receiver
        return Statistics(
            service=self.application.service,
            node_id=self.node_id or None,
            sending={name: agent.statistics() for name, agent in node.agents.senders.items()} if node else {},
            handling={name: agent.statistics() for name, agent in node.agents.handlers.items()} if node else {},
            receiving=receiver.statistics() if isinstance(receiver, ReceivingAgent) else None,
            listeners={**(node.listener_statistics() if node else {}), **self.application.mounted},
            pools=self.sessions.pools() | ({} if self._database is None else {"agents": self._database.pool()}),
            tallies={subject: self.counters.tallies(subject) for subject in Subject},
            loop_lag=self._loop_watch.lag.snapshot(),
            calls=self.application.offers.telemetry.statistics(),
        )

    # ------------------------------------------------------------------ its life

    def claim(self) -> None:
        """Let it run in this event loop. Raises WiringError, and changes nothing, when it is another's, or runs."""
        with self._claiming:
            if self._loop is not None:
                raise WiringError(
                    "the bus runs already: start it once, by `async with bus`, bus.run() or DurableMiddleware "
                    "(which takes lifespan=False when the application starts it)"
                )
            loops.enter(self.sessions.engine, self.database.engine)
            self._loop = asyncio.get_running_loop()

    def give_up(self) -> None:
        """Let go of what a closed event loop has left open: its node's heartbeat ends by itself."""
        self.life.end_watch()
        self.calls.close()
        self.application.offers.begin_anew()

    async def check(self) -> None:
        """Raise WiringError when this application must not start on this database."""
        self.check_wiring()
        await self.database.transaction(check_ready)

    def check_wiring(self) -> None:
        """Raise WiringError for a fault that needs no database to be seen."""
        for uri in [*self.application.destinations(), *(listening.uri for listening in self.application.listeners)]:
            self.transports.of(uri)
        self.application.check(self.envelope_factory)
        self.application.check_retention(self.settings.dedupe_window)
        if self.application.handlers:
            self.sessions.check()

    async def start(self) -> None:
        """Check the wiring and what is in flight, join the nodes, start the agents; raises when the first cannot.

        Waits for a database that is away, for `start_timeout`.
        """
        await self._open()
        self.application.warn()
        await once_it_answers(self._begin, within=self.settings.start_timeout)
        self.calls.connect()

    async def _begin(self) -> None:
        await self._enter()
        await in_flight.guard(self.database, self.application, self.settings)
        await self.life.start()

    async def _enter(self) -> None:
        """Check the database, and warn of names and orders that it knows and this bus has no more."""
        await self.database.transaction(check_ready)
        await former_names.warn(self.database, self.application)
        await left_orders.warn(self.database, self.application)

    async def start_storing(self) -> None:
        """Check the wiring, and only store arrivals, for the nodes of the service's other processes."""
        await self._open()
        await once_it_answers(self._enter, within=self.settings.start_timeout)
        self._storing.start()
        self.calls.read_without_node()
        self.calls.connect()

    async def _open(self) -> None:
        """Check the wiring, and begin what needs no database."""
        self._watching = asyncio.create_task(self._loop_watch.run(), name="measure the event loop")
        self.calls.open()
        await in_own_thread(self.application.ring.load)  # its source may ask a KMS
        self.check_wiring()
        self._waker.start(self.database)
        if self.settings.metrics_port is not None:
            with needs("metrics_port", extra="metrics"):
                from durable.observability.metrics.server import MetricsServer
            self._metrics = MetricsServer(self.monitor, lambda: self.receiver, self.settings)
            await self._metrics.open()

    async def stop(self) -> None:
        """Drain, release, leave, and close the connections, in bounded time."""
        drain_seconds = self.settings.drain_timeout.total_seconds()
        deadline = asyncio.get_running_loop().time() + drain_seconds
        await in_turn(
            self.calls.connections.close_all(_CLOSING_SECONDS),  # first: callers elsewhere go elsewhere
            self.life.stop(),
            self.calls.drain(deadline),
            self._storing.stop(drain_seconds, _CLOSING_SECONDS),
            self.calls.end_tasks(_CLOSING_SECONDS),
            self._doors.close(patience=drain_seconds, ending_seconds=_CLOSING_SECONDS),
            in_time(self.calls.links.close(), _CLOSING_SECONDS),
            in_time(self.application.offers.stop(_CLOSING_SECONDS), _CLOSING_SECONDS + 1),
            in_time(self.watch.stop(), _CLOSING_SECONDS),
            self._stop_watching(),
            in_time(self._waker.stop(), _CLOSING_SECONDS),
            self._empty_pools(),
        )

    async def _empty_pools(self) -> None:
        """Drop pooled connections. After a fault that broke the membership they may be broken too."""
        await in_turn(self._close_database(), in_time(self.sessions.close(), _CLOSING_SECONDS))

    async def _close_database(self) -> None:
        if self._database is not None:
            await in_time(self._database.close(), _CLOSING_SECONDS)

    async def _stop_watching(self) -> None:
        self.calls.close()
        watching = [self._watching] if self._watching is not None else []
        await in_turn(self._close_metrics(), end(watching, within=_CLOSING_SECONDS))

    async def _close_metrics(self) -> None:
        if self._metrics is not None:
            await self._metrics.close()

    def _make_node(self, memberships: Memberships) -> Node:
        context = self._context
        return Node(
            self.application,
            context,
            NodeAgents(
                self.application, context, sessions=self.sessions, transports=self.transports, stuck=self._stuck
            ),
            envelope_factory=self.envelope_factory,
            memberships=memberships,
            registering=self.calls.registering,
            doors=self._doors,
        )

    @property
    def _context(self) -> AgentContext:
        """Return the context of agents without a node."""
        own, ring = self.application.owns, self.application.ring
        return AgentContext(self.database, ANY_NODE, self.settings, self.clock, self.counters, ring, own)
