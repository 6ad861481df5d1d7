"""The watch over messages, at moments that a database seldom gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID

from durable.requests.watch import Watch
from durable.settings import Settings
from durable.storage import receipts
from durable.storage.database import Database
from durable.storage.receipts import WAITING, Sighting, Standing

ID = UUID(int=17)
PATIENT, AT_ONCE = timedelta(seconds=20), timedelta(0)
EARLIER = Standing(ID, "outgoing", "tcp://a", "orders.placed", "dead-lettered", "refused", datetime.now(UTC), 1)
LATER = EARLIER._replace(address="tcp://b", outcome="sent", reason=None)
WAITS = LATER._replace(outcome=WAITING, ended_at=None)


class HeldDatabase:
    """A database where a message ends in its second place, and each later look is held until it may end."""

    def __init__(self) -> None:
        self.looks_again = asyncio.Event()
        self.may_end = asyncio.Event()

    async def transaction(self, work: Callable[..., Any], *_: object, **__: object) -> object:
        if work is receipts.look:
            return Sighting([EARLIER, WAITS], horizon=1)
        self.looks_again.set()
        await self.may_end.wait()
        return [LATER]


async def test_receipt_has_every_delivery_when_another_caller_comes_during_a_look() -> None:
    database = HeldDatabase()
    watch = Watch(lambda: cast(Database, database), Settings(database_url=None))
    patient = asyncio.create_task(watch.wait(ID, PATIENT))
    await database.looks_again.wait()
    hasty = asyncio.create_task(watch.wait(ID, AT_ONCE))
    await asyncio.sleep(0)
    database.may_end.set()
    both = await asyncio.gather(patient, hasty)
    await watch.stop()
    assert [[each.outcome for each in receipt.deliveries] for receipt in both] == [["dead-lettered", "sent"]] * 2
