from dataclasses import dataclass

from durable import Bus, message

orders = Bus("orders", amqp_url="amqp://127.0.0.1")
billing = Bus("billing", amqp_url="amqp://127.0.0.1")


@message("orders.order-placed")
@dataclass
class OrderPlaced:
    number: int
