"""The contract of the inventory. Both services import it: orders to call, inventory to offer."""

from dataclasses import dataclass
from typing import Protocol

from durable.calls import service


@dataclass
class Reservation:
    sku: str
    left: int


@service("inventory", version="1.0")
class Inventory(Protocol):
    async def reserve(self, sku: str, count: int = 1) -> Reservation: ...

    async def left(self, sku: str) -> int: ...
