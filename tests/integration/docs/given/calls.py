from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol

from durable import Bus
from durable.calls import call, service


@dataclass
class Reservation:
    sku: str
    count: int


@service("inventory", version="1.2")
class Inventory(Protocol):
    async def reserve(self, sku: str, count: int = 1) -> Reservation: ...

    async def prices(self, *, place: str) -> dict[str, Decimal]: ...

    @call(fire_and_forget=True)
    async def note(self, text: str) -> None: ...


class Shelves:
    async def reserve(self, sku: str, count: int) -> Reservation:
        return Reservation(sku, count)

    async def prices(self, *, place: str) -> dict[str, Decimal]:
        return {place: Decimal("1.50")}

    async def note(self, text: str) -> None:
        print(text)


stock = Bus("stock")
stock.listen("tcp://127.0.0.1:2304")
stock.offer(Inventory, Shelves())
orders = Bus("orders")
