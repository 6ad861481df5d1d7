"""Keeps partitions ahead and drops them after their retention; forgets old ids, dead letters and staged rows.

Each step, and each day, has transactions of its own, and what fails in one of them keeps no other waiting. A day that
a long reader has locked is tried again some times, each for some milliseconds, and then left to the next run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Final

from sqlalchemy import Connection

from durable.errors import StorageUnavailable
from durable.failpoints import failpoint
from durable.settings import Settings
from durable.storage import actions, answers, circuits, dead_letters, maintenance, staging
from durable.storage.database import Database
from durable.storage.maintenance import HISTORY, IDS, Day
from durable.telemetry import log

_TRIES: Final = 5
_LONGEST_PAUSE: Final = 0.5  # seconds between them

Step = Callable[[], Awaitable[object]]


async def maintain(database: Database, settings: Settings) -> None:
    """Run the maintenance once."""
    keep_ids, keep_history = settings.keep_ids, settings.history_retention
    steps: list[tuple[str, Step]] = []
    for parent, keep in ((IDS, keep_ids), (HISTORY, keep_history)):
        steps.append((f"make {parent}", partial(_make_days, database, parent, settings.partitions_ahead)))
        steps.append((f"drop {parent}", partial(_drop_days, database, parent, keep)))
    for statement, keep in zip(maintenance.PURGES, (keep_ids, keep_ids, keep_history), strict=True):
        purge = partial(maintenance.purge, statement=statement, keep=keep, batch_size=settings.purge_batch_size)
        steps.append(("purge", partial(_purge, database, purge)))
    batch_size = settings.purge_letters_batch_size
    letters = partial(dead_letters.purge, keep=settings.dead_letter_retention, batch_size=batch_size)
    attempts = partial(dead_letters.purge_attempts, keep=keep_history, batch_size=batch_size)
    operated = partial(actions.purge, keep=settings.action_retention, batch_size=batch_size)
    answered = partial(answers.purge, keep=settings.answer_retention, batch_size=batch_size)
    steps += [
        ("close circuits", partial(_close_circuits, database)),
        ("purge dead letters", partial(_purge, database, letters)),
        ("purge failed attempts", partial(_purge, database, attempts)),
        ("purge answers", partial(_purge, database, answered)),
        ("purge actions", partial(_purge, database, operated)),
        ("sweep staged rows", partial(_sweep_staged, database, max(keep_ids, keep_history))),
    ]
    for name, step in steps:
        await _surviving(name, step)


async def _surviving(name: str, step: Step) -> None:
    try:
        await step()
    except StorageUnavailable as error:
        log.warning("maintenance: %s is left to the next run: %s", name, _first_line(error))
    except Exception as error:  # as at an agent's loop top: the later steps are not to be skipped
        log.error("maintenance: %s failed, the next run tries again: %s", name, _first_line(error))


async def _make_days(database: Database, parent: str, days_ahead: int) -> None:
    for day in await database.transaction(maintenance.missing_days, parent, days_ahead):
        await _surviving(f"make {day.name}", partial(_patiently, database, maintenance.make_day, day))


async def _drop_days(database: Database, parent: str, keep: timedelta) -> None:
    for day in await database.transaction(maintenance.past_days, parent, keep):
        await _surviving(f"drop {day.name}", partial(_drop_day, database, day, keep))


async def _drop_day(database: Database, day: Day, keep: timedelta) -> None:
    if await _patiently(database, maintenance.drop_day, day, keep):
        log.info("dropped %s, which is past its retention", day.name)


async def _patiently(database: Database, work: Callable[..., bool], *args: object) -> bool:
    """Wait for locks a short while at a time, and let those who queue behind go on in between."""
    for _ in range(_TRIES - 1):
        try:
            return await database.transaction(work, *args)
        except StorageUnavailable:
            await asyncio.sleep(random.uniform(0.2, 1) * _LONGEST_PAUSE)
    return await database.transaction(work, *args)


async def _purge(database: Database, work: Callable[[Connection, str], int]) -> None:
    while purged := await database.transaction(work):
        log.debug("old rows purged: %d", purged)
        failpoint("C21")


async def _close_circuits(database: Database) -> None:
    await database.transaction(circuits.close_ended)


async def _sweep_staged(database: Database, keep: timedelta) -> None:
    if swept := await database.transaction(staging.sweep, keep_batches=keep):
        log.info("dropped tables staged by jobs that died: %s", ", ".join(swept))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
