"""Keeps partitions ahead and drops them after their retention; forgets resolved dead letters and staged rows."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy.exc import SQLAlchemyError

from durable.failpoints import failpoint
from durable.settings import Settings
from durable.storage import circuits, dead_letters, maintenance, staging
from durable.storage.database import Database
from durable.telemetry import log

_SLACK = timedelta(days=1)  # an id is remembered a day longer than the window, so that no clock skew reopens it


async def maintain(database: Database, settings: Settings) -> None:
    """One run. Each step has a transaction of its own; a step that cannot get its lock is left to the next run."""
    keep_ids, keep_history = settings.dedupe_window + _SLACK, settings.history_retention
    try:
        await database.transaction(maintenance.make_partitions, settings.partitions_ahead)
        dropped = await database.transaction(maintenance.drop_partitions, keep_ids=keep_ids, keep_history=keep_history)
        if dropped:
            log.info("dropped partitions past their retention: %s", ", ".join(dropped))
        while await database.transaction(
            maintenance.purge_defaults,
            keep_ids=keep_ids,
            keep_history=keep_history,
            batch_size=settings.purge_batch_size,
        ):
            failpoint("C21")
        await database.transaction(circuits.close_ended)
        keep_letters = settings.dead_letter_retention
        while purged := await database.transaction(
            dead_letters.purge,
            keep_letters=keep_letters,
            keep_attempts=keep_history,
            batch_size=settings.purge_letters_batch_size,
        ):
            log.info("purged %d dead letters and failed attempts past their retention", purged)
            failpoint("C21")
        if swept := await database.transaction(staging.sweep, keep_batches=max(keep_ids, keep_history)):
            log.info("dropped what was staged by jobs that died: %s", ", ".join(swept))
    except SQLAlchemyError as error:
        log.error("maintenance failed, the next run tries again: %s", error)
