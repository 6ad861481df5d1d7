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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy.orm import SessionTransaction

from durable.envelope import Envelope
from durable.outbox.sql_text import Verb
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
    number: int = 0
    """The later of two in one place was begun within the earlier."""


class Pending:
    """The entries of one outbox."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._inserts = 0
        self._places: dict[SessionTransaction, Place] = {}
        self._begun: set[SessionTransaction] = set()
        self._savepoints: dict[str | None, Place] = {}
        self._unnamed: Place | None = None
        self._begun_so_far = 0
        self._texts: list[tuple[str | None, Place]] = []
        """Savepoints as SQL text, from outside in; a name may be there more than once."""
        self._doubtful: dict[str | None, Place] = {}
        """Those of texts that failed, which may have been begun before that."""
        self._lost_at: Place | None = None

    def remember(self, envelopes: Sequence[Envelope]) -> None:
        self._entries += map(Entry, envelopes)

    def unstored(self, before: SessionTransaction | None = None) -> list[Entry]:
        """Return the entries without a row, in order: all, or those from before this transaction of the session."""
        return [entry for entry in self._entries[: self._end(before)] if not entry.is_stored]

    def begin_insert(self) -> int:
        """Return the number of the insert that is made now."""
        self._inserts += 1
        return self._inserts

    @property
    def _here(self) -> Place:
        self._begun_so_far += 1
        return Place(len(self._entries), self._inserts, self._begun_so_far)

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
        self._begun.discard(transaction)
        self._places.pop(transaction, None)

    def forget(self, transaction: SessionTransaction) -> list[Sent]:
        """Roll it back, unless it was kept or the connection tells. Returns the rows that are gone with it."""
        self._begun.discard(transaction)
        place = self._places.pop(transaction, None)
        return [] if place is None else self._cut(place)

    def begin_on_connection(self, savepoint: SessionTransaction) -> None:
        """Note that this savepoint of the session is one of the connection's transaction from now on."""
        self._begun.add(savepoint)

    # ------------------------------------------------------------------ savepoints and transactions of the connection

    def begin_savepoint(self) -> None:
        """Begin one whose name is not known yet: name_savepoint() gives it before anything else becomes of it."""
        self._unnamed = self._here

    def name_savepoint(self, name: str | None) -> None:
        """Name the last one that was begun. With None, or the name of another, it could not be begun."""
        if name is not None and self._unnamed is not None:
            self._savepoints.setdefault(name, self._unnamed)
        self._unnamed = None

    def connect(self, transaction: SessionTransaction, savepoints: Sequence[str]) -> None:
        """Make this transaction of the session part of the savepoints that are open on its connection, from inside out.

        None of them begins behind its first message; those that are not known were begun before any message.
        """
        self.name_savepoint(savepoints[0] if savepoints else None)
        place = self._places.pop(transaction)
        self._savepoints = {name: min(place, self._savepoints.get(name, place)) for name in savepoints}

    def keep_savepoint(self, name: str) -> None:
        if (place := self._savepoints.pop(name, None)) is not None:
            self._texts = [each for each in self._texts if each[1].number < place.number]  # it ends those within it

    def forget_savepoint(self, name: str, before: SessionTransaction | None = None) -> list[Sent]:
        """Roll it back. `before` is a transaction of the session that is no part of it: its messages stay.

        One that is not known is gone already: the database refuses to roll back to it.
        """
        return self._cut(self._savepoints.pop(name, self._here), self._end(before))

    def meet_text(self, verb: Verb, name: str | None, before: SessionTransaction | None = None) -> list[Sent]:
        """Follow a savepoint as SQL text, which the database has accepted. Returns the rows that are gone with it;
        `before` as in forget_savepoint().

        One that is not known was begun before any message, unless it is one of SQLAlchemy's.
        """
        if verb == "savepoint":
            self._texts.append((name, self._here))
            return []
        at = max((at for at, (known, _place) in enumerate(self._texts) if known == name), default=-1)
        if verb == "rollback" and (name is None or name in self._doubtful):
            self._lost_at = self._doubtful.get(name, self._here)
            return []
        place = self._texts[at][1] if at >= 0 else self._savepoints.get(name, Place(0, 0))
        if verb == "release":
            self._texts = [each for each in self._texts if each[1].number < place.number]
            return []
        return self._cut(place, self._end(before))

    def doubt(self, names: Iterable[str | None]) -> None:
        """Note that savepoints may have been begun: of several statements in one text, one was refused."""
        self._doubtful |= dict.fromkeys(names, self._here)

    @property
    def is_lost(self) -> bool:
        """Tell whether nobody can say which messages are rolled back: after a rollback to a doubtful savepoint."""
        return self._lost_at is not None

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
            if before is not None or (each.nested and each not in self._begun)
        }
        self._savepoints.clear()
        self._texts.clear()
        self._doubtful.clear()
        self._unnamed = self._lost_at = None
        return list(_rows(taken))

    def _cut(self, place: Place, end: int | None = None) -> list[Sent]:
        gone = self._entries[place.at : end]
        del self._entries[place.at : end]
        lost = [entry for entry in self._entries if entry.stored_by > place.inserts]
        rows = list(_rows([*gone, *lost]))
        for entry in lost:
            entry.stored_by, entry.sent = 0, None
        # A savepoint behind it is gone with it, and must not cut off what is sent from now on.
        self._places = {
            each: known if known.at <= place.at else known._replace(at=max(place.at, known.at - len(gone)))
            for each, known in self._places.items()
        }
        self._savepoints = {name: known for name, known in self._savepoints.items() if known.at <= place.at}
        self._texts = [(name, known) for name, known in self._texts if known.number <= place.number]
        self._doubtful = {name: known for name, known in self._doubtful.items() if known.number <= place.number}
        if self._lost_at is not None and self._lost_at.number > place.number:
            self._lost_at = None
        if self._unnamed is not None and self._unnamed.at > place.at:
            self._unnamed = None
        return rows

    def _end(self, before: SessionTransaction | None) -> int:
        return len(self._entries) if before is None else self._places[before].at


def _rows(entries: Sequence[Entry]) -> Iterator[Sent]:
    return (entry.sent for entry in entries if entry.sent is not None)
