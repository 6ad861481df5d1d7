from dataclasses import dataclass

from durable import Bus, Context, message


@message("orders.order-placed")
@dataclass
class OrderPlaced:
    order_id: int


@message("warehouse.order-taken")
@dataclass
class OrderTaken:
    order_id: int


bus = Bus("orders")


@bus.handles(OrderPlaced)
async def place(order: OrderPlaced) -> None: ...
