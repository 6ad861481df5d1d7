"""Operators of a bus in memory: people who cancel or reschedule waiting messages, and replay or discard dead letters.

waiting, not due --cancel_message()----------------------->     cancelled
                 --reschedule_message(), run_message_now()  waiting again
dead letter      --replay()                                 waiting again, as new
                 --discard()------------------------------>     discarded
"""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

import msgspec

from durable.envelope import DUE
from durable.storage.dead_letters import Resolved
from durable.storage.inbox import Key
from durable.storage.rows import QUARANTINED
from durable.testing.mailbox import Mailbox
from durable.testing.rows import DeadLetter, Row


class MemoryOperators:
    """The first three do the work of the functions of the same names in durable.storage."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._history = mailbox.history
        self._ids = mailbox.ids
        self._clock = mailbox.clock

    def cancel_message(self, message: UUID, *, actor: str, reason: str | None, keep_body: bool = False) -> bool:
        told = f"cancelled by {actor}" + (f": {reason}" if reason else "")
        cancelled = [(rows, rows.pop(row.key)) for rows, row in self._waiting_for_time(message)]
        for rows, row in cancelled:
            self._history.note("cancelled", row, "incoming" if rows is self._mailbox.incoming else "outgoing", told)
            if rows is self._mailbox.incoming:
                self._ids.give_up(row.key)
        return bool(cancelled)

    def run_message_now(self, message: UUID) -> bool:
        found = self._waiting_for_time(message)
        for _, row in found:
            row.due = None
        return bool(found)

    def reschedule_message(self, message: UUID, *, at: datetime, dedupe_window: timedelta) -> Resolved:
        done, left = [], []
        for rows, row in self._waiting_for_time(message):
            too_old = rows is self._mailbox.outgoing and at >= row.envelope.sent_at + dedupe_window
            if too_old or row.envelope.is_late(at) or row.envelope.deliver_by == at:
                left.append(0)
            else:
                row.due = at
                if DUE in row.envelope.headers:
                    headers = {**row.envelope.headers, DUE: at.isoformat()}
                    row.envelope = msgspec.structs.replace(row.envelope, headers=headers)
                done.append(0)
        return Resolved(done, left)

    def _waiting_for_time(self, message: UUID) -> list[tuple[dict[Key, Row], Row]]:
        now = self._clock.now()
        every = [(rows, row) for rows in (self._mailbox.incoming, self._mailbox.outgoing) for row in rows.values()]
        return [(rows, row) for rows, row in every if row.envelope.id == message and not row.is_due(now)]

    def replay(self, letter: DeadLetter) -> None:
        """Let it wait again for its handler, as new."""
        key = letter.envelope.id, letter.address
        if not letter.replayable:
            raise ValueError(f"it was quarantined, and cannot be handled: {letter.reason}")
        if letter.side == "incoming" and not self._may_hold(key, letter):
            raise ValueError(f"the id of the dead letter of {letter.envelope.id} was used meanwhile")
        if key in (self._mailbox.incoming if letter.side == "incoming" else self._mailbox.outgoing):
            raise ValueError(f"the message of the dead letter of {letter.envelope.id} waits already")
        self._history.resolve(letter)
        envelope = letter.envelope
        if envelope.is_late(self._clock.now()):  # it would expire at once
            envelope = msgspec.structs.replace(envelope, deliver_by=None)
        row = Row(envelope, letter.address, was_stored=True)
        self._history.ended = [each for each in self._history.ended if (each.id, each.address) != row.key]
        if letter.side == "outgoing":
            self._mailbox.outgoing[row.key] = row
            return
        if not self._ids.is_held(row.key):
            self._ids.hold(row.key, envelope)
        self._mailbox.queue(row)

    def _may_hold(self, key: Key, letter: DeadLetter) -> bool:
        """Tell whether the message of a letter holds its id, or would hold it: no other has come under it."""
        if not self._ids.is_held(key):
            return True
        return letter.exception_type != QUARANTINED and self._ids.was_held_by(key, letter.envelope.sent_at)

    def discard(self, letter: DeadLetter, reason: str) -> None:
        """Give it up for good: another message may be sent under its business key."""
        self._history.resolve(letter)
        row = Row(letter.envelope, letter.address, attempts=letter.attempts)
        self._history.note("discarded", row, letter.side, reason)
        was_stored = letter.side == "incoming" and letter.exception_type != QUARANTINED
        was_last = self._ids.was_held_by(row.key, letter.envelope.sent_at)
        if was_stored and was_last and row.key not in self._mailbox.incoming:
            self._ids.give_up(row.key)
