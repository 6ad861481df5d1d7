"""Stock: reserves a piece for each order, and answers with the number that is left."""

import os

from messages import OrderPlaced, Reserved
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from durable import Bus, Retry

ORDERS = os.environ.get("ORDERS_ADDRESS", "tcp://127.0.0.1:2301")
STOCK = os.environ.get("STOCK_ADDRESS", "tcp://127.0.0.1:2302")
DATABASE = os.environ["STOCK_DATABASE"]

bus = Bus("stock", database=DATABASE)
bus.listen(STOCK)
bus.route(Reserved, to=ORDERS)


class Base(DeclarativeBase):
    pass


class Item(Base):
    __tablename__ = "items"
    name: Mapped[str] = mapped_column(primary_key=True)
    left: Mapped[int]


class SoldOut(Exception):
    """The last piece is gone."""


@bus.handles(OrderPlaced, on_error={SoldOut: Retry.never()})  # other errors: the retries of the settings
async def reserve(order: OrderPlaced, session: AsyncSession) -> Reserved:
    item = await session.get_one(Item, order.item, with_for_update=True)
    if item.left == 0:
        raise SoldOut(order.item)
    item.left -= 1
    return Reserved(order.order_id, item.left)  # sent in the same transaction


def deliver(name: str, count: int) -> None:
    engine = create_engine(DATABASE.replace("postgresql://", "postgresql+psycopg://"))
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        item = session.get(Item, name, with_for_update=True) or Item(name=name, left=0)
        item.left += count
        session.add(item)
        session.commit()


if __name__ == "__main__":
    deliver("teapot", 2)
