"""Bounded memory and batches: how much an agent may hold, and when it should send what it holds.

Room is reserved before a transaction commits and used after it, so that rows are only ever owned by a node that has
room for them; whoever gets no room stores its rows unowned, and recovery claims them when there is room again.

A batch is due at once when nothing is in flight; otherwise it gathers until it is full or a batch in flight is
answered (Nagle's algorithm, for envelopes: RFC 896). So a quiet agent adds no delay and a busy one sends full batches.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar


class Weighed(Protocol):
    @property
    def weight_bytes(self) -> int: ...


T = TypeVar("T", bound=Weighed)


class Buffer(Generic[T]):
    """A first-in first-out queue bounded in items and bytes, counting what is reserved, waiting and taken.

    An item takes up room from its reservation until done() is called for it. Thread-safe: units of work in other
    threads reserve room here.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting: deque[T] = deque()
        self._waiting_bytes = 0
        self._used_count = 0
        self._used_bytes = 0

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self._waiting)

    @property
    def has_turn(self) -> bool:
        """Tell whether an item may be taken."""
        return bool(self._waiting)

    @property
    def room(self) -> int:
        """Return the number of items that may still be reserved."""
        return max(0, self._max_count - self._used_count) if self._used_bytes < self._max_bytes else 0

    def room_for_claim(self, batch_size: int) -> int:
        """Return the number of items that a claim may take now.

        0, while items wait here and there is no room for a batch, or for half of a small buffer: a claim for each
        item that is done would cost more than the items.
        """
        room = self.room
        enough = min(batch_size, max(1, self._max_count // 2))
        return min(batch_size, room) if room >= enough or not self.has_turn else 0

    @property
    def used_count(self) -> int:
        return self._used_count

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def reserve(self, items: Sequence[Weighed]) -> bool:
        """Take room for all of these, or for none and return False."""
        weight = sum(item.weight_bytes for item in items)
        with self._lock:
            if self._used_count + len(items) > self._max_count or self._used_bytes + weight > self._max_bytes:
                return False
            self._used_count += len(items)
            self._used_bytes += weight
            return True

    def close(self) -> bool:
        """Give no room any more, if nothing has any now; False otherwise."""
        with self._lock:
            if self._used_count:
                return False
            self._max_count = 0
            return True

    def reserve_unchecked(self, items: Sequence[Weighed]) -> None:
        """Take room for items that are here already: a claim of one batch may go over the bytes by that batch."""
        with self._lock:
            self._used_count += len(items)
            self._used_bytes += sum(item.weight_bytes for item in items)

    def done(self, items: Sequence[Weighed]) -> None:
        """Give back the room of items that were taken, or whose reservation came to nothing."""
        with self._lock:
            self._used_count -= len(items)
            self._used_bytes -= sum(item.weight_bytes for item in items)

    def put(self, items: Iterable[T]) -> None:
        """Queue items whose room is reserved."""
        with self._lock:
            for item in items:
                self._waiting.append(item)
                self._waiting_bytes += item.weight_bytes

    def put_back(self, items: Sequence[T]) -> None:
        """Queue items that were taken again, at the head and in their order."""
        with self._lock:
            for item in reversed(items):
                self._waiting.appendleft(item)
                self._waiting_bytes += item.weight_bytes

    def waiting(self) -> list[T]:
        """Return the waiting items, in order."""
        with self._lock:
            return list(self._waiting)

    @property
    def first(self) -> T | None:
        """Return the item that has waited longest."""
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def full_batch_waits(self, batch_size: int, batch_bytes: int) -> bool:
        return len(self._waiting) >= batch_size or self._waiting_bytes >= batch_bytes

    def take(self, batch_size: int, batch_bytes: int) -> list[T]:
        """The next batch: at most `batch_size` items and `batch_bytes` bytes, but never fewer than one item."""
        batch: list[T] = []
        weight = 0
        with self._lock:
            while self._waiting and len(batch) < batch_size:
                weight += self._waiting[0].weight_bytes
                if batch and weight > batch_bytes:
                    break
                item = self._waiting.popleft()
                self._waiting_bytes -= item.weight_bytes
                batch.append(item)
        return batch


def is_due(buffer: Buffer[T], in_flight: int, *, batch_size: int, batch_bytes: int, batches_in_flight: int) -> bool:
    """Should the next batch be sent now?"""
    if not buffer.has_turn:
        return False
    if in_flight == 0:
        return True
    return in_flight < batches_in_flight and buffer.full_batch_waits(batch_size, batch_bytes)
