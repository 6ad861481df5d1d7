"""The messages of the two services. Each could also have classes of its own: only the names must agree."""

from dataclasses import dataclass

from durable import message


@message("orders.order-placed")
@dataclass
class OrderPlaced:
    order_id: int
    item: str


@message("stock.reserved")
@dataclass
class Reserved:
    order_id: int
    left: int
