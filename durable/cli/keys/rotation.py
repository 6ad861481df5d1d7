"""A run over all bodies that are to be encrypted anew: in batches, with progress, until done or stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection

from durable.cli.output import progress
from durable.cli.runs import stopped_by_signals
from durable.encryption.ring import KeyRing
from durable.envelope import Envelope
from durable.messages.sealed import is_sealed
from durable.settings import Settings
from durable.storage import actions, encrypted
from durable.storage.actions import Action
from durable.storage.connection_names import OF_COMMANDS
from durable.storage.database import Database
from durable.storage.encrypted import PLACES, Batch, Position, Wanted
from durable.storage.readiness import check_ready

_MOST_SHOWN = 5


@dataclass
class Rotated:
    """Result of a run over one place. `left`: rows that are still to be encrypted anew, besides those that could not be
    opened or changed.
    """

    place: str
    total: int
    done: int = 0
    left: int = 0
    unopened_count: int = 0
    unopened: Sequence[str] = ()
    """The first bodies that could not be opened, and why."""
    refused_count: int = 0
    refused: list[str] = field(default_factory=list)
    """The rows that the database refuses to change, and why."""
    stopped: bool = False


async def rotate_all(settings: Settings, ring: KeyRing, wanted: Wanted, *, actor: str, dry_run: bool) -> list[Rotated]:
    """Encrypt the bodies that are not as wanted. Raises StorageUnavailable, and SchemaMismatch.

    Each batch is a transaction: another run goes on where one was stopped, or has died.
    """
    database = Database(settings, OF_COMMANDS)
    try:
        await database.transaction(check_ready)
        rotated = [Rotated(place, await database.transaction(encrypted.count_stale, place, wanted)) for place in PLACES]
        if not dry_run:
            await _Run(database, settings, ring, wanted, actor).over(rotated)
        return rotated
    finally:
        await database.close()


class _Run:
    """One run."""

    def __init__(self, database: Database, settings: Settings, ring: KeyRing, wanted: Wanted, actor: str) -> None:
        self._database = database
        self._ring = ring
        self._wanted = wanted
        self._action = Action(actor=actor, verb="rotate", target="encrypted bodies")
        self._stopping = asyncio.Event()
        # A batch is in memory twice, readable and encrypted.
        self._batch_size = max(1, min(settings.batch_size, settings.buffer_bytes // settings.max_message_bytes))

    async def over(self, places: Sequence[Rotated]) -> None:
        total = sum(each.total for each in places)
        with stopped_by_signals(self._stopping), progress("encrypted") as show:
            for each in places:
                await self._rotate(each, lambda: show(sum(place.done for place in places), total))

    async def _rotate(self, rotated: Rotated, tell: Callable[[], None]) -> None:
        end: Position | None = Position()
        while end is not None and not self._stopping.is_set():
            batch = await self._database.transaction(self._rotate_batch, rotated.place, end)
            end = batch.end
            rotated.done += batch.done
            rotated.unopened_count += len(batch.unopened)
            told = [f"{envelope_id}: {reason}" for envelope_id, reason in batch.unopened]
            rotated.unopened = [*rotated.unopened, *told][:_MOST_SHOWN]
            rotated.refused_count += len(batch.refused)
            rotated.refused += [f"{row}: {reason}" for row, reason in batch.refused]
            tell()
        rotated.stopped = self._stopping.is_set() and end is not None
        left = await self._database.transaction(encrypted.count_stale, rotated.place, self._wanted)
        rotated.left = max(0, left - rotated.unopened_count - rotated.refused_count)

    def _rotate_batch(self, conn: Connection, schema: str, place: str, after: Position) -> Batch:
        batch = encrypted.rotate(
            conn, schema, place, self._wanted, self._reseal, after=after, batch_size=self._batch_size
        )
        if batch.done:
            actions.record(conn, schema, self._action, batch.done)
        return batch

    def _reseal(self, envelope: Envelope) -> bytes:
        if is_sealed(envelope.body):
            return self._ring.resealed(envelope, envelope)
        if self._wanted.everything or envelope.message_type in self._wanted.types:
            return self._ring.seal(envelope, envelope.body, envelope.destination)
        return envelope.body
