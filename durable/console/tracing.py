"""The way of messages over all services of the console: those of one conversation, or of one key.

Each service is asked side by side, for a bounded time: the history has no index of conversations or keys, so whole days
are read. A service that does not answer in time, or is away, leaves the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from durable.console.reading import UNREAD, Reading, why_unread
from durable.listed import SHOWN
from durable.storage import receipts
from durable.storage.bounded import Look, limit_times, look
from durable.storage.receipts import Sent, Step, Window

MOST_STEPS: Final = 500
SPAN: Final = timedelta(days=1)
"""The history is looked at for so long: of a conversation from its first message on, of a key until now."""
_LONGEST: Final = timedelta(seconds=2)

Read = Callable[[Connection, str], list[Step]]


class Placed(NamedTuple):
    """A step, its service, and how many messages led to its message."""

    service: str
    depth: int
    step: Step


class Way(NamedTuple):
    """Steps of all services by their time, and the services that have not answered, with why."""

    steps: Sequence[Placed]
    refusals: Mapping[str, str]
    has_more: bool = False

    @property
    def first(self) -> Sent:
        """The message of the first step."""
        step = self.steps[0].step
        return Sent(step.sent_at, step.id)

    def page_of(self, message_id: str) -> int:
        """Return the number of the page on which a message is first met; the first one when it is on none."""
        met = (number for number, each in enumerate(self.steps) if str(each.step.id) == message_id)
        return next(met, 0) // SHOWN + 1


async def conversation(services: Mapping[str, Reading], correlation_id: UUID, begun: datetime) -> Way:
    """Find the messages of a conversation that began then."""
    window = Window(begun, begun + SPAN, MOST_STEPS)
    way = await _way(services, lambda conn, schema: receipts.conversation(conn, schema, correlation_id, window))
    return way._replace(steps=way.steps[:MOST_STEPS], has_more=len(way.steps) >= MOST_STEPS)


async def of_key(services: Mapping[str, Reading], key: str, now: datetime, before: Sent | None = None) -> Way:
    """Find the newest messages with a key that wait, are dead letters, or have ended lately, of those sent before this
    one.
    """
    window = Window(now - SPAN, now + SPAN, MOST_STEPS)
    way = await _way(services, lambda conn, schema: receipts.of_key(conn, schema, key, window, before))
    if len(way.steps) < MOST_STEPS:
        return way
    newest = way.steps[-MOST_STEPS:]
    whole = [each for each in newest if each.step.id != newest[0].step.id]
    return way._replace(steps=whole or newest, has_more=True)


async def _way(services: Mapping[str, Reading], read: Read) -> Way:
    """Find the steps of all services, the oldest first."""
    looks = dict(
        zip(services, await asyncio.gather(*(_look(reading, read) for reading in services.values())), strict=True)
    )
    found = [(service, step) for service, each in looks.items() for step in each.found or ()]
    depths = _depths(step for _, step in found)
    steps = [Placed(service, depths[step.id], step) for service, step in sorted(found, key=_time)]
    return Way(steps, {service: each.refusal for service, each in looks.items() if each.refusal})


async def _look(reading: Reading, read: Read) -> Look[list[Step]]:
    try:
        return await reading.transaction(_bounded, read)
    except UNREAD as error:
        return Look(None, why_unread(error))


def _bounded(conn: Connection, schema: str, read: Read) -> Look[list[Step]]:
    limit_times(conn, schema, _LONGEST)
    return look(conn, schema, read)


def _time(found: tuple[str, Step]) -> tuple[datetime, UUID, bool]:
    _, step = found
    return step.sent_at, step.id, step.side == "incoming"


def _depths(steps: Iterable[Step]) -> dict[UUID, int]:
    """Count the messages that led to each, as far as they were found; a circle of causes ends where it began."""
    causes = {step.id: step.causation_id for step in steps}
    depths: dict[UUID, int] = {}
    for each in causes:
        above: list[UUID] = []
        at: UUID | None = each
        while at is not None and at in causes and at not in depths and at not in above:
            above.append(at)
            at = causes[at]
        base = depths[at] + 1 if at is not None and at in depths else 0
        for number, one in enumerate(reversed(above)):
            depths[one] = base + number
    return depths
