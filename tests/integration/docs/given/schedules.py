from dataclasses import dataclass
from datetime import datetime, timedelta

from durable import Bus, message
from durable.envelope import NodeId
from durable.storage import schedules
from durable.storage.schedules import Declaration

bus = Bus("orders")


@message("orders.compact")
@dataclass
class Compact:
    pass


@message("orders.report")
@dataclass
class Report:
    upto: datetime


bus.route(Compact, to="tcp://127.0.0.1:2302")
bus.route(Report, to="tcp://127.0.0.1:2302")


async def begin() -> None:
    global message_id
    async with bus.unit_of_work():
        message_id = bus.send(Compact(), delay=3600)
    nightly = Declaration("nightly", "0 3 * * *", "UTC", "once", "orders.compact", None, "of a node")
    await bus.runtime.database.transaction(schedules.declare, NodeId(1), [nightly])


async def finish() -> None:
    await bus.runtime.sessions.close()
    await bus.runtime.database.close()
