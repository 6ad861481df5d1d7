from dataclasses import dataclass
from datetime import datetime, timedelta

from durable import Bus, message

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


async def finish() -> None:
    await bus.runtime.sessions.close()
    await bus.runtime.database.close()
