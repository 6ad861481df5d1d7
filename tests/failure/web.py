"""A web service whose requests send a message each, which it receives by its own door and handles.

POST /orders/7   writes an order and its message, and answers 201 with the order's number
POST /orders/10  the same for numbers that end with 0, and then answers 409
"""

from __future__ import annotations

import os
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException

from durable import Bus, UnitOfWork
from durable.asgi import DurableMiddleware, unit_of_work
from tests.failure.app import ADD_ORDER, RETRY, OrderPlaced, bill

bus = Bus("shop")
bus.route(OrderPlaced, to=f"{os.environ.get('SHOP_URL', 'http://127.0.0.1:8001')}/durable")
bus.handles(OrderPlaced, retry=RETRY)(bill)

app = FastAPI()
app.add_middleware(DurableMiddleware, bus=bus)
app.mount("/durable", bus.asgi(allow_local=True))


def is_refused(order_id: int) -> bool:
    return order_id % 10 == 0


@app.post("/orders/{order_id}", status_code=201)
async def place_order(order_id: int, uow: Annotated[UnitOfWork, Depends(unit_of_work)]) -> int:
    envelope_id = bus.send(OrderPlaced(order_id))
    await uow.session.execute(ADD_ORDER, {"order_id": order_id, "envelope_id": envelope_id})
    if is_refused(order_id):
        raise HTTPException(409)
    return order_id
