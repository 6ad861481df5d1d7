"""From a message to its envelopes: name, body, destinations, times and ids.

A message sent while another is handled carries that one's correlation id, and its id as causation id, so that a
conversation can be followed over any number of services. Its own id follows from that one's: when the handler runs
again, for whatever reason, it sends the same ids again, and what was received before is recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypedDict, Unpack
from uuid import UUID, uuid5

from durable import codec, screening
from durable.clock import Clock
from durable.envelope import Envelope, new_id
from durable.errors import InvalidMessage
from durable.messages import name_of
from durable.ordering import Place
from durable.routing import LOCAL, Routes
from durable.settings import Settings

REPLY_TO = "reply-to"
TENANT = "tenant"

_BUSINESS_KEYS = UUID("6f0d1b4e-5c0a-5d57-9a3c-2d8f6b1e7a94")
"""The namespace of ids that are made of business keys; any fixed one would do."""


class SendOptions(TypedDict, total=False):
    """What send() and publish() take besides the message."""

    deliver_by: datetime | timedelta
    """Expire the message when it has not been handled by then; an aware datetime, or a time from now."""
    delay: timedelta | float
    """Send it only after this time (a timedelta or seconds)."""
    at: datetime
    """Send it only at this time (aware)."""
    headers: Mapping[str, str]
    """The application's own headers: text without control characters, at most 100."""
    key: str
    """Such as "order-17": messages of one key are handled one after another, in the order of their commits."""
    tenant: str
    """Whose message it is, for handlers that are fair: a header of this name."""
    reply_to: str
    """Where `ctx.reply()` sends the answer."""
    id_from: str
    """A business key, such as "invoice-17": messages of this service and type under one key are one message."""


class Cause:
    """The message that is being handled: what is sent meanwhile follows from it, in the order in which it is sent."""

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope
        self._sent = 0

    def next_id(self, service: str, message_type: str) -> UUID:
        """The id of the next message of this attempt. A service has one handler of a message, so its name will do."""
        self._sent += 1
        return uuid5(self.envelope.id, f"{service}/{self._sent}/{message_type}")


class Composer:
    """Makes the envelopes of one service."""

    def __init__(
        self,
        service: str,
        routes: Routes,
        settings: Settings,
        clock: Clock,
        *,
        resolve: Callable[[str, str], str] = lambda uri, _message_type: uri,
    ) -> None:
        self._service = service
        self._routes = routes
        self._max_message_bytes = settings.max_message_bytes
        self._dedupe_window = settings.dedupe_window
        self._clock = clock
        self._resolve = resolve

    def command(
        self, message: object, *, to: str | None = None, cause: Cause | None = None, **options: Unpack[SendOptions]
    ) -> Envelope:
        """The envelope of a command; raises RoutingError without exactly one destination, InvalidMessage, and
        InvalidSetting when no transport could ever send to `to`."""
        message_type = name_of(type(message))
        if to is not None:
            to = self._resolve(to, message_type)  # declared routes were resolved when they were declared
        destination = self._routes.for_send(message_type, to)
        return self._compose(message, [destination], cause, options)[0]

    def event(
        self, message: object, *, cause: Cause | None = None, **options: Unpack[SendOptions]
    ) -> tuple[UUID, list[Envelope]]:
        """The id of an event and an envelope for each subscriber, all with this id; raises InvalidMessage."""
        destinations = self._routes.for_publish(name_of(type(message)))
        if not destinations:
            codec.encode(message)  # an event that nobody wants is still checked
            return new_id(), []
        envelopes = self._compose(message, destinations, cause, options)
        return envelopes[0].id, envelopes

    def cascaded(self, message: object, *, cause: Cause | None) -> list[Envelope]:
        """The envelopes of a message that a handler returned: an event when it has subscribers, else a command."""
        if self._routes.is_event(name_of(type(message))):
            return self.event(message, cause=cause)[1]
        return [self.command(message, cause=cause)]

    def place(self, envelope: Envelope) -> Place:
        """Behind whom it queues in this service's inbox, or in its outbox."""
        places = self._routes.places
        return places.incoming(envelope) if envelope.destination == LOCAL else places.outgoing(envelope)

    def _compose(
        self, message: object, destinations: Sequence[str], cause: Cause | None, options: SendOptions
    ) -> list[Envelope]:
        now = self._clock.now()
        message_type = name_of(type(message))
        envelope_id = self._id(message_type, cause, options)
        headers = dict(options.get("headers", {}))
        if "reply_to" in options:
            headers[REPLY_TO] = options["reply_to"]
        if "tenant" in options:
            headers[TENANT] = options["tenant"]
        body = codec.encode(message)
        envelopes = [
            Envelope(
                id=envelope_id,
                message_type=message_type,
                destination=destination,
                source=self._service,
                correlation_id=cause.envelope.correlation_id if cause else envelope_id,
                causation_id=cause.envelope.id if cause else None,
                partition_key=options.get("key"),
                headers=headers,
                body=body,
                sent_at=now,
                deliver_by=_moment(options.get("deliver_by"), now),
                execution_time=_execution_time(options, now),
            )
            for destination in destinations
        ]
        for envelope in envelopes:
            self._refuse_distant(envelope)
        if options.get("key") == "":
            raise InvalidMessage(
                f"{type(message).__qualname__} cannot be sent: key is empty; leave it out, or name one"
            )
        if reason := screening.flaw(envelopes[0], max_message_bytes=self._max_message_bytes):
            raise InvalidMessage(f"{type(message).__qualname__} cannot be sent: {reason}")
        return envelopes

    def _id(self, message_type: str, cause: Cause | None, options: SendOptions) -> UUID:
        key = options.get("id_from")
        if key is not None:
            if not key or not key.isprintable():
                raise InvalidMessage(f"id_from={key!r}: a business key is printable text, such as 'invoice-17'")
            return uuid5(_BUSINESS_KEYS, f"{self._service}/{message_type}/{key}")
        return cause.next_id(self._service, message_type) if cause else new_id()

    def _refuse_distant(self, envelope: Envelope) -> None:
        """Its id dates from now: a peer that gets it after the dedupe window could not tell it from a duplicate."""
        due = envelope.execution_time
        if due is None or due.tzinfo is None or envelope.destination == LOCAL:
            return
        if due - envelope.sent_at >= self._dedupe_window:
            raise InvalidMessage(
                f"a message for {envelope.destination} may be put off by less than dedupe_window "
                f"({self._dedupe_window}); schedule a message to this service's own handler, which sends it then"
            )


def _execution_time(options: SendOptions, now: datetime) -> datetime | None:
    if "at" in options and "delay" in options:
        raise InvalidMessage("give at= or delay=, not both")
    return options.get("at") or _moment(options.get("delay"), now)


def _moment(value: datetime | timedelta | float | None, now: datetime) -> datetime | None:
    """A time, or a time from now; seconds are a time from now."""
    if isinstance(value, timedelta):
        return now + value
    if isinstance(value, int | float):
        return now + timedelta(seconds=value)
    return value
