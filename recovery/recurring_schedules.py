"""Runs the recurring schedules that this node's code declares: each occurrence once over all nodes.

    poll() --> rows --not declared, or by a node that is older or gone--> declare
                    --due, and declared as here--> [ lock, make the message, store it, move on ] one transaction
                    --otherwise--> wait, no longer than until the next is due

A node whose code declares a schedule otherwise than the youngest node does leaves it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from sqlalchemy import Connection

from durable.agents.context import AgentContext
from durable.application.cron import Pause, due_occurrences
from durable.application.schedules import Schedule
from durable.envelope import ANY_NODE, Envelope
from durable.errors import BrokeOff, StorageUnavailable
from durable.failpoints import failpoint
from durable.messages.routing import LOCAL
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.storage import outbox
from durable.storage import schedules as storage
from durable.storage.outbox import Sent
from durable.storage.rows import storable
from durable.storage.schedules import Declaration, Due, Row
from durable.tasks.cancelling import raise_if_cancelled
from durable.telemetry import Event, log

_TRY_AGAIN_AFTER: Final = timedelta(minutes=1)
_LONGEST_ERROR: Final = 1_000


class Look(NamedTuple):
    """Outcome of a look at the schedules: did some run, whose messages wait to be claimed, and when is the next due?"""

    has_run: bool = False
    next_in: timedelta | None = None


class Recurring:
    """The schedules of one node."""

    def __init__(
        self, context: AgentContext, schedules: Mapping[str, Schedule], envelope_factory: EnvelopeFactory
    ) -> None:
        self._database = context.database
        self._node = context.node
        self._schedules = schedules
        self._envelope_factory = envelope_factory
        self._counters = context.counters
        self._failed: set[str] = set()
        """Those at whose last run the database could not be used: perhaps it is they that it fails for, so they are
        the last to run."""

    async def poll(self) -> Look:
        """Run the due schedules."""
        if not self._schedules:
            return Look()
        rows = await self._read()
        if unclaimed := [s for name, s in self._schedules.items() if self._has_a_say(rows.get(name))]:
            await self._database.transaction(storage.declare, self._node, [_declaration(s) for s in unclaimed])
            rows = await self._read()
        ran = 0
        if due := [row.name for row in rows.values() if self._is_due(row)]:
            for name in sorted(due, key=self._failed.__contains__):
                self._failed.add(name)
                ran += await self._run(self._schedules[name])
                self._failed.discard(name)
            rows = await self._read()
        waits = (wait for row in rows.values() for wait in (row.due_in, row.asked_in) if wait is not None)
        return Look(ran > 0, min((wait for wait in waits if wait > timedelta(0)), default=None))

    async def _read(self) -> dict[str, Row]:
        rows = await self._database.transaction(storage.read, list(self._schedules))
        return {row.name: row for row in rows}

    def _has_a_say(self, row: Row | None) -> bool:
        return row is None or row.declared_by < self._node or not row.is_live

    def _is_due(self, row: Row) -> bool:
        wanted = any(wait is not None and wait <= timedelta(0) for wait in (row.due_in, row.asked_in))
        return wanted and row.declaration == self._schedules[row.name].declaration

    async def _run(self, schedule: Schedule) -> int:
        """Run what is due of a schedule. Returns how many ran."""
        try:
            ran = await self._database.transaction(self._run_locked, schedule)
        except StorageUnavailable:
            raise
        except BaseException as error:  # what it makes, or where that goes, is the application's
            raise_if_cancelled(error)
            log.exception("schedule %s cannot run; will retry", schedule.name)
            await self._database.transaction(self._fail, schedule, error)
            return 0
        failpoint("C22")
        self._counters.add(Event.RECURRED, ran)
        return ran

    def _run_locked(self, conn: Connection, schema: str, schedule: Schedule) -> int:
        """Store the due occurrences of a schedule and move it on. Returns how many ran."""
        row = storage.lock_due(conn, schema, schedule.name, schedule.declaration)
        if row is None:
            return 0
        occurrences, following = _due(schedule, row)
        try:
            envelopes = [e for at in occurrences for e in schedule.envelopes(self._envelope_factory, at)]
            if row.asked_at is not None:
                envelopes += schedule.envelopes(self._envelope_factory, row.asked_at, asked_for=True)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a factory's: nobody is to take an OSError for the database's
            if isinstance(error, OSError):
                raise RuntimeError(str(error)) from error
            if not isinstance(error, Exception):
                raise BrokeOff(f"{type(error).__name__}: {error}") from error
            raise
        if envelopes:
            outbox.store(conn, schema, self._unowned(envelopes))
        failpoint("C22")
        moved = following is not None
        storage.move_on(
            conn,
            schema,
            schedule.name,
            occurrence_at=following if moved else row.occurrence_at,
            due_at=following or row.due_at,
            last_at=occurrences[-1] if occurrences else None,
            ran=bool(envelopes),
            message_type=envelopes[0].message_type if envelopes else None,
        )
        return len(occurrences) + (row.asked_at is not None)

    def _unowned(self, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Send without an owner, for any node to claim: this node does so in the same round."""
        return [
            Sent(e, LOCAL if e.destination == LOCAL else None, ANY_NODE, self._envelope_factory.place(e))
            for e in envelopes
        ]

    def _fail(self, conn: Connection, schema: str, schedule: Schedule, error: BaseException) -> None:
        row = storage.lock_due(conn, schema, schedule.name, schedule.declaration)
        if row is None:
            return
        occurrences, following = _due(schedule, row)
        occurrence, due = following or row.occurrence_at, following or row.due_at
        has_failed = row.has_failed and following is None
        if occurrences:  # one that has failed twice, the second time beside the next, gives way to that
            again = row.now + _TRY_AGAIN_AFTER
            occurrence = occurrences[0 if schedule.misfire == "all" else -1]
            due, has_failed = min(again, following or again), True
        storage.fail(
            conn,
            schema,
            schedule.name,
            occurrence_at=occurrence,
            due_at=due,
            has_failed=has_failed,
            delay=_TRY_AGAIN_AFTER,
            error=storable(f"{type(error).__name__}: {error}", _LONGEST_ERROR),
        )


def _due(schedule: Schedule, row: Due) -> tuple[Sequence[datetime], datetime | None]:
    """The occurrences to run now, and the one to wait for if that is another. What was due before a pause, and did not
    run, stays due: it runs when the pause has ended.
    """
    if not row.is_due:
        return [], None
    pause = None if row.paused_since is None else Pause(row.paused_since, row.paused_until or row.now)
    found = due_occurrences(
        schedule.cron,
        schedule.misfire,
        occurrence=row.occurrence_at,
        due=row.due_at,
        has_failed=row.has_failed,
        now=row.now,
        pause=pause,
    )
    if row.is_paused:
        return [], None if found.run else found.next
    return found.run, found.next


def _declaration(schedule: Schedule) -> Declaration:
    return Declaration(
        schedule.name,
        schedule.cron.expression,
        schedule.cron.tz,
        schedule.misfire,
        schedule.message_type,
        schedule.to,
        schedule.declaration,
    )
