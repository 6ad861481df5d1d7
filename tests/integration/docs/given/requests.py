from dataclasses import dataclass

from durable import Bus, message


@message("orders.order-placed")
@dataclass
class OrderPlaced:
    order_id: int


bus = Bus("orders")


@bus.handles(OrderPlaced)
async def place(order: OrderPlaced) -> None: ...
