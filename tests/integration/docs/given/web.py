import os
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

import httpx
from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError

from durable import message
from durable.testing import InMemoryBus


@message("orders.order-placed")
@dataclass
class OrderPlaced:
    order_id: int


@message("orders.remind")
@dataclass
class Remind:
    order_id: UUID


class NewOrder(BaseModel):
    amount: int


class Session:
    async def flush(self) -> None:
        raise IntegrityError("INSERT", None, Exception("a duplicate"))


class Uow:
    session = Session()


uow = Uow()
