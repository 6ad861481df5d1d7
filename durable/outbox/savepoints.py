"""Open savepoints of a connection's transaction, as the database keeps them.

    SAVEPOINT a      the innermost one; it hides an outer one of its name until it ends
    RELEASE a        the last one of this name ends, and those within it
    ROLLBACK TO a    those within it end, and it stays

The database alone can tell which one is meant after a text of several statements has failed, some of which may have
been carried out, when two have this name; and where the name cannot be read. A rollback to such a one is lost: nobody
can tell what it has undone, until a savepoint from before it is rolled back to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from durable.outbox.sql_text import About, Verb

Mark = TypeVar("Mark")


@dataclass(slots=True, eq=False)
class Savepoint(Generic[Mark]):
    """An open savepoint. `mark`: where its owner stood when it was begun, unless that `is_unsure`."""

    name: str | None
    mark: Mark
    is_unsure: bool = False


class Savepoints(Generic[Mark]):
    """The savepoints that are open, from outside in."""

    def __init__(self, open_ones: Sequence[Savepoint[Mark]] = ()) -> None:
        self.open = list(open_ones)
        self.is_lost = False
        """Was there a rollback of which only the database knows how far it went?"""
        self._older: Savepoint[Mark] | None = None
        self._doubted = 0  # so many of them, from outside in: some may have ended
        self._before_loss = 0  # so many of them, from outside in, were begun before that rollback

    def copy(self) -> Self:
        copied = type(self)(self.open)
        copied.is_lost, copied._older = self.is_lost, self._older
        copied._doubted, copied._before_loss = self._doubted, self._before_loss
        return copied

    def clear(self) -> None:
        """Begin the next transaction of the connection."""
        self.open.clear()
        self.is_lost, self._older = False, None
        self._doubted = self._before_loss = 0

    def join(self, names: Sequence[str], mark: Mark) -> None:
        """Put those that are not known around the others; `names` from outside in."""
        known = {each.name for each in self.open}
        at = 0 if self._older is None else 1
        self.open[at:at] = [Savepoint(name, mark) for name in names if name not in known]

    def follow_late(self, mark: Mark) -> None:
        """Take names that are not known for savepoints from before: not all of the transaction has been followed."""
        self._older = Savepoint(None, mark)
        self.open.insert(0, self._older)

    def meet(self, verb: Verb, name: str | None, mark: Mark) -> Savepoint[Mark] | None:
        """Follow a statement that the database has accepted. Returns the savepoint that it means, which has this mark
        when it was begun now; None when only the database can tell."""
        if verb == "savepoint":
            self.open.append(Savepoint(name, mark))
            return self.open[-1]
        found = self._find(name)
        if found is None:
            self._doubted = len(self.open)
            if verb == "rollback" and not self.is_lost:
                self.is_lost, self._before_loss = True, len(self.open)
        elif verb == "release":
            self._end(self.open.index(found) + (found is self._older))
        else:
            self._roll_back_to(self.open.index(found))
        return found

    def doubt(self, about: Sequence[About], mark: Mark) -> None:
        """Note that some of these may have been carried out, from the first on: one text of them has failed."""
        is_unsure = self._older is not None or any(verb == "rollback" for verb, _ in about)
        self.open += [Savepoint(name, mark, is_unsure) for verb, name in about if verb == "savepoint"]
        if about:
            self._doubted = len(self.open)

    def _find(self, name: str | None) -> Savepoint[Mark] | None:
        if name is None:
            return None
        found = [at for at, each in enumerate(self.open) if each.name == name]
        if not found:
            return self._older
        if self.open[found[-1]].is_unsure or (len(found) > 1 and found[-1] < self._doubted):
            return None
        return self.open[found[-1]]

    def _end(self, at: int) -> None:
        del self.open[at:]
        self._doubted, self._before_loss = min(self._doubted, at), min(self._before_loss, at)

    def _roll_back_to(self, at: int) -> None:
        if at < self._doubted:  # as it was open, so are those around it, and the others have ended
            self._doubted = 0
        if at < self._before_loss:
            self.is_lost, self._before_loss = False, 0
        del self.open[at + 1 :]
