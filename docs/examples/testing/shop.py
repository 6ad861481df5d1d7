from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from durable import Bus, Retry, message


class Base(DeclarativeBase):
    pass


class Shipment(Base):
    __tablename__ = "shipments"
    order_id: Mapped[int] = mapped_column(primary_key=True)


@message("shop.order-placed")
@dataclass
class OrderPlaced:
    order_id: int


@message("shop.order-shipped")
@dataclass
class OrderShipped:
    order_id: int


@message("shop.count-stock")
@dataclass
class CountStock:
    pass


BILLING = "tcp://127.0.0.1:2302"
bus = Bus("shop")
bus.route(OrderShipped, to=BILLING)
bus.every("0 3 * * *", CountStock(), name="nightly")


@bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[60]))
async def ship(placed: OrderPlaced, session: AsyncSession) -> OrderShipped:
    session.add(Shipment(order_id=placed.order_id))
    return OrderShipped(placed.order_id)


@bus.handles(CountStock)
async def count(_: CountStock) -> None: ...
