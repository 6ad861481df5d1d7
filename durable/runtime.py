"""The composition root: a process of a service, which is one node after another.

The only module that builds concrete transports.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from durable import codec, in_flight
from durable.application import Application, Transports
from durable.clock import Clock, SystemClock
from durable.composing import Composer
from durable.envelope import ANY_NODE, Envelope, NodeId
from durable.errors import InvalidSetting, StorageUnavailable
from durable.loop_watch import LoopWatch
from durable.messages import class_of, content_type_of
from durable.monitor import Monitor
from durable.node import Node
from durable.receiving import LeftToOthers, ReceivingAgent
from durable.retry import Policy
from durable.sessions import Sessions
from durable.settings import Settings
from durable.statistics import Statistics
from durable.storage import migrator
from durable.storage.database import Database
from durable.storage.outbox import Sent
from durable.telemetry import Counters, Subject, log
from durable.transactions import Ending
from durable.transports.base import Receiver, Transport
from durable.transports.tcp import TcpTransport
from durable.unit_of_work import Scope
from durable.waking import Waker

if TYPE_CHECKING:
    from prometheus_client.registry import Collector
    from starlette.applications import Starlette

    from durable.metrics.server import MetricsServer
    from durable.transports.http import HttpTransport

_LONGEST_PAUSE = 30.0  # seconds before a node that failed starts again


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
            resolve=lambda uri, message_type: self.transports().resolve(uri, message_type),
            around=application.onion.around_sending,
        )
        self.sessions = Sessions(settings, self.composer, self, scope, **engines)
        self.node: Node | None = None
        self._stopping = asyncio.Event()
        self._living: asyncio.Task[None] | None = None
        self._storing: ReceivingAgent | None = None
        self._database: Database | None = None
        self._waker = Waker(settings)
        self._loop_watch = LoopWatch()
        self._watching: asyncio.Task[None] | None = None
        self._metrics: MetricsServer | None = None
        self.monitor = Monitor(
            self.statistics,
            lambda: self.database,
            application,
            settings,
            self.clock,
            is_to_be_node=lambda: self.is_running and self._storing is None,
        )

    @property
    def database(self) -> Database:
        if self._database is None:
            self._database = Database(self.settings)
        return self._database

    def transports(self) -> Transports:
        if self._transports is None:
            tcp = TcpTransport(self.settings, service=self.application.service, node=lambda: self.node_id)
            optional: dict[str, Callable[[], Transport]]
            optional = {"http": lambda: self.http, "https": lambda: self.http, "rabbitmq": self._rabbitmq}
            self._transports = Transports([tcp, *self.application.transports], optional)
        return self._transports

    @cached_property
    def http(self) -> HttpTransport:
        """Raises InvalidSetting when what it is built on is not installed."""
        try:
            from durable.transports.http import HttpTransport
        except ImportError as error:
            raise _not_installed("http://", "http", error) from error
        return HttpTransport(self.settings, service=self.application.service, messages=self._handled)

    def metrics_app(self, monitor: Callable[[], Monitor], others: Collector | None = None) -> Starlette:
        """Raises InvalidSetting when what it is built on is not installed."""
        try:
            from durable.metrics.server import make_app
        except ImportError as error:
            raise _not_installed("metrics_app()", "metrics", error) from error
        return make_app(monitor, others)

    def _metrics_server(self) -> MetricsServer:
        try:
            from durable.metrics.server import MetricsServer
        except ImportError as error:
            raise _not_installed("metrics_port", "metrics", error) from error
        return MetricsServer(self.monitor, self.settings)

    def _rabbitmq(self) -> Transport:
        try:
            from durable.transports.rabbitmq import RabbitTransport
        except ImportError as error:
            raise _not_installed("rabbitmq://", "rabbitmq", error) from error
        return RabbitTransport(self.settings, service=self.application.service, messages=self._handled)

    def _handled(self) -> Mapping[str, type]:
        """As which class messages of each type are handled here; more may be declared later."""
        return {name: handler.cls for name, handler in self.application.by_type().items()}

    @property
    def receiver(self) -> Receiver | None:
        """Where what arrives can be stored now; None while this process is not ready for it."""
        return self.node.receiver if self.node is not None else self._storing

    @property
    def is_running(self) -> bool:
        """Was it started, and not stopped yet?"""
        return self._living is not None

    @property
    def metrics_address(self) -> str | None:
        """Where /metrics and /health are served; None where they are not."""
        return self._metrics.address if self._metrics is not None else None

    @property
    def node_id(self) -> NodeId:
        return self.node.node_id if self.node is not None else ANY_NODE

    def statistics(self) -> Statistics:
        """What this process is doing, and has done since it started. In the event loop."""
        node, receiver = self.node, self.receiver
        return Statistics(
            service=self.application.service,
            node_id=self.node_id or None,
            sending={name: agent.statistics() for name, agent in node.senders.items()} if node else {},
            handling={name: agent.statistics() for name, agent in node.handlers.items()} if node else {},
            receiving=receiver.statistics() if isinstance(receiver, ReceivingAgent) else None,
            listeners=node.listener_statistics() if node else {},
            pools=self.sessions.pools() | ({} if self._database is None else {"agents": self._database.pool()}),
            tallies={subject: self.counters.tallies(subject) for subject in Subject},
            loop_lag=self._loop_watch.lag.snapshot(),
        )

    # ------------------------------------------------------------------ its life

    async def check(self) -> None:
        """Raise WiringError when this application must not start on this database."""
        transports = self.transports()
        for uri in [*self.application.destinations(), *(listening.uri for listening in self.application.listeners)]:
            transports.of(uri)
        for name in self.application.by_type().keys() | self.application.routes.destinations().keys():
            codec.codec_for(content_type_of(class_of(name)))
        for schedule in self.application.schedules.values():
            schedule.check(self.composer)
        horizon = max((policy.horizon for policy in self._policies()), default=None)
        if horizon is not None and horizon >= self.settings.dedupe_window:
            raise InvalidSetting(
                f"dedupe_window: {self.settings.dedupe_window} is not longer than the retries go on ({horizon}); "
                "a message could come again after its id was forgotten"
            )
        await self.database.transaction(migrator.check_version)

    def _policies(self) -> Iterator[Policy]:
        return map(self.application.policy, self.application.handlers.values())

    async def start(self) -> None:
        """Check the wiring and what is in flight, join the nodes, start the agents; raises when the first cannot."""
        await self.check()
        self._waker.start(self.database)
        await in_flight.guard(self.database, self.application, self.settings)
        await self._start_watching()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._living = asyncio.create_task(self._live(started), name=f"durable {self.application.service}")
        await started

    async def start_storing(self) -> None:
        """Check the wiring, and only store what arrives: it is left to the nodes of the service's other processes."""
        await self.check()
        self._waker.start(self.database)
        await self._start_watching()
        self._storing = ReceivingAgent(
            database=self.database,
            node=ANY_NODE,
            settings=self.settings,
            clock=self.clock,
            intake=LeftToOthers(),
            places=self.application.routes.places,
            counters=self.counters,
            spans=self.application.batch_spans,
        )
        self._living = asyncio.create_task(self._storing.run(), name=f"durable {self.application.service}")

    async def stop(self) -> None:
        """Drain, release, leave, and close the connections."""
        self._stopping.set()
        if self._storing is not None:
            self._storing.stop()
        if self._living is not None:
            await self._living
        await self._stop_watching()
        await self._waker.stop()
        if self._database is not None:
            await self._database.close()
        await self.sessions.close()

    async def _start_watching(self) -> None:
        self._watching = asyncio.create_task(self._loop_watch.run(), name="measure the event loop")
        if self.settings.metrics_port is not None:
            self._metrics = self._metrics_server()
            await self._metrics.open()

    async def _stop_watching(self) -> None:
        if self._metrics is not None:
            await self._metrics.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _live(self, started: asyncio.Future[None]) -> None:
        pause = 1.0
        while not self._stopping.is_set():
            self.node = self._make_node()
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

    def _make_node(self) -> Node:
        return Node(
            self.application,
            settings=self.settings,
            database=self.database,
            sessions=self.sessions,
            transports=self.transports(),
            composer=self.composer,
            clock=self.clock,
            counters=self.counters,
        )

    # ------------------------------------------------------------------ for units of work: the Dispatcher

    def reserve(self, envelopes: Sequence[Envelope]) -> list[NodeId]:
        node = self.node
        return [node.reserve(envelope) for envelope in envelopes] if node else [ANY_NODE] * len(envelopes)

    def committed(self, sent: Sequence[Sent]) -> None:
        if node := self.node:
            node.in_loop(node.deliver, sent)
        if any(self._is_for_others(each) for each in sent):
            self._waker.wake()

    def committing(self, ending: Ending, sent: Sequence[Sent]) -> None:
        self.abandoned(sent)  # whoever claims them then sees whether they are there
        self._waker.wake_after(ending)

    def _is_for_others(self, sent: Sent) -> bool:
        """Must the other nodes look? A node claims what is ordered by itself, as soon as it hears of the commit."""
        if sent.owner != ANY_NODE or (self.node is not None and sent.place.ordering_key is not None):
            return False
        due = sent.envelope.execution_time
        return due is None or due - self.clock.now() < self.settings.poll_interval

    def abandoned(self, sent: Sequence[Sent]) -> None:
        if node := self.node:
            node.give_back(sent)


def _not_installed(scheme: str, extra: str, error: ImportError) -> InvalidSetting:
    return InvalidSetting(f"{scheme} needs {error.name}; run: pip install 'durable-bus[{extra}]'")


async def _until(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set, or this time has passed."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
