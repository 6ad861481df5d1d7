"""What the nodes of `orders` do besides being nodes: transactions that send, until it is calm.

Some are rolled back, whole or from a savepoint on: none of their messages may ever take effect. A transaction that
fails is not repeated: the ledger says whether it was committed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus
from tests.chaos.ledger import ADD_SENT, NEXT_NUMBER, sent_row
from tests.chaos.messages import ANSWERS, FAILS, FAILS_AT_FIRST, SLOW, Charge, Kind, Note, Offer, Order, Reminder

log = logging.getLogger("chaos")

TASKS = 2
KEYS = 4
"""Keys of each task: no other task waits for the locks of a paused one."""
# Slow ones are there so that a pause or a kill finds handlers in the middle.
MOSTLY_GOOD = (*[""] * 20, *[FAILS_AT_FIRST] * 3, *[SLOW] * 3)
BEHAVIOURS: dict[type[Kind], tuple[str, ...]] = {
    Order: (*MOSTLY_GOOD, *[ANSWERS] * 8, FAILS),
    # None that fails by itself: each would open the circuit again when it is tried, and the others wait behind it.
    Charge: MOSTLY_GOOD,
    Note: (*MOSTLY_GOOD, FAILS),
    Reminder: ("",),
    Offer: ("",),
}
KINDS = (*[Order] * 8, *[Charge] * 5, *[Reminder] * 2, Offer, *[Note] * 3)


class RolledBack(Exception):
    """A transaction is given up on purpose."""


class Producer:
    """One of several tasks that send."""

    def __init__(self, bus: Bus, name: str, pause_seconds: float, calm: Path) -> None:
        self._bus = bus
        self._name = name
        self._pause = pause_seconds
        self._calm = calm
        self._rng = random.Random(name)
        self._number = 0

    async def run(self) -> None:
        while not self._bus.runtime.is_running:  # noqa: ASYNC110  nobody announces it
            await asyncio.sleep(0.05)
        while not self._calm.exists():
            try:
                await self._transaction()
            except RolledBack:
                pass
            except Exception as error:
                log.info("transaction failed: %s", type(error).__qualname__)
            await asyncio.sleep(self._rng.uniform(0, 2 * self._pause))

    async def _transaction(self) -> None:
        async with self._bus.unit_of_work() as uow:
            for _ in range(self._rng.randint(1, 3)):
                await self._send(uow.session)
            if self._rng.random() < 0.1:
                savepoint = await uow.session.begin_nested()
                await self._send(uow.session)
                await savepoint.rollback()
            if self._rng.random() < 0.1:
                raise RolledBack

    async def _send(self, session: AsyncSession) -> None:
        cls: type[Kind] = self._rng.choice(KINDS)
        self._number += 1
        message = cls(self._number, behaviour=self._rng.choice(BEHAVIOURS[cls]))
        if isinstance(message, Order):
            message.key = f"{self._name}-{self._rng.randrange(KEYS)}"
            message.number = (await session.execute(NEXT_NUMBER, {"key": message.key})).scalar_one()
            row = sent_row(self._bus.send(message, key=message.key), message)
        elif isinstance(message, Reminder):
            delay = timedelta(seconds=self._rng.uniform(0.3, 5))
            due_at = datetime.now(UTC) + delay  # before send() looks at the clock
            row = sent_row(self._bus.send(message, delay=delay), message, due_at=due_at)
        elif isinstance(message, Offer):
            deliver_by = datetime.now(UTC) + timedelta(seconds=self._rng.uniform(2, 8))
            row = sent_row(self._bus.send(message, deliver_by=deliver_by), message, deliver_by=deliver_by)
        else:
            row = sent_row(self._bus.send(message), message)
        await session.execute(ADD_SENT, row)
