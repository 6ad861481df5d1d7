"""The call of a handler: its messages, their transaction, and the context of each message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Self, Unpack
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable.application.context import CircuitControl, PauseRequest
from durable.envelope import IN_REPLY_TO, REPLY_TO, LeasedEnvelope, request_of
from durable.errors import RoutingError
from durable.messages.routing import LOCAL
from durable.outbox.envelope_factory import Cause, SendOptions, check_options
from durable.outbox.outbox import Outbox


class Context:
    """Context of a message while its handler runs. Read-only."""

    __slots__ = ("_asked", "_attempt", "_cause", "_envelope", "_is_own", "_outbox")

    def __init__(
        self,
        lease: LeasedEnvelope,
        attempt: int,
        outbox: Outbox,
        asked: list[PauseRequest] | None = None,
        cause: Cause | None = None,
    ) -> None:
        self._envelope = lease.envelope
        self._is_own = lease.endpoint == LOCAL
        self._outbox = outbox
        self._attempt = attempt
        self._cause = cause
        self._asked = [] if asked is None else asked

    @property
    def circuit(self) -> CircuitControl:
        """Stops this handler, or a destination, on every node: `ctx.circuit.open(for_=60, reason="quota used up")`."""
        return CircuitControl(self._envelope.message_type, self._asked, self._outbox.destinations_of)

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._attempt

    @property
    def id(self) -> UUID:
        """The id of the message, the same at every attempt and in every service: key for work outside the database."""
        return self._envelope.id

    @property
    def message_type(self) -> str:
        """The name under which the message was sent, such as `shop.order-placed`; of an older version, its own."""
        return self._envelope.message_type

    @property
    def source(self) -> str:
        """The service that sent the message."""
        return self._envelope.source

    @property
    def correlation_id(self) -> UUID:
        """The id of the message that began the conversation."""
        return self._envelope.correlation_id

    @property
    def causation_id(self) -> UUID | None:
        """The id of the message whose handler sent this one."""
        return self._envelope.causation_id

    @property
    def request_id(self) -> UUID | None:
        """The id of the message that this one answers by ctx.reply(); None when it is no answer."""
        return request_of(self._envelope)

    @property
    def sent_at(self) -> datetime:
        """The time at which the message was sent, by the sender's clock; an aware datetime."""
        return self._envelope.sent_at

    @property
    def deliver_by(self) -> datetime | None:
        """Time at which the message expires unless handled; pass it to send() for messages that are useless later."""
        return self._envelope.deliver_by

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the message, those of durable and of tracing among them. Read-only."""
        return MappingProxyType(self._envelope.headers)

    def send(self, message: object, *, to: str | None = None, **options: Unpack[SendOptions]) -> UUID:
        """Send a command with the handler's transaction."""
        with self._outbox.caused_by(self._cause):
            return self._outbox.send(message, to=to, **options)

    def publish(self, message: object, **options: Unpack[SendOptions]) -> UUID:
        """Publish an event with the handler's transaction."""
        with self._outbox.caused_by(self._cause):
            return self._outbox.publish(message, **options)

    def reply(self, message: object, **options: Unpack[SendOptions]) -> UUID:
        """Send a command to the address that the sender gave with reply_to=; its header in-reply-to names the message.

        Raises RoutingError if it gave none, and InvalidMessage if another service gave one that is neither a declared
        destination nor allowed by the setting answer_to: the message becomes a dead letter then.
        """
        check_options("reply", options)
        address = self._envelope.headers.get(REPLY_TO)
        if address is None:
            raise RoutingError(f"message {self.id} asks for no reply: the sender gave no reply_to=")
        options["headers"] = {IN_REPLY_TO: str(self.id), **(options.get("headers") or {})}
        with self._outbox.caused_by(self._cause):
            if self._is_own:
                return self._outbox.send(message, to=address, **options)
            return self._outbox.answer(message, to=address, **options)

    def cascade(self, result: object) -> None:
        """Send the messages that a handler returned: one, several in a list or tuple, or None."""
        if result is None:
            return
        with self._outbox.caused_by(self._cause):
            self._outbox.cascade(result)


class Incoming(msgspec.Struct, frozen=True, eq=False):
    """Call of a handler: its messages and context. Immutable; `replace` makes another one."""

    message: object
    """The message; a list of them for a handler that takes a list."""
    session: Session | AsyncSession
    """The transaction that the message is finished in. A sync handler's Session does its I/O in threads only."""
    contexts: Sequence[Context]
    """The context of each message: one, except for a handler that takes a list."""
    handler: str = ""
    """The dotted name of the handler."""

    @property
    def messages(self) -> Sequence[object]:
        """The message in a list of its own, or the list of them."""
        return self.message if isinstance(self.message, list) else (self.message,)

    @property
    def context(self) -> Context:
        """Context of the message, or of the first of the list."""
        return self.contexts[0]

    @property
    def attempt(self) -> int:
        """The number of this attempt at the message, or at the first of the list, from 1 on."""
        return self.contexts[0].attempt

    def replace(self, **changes: Any) -> Self:
        """The same with other fields: `incoming.replace(message=other)`."""
        return msgspec.structs.replace(self, **changes)
