"""Orders: writes an order and tells stock of it, in one transaction."""

import asyncio
import os
import sys

from messages import OrderPlaced, Reserved
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from durable import Bus

ORDERS = os.environ.get("ORDERS_ADDRESS", "tcp://127.0.0.1:2301")
STOCK = os.environ.get("STOCK_ADDRESS", "tcp://127.0.0.1:2302")

bus = Bus("orders", database=os.environ["ORDERS_DATABASE"])
bus.listen(ORDERS)
bus.route(OrderPlaced, to=STOCK)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    state: Mapped[str] = mapped_column(default="placed")


@bus.handles(Reserved)
async def confirm(reserved: Reserved, session: AsyncSession) -> None:
    order = await session.get_one(Order, reserved.order_id)
    order.state = "reserved"


async def place(item: str) -> None:
    async with bus.unit_of_work() as uow:
        await (await uow.session.connection()).run_sync(Base.metadata.create_all)
        order = Order(item=item)
        uow.session.add(order)
        await uow.session.flush()  # the order has its id
        bus.send(OrderPlaced(order.id, item))


if __name__ == "__main__":
    asyncio.run(place(sys.argv[1]))
