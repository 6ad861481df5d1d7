import asyncio
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from durable import Bus, message


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    is_shipped: Mapped[bool] = mapped_column(default=False)


@message("shop.order-placed")
@dataclass
class OrderPlaced:
    order_id: int


bus = Bus("shop")  # its database: DURABLE_DATABASE_URL


@bus.handles(OrderPlaced)
async def ship(placed: OrderPlaced, session: AsyncSession) -> None:
    order = await session.get_one(Order, placed.order_id)
    order.is_shipped = True  # committed with the end of the message: once, also after a crash
    print(f"order {order.id}: {order.item}, shipped")


async def place(item: str) -> None:
    async with bus.unit_of_work() as uow:  # one AsyncSession, one transaction
        await (await uow.session.connection()).run_sync(Base.metadata.create_all)
        order = Order(item=item)
        uow.session.add(order)
        await uow.session.flush()  # the order has its id
        bus.send(OrderPlaced(order.id))  # stored with the order, or not at all


async def main() -> None:  # first: durable-agent migrate shop:bus
    await place("teapot")
    await bus.serve()  # handles messages until Ctrl-C


if __name__ == "__main__":
    asyncio.run(main())
