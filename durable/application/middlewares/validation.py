"""Validation middleware: checks a message where it is sent, and before a handler sees it.

send      as its receiver will: its class's types and validators, over its bytes; then the checks --> InvalidMessage
handle    the checks; its class has checked it when it was decoded                                --> dead letter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from durable.application.incoming import Incoming
from durable.application.middleware import HandleNext, Middleware, SendNext
from durable.arguments import checked
from durable.errors import InvalidMessage, text_of
from durable.messages import codec
from durable.outbox.envelope_factory import Outgoing, blank

Check = Callable[[Any], object]
"""Raises, or returns False, when there is something wrong with a message."""


class Validation(Middleware):
    """Validates every message by its class, and by the checks of its class and of the classes that it derives from:
    `Validation({OrderPlaced: lambda order: order.total > 0})`.

    A message that is refused when it is sent raises InvalidMessage at the call, one that is refused when it is to be
    handled becomes a dead letter, without another attempt.
    """

    @checked
    def __init__(self, checks: Mapping[type, Check] | None = None) -> None:
        self._checks = dict(checks or {})
        self._of_class: dict[type, Sequence[Check]] = {}

    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        _decode_as_receivers_do(outgoing.message)
        self._check(outgoing.message)
        return call_next(outgoing)

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        for message in incoming.messages:
            self._check(message)
        return await call_next(incoming)

    def _check(self, message: object) -> None:
        cls = type(message)
        checks = self._of_class.get(cls)
        if checks is None:
            checks = self._of_class[cls] = [self._checks[base] for base in cls.__mro__ if base in self._checks]
        for check in checks:
            try:
                refused = check(message) is False
            except Exception as error:  # the application's, whatever it is
                raise InvalidMessage(f"{cls.__qualname__} is refused: {text_of(error)}") from error
            if refused:
                raise InvalidMessage(f"{cls.__qualname__} is refused by {_name(check)}; correct the message")


def _decode_as_receivers_do(message: object) -> None:
    """Decode a message as its receivers do. Raises InvalidMessage. Instances of most classes can be made with values
    that their types do not allow.
    """
    draft = blank(message)
    codec.refuse_unfaithful(message, codec.encode(message, draft), draft.content_type)


def _name(check: Check) -> str:
    return getattr(check, "__qualname__", repr(check))
