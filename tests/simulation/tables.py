"""Tables in memory, as a database keeps them: a transaction sees what was committed, and its own changes.

A change locks its row until the transaction ends. Who meets the lock of another waits for its end (`Waits`), or passes
by it (`skip_locked`). Rows are immutable: a change puts another in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Mapping
from datetime import datetime
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class Waits(BaseException):
    """A statement has met the lock of another transaction; it is begun again when that has ended."""

    def __init__(self, holder: Transaction) -> None:
        self.holder = holder


class Table(Generic[R]):
    """The committed rows by key."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: dict[Hashable, R] = {}
        self.locks: dict[Hashable, Transaction] = {}


class Store:
    """The tables of one database, and what locks and numbers it gives."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self.clock = clock
        names = (
            "outgoing", "incoming", "received_ids", "undated_ids", "history", "letters", "failed_attempts", "nodes",
            "circuits", "counts", "schedules", "placements", "sent", "effects",
        )  # fmt: skip
        self.tables: dict[str, Table[Any]] = {name: Table(name) for name in names}
        self.advisory: dict[tuple[int, int], Transaction] = {}
        self.node_locks: set[int] = set()
        self.started_at = clock()
        self.sequences: dict[str, int] = {}
        self.watch: Callable[[Table[Any], Hashable, Any, Any], None] = lambda table, key, before, after: None
        """Hears of each row that is committed: what it was, and what it is."""

    def next(self, sequence: str) -> int:
        """A number; it is used up, whatever becomes of the transaction."""
        self.sequences[sequence] = number = self.sequences.get(sequence, 0) + 1
        return number


class Transaction:
    """A transaction: read committed."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now = store.clock()
        self.is_over = False
        self.notifies = False
        self.payload = ""
        self.waits_for: Transaction | None = None
        self._changes: dict[str, dict[Hashable, Any]] = {}
        self._locked: list[tuple[Table[Any], Hashable]] = []
        self._advisory: list[tuple[int, int]] = []
        self._ended: list[asyncio.Future[None]] = []

    @property
    def clock(self) -> datetime:
        return self.store.clock()

    @property
    def is_read_only(self) -> bool:
        return not self._changes and not self.notifies

    # ------------------------------------------------------------------ rows

    def get(self, name: str, key: Hashable) -> Any | None:
        changes = self._changes.get(name)
        if changes is not None and key in changes:
            return changes[key]
        return self.store.tables[name].rows.get(key)

    def all(self, name: str) -> list[Any]:
        rows, changes = self.store.tables[name].rows, self._changes.get(name)
        if not changes:
            return list(rows.values())
        merged = {**rows, **changes}
        return [row for row in merged.values() if row is not None]

    def items(self, name: str) -> Iterator[tuple[Hashable, Any]]:
        merged: Mapping[Hashable, Any] = {**self.store.tables[name].rows, **self._changes.get(name, {})}
        return ((key, row) for key, row in merged.items() if row is not None)

    def lock(self, name: str, key: Hashable) -> None:
        """Lock a row, or raise Waits."""
        table = self.store.tables[name]
        holder = table.locks.get(key)
        if holder is None:
            table.locks[key] = self
            self._locked.append((table, key))
        elif holder is not self:
            raise Waits(holder)

    def is_locked(self, name: str, key: Hashable) -> bool:
        """Tell whether another transaction holds the lock of a row, so that SKIP LOCKED passes by it."""
        return self.store.tables[name].locks.get(key, self) is not self

    def put(self, name: str, key: Hashable, row: Any) -> None:
        self.lock(name, key)
        self._changes.setdefault(name, {})[key] = row

    def delete(self, name: str, key: Hashable) -> None:
        self.lock(name, key)
        self._changes.setdefault(name, {})[key] = None

    def try_advisory(self, key: tuple[int, int]) -> bool:
        holder = self.store.advisory.setdefault(key, self)
        if holder is self and key not in self._advisory:
            self._advisory.append(key)
        return holder is self

    # ------------------------------------------------------------------ its parts, and its end

    def mark(self) -> dict[str, dict[Hashable, Any]]:
        """A place to go back to. The locks that were taken since are kept, which is harder than in Postgres."""
        return {name: dict(rows) for name, rows in self._changes.items()}

    def back_to(self, mark: dict[str, dict[Hashable, Any]]) -> None:
        self._changes = mark

    def commit(self) -> None:
        for name, rows in self._changes.items():
            table = self.store.tables[name]
            for key, row in rows.items():
                before = table.rows.get(key)
                if row is None:
                    table.rows.pop(key, None)
                else:
                    table.rows[key] = row
                self.store.watch(table, key, before, row)
        self._end()

    def rollback(self) -> None:
        self._end()

    def _end(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        for table, key in self._locked:
            del table.locks[key]
        for key in self._advisory:
            del self.store.advisory[key]
        self._changes = {}
        for each in self._ended:
            if not each.done():
                each.set_result(None)

    def ended(self) -> asyncio.Future[None]:
        """Return a future that is done when the transaction has ended."""
        future = asyncio.get_running_loop().create_future()
        if self.is_over:
            future.set_result(None)
        else:
            self._ended.append(future)
        return future
