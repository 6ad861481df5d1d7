"""Envelopes of a message: name, body, destinations, times and ids.

A message sent while another is handled carries that one's correlation id, and its id as causation id, so that a
conversation can be followed over any number of services. Its own id follows from that one's: when the handler runs
again, for whatever reason, it sends the same ids again, and what was received before is recognised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, TypedDict, Unpack
from uuid import UUID, uuid5

import msgspec

from durable.arguments import Argument, annotations_of, refuse_misfits, refuse_unknown
from durable.clock import Clock
from durable.duration import Duration, duration
from durable.encryption.ring import KeyRing
from durable.envelope import DUE, REPLY_TO, TENANT, Envelope, LeasedEnvelope, derived_id, is_generated, new_id
from durable.errors import InvalidMessage, InvalidSetting, WiringError
from durable.messages import codec
from durable.messages import validation as screening
from durable.messages.ordering import QueueKeys
from durable.messages.registry import class_name, content_type_of, name_of, registered
from durable.messages.reply_to import Answers
from durable.messages.routing import LOCAL, Routes
from durable.messages.scope import peer_of
from durable.messages.versions import unversioned
from durable.plain import plain_text, plain_time
from durable.settings import Settings
from durable.telemetry import log

Kind = Literal["command", "event", "cascade", "answer"]


_BUSINESS_KEYS = UUID("6f0d1b4e-5c0a-5d57-9a3c-2d8f6b1e7a94")
"""The namespace of ids that are made of business keys; any fixed one would do."""

_LESS = "; send less, such as a reference, or raise the setting here and at the receivers"
"""The remedy for a message beyond a limit."""

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:.")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_NO_ID = UUID(int=0)
NO_ENVELOPE = Envelope(
    id=_NO_ID,
    message_type="",
    destination="",
    source="",
    correlation_id=_NO_ID,
    body=b"",
    sent_at=datetime(2000, 1, 1, tzinfo=UTC),
)


class SendOptions(TypedDict, total=False):
    """Options of send() and publish(). None leaves an option out, except for deliver_by."""

    deliver_by: datetime | Duration | None
    """Expire the message when it has not been handled by then; an aware datetime, or a time from now. None: never, even
    where a deadline would be inherited."""
    delay: Duration | None
    """Send it only after this time (seconds, "10m" or a timedelta)."""
    at: datetime | None
    """Send it only at this time (aware)."""
    headers: Mapping[str, str] | None
    """The application's own headers: text without control characters, at most 100."""
    key: str | None
    """Such as "order-17": messages of one key are handled one after another, in the order of their commits."""
    tenant: str | None
    """The tenant of the message, for fair handlers: a header of this name."""
    reply_to: str | None
    """The address to which `ctx.reply()` sends the answer."""
    id_from: str | None
    """A business key, such as "invoice-17": messages of this service and type, of any version, under one key are
    one message."""


class Parent(NamedTuple):
    """Handled message, as the ids of what its handler sends name it. `use` tells it from other messages under its id:
    of other peers, and of an id that may be used again once it is forgotten.
    """

    id: UUID
    use: str = ""

    @classmethod
    def of(cls, lease: LeasedEnvelope) -> Self:
        envelope, peer = lease.envelope, peer_of(lease.endpoint)
        of_peer = "" if peer is None else f"<-{peer}"
        sent_at = "" if is_generated(envelope.id) else f"@{(envelope.sent_at - _EPOCH) // _MICROSECOND}"
        return cls(envelope.id, of_peer + sent_at)


class Cause:
    """Cause of the messages that are sent now: the message in handling, or a list of them in one call. Sent messages
    get ids that follow from it, in the order in which they are sent.

    `deliver_by` is that of what is sent meanwhile, where its sender gives none. `envelope` is None for a list, whose
    messages may be of several conversations; `parents` are all of them.
    """

    def __init__(
        self,
        envelope: Envelope | None,
        deliver_by: datetime | None = None,
        *,
        handler: str = "",
        parents: Sequence[Parent] = (),
    ) -> None:
        self.envelope = envelope
        self.deliver_by = deliver_by
        self.is_over = False
        """True when the message has ended: its tasks can send nothing more."""
        self._handler = handler
        self._parents = [*parents] if envelope is None or parents else [Parent(envelope.id)]
        self._sent = 0

    def next_id(self, service: str, message_type: str) -> UUID:
        """The id of the next message of this attempt: the same in each attempt of this handler."""
        self._sent += 1
        first, *others = self._parents
        told = first.use + "".join(f"/{each.id}{each.use}" for each in others)
        return derived_id(first.id, f"{service}/{self._handler}/{self._sent}/{unversioned(message_type)}{told}")


class Outgoing(msgspec.Struct, frozen=True, eq=False):
    """A message on its way into the outbox. Immutable: `replace` and `with_headers` make another one."""

    message: object
    kind: Kind = "command"
    """Was it sent, published, returned by a handler, or sent to where a message asked for its answer? A cascade is an
    event if it has subscribers, else a command; an answer is a command to an address that must be allowed."""
    to: str | None = None
    """The destination used instead of the declared one; events have none."""
    options: SendOptions = {}
    """The arguments of send() besides the message."""
    caused_by: Envelope | None = None
    """The message that is being handled meanwhile, if it is one."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that it is sent with, besides those that durable adds."""
        return self.options.get("headers") or {}

    def replace(self, **changes: Any) -> Self:
        """The same with other fields: `outgoing.replace(message=other)`."""
        return msgspec.structs.replace(self, **changes)

    def with_headers(self, headers: Mapping[str, str]) -> Self:
        """The same with these headers besides its own, which they override."""
        return self.replace(options={**self.options, "headers": {**self.headers, **headers}})


class Sending(Outgoing, frozen=True, eq=False):
    """A message on its way into one outbox."""

    cause: Cause | None = None
    remember: Callable[[Sequence[Envelope]], None] = lambda _envelopes: None
    """Takes the envelopes that are made of it."""


Send = Callable[[Outgoing], UUID | None]


class EnvelopeFactory:
    """Factory of the envelopes of one service. `around` returns the middleware of a call: it is asked for once."""

    def __init__(
        self,
        service: str,
        routes: Routes,
        settings: Settings,
        clock: Clock,
        *,
        resolve: Callable[[str, str], str] = lambda uri, _message_type: uri,
        around: Callable[[Send], Send] = lambda send: send,
        ring: KeyRing | None = None,
    ) -> None:
        self.service = service
        self._routes = routes
        self._limits = settings.limits
        self._validates = settings.validate_sent
        self._dedupe_window = settings.dedupe_window
        self._clock = clock
        self._resolve = resolve
        self._unwanted: set[str] = set()
        self._around = around
        self._answers = Answers(settings)
        self._ring = ring or KeyRing()

    @cached_property
    def send(self) -> Send:
        """Make the envelopes of a message and let its outbox remember them, within the middleware of sending."""
        return self._around(self._send)

    def _send(self, outgoing: Outgoing) -> UUID:
        if not isinstance(outgoing, Sending):
            raise TypeError("a middleware passes on the Outgoing that it was given, or a replace() of it")
        message = outgoing.message
        message_type = name_of(type(message))
        destinations = self._destinations(outgoing.kind, message_type, outgoing.to)
        if outgoing.options.get("reply_to") == LOCAL:
            _refuse_lost_answer(message_type, destinations)
        # An event that nobody wants is checked all the same.
        envelopes = self._compose(message, message_type, destinations or [LOCAL], outgoing.cause, outgoing.options)
        if not destinations:
            self._tell_of_no_subscriber(message_type)
        outgoing.remember(envelopes if destinations else [])
        return envelopes[0].id

    def _destinations(self, kind: Kind, message_type: str, to: str | None) -> Sequence[str]:
        """Return the destinations. Raises RoutingError, and InvalidSetting when no transport serves `to`."""
        if kind == "answer" and to is not None:
            self._refuse_stranger(to, message_type)
        if kind == "event" or (kind != "command" and to is None and self._routes.is_event(message_type)):
            return self._routes.for_publish(message_type)
        if to is not None and to != LOCAL:
            to = self._resolve(to, message_type)  # declared routes were resolved when they were declared
        return [self._routes.for_send(message_type, to)]

    def command(self, message: object, *, to: str | None = None, **options: Unpack[SendOptions]) -> Envelope:
        """The envelope of a command that nothing caused; raises RoutingError, InvalidMessage, and InvalidSetting."""
        message_type = name_of(type(message))
        return self._compose(message, message_type, self._destinations("command", message_type, to), None, options)[0]

    def cascaded(self, message: object, **options: Unpack[SendOptions]) -> list[Envelope]:
        """The envelopes of a message that a schedule brings: an event when it has subscribers, else a command."""
        message_type = name_of(type(message))
        return self._compose(message, message_type, self._destinations("cascade", message_type, None), None, options)

    def _tell_of_no_subscriber(self, message_type: str) -> None:
        """Warn once about an event without subscribers: no mistake, but perhaps a misspelt subscription."""
        if message_type not in self._unwanted:
            self._unwanted.add(message_type)
            log.warning(
                "event %s was published without a receiver: no subscriber and no handler here; declare one by "
                "bus.subscribe()",
                message_type,
            )

    def reply_to(self, message_type: str, answers: Sequence[type]) -> str:
        """Return the address of this service for these answers; raises InvalidMessage unless they are expected."""
        expected = self._routes.answers
        names = [name_of(cls) for cls in answers]
        for name in names:
            if name not in expected:
                raise InvalidMessage(
                    f"request {message_type}: answer {name} is not expected; declare bus.expects({class_name(name)})"
                )
        addresses = {expected[name] for name in names}
        if len(addresses) != 1:
            raise InvalidMessage(f"request {message_type}: name the classes of its answers, expected at one address")
        return addresses.pop()

    def destinations_of(self, uri: str) -> list[str]:
        """The destinations that messages to this address have: one, or one for each type where they are told apart.

        Raises InvalidSetting when nothing could ever be sent there.
        """
        found: dict[str, None] = {}
        refused: InvalidSetting | None = None
        for message_type in [name for name, _ in registered()] or ["any"]:
            try:
                found[self._resolve(uri, message_type)] = None
            except InvalidSetting as error:  # perhaps that of one type alone
                refused = error
        if not found and refused is not None:
            raise refused
        return list(found)

    def place(self, envelope: Envelope) -> QueueKeys:
        """Return the ordering key and share of a message in this service's inbox, or in its outbox."""
        places = self._routes.places
        return places.incoming(envelope) if envelope.destination == LOCAL else places.outgoing(envelope)

    def _refuse_stranger(self, address: str, message_type: str) -> None:
        """Raise InvalidMessage unless an answer may go to this address."""
        if address == LOCAL:  # of this service: whoever asked over HTTP reads the answer here
            if message_type not in self._routes.answers:
                raise InvalidMessage(
                    f"answer {message_type} is not expected here; declare bus.expects({class_name(message_type)})"
                )
            return
        declared = {uri for uris in self._routes.destinations().values() for uri in uris}
        declared |= {self._resolved(uri, message_type) for uri in self._answers.written_out}
        try:
            resolved = self._resolve(address, message_type)
        except WiringError as error:
            raise InvalidMessage(f"reply-to {address!r} is no address that can be sent to: {error}") from error
        if resolved not in declared and not self._answers.may_go(address, declared):
            raise InvalidMessage(
                f"reply-to {address!r} is neither a declared destination nor allowed; declare a route to it, or add it "
                "to the setting answer_to"
            )

    def _resolved(self, uri: str, message_type: str) -> str:
        """The destination of an address of the settings, or the address where no transport of this process has it."""
        try:
            return self._resolve(uri, message_type)
        except WiringError:
            return uri

    def _compose(
        self,
        message: object,
        message_type: str,
        destinations: Sequence[str],
        cause: Cause | None,
        options: SendOptions,
    ) -> list[Envelope]:
        """An envelope for each destination, all with one id; raises InvalidMessage, and InvalidSetting: no key."""
        now = plain_time(self._clock.now())
        envelope_id = self._id(message_type, cause, options)
        caused_by = cause.envelope if cause else None
        execution_time = _execution_time(options, now)
        draft = Envelope(  # without its destination and its body, which the codec makes for it
            id=envelope_id,
            message_type=message_type,
            destination="",
            source=self.service,
            correlation_id=caused_by.correlation_id if caused_by else envelope_id,
            causation_id=caused_by.id if caused_by else None,
            partition_key=None if (key := options.get("key")) is None else plain_text(key),
            headers=_headers(message_type, options, execution_time) if options else {},
            content_type=content_type_of(type(message)),
            body=b"",
            sent_at=now,
            deliver_by=_moment(options.get("deliver_by", cause.deliver_by if cause else None), now),
            execution_time=execution_time,
        )
        body = codec.encode(message, draft)
        if self._validates:
            codec.refuse_unfaithful(message, body, draft.content_type)
        envelopes = [msgspec.structs.replace(draft, destination=plain_text(each), body=body) for each in destinations]
        self._refuse_unfit(envelopes, type(message).__qualname__, options)
        return self._ring.sealed(envelopes) if self._ring.must_seal(message_type) else envelopes

    def _refuse_unfit(self, envelopes: Sequence[Envelope], name: str, options: SendOptions) -> None:
        first = envelopes[0]
        if first.execution_time is not None:
            for envelope in envelopes:
                self._refuse_distant(envelope)
        for option in ("key", "tenant"):
            if options.get(option) == "":
                raise InvalidMessage(f"{name} cannot be sent: {option} is empty; leave it out, or name one")
        if reason := screening.find_error(first, **self._limits):
            raise InvalidMessage(f"{name} cannot be sent: {reason}{_LESS if ' than max_' in reason else ''}")
        if screening.never_due(first):
            raise InvalidMessage(
                f"{name} cannot be sent: the message would be due at {first.execution_time}, when its deliver_by "
                f"({first.deliver_by}) has passed; give it longer, or send it earlier"
            )

    def _id(self, message_type: str, cause: Cause | None, options: SendOptions) -> UUID:
        key = options.get("id_from")
        if key is not None:
            if not key or not key.isprintable():
                raise InvalidMessage(f"id_from={key!r}: a business key is printable text, such as 'invoice-17'")
            return uuid5(_BUSINESS_KEYS, f"{self.service}/{unversioned(message_type)}/{plain_text(key)}")
        return cause.next_id(self.service, message_type) if cause else new_id()

    def _refuse_distant(self, envelope: Envelope) -> None:
        """Refuse a message that is due after the dedupe window: its id dates from now, and its receiver could not tell
        it from a duplicate by then.
        """
        due = envelope.execution_time
        if due is None or due.tzinfo is None or envelope.destination == LOCAL:
            return
        if due - envelope.sent_at >= self._dedupe_window:
            raise InvalidMessage(
                f"a message for {envelope.destination} may be put off by less than dedupe_window "
                f"({self._dedupe_window}); schedule a message to this service's own handler, which sends it then"
            )


def check_options(function: str, options: SendOptions, *, to: object = None) -> None:
    """Raise InvalidSetting for an option that is none, and InvalidMessage for a value of another kind."""
    known = annotations_of(SendOptions)
    refuse_unknown(function, options, known, "option")
    given = [Argument(name, value, known[name]) for name, value in options.items() if value is not None]
    refuse_misfits(function, [Argument("to", to, str | None), *given], InvalidMessage)
    for name in ("at", "deliver_by"):
        moment = options.get(name)
        if isinstance(moment, datetime) and moment.tzinfo is None:
            raise InvalidMessage(f"{function}: {name}={moment} has no time zone; give an aware datetime")


def blank(message: object) -> Envelope:
    """Make an envelope without a destination, to encode a message that is only shown, or compared."""
    facts = {"message_type": name_of(type(message)), "content_type": content_type_of(type(message))}
    return msgspec.structs.replace(NO_ENVELOPE, **facts)


def _headers(message_type: str, options: SendOptions, execution_time: datetime | None) -> dict[str, str]:
    headers = dict(options.get("headers") or {})
    if (reply_to := options.get("reply_to")) is not None:
        _refuse_no_address(message_type, reply_to)
        headers[REPLY_TO] = reply_to
    if (tenant := options.get("tenant")) is not None:
        headers[TENANT] = tenant
    if execution_time is not None:
        headers[DUE] = execution_time.isoformat()
    return {plain_text(name): plain_text(value) for name, value in headers.items()}


def _refuse_lost_answer(message_type: str, destinations: Sequence[str]) -> None:
    """Refuse an answer to `local` from another service, which would send it to itself."""
    if remote := [each for each in destinations if each != LOCAL]:
        raise InvalidMessage(
            f"{message_type} cannot be sent: reply_to='local' is this service, and the message goes to {remote[0]}; "
            "give an address at which that service reaches this one, by reply_to= or bus.expects(..., at=)"
        )


def _refuse_no_address(message_type: str, reply_to: str) -> None:
    """Refuse a reply_to that is no address. The receiver decides whether it can answer there: its transports may
    differ.
    """
    if reply_to != LOCAL and not _URI.match(reply_to):
        raise InvalidMessage(
            f"{message_type} cannot be sent: reply_to={reply_to!r} is no address; give one such as 'tcp://orders:2302'"
        )


def _execution_time(options: SendOptions, now: datetime) -> datetime | None:
    at, delay = options.get("at"), options.get("delay")
    if at is not None and delay is not None:
        raise InvalidMessage("at= and delay= exclude each other; give one of them")
    return _moment(at or delay, now)


def due_time(at: datetime | None, delay: Duration | None, now: datetime) -> datetime:
    """The one of both that is given, as a time; raises InvalidMessage."""
    moment = at if delay is None else _moment(delay, now)
    if moment is None or (at is not None and delay is not None):
        raise InvalidMessage("due time: give at= or delay=, one of them")
    if moment.tzinfo is None or not screening.EARLIEST <= moment <= screening.LATEST:
        raise InvalidMessage(f"at={moment}: give an aware datetime within the calendar")
    return moment


def _moment(value: datetime | Duration | None, now: datetime) -> datetime | None:
    """A time, or a time from now; raises InvalidMessage for a time beyond the calendar."""
    if value is None:
        return None
    if isinstance(value, datetime):
        return plain_time(value)
    try:
        return now + duration(value)
    except ValueError as error:
        raise InvalidMessage(str(error)) from None
    except OverflowError:
        raise InvalidMessage(f"{value!r} from now lies outside the calendar; give a shorter time") from None
