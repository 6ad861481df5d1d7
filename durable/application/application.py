"""Application: its declarations, and the transports that its addresses need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from durable.application.handlers import Handler, OnDeadLetter
from durable.application.middleware import MiddlewareStack
from durable.application.retry import Policy, Retry, RetryAfter
from durable.application.schedules import Schedule
from durable.calls.contract import Contract
from durable.calls.provider import CallProvider
from durable.encryption.ring import KeyRing
from durable.envelope import Envelope, LeasedEnvelope
from durable.errors import InvalidMessage, InvalidSetting, RoutingError, UnknownMessageType
from durable.grammar import suggestion
from durable.messages import codec, upcasting
from durable.messages.registry import class_of, content_type_of, is_encrypted, name_of, registered
from durable.messages.routing import LOCAL, Routes
from durable.messages.scope import listener_of
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.redaction import printable
from durable.schemes import normal_scheme
from durable.storage.leases import Burials
from durable.storage.placements import Declared
from durable.telemetry import BatchSpans, log
from durable.transports.base import Transport


class Listening(NamedTuple):
    """Declared listener: its URI and the stable key of its envelopes."""

    uri: str
    endpoint: str


@dataclass
class Application:
    """Declarations of an application."""

    service: str
    routes: Routes = field(default_factory=Routes)
    handlers: dict[str, Handler] = field(default_factory=dict)
    retry: Retry = field(default_factory=Retry)
    """The retry policy of handlers without one of their own."""
    by_error: dict[type[Exception], Retry | RetryAfter] = field(default_factory=dict)
    listeners: list[Listening] = field(default_factory=list)
    transports: list[Transport] = field(default_factory=list)
    mounted: dict[str, Counter[str]] = field(default_factory=dict)
    """The counts of the apps of bus.asgi() since they were made, by `asgi:` and their endpoint."""
    stack: MiddlewareStack = field(default_factory=MiddlewareStack)
    batch_spans: BatchSpans | None = None
    schedules: dict[str, Schedule] = field(default_factory=dict)
    ring: KeyRing = field(default_factory=KeyRing)
    """Keys that encrypt and decrypt bodies."""
    offers: CallProvider = field(default_factory=CallProvider)
    """Services that can be called here; they may change while the bus runs."""
    connected: list[str] = field(default_factory=list)
    """Addresses of the directories of other services."""
    called: list[tuple[Contract, str | None]] = field(default_factory=list)
    """Contracts of callers, each with its address; None: this process."""

    def policy(self, handler: Handler) -> Policy:
        """Return the policy for failures of this handler: its own rules come before those of the service."""
        return Policy(handler.retry or self.retry, {**self.by_error, **handler.by_error})

    def owns(self, lease: LeasedEnvelope) -> bool:
        """Tell whether a message of the inbox was sent to this service, rather than to another with the same tables."""
        if lease.endpoint == LOCAL:
            return lease.envelope.source == self.service
        return listener_of(lease.endpoint) in {self.service} | self.endpoints

    @property
    def endpoints(self) -> set[str]:
        """Names under which this bus receives messages."""
        names = {listening.endpoint for listening in self.listeners}
        return names | {each.removeprefix("asgi:") for each in self.mounted}

    def burials(self, by_default: str) -> Burials:
        """Return the messages that become dead letters when too late; `by_default` is the setting on_expiry."""
        others = [name for name, handler in self.by_type().items() if handler.on_expiry not in (None, by_default)]
        return Burials(by_default == "dead-letter", others)

    def parked_types(self, by_default: OnDeadLetter) -> dict[str, str]:
        """The type of the handler of each message type whose dead letters park; `by_default` as for burials()."""
        return {name: each.message_type for name, each in self.by_type().items() if each.parks(by_default)}

    def declare(self, handler: Handler) -> None:
        """Add a handler. Raises InvalidSetting when one of its messages, or of their older versions, has a handler
        already.
        """
        self.refuse_second("handles", handler.message_type)
        _by_type({**self.handlers, handler.message_type: handler})
        self.handlers[handler.message_type] = handler
        self.routes.handled_here(handler.message_type)
        if handler.ordered:
            self.routes.places.ordered_types.add(handler.message_type)
        if handler.fair_by is not None:
            self.routes.places.shared[handler.message_type] = handler.fair_by

    def refuse_second(self, function: Literal["handles", "expects"], message_type: str) -> None:
        """Raise InvalidSetting when messages of this type are handled, or kept as answers, already."""
        known = self.handlers.get(message_type)
        if known is None:
            return
        remedy = "one handler may call others"
        if known.keeps_answers or function == "expects":
            remedy = "an answer that is expected has no other handler; remove one of the two"
        raise InvalidSetting(f"{function}: {message_type} is handled by {known.name} already; {remedy}")

    def expect(self, message_type: str, at: str) -> None:
        """Let the handler of this type keep its messages, which are answers that come to this address."""
        self.handlers[message_type] = replace(self.handlers[message_type], keeps_answers=True)
        self.routes.answers[message_type] = at

    def answer_in(self, envelope: Envelope, wanted: Sequence[type]) -> Any:
        """Return the answer in this envelope, as the first of these classes that it is, or is upcast to.

        Raises InvalidMessage, MissingKey and Forged.
        """
        by_name = {name_of(cls): cls for cls in wanted}
        types = envelope.message_type, *upcasting.newer_types(envelope.message_type)
        cls = next((by_name[each] for each in types if each in by_name), None)
        if cls is None:
            names = " or ".join(by_name)
            raise InvalidMessage(f"answer {envelope.id}: of type {envelope.message_type}, not {names}; wait for it")
        return upcasting.decode(self.ring.opened(envelope), cls)

    def by_type(self) -> dict[str, Handler]:
        """The handler of each message type that is handled here: its own, and those that are upcast to it.

        Raises InvalidSetting when two handlers could have one, by an upcaster that was declared after them.
        """
        return _by_type(self.handlers)

    def handler_types(self) -> dict[str, str]:
        """The type of the handler of each message type that is handled here; a newer one handles what is upcast."""
        return {name: handler.message_type for name, handler in self.by_type().items()}

    def handled_classes(self) -> dict[str, type]:
        """The class under which messages of each type are handled here; more may be declared later."""
        return {name: handler.cls for name, handler in self.by_type().items()}

    def placements(self) -> list[Declared]:
        """The place of every message type that is handled here, and of every declared destination."""
        places = self.routes.places
        types = [Declared("incoming", name, places.of_type(name)) for name in self.by_type()]
        return types + [Declared("outgoing", to, places.of_destination(to)) for to in self.destinations()]

    def check(self, envelope_factory: EnvelopeFactory) -> None:
        """Raise WiringError, or InvalidMessage, for a fault that would fail the first message."""
        for name in self.by_type().keys() | self.routes.destinations().keys():
            _check_codec(class_of(name))
        self._check_keys()
        for handler in self.handlers.values():
            self._check_returns(handler)
        for schedule in self.schedules.values():
            schedule.check(envelope_factory)

    def _check_keys(self) -> None:
        """Raise InvalidSetting where messages are to be encrypted and there is no key, or no way to encrypt."""
        if self.ring.is_configured:
            self.ring.load()
            return
        sealed = [name for name in self.by_type().keys() | self.routes.destinations().keys() if is_encrypted(name)]
        if self.ring.everything or sealed:
            what = "encrypt_all is on" if self.ring.everything else f"{min(sealed)} is declared with encrypted=True"
            raise InvalidSetting(
                f"encryption_keys: no key is given, and {what}; give keys by encryption_keys, encryption_key_file or "
                "Bus.keys_from()"
            )

    def check_retention(self, dedupe_window: timedelta) -> None:
        """Raise InvalidSetting when a message could be retried for longer than its id is remembered."""
        horizon = max((self.policy(handler).horizon for handler in self.handlers.values()), default=timedelta(0))
        if horizon >= dedupe_window:
            raise InvalidSetting(
                f"dedupe_window: {dedupe_window} is not longer than the retries go on ({horizon}); "
                "a message could come again after its id was forgotten"
            )

    def warn(self) -> None:
        """Log declarations that are valid, but hardly meant."""
        if self.listeners and not self.handlers and not self.offers.offers().offers:
            uris = ", ".join(listening.uri for listening in self.listeners)
            log.warning("no handler is declared: every message that arrives at %s becomes a dead letter", uris)

    def _check_returns(self, handler: Handler) -> None:
        """Check by its annotation that the result of a handler, which is sent, has a destination."""
        for cls in handler.returns:
            names = [name for name, known in registered() if known is cls]
            if not names and any(issubclass(known, cls) for _, known in registered()):
                continue  # the base class of messages: which of them is known at run time only
            if not names:
                raise UnknownMessageType(
                    f"handler {handler.name}: return type {cls.__qualname__} is no message; decorate that with "
                    "@message(name), or correct the annotation"
                )
            if not self.routes.is_event(names[0]):
                self._check_route(handler, names[0])

    def _check_route(self, handler: Handler, message_type: str) -> None:
        try:
            self.routes.for_send(message_type)
        except RoutingError as error:
            raise RoutingError(f"handler {handler.name}: the returned message cannot be sent: {error}") from error

    def destinations(self) -> list[str]:
        """Every remote destination that is declared, once each."""
        declared = self.routes.destinations().values()
        return sorted({uri for uris in declared for uri in uris if uri != LOCAL})


def _check_codec(cls: type) -> None:
    try:
        codec.check_class(cls, content_type_of(cls))
    except NameError as error:
        raise InvalidSetting(f"{cls.__qualname__}: an annotation cannot be resolved: {error}") from error


def _by_type(handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    found = dict(handlers)
    for older in upcasting.upcast_types():
        chain = [handlers[name] for name in (older, *upcasting.newer_types(older)) if name in handlers]
        if len(chain) > 1:
            raise InvalidSetting(
                f"{older} is handled by {chain[0].name}, and upcast for {chain[1].name}; remove that handler, "
                "or the upcaster"
            )
        for handler in chain:
            found[older] = handler
    return found


class Transports:
    """The transports of this process by URI scheme.

    Those in `optional` are made when the first URI of their scheme is met: what they are built on may not be installed.
    """

    def __init__(
        self, transports: Sequence[Transport], optional: Mapping[str, Callable[[], Transport]] | None = None
    ) -> None:
        self._by_scheme = {scheme: transport for transport in transports for scheme in transport.schemes}
        self._optional = dict(optional or {})

    def of(self, uri: str) -> Transport:
        """The transport of this URI; raises InvalidSetting for a scheme that none understands."""
        uri = normal_scheme(uri)
        scheme, separator, rest = uri.partition("://")
        if "@" in rest.partition("/")[0]:  # before any other error, for each of them shows the address
            raise InvalidSetting(
                f"{printable(scheme)}://...: an address has no user and no password; secrets belong in settings"
            )
        if scheme not in self._by_scheme and scheme in self._optional:
            made = self._optional[scheme]()
            self._by_scheme = dict.fromkeys(made.schemes, made) | self._by_scheme
        transport = self._by_scheme.get(scheme)
        if transport is None or not separator:
            names = sorted({*self._by_scheme, *self._optional})
            known = ", ".join(f"{name}://" for name in names)
            told = printable(uri) or repr(uri)
            if not separator:
                raise InvalidSetting(
                    f"{told}: no transport has this scheme, for it has none; give an address such as "
                    f"tcp://127.0.0.1:2301, not the name of a service; known: {known}"
                )
            raise InvalidSetting(f"{told}: no transport has this scheme{suggestion(scheme, names)}; known: {known}")
        transport.check(uri)
        return transport

    def resolve(self, uri: str, message_type: str) -> str:
        """The destination of messages of this type that are sent to `uri`; raises InvalidSetting."""
        return self.of(uri).resolve(normal_scheme(uri), message_type)
