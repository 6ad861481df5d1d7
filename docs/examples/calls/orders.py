"""Orders: asks the inventory for each article, and one of its own nodes for the number of the order."""

import asyncio
import os
import sys
from itertools import count
from typing import Protocol

from contract import Inventory

from durable import Bus
from durable.calls import service
from durable.errors import NoProvider, RemoteError

INVENTORY = os.environ.get("INVENTORY_ADDRESS", "tcp://127.0.0.1:2304")

bus = Bus("orders", database=os.environ["ORDERS_DATABASE"])
bus.listen(os.environ.get("ORDERS_ADDRESS", "tcp://127.0.0.1:2305"))
inventory = bus.caller(Inventory, at=INVENTORY)


@service("order-numbers", version="1.0")
class Numbers(Protocol):
    async def next(self) -> int: ...


class Counting:
    """Numbers in the memory of one process."""

    def __init__(self) -> None:
        self._numbers = count(1)

    async def next(self) -> int:
        return next(self._numbers)


bus.offer(Numbers, Counting(), singleton=True)  # each node offers it; one of them has the calls of all
numbers = bus.caller(Numbers, next={"timeout": 10})


async def place(sku: str) -> None:
    try:
        reservation = await inventory.reserve(sku)
    except RemoteError as error:
        print(f"no {sku}: {error.reason}")
    except NoProvider:
        print(f"no {sku}: the inventory is closed")
    else:
        print(f"order {await numbers.next()}: {sku}, {reservation.left} left")


async def main() -> None:
    async with bus:
        for sku in sys.argv[1:]:
            await place(sku)


if __name__ == "__main__":
    asyncio.run(main())
