"""The bus: what an application declares and calls.

bus = Bus("orders", database="postgresql+asyncpg://...")
bus.route(OrderPlaced, to="tcp://127.0.0.1:2302")

async with bus:                                   # the agents run
    async with bus.unit_of_work() as uow:         # one AsyncSession, one transaction
        uow.session.add(Order(...))
        bus.send(OrderPlaced(...))                # stored with it, or not at all
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    NoReturn,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from durable.application import answers
from durable.application.application import Application, Listening
from durable.application.circuit_breaker import CircuitBreaker
from durable.application.cron import Misfire
from durable.application.handlers import Handler, MaxBatch, OnDeadLetter, OnExpiry, refuse_verdicts
from durable.application.middleware import Middleware, Stage
from durable.application.retry import ByError, Retry, RetryAfter, RetryPolicy
from durable.application.schedules import Factory, declare
from durable.application.signatures import dotted_name
from durable.arguments import checked, checked_names, length_of_time, refuse_unknown
from durable.calls.caller import OnError, Place, RemoteService
from durable.calls.choice import HERE
from durable.calls.connections import MOST as MOST_CONNECTIONS
from durable.calls.contract import Contract, contract_of
from durable.calls.links import Links
from durable.calls.places import Elsewhere, Here
from durable.calls.provider import CallProvider
from durable.calls.providers import Anywhere, Provider
from durable.duration import Duration
from durable.encryption.keys import Keys
from durable.encryption.ring import KeyRing
from durable.errors import InvalidMessage, InvalidSetting, WiringError, needs
from durable.grammar import suggestion
from durable.kinds import shown
from durable.messages.registry import name_of
from durable.messages.routing import LOCAL
from durable.messages.validation import check_service
from durable.outbox.envelope_factory import SendOptions, due_time
from durable.outbox.outbox import Outbox
from durable.outbox.scope import Scope
from durable.outbox.unit_of_work import Enlisting, UnitOfWork
from durable.plain import plain_text
from durable.process import serving
from durable.process.forking import in_each_child
from durable.redaction import printable
from durable.requests.receipts import Receipt
from durable.runtime import Runtime
from durable.schemes import normal_scheme
from durable.settings import Settings, load_settings
from durable.statistics import Statistics
from durable.storage import circuits, delayed, loops, schedules
from durable.storage.circuits import CircuitKind
from durable.tasks.cancelling import run_to_completion
from durable.telemetry import log
from durable.transports.base import Transport

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client.registry import Collector
    from starlette.types import ASGIApp

    from durable.setting_options import SettingOptions  # for checkers alone: Settings tells what is wrong with a value

F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
Mode = Literal["full", "send-only"]
MessageClass = Annotated[type, "a message class, such as OrderPlaced"]
ServiceClass = Annotated[type, "a class declared with @service"]
AnySession = Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any]


_LONGEST_ENDPOINT: Final = 100
_PARAMETERS: Final = ("service", "database", "mode", "engine", "sync_engine", "transports", "settings")


class PauseTarget(TypedDict, total=False):
    """Targets of pause() and resume() other than the class of a handler."""

    listener: str
    destination: str
    schedule: str
    key: str


class Bus:
    """Service of an application: its handlers, routes and node.

    `service`: its name for its peers. `database`: SQLAlchemy URL of the application's own Postgres (default: the
    setting database_url). `engine` and `sync_engine`: engines for units of work, instead of engines made from that
    URL; the application closes them. `mode`: a "send-only" process stores messages, and leaves sending and handling to
    the service's other processes. Further keyword arguments are settings (`batch_size=50`).

    Raises InvalidSetting for an unknown setting or an invalid value.
    """

    @checked
    def __init__(
        self,
        service: str,
        database: str | None = None,
        *,
        mode: Mode = "full",
        engine: AsyncEngine | None = None,
        sync_engine: Engine | None = None,
        transports: Sequence[Transport] = (),
        settings: Settings | None = None,
        **overrides: Unpack[SettingOptions],
    ) -> None:
        check_service("Bus", service)
        refuse_unknown("Bus", overrides, [*_PARAMETERS, *Settings.model_fields], "setting")
        if settings is not None and (overrides or database is not None):
            raise InvalidSetting("settings: give settings=..., or database and single settings, not both")
        if database is not None:
            overrides["database_url"] = database
        self.service = plain_text(service)
        self.mode = mode
        self.settings = settings or load_settings(**overrides)
        self._scope = Scope()
        offers = CallProvider(lambda: self.settings)
        self._application = Application(self.service, transports=list(transports), offers=offers)
        self._application.retry = _retry_of(self.settings)
        self._application.ring = KeyRing.of(self.settings)
        self._key_source: Callable[[], Keys] | None = None
        self._engines: dict[str, Any] = {"engine": engine, "sync_engine": sync_engine}
        self._substitute: Runtime | None = None
        self._runtime = self._make_runtime()
        in_each_child(self, Bus._begin_anew)

    # ------------------------------------------------------------------ declare, before the bus starts

    @checked_names
    def handles(
        self,
        cls: type,
        *,
        retry: Retry | None = None,
        on_error: ByError | None = None,
        concurrency: int | None = None,
        max_batch: MaxBatch | None = None,
        timeout: Duration | None = None,
        circuit_breaker: CircuitBreaker | None = None,
        inherit_deliver_by: bool = False,
        ordered: bool = False,
        on_dead_letter: OnDeadLetter | None = None,
        on_expiry: OnExpiry | None = None,
        fair_by: str | None = None,
        weights: Mapping[str, int] | None = None,
    ) -> Callable[[F], F]:
        """Declare the handler of a message class, and of the older classes that upcasters convert to it.

        `retry`: policy for failed messages (default: the settings retry_*). `on_error`: policies for single exception
        classes, `{TimeoutError: Retry(...)}`; the nearest class counts. `concurrency`: messages handled at once on each
        node (default: the setting). `max_batch`: up to this many waiting messages share one transaction, which is much
        faster for short handlers; when one of them fails, each is run alone. "auto": as many messages of an async
        handler as take the setting group_time together, as long as none awaits or changes what another could notice
        (default: the setting max_batch, which is "auto"). 1: each has its own. A handler whose message is annotated
        list[cls] is called once for the batch, and messages that it sends begin new conversations.

        `timeout`: longest attempt (seconds, "30s" or a timedelta; default: the setting handler_timeout).
        `circuit_breaker`: stops the handler on every node while too many of its messages fail. `inherit_deliver_by`:
        messages sent by the handler expire when its message does, unless they have a deliver_by= of their own.

        Messages of one `key=` are handled one after another, in the order of their commits. `ordered`: all messages of
        this class are, over all nodes. `on_dead_letter`: "park" stops the key of a dead letter (an ordered handler as
        a whole) until it is resumed, "continue" goes on with the next message (default: the setting). `on_expiry`:
        "dead-letter" keeps a message that comes too late for its deliver_by as a dead letter, "forget" as a line of
        the history (default: the setting). `fair_by`: header by which tenants take turns (`tenant` is that of
        `send(tenant=...)`), or `key`; each tenant gets as many turns in a row as `weights` says (default: 1).

        The function's parameters are known by their annotations. Each may be left out, also the message: some are
        signals without contents.

        Each message is handled exactly once within the dedupe window: its effects and its completion are one
        transaction. Raises InvalidSetting for an invalid parameter, or a second handler of the same class.
        """
        if not isinstance(cls, type):
            raise InvalidSetting(f"handles: cls={shown(cls)}: give the message class: @bus.handles(OrderPlaced)")
        message_type = name_of(cls)
        self._refuse_when_running("handles", message_type)

        def declare(function: F) -> F:
            name = f"handler {dotted_name(function)}"
            self._application.declare(
                Handler(
                    message_type=message_type,
                    cls=cls,
                    function=function,
                    retry=retry,
                    by_error={} if on_error is None else on_error,
                    concurrency=concurrency,
                    max_batch=max_batch,
                    timeout=None if timeout is None else length_of_time(name, "timeout", timeout),
                    circuit_breaker=circuit_breaker,
                    inherit_deliver_by=inherit_deliver_by,
                    ordered=ordered,
                    on_dead_letter=on_dead_letter,
                    on_expiry=on_expiry,
                    fair_by=fair_by,
                    weights={} if weights is None else weights,
                )
            )
            return function

        return declare

    @checked
    def expects(self, cls: MessageClass, *, at: str = LOCAL) -> None:
        """Keep the answers of this class to requests of this service, for wait_for(): see docs/requests.md.

        `at`: address of this service, at which those who answer reach it; without one, requests are handled by this
        service itself. An answer is kept once, in the transaction that finishes it, for `answer_retention`. Raises
        InvalidSetting for a class that is handled or expected already, or an address that nobody can send to, and
        WiringError while the bus runs.
        """
        message_type = name_of(cls)
        self._refuse_when_running("expects", message_type)
        self._application.refuse_second("expects", message_type)
        if at != LOCAL:
            self.runtime.transports.resolve(at, message_type)
        self.handles(cls, max_batch=answers.GROUP)(answers.keeper_of(cls))
        self._application.expect(message_type, at)

    @checked
    def offer(self, contract: ServiceClass, implementation: object, *, singleton: bool = False) -> None:
        """Let other services call the methods of this object, at the tcp:// and unix:// addresses of listen().

        `contract`: class declared with `durable.calls.service`. `implementation`: object with its methods, all of which
        are async. They run in the bus's event loop, up to `call_concurrency` at once; up to `call_backlog` wait. They
        are in no unit of work. May be called while the bus runs. Callers find the provider by the registry in the
        service's database.

        `singleton`: of all nodes that offer the service, one runs its calls, and another takes over when that one is
        gone. A node is needed for it: a "send-only" process never holds a singleton. Raises InvalidSetting for a class
        that is no service, an object that lacks a method, and a service that is offered already.
        """
        self.runtime.check_loop()
        self._application.offers.offer(contract_of(contract), implementation, singleton=singleton)

    @checked
    def connect(self, address: str) -> None:
        """Learn which services another service knows, and tell it what this one offers: see docs/calls.md.

        `address`: a tcp:// or unix:// address at which it listens. Callers without an address then find its providers,
        and those that others have announced there. A lost connection is opened again for as long as the bus runs. Call
        it before the bus runs, or in its event loop. Raises InvalidSetting for an address that cannot be connected to,
        or is connected to already.
        """
        self._here.calls.connections.check(address)
        connected = self._application.connected
        if address in connected:
            raise InvalidSetting(f"connect: {address} is connected to already; connect to each address once")
        if len(connected) == MOST_CONNECTIONS:
            raise InvalidSetting(f"connect: {MOST_CONNECTIONS} addresses are connected to already; disconnect from one")
        if self.runtime.is_running:
            self.runtime.calls.connections.open(address)
        connected.append(address)

    @checked
    def disconnect(self, address: str) -> None:
        """Forget the services that were learned at this address, and withdraw there what this one offers.

        Raises InvalidSetting for an address that is not connected to.
        """
        if address not in self._application.connected:
            raise InvalidSetting(f"disconnect: {address} is not connected to; give an address of connect()")
        connections = self._here.calls.connections
        self._application.connected.remove(address)
        connections.cancel(address)

    @checked
    def withdraw(self, contract: ServiceClass) -> None:
        """Offer a service no longer; calls under way are finished. Raises InvalidSetting when it is not offered."""
        self.runtime.check_loop()
        self._application.offers.withdraw(contract_of(contract))

    @checked
    def caller(
        self,
        contract: Annotated[Callable[..., A], "a class declared with @service"],
        *,
        at: str | Provider | None = None,
        on_error: OnError | None = None,
        **methods: Mapping[str, Duration],
    ) -> A:
        """Return an object with the methods of a service, each of which calls its provider: see docs/calls.md.

        `contract`: class declared with `durable.calls.service`. `at`: tcp:// or unix:// address of the provider, or one
        of `providers()`; without it, each call goes to the best of all that are known: this bus itself, or else a Unix
        socket of this machine, or else the least busy one. `on_error`: is given the errors of calls whose methods are
        declared with fire_and_forget (default: they are logged). `methods`: options of single methods,
        `reserve={"timeout": 5}`.

        A call is not in the unit of work, and runs once at most. It returns the result, or raises a CallFailed.
        Raises InvalidSetting for a class that is no service, and an address that cannot be called.
        """
        declared = contract_of(contract)
        place, address = self._place(declared, at)
        remote = RemoteService(
            declared,
            place,
            timeout=self.settings.call_timeout.total_seconds(),
            options=methods,
            on_error=on_error,
            telemetry=self._application.offers.telemetry,
            check=lambda: self._here,
        )
        if (declared, address) not in self._application.called:
            self._application.called.append((declared, address))
        service: A = remote.stub()
        return service

    def _place(self, contract: Contract, at: str | Provider | None) -> tuple[Place, str | None]:
        """Return the place to call, and its address; None: whichever provider is best."""
        if at is None:
            return Anywhere(contract, lambda: self.runtime.calls.providers), None
        epoch = 0
        if isinstance(at, Provider):
            if at.service != contract.name or not at.address:
                raise InvalidSetting(f"caller: at={at}: is no provider of {contract.name} that can be called from here")
            epoch, at = at.epoch, at.address
        if at == HERE:
            return Here(lambda: self._application.offers, self._links, epoch), None
        self.runtime.calls.links.check(at)
        return Elsewhere(at, self._links, epoch), at

    @checked
    async def providers(self, contract: ServiceClass) -> list[Provider]:
        """Return the providers of a service that this bus knows, by application and node.

        They are read from the service's database; while that is away, they are those of before. A bus that does not run
        knows only itself. Raises InvalidSetting for a class that is no service.
        """
        return await self._here.calls.look_up(contract_of(contract).name)

    @property
    def _here(self) -> Runtime:
        """The runtime. Raises WiringError in an event loop other than its own."""
        self.runtime.check_loop()
        return self.runtime

    def _links(self) -> Links | None:
        return self.runtime.calls.open_links

    @checked
    def on_error(self, *errors: type[Exception], retry: RetryPolicy | RetryAfter) -> None:
        """Set the retry policy of these exceptions in every handler that has no policy of its own for them.

        `bus.on_error(TimeoutError, retry=Retry(immediate=0, delays=[5, 60]))`, or
        `bus.on_error(RateLimited, retry=RetryAfter())`, which stops the handler for as long as the error asks for.
        Raises InvalidSetting for classes that are no exceptions, and WiringError while the bus runs.
        """
        self._refuse_when_running("on_error", ", ".join(error.__qualname__ for error in errors))
        if not errors:
            raise InvalidSetting("on_error: errors: give at least one class of exceptions, such as TimeoutError")
        refuse_verdicts("on_error", errors)
        self._application.by_error.update(dict.fromkeys(errors, retry))

    @checked
    def keys_from(self, source: Callable[[], Keys]) -> None:
        """Encrypt and decrypt bodies with the keys that this function returns, instead of those of the settings.

        The function may ask a KMS. It is called when the first key is needed, in the thread of the caller, and then
        every `encryption_reload`, and soon after a message came whose key was missing, in a thread of its own; never
        for a message. When it raises, the keys of before are used. Raises WiringError while the bus runs.
        """
        self._refuse_when_running("keys_from", dotted_name(source))
        self._key_source = source
        self._application.ring.take_from(source, self.settings.encryption_reload.total_seconds())

    @checked
    def use(self, middleware: Middleware, *, stage: Stage = "core") -> None:
        """Put middleware around every sent message and every handler: see docs/middleware.md.

        `stage`: "before" is around "core", and "core" around "after"; in each stage the component that was used first
        is around the others. Raises WiringError once the bus has started or sent, and InvalidSetting for an object that
        is no Middleware.
        """
        self._application.stack.use(middleware, stage)

    @checked
    def trace(self, provider: TracerProvider | None = None) -> None:
        """Make OpenTelemetry spans of all messages and calls: see docs/telemetry.md.

        `provider`: tracer provider of the spans (default: the global one). Call it before use() of middleware that is
        to run within the spans. Raises InvalidSetting when `durable-bus[tracing]` is not installed.
        """
        with needs("trace()", extra="tracing"):
            from durable.application.call_tracing import CallTracing
            from durable.application.tracing import Tracing
        if provider is not None and not hasattr(provider, "get_tracer"):
            raise InvalidSetting(f"trace: provider={provider!r}: give a TracerProvider of OpenTelemetry")
        tracing = Tracing(provider, lambda: self.settings.limits)
        self._application.offers.telemetry.spans = CallTracing(provider)
        self.use(tracing, stage="before")
        self._application.batch_spans = tracing

    @checked_names
    def meter(self, provider: MeterProvider | None = None) -> None:
        """Give the metrics to OpenTelemetry, under the names of /metrics: see docs/telemetry.md.

        `provider`: meter provider of the instruments (default: the global one). Raises InvalidSetting when
        `durable-bus[tracing]` is not installed.
        """
        try:
            from durable.observability.metrics.meters import Meters, Source
        except ImportError as error:
            raise InvalidSetting("meter() needs opentelemetry; run: pip install 'durable-bus[tracing]'") from error
        if provider is not None and not hasattr(provider, "get_meter"):
            raise InvalidSetting(f"meter: provider={provider!r}: give a MeterProvider of OpenTelemetry")
        meters = Meters(lambda: Source(self.runtime.monitor, self.runtime.loop), provider)
        self._application.offers.telemetry.record = meters.record_call

    @checked
    def listen(self, uri: str, *, name: str | None = None) -> None:
        """Receive messages at this address, from the start of the bus on.

        `name`: key under which duplicates are recognised (default: the service). Give listeners the same name when
        they may be sent the same envelope. Raises InvalidSetting for an invalid address, one that was declared before,
        or one that shares a queue of RabbitMQ with another listener and differs; and WiringError while the bus runs.
        """
        self._refuse_when_running("listen", uri)
        uri = normal_scheme(uri)
        self.runtime.transports.of(uri)
        _check_endpoint("listen", name)
        if any(listening.uri == uri for listening in self._application.listeners):
            raise InvalidSetting(f"{uri}: the bus has this listener already; declare each address once")
        added = Listening(uri, plain_text(name or self.service))
        self.runtime.transports.check_listener(added)
        self._application.listeners.append(added)

    @checked
    def asgi(self, name: str | None = None, *, allow_local: bool = False) -> ASGIApp:
        """Return an ASGI app that receives messages over HTTP, to be mounted: `app.mount("/durable", bus.asgi())`.

        The app answers 503 until the bus runs, and follows it from run to run, with its current settings. `name` as in
        listen(). Its counters appear under the listener `asgi:` and that name.

        Without `shared_secret` and `peers` it refuses every request. With `allow_local` it then takes those of programs
        on this machine that come directly: none from a browser, and none through a proxy or tunnel that says what it
        is. One that does not say so lets every stranger in. Raises InvalidSetting when `durable-bus[http]` is not
        installed.
        """
        endpoint = plain_text(name or self.service)
        _check_endpoint("asgi", name)
        counts = self._application.mounted.setdefault(f"asgi:{endpoint}", Counter())
        return self.runtime.transports.http.app(
            endpoint, lambda: self.runtime.receiver, counts, allow_local=allow_local
        )

    @checked
    def metrics_app(self, registry: Collector | None = None) -> ASGIApp:
        """Return an ASGI app with /metrics for Prometheus and /health, to be mounted: `app.mount("/internal", ...)`.

        It has /health/live and /health/ready for probes, too: see docs/telemetry.md. `registry`: collector whose
        metrics are exposed as well, such as prometheus_client.REGISTRY. The app asks for no credentials. Where no
        application serves it, set metrics_port. Raises InvalidSetting when `durable-bus[metrics]` is not installed.
        """
        if registry is not None and not hasattr(registry, "collect"):
            raise InvalidSetting(f"metrics_app: registry={registry!r}: give a Collector of prometheus_client")
        with needs("metrics_app()", extra="metrics"):
            from durable.observability.metrics.server import make_app
        return make_app(lambda: self.runtime.monitor, lambda: self.runtime.receiver, registry)

    def statistics(self) -> Statistics:
        """Return the counters of this process since the bus was started. Call it in the bus's event loop."""
        return self.runtime.statistics()

    @checked
    def route(
        self,
        cls: MessageClass,
        *,
        to: str,
        ordered: bool = False,
        fair_by: str | None = None,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        """Route commands of this class to one destination.

        `to`: address of the destination. `ordered`: all envelopes for it leave in the order of their commits, one batch
        at a time over all nodes. `fair_by`: header, or `key`, by which the tenants of the destination take turns, each
        as often in a row as `weights` says (default: 1). Raises InvalidSetting, and RoutingError for a second route.
        """
        places = self._application.routes.places
        destination = self._connect(self._application.routes.route, cls, to)
        places.declare_destination(destination, ordered, fair_by, weights or {})

    @checked
    def subscribe(
        self,
        cls: MessageClass,
        *,
        to: str,
        ordered: bool = False,
        fair_by: str | None = None,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        """Send events of this class to this destination as well; arguments as in route(). Raises InvalidSetting."""
        places = self._application.routes.places
        destination = self._connect(self._application.routes.subscribe, cls, to)
        places.declare_destination(destination, ordered, fair_by, weights or {})

    def _connect(self, declare: Callable[[str, str], None], cls: type, to: str) -> str:
        message_type = name_of(cls)
        destination = self.runtime.transports.resolve(to, message_type)
        declare(message_type, destination)
        return destination

    @checked
    def every(
        self,
        cron: str,
        message: object | Factory,
        *,
        name: str,
        tz: str = "UTC",
        misfire: Misfire = "once",
        to: str | None = None,
        **options: Unpack[SendOptions],
    ) -> None:
        """Send a message at every time that `cron` names in the time zone `tz`: once over all nodes.

        `message`: the message, or a function that is called with the time of the occurrence, an aware datetime in UTC,
        and returns the message; the function must be quick. `name`: identifies the schedule for operators and for
        other versions of the code; the declaration of the youngest node counts. `misfire`: occurrences that came while
        no node ran are run "once" for all of them, "all" (the last 100), or "skip". `to` and `options` as in send();
        deliver_by= is a timedelta. A process with mode="send-only" runs no schedules. Raises InvalidSetting.
        """
        name = plain_text(name)
        self._refuse_when_running("every", name)
        if name in self._application.schedules:
            raise InvalidSetting(f"every {name!r}: there is a schedule of this name already; give each its own")
        if to is not None:
            self.runtime.transports.of(to)
        self._application.schedules[name] = declare(
            cron, message, name=name, tz=tz, misfire=misfire, to=to, options=options
        )

    def configure(self, **overrides: Unpack[SettingOptions]) -> None:
        """Change settings after the bus was made, as the command line does.

        Raises InvalidSetting, and WiringError while the bus runs.
        """
        self._refuse_when_running("configure", ", ".join(overrides))
        given = self.settings.model_dump(exclude_unset=True)
        self.settings = load_settings(**{**given, **overrides})
        self._application.retry = _retry_of(self.settings)
        self._application.ring = KeyRing.of(self.settings)
        if self._key_source is not None:
            self.keys_from(self._key_source)
        self.runtime = self._make_runtime()

    # ------------------------------------------------------------------ send

    def send(self, message: object, *, to: str | None = None, **options: Unpack[SendOptions]) -> UUID:
        """Send a command with the current unit of work; returns the envelope's id.

        The envelope is stored when the unit of work commits, and dropped when it rolls back. It is delivered at least
        once, and handled exactly once within the dedupe window. `to`: address of the destination, instead of the route.
        Raises NoUnitOfWork outside of a unit of work, RoutingError without a destination, and InvalidMessage for a
        message that cannot be sent.
        """
        return self._scope.outbox.send(message, to=to, **options)

    def publish(self, message: object, **options: Unpack[SendOptions]) -> UUID:
        """Send an event to every subscriber, with the current unit of work; all copies share the id returned.

        An event with neither subscribers nor a handler here is dropped. Guarantees and errors as in send().
        """
        return self._scope.outbox.publish(message, **options)

    def request(
        self,
        message: object,
        *answers: type,
        to: str | None = None,
        timeout: Duration | None = None,
        **options: Unpack[SendOptions],
    ) -> UUID:
        """Send a command whose answer is awaited by wait_for(id, Answer), with the current unit of work.

        `answers`: the classes of which the answer is one, each declared by expects(). `timeout` (seconds, or a
        timedelta): the request expires unless it was handled by then. Returns the id of the request; other arguments,
        guarantees and errors as in send().
        """
        return self._scope.outbox.request(message, *answers, to=to, timeout=timeout, **options)

    @checked_names
    def unit_of_work(self, *, timeout: Duration | None = None) -> UnitOfWork:
        """Open an AsyncSession and a transaction: `async with bus.unit_of_work() as uow`.

        `timeout` (seconds, or a timedelta): longest statement, and longest pause between statements, when above the
        setting unit_of_work_timeout. Raises InvalidSetting for a time that is not above 0.
        """
        longest = None if timeout is None else length_of_time("unit_of_work", "timeout", timeout)
        if longest is not None and longest <= timedelta(0):
            raise InvalidSetting(f"unit_of_work: timeout must be above 0 (got {timeout})")
        sessions = self.runtime.sessions
        if asyncio._get_running_loop() is not None:
            self.runtime.check_loop()
        session = sessions.open(longest)
        return UnitOfWork(session, sessions.outbox(session), self._scope)

    @checked
    def enlist(self, session: AnySession) -> AbstractContextManager[Outbox]:
        """Make your own session a unit of work. Every later commit of this session stores its messages, also after
        the block; inside the block `bus.send()` finds the session.

        A scoped session stands for that of the thread or task in which `bus.send()` is called; the outbox of this block
        is that of the present one. Raises WiringError for an AsyncSession whose engine belongs to another event loop.
        """
        return Enlisting(self._enlisted(session))

    @contextmanager
    def _enlisted(self, session: AnySession) -> Iterator[Outbox]:
        if isinstance(session, scoped_session | async_scoped_session):
            registry, outbox_of = session, self._outbox
            with self._scope.entered(lambda: outbox_of(registry())):
                yield outbox_of(registry())
        else:
            outbox = self._outbox(session)
            with self._scope.entered(lambda: outbox):
                yield outbox

    def _outbox(self, session: Session | AsyncSession) -> Outbox:
        if isinstance(session, AsyncSession):
            loops.enter_with(session)
        return self.runtime.sessions.outbox(session)

    # ------------------------------------------------------------------ what became of a message

    @overload
    async def wait_for(self, message: UUID, *, timeout: Duration = ...) -> Receipt: ...  # noqa: ASYNC109

    @overload
    async def wait_for(self, message: UUID, a: type[A], /, *, timeout: Duration = ...) -> A: ...  # noqa: ASYNC109

    @overload
    async def wait_for(
        self,
        message: UUID,
        a: type[A],
        b: type[B],
        /,
        *,
        timeout: Duration = ...,  # noqa: ASYNC109
    ) -> A | B: ...

    @overload
    async def wait_for(
        self,
        message: UUID,
        a: type[A],
        b: type[B],
        c: type[C],
        /,
        *,
        timeout: Duration = ...,  # noqa: ASYNC109
    ) -> A | B | C: ...

    @overload
    async def wait_for(
        self,
        message: UUID,
        a: type[A],
        b: type[B],
        c: type[C],
        d: type[D],
        /,
        *others: type[D],
        timeout: Duration = ...,  # noqa: ASYNC109
    ) -> A | B | C | D: ...

    @checked
    async def wait_for(  # the callers of one process share a task, which no caller may cancel
        self,
        message: UUID,
        *answers: type,
        timeout: Duration = timedelta(seconds=30),  # noqa: ASYNC109
    ) -> Any:
        """Wait until a message waits nowhere in this service any more, and return its outcome: see docs/requests.md.

        `answers`: wait for the answer to a request() instead, and return it: a message of one of these classes. Any
        node of the service may wait for it, as often as it likes, within `answer_retention`.

        `message`: the id that send() or publish() returned, after the commit; any node of the service may ask. Callers
        share their looks at the database, at first every 20 ms, and at last every `poll_interval`. Call it while the
        bus runs, and not in a handler for a message that waits behind it.

        Raises StillWaiting after `timeout`, UnknownMessage when no message of this id is known here, StorageUnavailable
        when the database was away at the timeout, and InvalidSetting for a time that is not above 0. For an answer also
        NoAnswer when the request was dead-lettered, expired or cancelled, InvalidMessage for an answer of another
        class, MissingKey when the key of the answer is not here, and Forged when it was changed since it was encrypted.
        """
        time = length_of_time("wait_for", "timeout", timeout)
        if time <= timedelta(0):
            raise InvalidSetting(f"wait_for: timeout must be above 0 (got {timeout})")
        if not answers:
            return await self._here.watch.wait(message, time)
        return self._application.answer_in(await self._here.watch.answer(message, time), answers)

    # ------------------------------------------------------------------ pause

    @checked
    async def pause(
        self,
        cls: MessageClass | None = None,
        *,
        for_: Duration | None = None,
        reason: str = "paused by the application",
        **named: Unpack[PauseTarget],
    ) -> None:
        """Pause one handler, key, listener, destination or schedule on every node. The class of an older version, which
        the handler of a newer one takes, pauses the messages of that version alone. A key stops no ordered handler.

        The pause lasts for `for_` (`60`, "1m" or a timedelta), or until resume(). Messages wait meanwhile; senders to a
        paused listener see Busy; occurrences of a paused schedule are passed over. The pause is a row of `circuits`,
        committed by itself when this returns, also inside a unit of work or a handler, whose rollback does not end it;
        the other nodes obey it within a moment. `reason` is shown to operators. Call it while the bus runs, as a node
        or send-only; elsewhere there is `durable-agent pause`. Raises InvalidSetting for a time that is not above 0,
        when not exactly one target is named, or for a schedule that neither this application nor a node has declared.
        The names of other targets are not checked: a handler or listener may be that of another version of the code.
        """
        time = None if for_ is None else length_of_time("pause", "for_", for_)
        if time is not None and time <= timedelta(0):
            raise InvalidSetting(f"pause: for_={for_!r} is over before it begins; give a time above 0, or none")
        targets = self._circuits(cls, named)
        await self._refuse_unknown_schedule(named.get("schedule"))
        await self._here.database.transaction(
            circuits.pause_each, targets, reason=reason, actor=self.service + circuits.BY_CODE, duration=time
        )

    @checked
    async def resume(self, cls: MessageClass | None = None, **named: Unpack[PauseTarget]) -> bool:
        """End a pause before its time, or close a circuit that failures have opened; without one of these, end the park
        of a key, or of an ordered handler, by a dead letter.

        Names one target, and commits by itself, as pause() does. False when the target was neither paused nor stopped.
        A park that is left is told in the log: another resume() ends it, and the messages behind the letter go on.
        """
        targets = self._circuits(cls, named)
        resumed = await self._here.database.transaction(circuits.resume_each, targets)
        if resumed.still_parked is not None:
            kind, key = targets[0]
            reason = printable(resumed.still_parked)
            log.warning("dead letter still parks %s %s: %s; resume it again to go on", kind, key, reason)
        return resumed.was_open

    def _circuits(self, cls: type | None, named: PauseTarget) -> list[tuple[CircuitKind, str]]:
        """Return the names of these targets; an address that is resolved by type names one destination for each."""
        given = cast(Mapping[str, str | None], named)
        chosen = [(CircuitKind(kind), plain_text(key)) for kind, key in given.items() if key is not None]
        if cls is not None:
            chosen.append((CircuitKind.HANDLER, name_of(cls)))
        if len(chosen) != 1:
            names = ", ".join(f"{name}=" for name in PauseTarget.__annotations__)
            raise InvalidSetting(f"pause: name a message class, or one of {names}; one of them")
        kind, key = chosen[0]
        if not (key if kind is CircuitKind.KEY else key.strip()):
            raise InvalidSetting(f"pause: {kind.value}={key!r} is no name; give that of a {kind.value}")
        if kind is CircuitKind.DESTINATION:
            return [(kind, each) for each in self.runtime.envelope_factory.destinations_of(key)]
        return chosen

    async def _refuse_unknown_schedule(self, name: str | None) -> None:
        """Refuse a misspelt name: its pause would pause nothing, and later a schedule that gets this name."""
        declared = self._application.schedules
        if name is None or name in declared:
            return
        known = {*declared, *await self._here.database.transaction(schedules.names)}
        if name not in known:
            todo = suggestion(name, sorted(known)) or "; give the name of a schedule, as shown by scheduled list"
            raise InvalidSetting(f"pause: schedule {name!r} is neither declared nor stored{todo}")

    # ------------------------------------------------------------------ what waits for its time

    @checked
    async def cancel(self, message: UUID, *, reason: str | None = None) -> bool:
        """Cancel a scheduled message before it is due; the history records it as cancelled.

        The change commits by itself and at once, also inside a unit of work or a handler: a rollback there does not
        bring the message back. So call it after the commit. False when the message is due already, or done. An event
        with several destinations is cancelled for those that it has not left for. `reason` is kept in the history. Call
        it while the bus runs, as a node or send-only; elsewhere there is `durable-agent scheduled`. All this holds for
        the methods below, too.
        """
        return await self._here.database.transaction(
            delayed.cancel_message,
            message,
            actor=self.service,
            reason=reason,
            keep_body=self.settings.history_bodies,
        )

    @checked
    async def run_now(self, message: UUID) -> bool:
        """Make a scheduled message due at once. False when the message is due already, or done.

        Commits by itself, as cancel() does.
        """
        return await self._here.database.transaction(delayed.run_message_now, message)

    @checked
    async def reschedule(self, message: UUID, *, at: datetime | None = None, delay: Duration | None = None) -> bool:
        """Make a scheduled message due at another time: `at`, or `delay` from now. False when it is due already.

        Commits by itself, as cancel() does. Raises InvalidMessage when the message would expire before that time, or be
        older then than the dedupe_window of its receiver, and when not exactly one of both is given.
        """
        moment = due_time(at, delay, self.runtime.clock.now())
        changed = await self._here.database.transaction(
            delayed.reschedule_message, message, at=moment, dedupe_window=self.settings.dedupe_window
        )
        if changed.left and not changed.done:
            raise InvalidMessage(
                f"{message} cannot wait until {moment}: the message would expire, or be too old for its receiver"
            )
        return bool(changed.done)

    @checked
    async def run_schedule(self, name: str) -> bool:
        """Run a recurring schedule once, besides its occurrences; several calls before a node has run it are one run.
        False when no node runs this schedule.

        Commits by itself, as cancel() does: the schedule runs although the handler that asked fails.
        """
        return await self._here.database.transaction(schedules.ask, name, actor=self.service)

    @checked
    async def reschedule_next(self, name: str, *, at: datetime | None = None, delay: Duration | None = None) -> bool:
        """Make the next occurrence of a schedule due at another time. False when there is no such schedule.

        Commits by itself, as cancel() does.
        """
        moment = due_time(at, delay, self.runtime.clock.now())
        return await self._here.database.transaction(schedules.reschedule, name, at=moment, actor=self.service)

    # ------------------------------------------------------------------ run

    def __enter__(self) -> NoReturn:
        raise WiringError("Bus: `with bus` starts no bus; use `async with bus`")

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Self:
        self.runtime.claim()  # until then it may be another's, and nothing of it is stopped
        try:
            if self.mode == "send-only":
                await self.runtime.start_storing()
            else:
                await self.runtime.start()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)  # nobody else closes what was opened
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.runtime.check_loop()
        if self.runtime.is_of_another_loop:  # which has only used it
            return
        life = self.runtime.life
        try:
            await run_to_completion(self.runtime.stop())
        finally:
            if not life.owns_process:
                life.end_watch()
            self.runtime = self._make_runtime()

    async def serve(self) -> None:
        """Run until SIGINT or SIGTERM: the first drains, a second ends the process at once.

        A signal within 0.3 s of the first counts as its echo: wrappers of processes send such.
        The process is taken for the bus's own. A fault that cannot be survived, such as an agent that does not end,
        ends it with an exit code and a line of log: see the setting `on_stuck`.
        """
        life = self.runtime.life
        if self.mode == "send-only":
            log.warning('mode="send-only": this process sends and handles nothing; it waits for a signal to end')
        try:
            await serving.serve(self, life)
        finally:
            life.end_watch()

    def run(self) -> None:
        """Run serve() as a whole process, which threads of handlers that never end do not keep alive.

        SIGINT and SIGTERM stay its own afterwards: any further one ends the process at once. Raises WiringError inside
        a running event loop.
        """
        serving.run(self, self.runtime.life)

    @property
    def runtime(self) -> Runtime:
        """The runtime of this process. One that a closed event loop has left behind is given up."""
        if self._runtime.is_left_behind:
            self._runtime.give_up()
            self._runtime = self._make_runtime()
        return self._runtime

    @runtime.setter
    def runtime(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def application(self) -> Application:
        """Declarations of this bus."""
        return self._application

    @contextmanager
    def running_on(self, runtime: Runtime) -> Iterator[None]:
        """Use this runtime in this block, instead of the bus's own: how durable.testing puts a bus into memory."""
        own, before = self.runtime, self._substitute
        self.runtime = self._substitute = runtime
        try:
            yield
        finally:
            self.runtime, self._substitute = own, before

    def _begin_anew(self) -> object:
        """Be a bus that does not run, in a process that was forked from the one where it may have run."""
        if not self.runtime.is_used:
            return None
        before, self.runtime = self.runtime, self._make_runtime()
        return before, self._application.offers.begin_anew()

    def _make_runtime(self) -> Runtime:
        return self._substitute or Runtime(self._application, self.settings, self._scope, **self._engines)

    def _refuse_when_running(self, function: str, what: str) -> None:
        if self.runtime.is_running:
            raise WiringError(f"{function}: {what}: declare it before the bus starts; this bus runs already")


def _retry_of(settings: Settings) -> Retry:
    """Return the retry policy of handlers without one of their own."""
    return Retry(settings.retry_immediate, settings.retry_delays, settings.retry_jitter, settings.retry_max_age)


def _check_endpoint(function: str, name: str | None) -> None:
    if name is not None and not (0 < len(name) <= _LONGEST_ENDPOINT and name.isprintable()):
        raise InvalidSetting(
            f"{function}: name={name!r}: give 1 to {_LONGEST_ENDPOINT} characters of printable text, such as 'orders'"
        )
