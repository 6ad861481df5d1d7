import logging
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, CircuitBreaker, RetryAfter, message

bus = Bus("orders")


@message("orders.order-placed")
@dataclass
class OrderPlaced:
    number: int


class RateLimited(Exception):
    pass
