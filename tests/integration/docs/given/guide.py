from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated
from uuid import UUID, uuid4

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from durable import Bus, Context, Depends, Retry, message
from durable.application.middlewares import Logging, Validation

bus = Bus("orders")
engine = create_engine(bus.settings.database_url.get_secret_value().replace("postgresql://", "postgresql+psycopg://"))


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    total: Mapped[Decimal]


class Reservation(Base):
    __tablename__ = "reservations"
    order_id: Mapped[UUID] = mapped_column(primary_key=True)


class Stock:
    pass


def stock() -> Stock:
    return Stock()


@message("orders.order-placed")
@dataclass
class OrderPlaced:
    order_id: UUID
    total: Decimal


@message("orders.reserved")
@dataclass
class Reserved:
    order_id: UUID


@message("orders.flight-recorded")
@dataclass
class FlightRecorded:
    number: int


@message("orders.report-wanted")
@dataclass
class ReportWanted:
    tenant: str


def check_order(order: object) -> bool:
    return True


bus.route(OrderPlaced, to="tcp://127.0.0.1:2302")
bus.route(Reserved, to="tcp://127.0.0.1:2302")
Base.metadata.create_all(engine)
order = Order(id=uuid4(), total=Decimal(42))
another = Order(id=uuid4(), total=Decimal(17))


async def finish() -> None:
    engine.dispose()
    await bus.runtime.sessions.close()
    await bus.runtime.database.close()
