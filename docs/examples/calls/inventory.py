"""Inventory: offers its shelves to other services."""

import os

from contract import Inventory, Reservation

from durable import Bus

bus = Bus("inventory", database=os.environ["INVENTORY_DATABASE"])
bus.listen(os.environ.get("INVENTORY_ADDRESS", "tcp://127.0.0.1:2304"))


class SoldOut(Exception):
    """There is less on the shelf than was asked for."""


class Shelves:
    def __init__(self) -> None:
        self._left = {"teapot": 2, "cup": 12}

    async def reserve(self, sku: str, count: int) -> Reservation:
        if await self.left(sku) < count:
            raise SoldOut(f"{self._left.get(sku, 0)} of {sku} are left")
        self._left[sku] -= count
        return Reservation(sku, self._left[sku])

    async def left(self, sku: str) -> int:
        return self._left.get(sku, 0)


bus.offer(Inventory, Shelves())
