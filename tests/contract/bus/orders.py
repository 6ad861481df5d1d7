"""Messages of the tests of a bus, their addresses, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from durable import (
    Bus,
    HandleNext,
    Incoming,
    Middleware,
    Outgoing,
    Retry,
    SendNext,
    message,
)
from durable.envelope import Envelope, new_id

BILLING = "memory://billing"
MAIL = "memory://mail"
ORDERS = "memory://orders"  # the address of the bus under test
NEVER = Retry(immediate=0, delays=[])
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)  # longer than any test takes to look


@message("contract.order-placed")
class OrderPlaced(msgspec.Struct):
    number: int
    note: str = ""


@message("contract.order-shipped")
class OrderShipped(msgspec.Struct):
    number: int


@message("contract.order-billed")
class OrderBilled(msgspec.Struct):
    number: int


@message("contract.nobody-wants-this")
class NobodyWantsThis(msgspec.Struct):
    number: int = 0


@message("contract.dataclass")
@dataclass
class AsDataclass:
    id: UUID
    total: float


def collect(bus: Bus, cls: type = OrderPlaced, **options: Any) -> list[Any]:
    """Declare a handler that does nothing but collect what it is given."""
    seen: list[Any] = []

    async def handle(given: Any) -> None:
        seen.append(given)

    handle.__annotations__["given"] = cls
    bus.handles(cls, **options)(handle)
    return seen


def arriving(message_type: str = "contract.order-placed", body: bytes = b'{"number":1}') -> Envelope:
    return Envelope(
        id=new_id(),
        message_type=message_type,
        destination=ORDERS,
        source="shop",
        correlation_id=new_id(),
        body=body,
        sent_at=datetime.now(UTC),
    )


tenant: ContextVar[str] = ContextVar("tenant", default="none")


class Watching(Middleware):
    """Keeps what passes by."""

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []
        self.ids: list[UUID | None] = []
        self.handled: list[Incoming] = []

    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        self.sent.append(outgoing)
        self.ids.append(call_next(outgoing))
        return self.ids[-1]

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        self.handled.append(incoming)
        return await call_next(incoming)


class Sending(Middleware):
    """A component of one function, around what is sent."""

    def __init__(self, function: Callable[[Outgoing, SendNext], UUID | None]) -> None:
        self._function = function

    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        return self._function(outgoing, call_next)
