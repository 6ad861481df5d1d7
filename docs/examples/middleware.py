"""A shop whose messages carry their tenant, are validated and logged: the components of docs/middleware.md."""

from contextvars import ContextVar
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, HandleNext, Incoming, Middleware, Outgoing, SendNext, message
from durable.application.middlewares import Logging, Validation


@message("shop.order-placed")
@dataclass
class OrderPlaced:
    number: int
    total: int


@message("shop.order-shipped")
@dataclass
class OrderShipped:
    number: int


@message("shop.newsletter")
@dataclass
class Newsletter:
    text: str


tenant: ContextVar[str] = ContextVar("tenant", default="")


class Tenant(Middleware):
    """Give messages that are sent for a tenant's message the same tenant."""

    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        return call_next(outgoing.with_headers({"tenant": tenant.get()}))

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        token = tenant.set(incoming.context.headers.get("tenant", ""))
        try:
            return await call_next(incoming)
        finally:
            tenant.reset(token)


class NoNewsletters(Middleware):
    """Drop newsletters: their senders see no error."""

    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        if isinstance(outgoing.message, Newsletter):
            return None
        return call_next(outgoing)


class OnceMore(Middleware):
    """Run a handler again at once after a lost connection, in the same transaction."""

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        assert isinstance(incoming.session, AsyncSession)
        try:
            async with incoming.session.begin_nested():  # undoes what the first run wrote and sent
                return await call_next(incoming)
        except ConnectionError:
            return await call_next(incoming)


def has_a_total(order: OrderPlaced) -> bool:
    return order.total > 0


bus = Bus("shop")
bus.use(Logging(), stage="before")
bus.use(Validation({OrderPlaced: has_a_total}))
bus.use(Tenant())
bus.use(NoNewsletters())
bus.use(OnceMore(), stage="after")

shipped: list[tuple[int, str]] = []


@bus.handles(OrderPlaced)
async def place(order: OrderPlaced) -> OrderShipped:
    return OrderShipped(order.number)


@bus.handles(OrderShipped)
async def ship(order: OrderShipped) -> None:
    shipped.append((order.number, tenant.get()))


@bus.handles(Newsletter)
async def post(newsletter: Newsletter) -> None:
    raise NotImplementedError
