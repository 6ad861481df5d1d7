import asyncio
import inspect
import os
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from durable import Bus, message

url = os.environ["DURABLE_DATABASE_URL"]
os.environ |= {
    "SEND_ONLY": "1",
    "SHOP_DATABASE_URL": url.replace("postgresql://", "postgresql+psycopg://", 1),
    "ORDERS_DATABASE_URL": url.replace("postgresql://", "postgresql+asyncpg://", 1),
}


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


@message("given.order-placed")
@dataclass
class OrderPlaced:
    order_id: int


tables = create_engine(os.environ["SHOP_DATABASE_URL"])
Base.metadata.create_all(tables)
tables.dispose()
engine: Any = create_async_engine(os.environ["ORDERS_DATABASE_URL"])
bus = Bus("given", mode="send-only")
names = globals()


@bus.handles(OrderPlaced)
async def handle(placed: OrderPlaced) -> None: ...


def waiting() -> int:
    with psycopg.connect(url) as conn:
        [count] = conn.execute("SELECT count(*) FROM durable.incoming_envelopes").fetchone() or [0]
    return int(count)


def post() -> int:
    return int(names["app"].test_client().post("/orders", data={"item": "teapot"}).status_code)


def send_and_cancel() -> bool:
    """Do as a sync server does, in a thread of its own."""
    sync_engine = create_engine(os.environ["SHOP_DATABASE_URL"])
    with Session(sync_engine) as session, bus.enlist(session):
        reminder = bus.send(OrderPlaced(17), delay=600)
        session.commit()
    sync_engine.dispose()
    return bool(asyncio.run(names["cancel"](reminder)))


async def finish() -> None:
    """Call what the block has defined."""
    if "app" in names:
        assert await asyncio.to_thread(post) == 201
        assert waiting() == 1
    elif "place" in names:
        await names["place"](Order(id=17, item="teapot"))
        assert waiting() == 1
    elif "cancel" in names:
        assert await names["cancel"](uuid4()) is False
        assert await asyncio.gather(*(asyncio.to_thread(send_and_cancel) for _ in range(4))) == [True] * 4
        assert waiting() == 0
    for name in ("SEND_ONLY", "SHOP_DATABASE_URL", "ORDERS_DATABASE_URL"):
        del os.environ[name]
    disposed = engine.dispose()
    if inspect.isawaitable(disposed):
        await disposed
    await bus.runtime.sessions.close()
    await bus.runtime.database.close()
