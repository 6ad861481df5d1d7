"""Billing: makes an invoice of each order, and answers with its number.

uvicorn billing:app --port 8002 --workers 2
"""

import os
from typing import Annotated
from uuid import UUID

from fastapi import Depends, FastAPI
from messages import InvoiceMade, OrderPlaced
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from durable import Bus, UnitOfWork
from durable.asgi import DurableMiddleware, unit_of_work

ORDERS = os.environ.get("ORDERS_URL", "http://127.0.0.1:8001/durable")

bus = Bus("billing")
bus.route(InvoiceMade, to=ORDERS)

app = FastAPI()
app.add_middleware(DurableMiddleware, bus=bus)
app.mount("/durable", bus.asgi(allow_local=True))


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoices"
    number: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[UUID]
    amount: Mapped[int]


@bus.handles(OrderPlaced)
async def make_invoice(order: OrderPlaced, session: AsyncSession) -> InvoiceMade:
    invoice = Invoice(order_id=order.order_id, amount=order.amount)
    session.add(invoice)
    await session.flush()  # now it has its number
    return InvoiceMade(order.order_id, invoice.number)


@app.get("/turnover")
async def turnover(uow: Annotated[UnitOfWork, Depends(unit_of_work)]) -> int:
    return await uow.session.scalar(select(func.coalesce(func.sum(Invoice.amount), 0))) or 0
