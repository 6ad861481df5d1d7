from dataclasses import dataclass

from durable import Bus, message

bus = Bus("orders")


@message("orders.order-placed")
@dataclass
class OrderPlaced:
    number: int


@message("orders.order-paid")
@dataclass
class OrderPaid:
    number: int


@message("orders.ledger-entry")
@dataclass
class LedgerEntry:
    number: int


@message("orders.report-wanted")
@dataclass
class ReportWanted:
    number: int


bus.route(OrderPlaced, to="tcp://127.0.0.1:2302")
bus.route(OrderPaid, to="tcp://127.0.0.1:2302")


async def finish() -> None:
    await bus.runtime.sessions.close()
    await bus.runtime.database.close()
