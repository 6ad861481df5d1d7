"""Runs the recurring schedules that this node's code declares: each occurrence once over all nodes.

    poll() --> rows --not declared, or by a node that is older or gone--> declare
                    --due, and declared as here--> a turn for each run: by hand, then of the occurrences in order
                    --otherwise--> wait, no longer than until the next is due

    turn --> take: [ lock, make the message, store it, move on ] one transaction
         --its function raises, or its message is refused--> fail: [ lock, try it again later ] another one

A node whose code declares a schedule otherwise than the youngest node does leaves it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from sqlalchemy import Connection

from durable.agents.context import AgentContext
from durable.application.cron import MOST_AT_ONCE, DueOccurrences, Pause, due_occurrences
from durable.application.schedules import Schedule
from durable.envelope import ANY_NODE
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
_BESIDES: Final = 2
"""Runs of a schedule beside those that it has missed: by hand, and of an occurrence that has failed."""


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
        """Run what is due of a schedule, each run in a transaction of its own: one that fails takes no other along.
        Returns how many ran.
        """
        ran = 0
        for _ in range(MOST_AT_ONCE + _BESIDES):
            turn = _Turn(schedule, self._envelope_factory)
            try:
                has_run = await self._database.transaction(turn.take)
            except StorageUnavailable:
                raise
            except BaseException as error:  # what it makes, or where that goes, is the application's
                raise_if_cancelled(error)
                log.exception("schedule %s cannot run; will retry", schedule.name)
                await self._database.transaction(turn.fail, error)
            else:
                failpoint("C22")
                self._counters.add(Event.RECURRED, has_run)
                ran += has_run
            if not turn.is_followed:
                break
        return ran


class _Turn:
    """One run of a schedule, by hand or of an occurrence. take() finds which, and fail() is told of the same."""

    def __init__(self, schedule: Schedule, envelope_factory: EnvelopeFactory) -> None:
        self._schedule = schedule
        self._envelope_factory = envelope_factory
        self._row: Due | None = None
        self.is_followed = False
        """May another run be due already?"""

    def take(self, conn: Connection, schema: str) -> bool:
        """Store the messages of the run, and move the schedule on. False when none was due."""
        row = self._row = storage.lock_due(conn, schema, self._schedule.name, self._schedule.declaration)
        self.is_followed = False
        if row is None:
            return False
        if row.asked_at is not None:
            self.is_followed = row.is_due
            message_type = self._store(conn, schema, row.asked_at, asked_for=True)
            storage.ran_as_asked(conn, schema, self._schedule.name, message_type=message_type)
            return True
        found = _due(self._schedule, row)
        if found.run and row.is_paused:  # it runs when the pause has ended
            return False
        occurrence = found.run[0] if found.run else None
        following = found.run[1] if len(found.run) > 1 else found.next
        self.is_followed = following <= row.now
        message_type = None if occurrence is None else self._store(conn, schema, occurrence)
        storage.move_on(
            conn, schema, self._schedule.name, occurrence_at=following, last_at=occurrence, message_type=message_type
        )
        return occurrence is not None

    def _store(self, conn: Connection, schema: str, moment: datetime, *, asked_for: bool = False) -> str | None:
        """Store the messages of a run without an owner, for any node to claim: this one does so in the same round.
        Returns their type, None when they have no destination.
        """
        try:
            envelopes = self._schedule.envelopes(self._envelope_factory, moment, asked_for=asked_for)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a factory's: nobody is to take an OSError for the database's
            if isinstance(error, OSError):
                raise RuntimeError(str(error)) from error
            if not isinstance(error, Exception):
                raise BrokeOff(f"{type(error).__name__}: {error}") from error
            raise
        if envelopes:
            sent = [
                Sent(e, LOCAL if e.destination == LOCAL else None, ANY_NODE, self._envelope_factory.place(e))
                for e in envelopes
            ]
            outbox.store(conn, schema, sent)
        failpoint("C22")
        return envelopes[0].message_type if envelopes else None

    def fail(self, conn: Connection, schema: str, error: BaseException) -> None:
        """Try the run again later, or let the next occurrence take the place of one that was tried beside it. A
        schedule that was changed meanwhile is left alone.
        """
        tried, name = self._row, self._schedule.name
        row = storage.lock_due(conn, schema, name, self._schedule.declaration)
        told = storable(f"{type(error).__name__}: {error}", _LONGEST_ERROR)
        if row is None or tried is None or not row.is_same_run(tried):
            self.is_followed = False
        elif tried.asked_at is not None:
            storage.fail_as_asked(conn, schema, name, delay=_TRY_AGAIN_AFTER, error=told)
        else:
            found = _due(self._schedule, tried)
            self.is_followed = len(found.run) > 1 and self._schedule.misfire != "all"
            occurrence = [*found.run, found.next][1 if self.is_followed else 0]
            due = occurrence if self.is_followed else min(row.now + _TRY_AGAIN_AFTER, found.next)
            storage.fail(conn, schema, name, occurrence_at=occurrence, due_at=due, error=told)


def _due(schedule: Schedule, row: Due) -> DueOccurrences:
    """The occurrences to run now, and the one to wait for afterwards."""
    pause = None if row.paused_since is None else Pause(row.paused_since, row.paused_until or row.now)
    return due_occurrences(
        schedule.cron,
        schedule.misfire,
        occurrence=row.occurrence_at,
        due=row.due_at,
        has_failed=row.has_failed,
        now=row.now,
        pause=pause,
    )


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
