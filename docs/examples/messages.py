"""The messages of the two services. Each could also have classes of its own: only the names must agree."""

from dataclasses import dataclass
from uuid import UUID

from durable import message


@message("orders.order-placed")
@dataclass
class OrderPlaced:
    order_id: UUID
    amount: int


@message("billing.invoice-made")
@dataclass
class InvoiceMade:
    order_id: UUID
    number: int
