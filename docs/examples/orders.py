"""Orders: writes each order, and tells billing of it, in one transaction.

uvicorn orders:app --port 8001 --workers 2
"""

import os
from typing import Annotated
from uuid import UUID, uuid4

from fastapi import Depends, FastAPI, HTTPException
from messages import InvoiceMade, OrderPlaced
from pydantic import BaseModel, PositiveInt
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from durable import Bus, UnitOfWork
from durable.asgi import DurableMiddleware, unit_of_work

BILLING = os.environ.get("BILLING_URL", "http://127.0.0.1:8002/durable")

bus = Bus("orders", mode="send-only" if "SEND_ONLY" in os.environ else "full")
bus.route(OrderPlaced, to=BILLING)

app = FastAPI()
app.add_middleware(DurableMiddleware, bus=bus)
app.mount("/durable", bus.asgi(allow_local=True))

Uow = Annotated[UnitOfWork, Depends(unit_of_work)]


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    amount: Mapped[int]
    invoice: Mapped[int | None]  # its number, once billing has made it


class NewOrder(BaseModel):
    amount: PositiveInt


class OrderState(BaseModel):
    id: UUID
    amount: int
    invoice: int | None


@app.post("/orders", status_code=201)
async def place_order(new: NewOrder, uow: Uow) -> OrderState:
    order = Order(id=uuid4(), amount=new.amount, invoice=None)
    uow.session.add(order)
    bus.send(OrderPlaced(order.id, order.amount))
    return OrderState(id=order.id, amount=order.amount, invoice=None)


@app.get("/orders/{order_id}")
async def show_order(order_id: UUID, uow: Uow) -> OrderState:
    order = await uow.session.get(Order, order_id)
    if order is None:
        raise HTTPException(404)
    return OrderState(id=order.id, amount=order.amount, invoice=order.invoice)


@bus.handles(InvoiceMade)
async def record_invoice(made: InvoiceMade, session: AsyncSession) -> None:
    order = await session.get_one(Order, made.order_id)
    order.invoice = made.number
