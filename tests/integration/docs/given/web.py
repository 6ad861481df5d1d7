import os
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

import httpx
from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError

from durable import Bus, message
from durable.testing import InMemoryBus

bus = Bus("orders")
app = FastAPI()


@message("orders.order-placed")
@dataclass
class OrderPlaced:
    order_id: UUID


@message("orders.remind")
@dataclass
class Remind:
    order_id: UUID


class NewOrder(BaseModel):
    amount: int


class Session:
    async def flush(self) -> None:
        pass


class Uow:
    session = Session()


uow = Uow()
