from dataclasses import dataclass

from durable import Bus, message

orders = Bus("orders")
billing = Bus("billing")


@message("orders.order-placed")
@dataclass
class OrderPlaced:
    number: int
