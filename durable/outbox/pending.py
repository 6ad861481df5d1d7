"""Messages of transactions that have not ended, in the order in which they were sent.

    remember() --> not stored --store--> stored --the connection's COMMIT--> take()
                       |                   |
                       +-----> forget() <--+   a savepoint or the transaction of a session was rolled back

A savepoint, and the beginning of a session's transaction, is a place between two messages. Rolling it back forgets the
messages behind its place, and the rows that were written since: a message before its place whose row is gone is stored
again. As long as a session's transaction has no connection it is in no savepoint of one, and its
messages stand last. Once it has, what the connection rolls back tells what becomes of them: there the rows are, and a
session that has joined may end without taking them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from sqlalchemy.orm import SessionTransaction

from durable.envelope import Envelope
from durable.outbox.savepoints import Savepoints
from durable.outbox.sql_text import About, Verb
from durable.storage.outbox import Sent


@dataclass(slots=True, eq=False)
class Entry:
    """A message of a transaction that has not ended. `sent` is its row, once it has one of its own."""

    envelope: Envelope
    sent: Sent | None = None
    stored_by: int = 0
    """The number of the insert that has stored it, from 1; 0: none has."""

    @property
    def is_stored(self) -> bool:
        return self.stored_by > 0


class Place(NamedTuple):
    """The number of messages, and of inserts, before a savepoint or transaction."""

    at: int
    inserts: int


class Pending:
    """The entries of one outbox."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._inserts = 0
        self._places: dict[SessionTransaction, Place] = {}
        """Of the session's transactions, and of its savepoints, that are not yet part of the connection's."""
        self._savepoints = Savepoints[Place]()

    def remember(self, envelopes: Sequence[Envelope]) -> None:
        self._entries += map(Entry, envelopes)

    def unstored(self, before: SessionTransaction | None = None) -> list[Entry]:
        """Return the entries without a row, in order: all, or those from before this transaction of the session."""
        return [entry for entry in self._entries[: self._end(before)] if not entry.is_stored]

    def has_row(self, message_id: UUID) -> bool:
        """Tell whether a message of this id has a row of its own: one that had been sent before everywhere has none."""
        return any(entry.sent is not None and entry.envelope.id == message_id for entry in self._entries)

    def begin_insert(self) -> int:
        """Return the number of the insert that is made now."""
        self._inserts += 1
        return self._inserts

    @property
    def _here(self) -> Place:
        return Place(len(self._entries), self._inserts)

    def since(self, transaction: SessionTransaction) -> list[Entry]:
        """The entries of this transaction of the session."""
        return self._entries[self._places[transaction].at :]

    def __bool__(self) -> bool:
        return bool(self._entries)

    # ------------------------------------------------------------------ transactions and savepoints of the session

    def begin(self, transaction: SessionTransaction) -> None:
        self._places[transaction] = self._here

    def keep(self, transaction: SessionTransaction) -> None:
        """Leave its messages to the transaction around it."""
        self._places.pop(transaction, None)

    def forget(self, transaction: SessionTransaction) -> list[Sent]:
        """Roll it back, unless it was kept or the connection tells. Returns the rows that are gone with it."""
        place = self._places.pop(transaction, None)
        return [] if place is None else self._cut(place)

    # ------------------------------------------------------------------ savepoints and transactions of the connection

    def connect(self, transaction: SessionTransaction, savepoints: Sequence[str], *, late: bool) -> None:
        """Make this transaction of the session part of the savepoints that are open on its connection, from inside out.

        None of them begins behind its first message; those that are not known were begun before any message. `late`:
        there may be others like these, as SQL text.
        """
        if late:
            self._savepoints.follow_late(Place(0, 0))
        place = self._places.pop(transaction)
        self._savepoints.join(savepoints[::-1], place)
        for savepoint in self._savepoints.open:
            savepoint.mark = min(savepoint.mark, place)

    def begin_on_connection(self, savepoint: SessionTransaction) -> None:
        """Make this savepoint of the session the one that the connection has just begun."""
        place = self._places.pop(savepoint, None)
        if place is not None and self._savepoints.open:
            innermost = self._savepoints.open[-1]
            innermost.mark = min(innermost.mark, place)

    def meet(self, verb: Verb, name: str | None, before: SessionTransaction | None = None) -> list[Sent]:
        """Follow a statement that the database has accepted. Returns the rows that are gone with it.

        `before` is a transaction of the session that is no part of the connection's: its messages stay.
        """
        savepoint = self._savepoints.meet(verb, name, self._here)
        return [] if savepoint is None or verb != "rollback" else self._cut(savepoint.mark, self._end(before))

    def doubt(self, about: Sequence[About]) -> None:
        """Note that some of these may have been carried out: of several statements in one text, one was refused."""
        self._savepoints.doubt(about, self._here)

    @property
    def is_lost(self) -> bool:
        """Tell whether nobody can say which messages are rolled back."""
        return self._savepoints.is_lost

    def take(self, before: SessionTransaction | None = None) -> list[Sent]:
        """End the connection's transaction: remove the entries, and return the rows of those that have one.

        `before` is a transaction of the session that is no part of it yet: its messages stay. Those that were
        part of it have ended with it: the session can roll back none of what follows. A savepoint of the session
        without a statement yet is no part of it: it will begin in the connection's next transaction.
        """
        end = self._end(before)
        taken = self._entries[:end]
        del self._entries[:end]
        self._places = {
            each: place._replace(at=max(place.at - end, 0))
            for each, place in self._places.items()
            if before is not None or each.nested
        }
        self._savepoints.clear()
        return list(_rows(taken))

    def _cut(self, place: Place, end: int | None = None) -> list[Sent]:
        gone = self._entries[place.at : end]
        del self._entries[place.at : end]
        lost = [entry for entry in self._entries if entry.stored_by > place.inserts]
        rows = list(_rows([*gone, *lost]))
        for entry in lost:
            entry.stored_by, entry.sent = 0, None
        # What was begun behind it must not cut off what is sent from now on.
        self._places = {each: _moved(known, place, len(gone)) for each, known in self._places.items()}
        for savepoint in self._savepoints.open:
            savepoint.mark = _moved(savepoint.mark, place, len(gone))
        return rows

    def _end(self, before: SessionTransaction | None) -> int:
        return len(self._entries) if before is None else self._places[before].at


def _rows(entries: Sequence[Entry]) -> Iterator[Sent]:
    return (entry.sent for entry in entries if entry.sent is not None)


def _moved(place: Place, cut: Place, gone: int) -> Place:
    """Return the place without the messages that are gone from behind this one."""
    return place if place.at <= cut.at else place._replace(at=max(cut.at, place.at - gone))
