"""Queue of an agent, in memory, where order and shares matter: it decides whose turn comes next.

Three kinds of queues lie behind one buffer:

    plain     what has no order and no share: first in, first out, as in durable.agents.buffer
    keys      one for each ordering key: its head is handed out, and nothing more until that is settled
    shares    one for each tenant of a fair handler: they take turns, each as often in a row as its weight says

    put --> key's queue --take--> busy --settled--> its next turn, at the end of the row of those that wait
                 ^                  |
                 +---- put_back ----+

An agent that nobody asks for order or fairness uses the plain queue alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from durable.agents.buffer import Buffer
from durable.envelope import Envelope, LeasedEnvelope


class _Share:
    """Waiting messages of one tenant: those without an order, and the keys whose turn it may be."""

    __slots__ = ("keys", "keys_first", "left", "plain", "weight")

    def __init__(self, weight: int) -> None:
        self.plain: deque[LeasedEnvelope] = deque()
        self.keys: deque[str] = deque()
        self.keys_first = True
        self.weight = weight
        self.left = weight


class FairQueue(Buffer[LeasedEnvelope]):
    """A buffer in which one message of a key is out at a time, and tenants take turns.

    `run` messages of one key may be taken together, in order. `share_of` names the tenant of a message; None means
    that there are none. `alone` says of a message that no other of its key may be taken with it.
    """

    def __init__(
        self,
        max_count: int,
        max_bytes: int,
        *,
        run: int = 1,
        share_of: Callable[[Envelope], str] | None = None,
        weights: Mapping[str, int] | None = None,
        alone: Callable[[LeasedEnvelope], bool] = lambda lease: False,
    ) -> None:
        super().__init__(max_count, max_bytes)
        self._run = run
        self._share_of = share_of
        self._weights = weights or {}
        self._alone = alone
        self._keys: dict[str, deque[LeasedEnvelope]] = {}
        self._busy: set[str] = set()
        self._shares: dict[str, _Share] = {}
        self._turns: deque[str] = deque()  # the shares that have something to hand out
        self._queued = 0  # besides the plain queue
        self._plain_first = False

    def __len__(self) -> int:
        """Return the number of waiting messages, also of those behind one that is out."""
        return super().__len__() + self._queued

    @property
    def first(self) -> LeasedEnvelope | None:
        """Return the message at the head of a queue: the oldest without an order or a share, if there is one."""
        return super().first or next(self._heads(), None)

    def _heads(self) -> Iterator[LeasedEnvelope]:
        yield from (waiting[0] for waiting in self._keys.values())
        yield from (share.plain[0] for share in self._shares.values() if share.plain)

    @property
    def has_turn(self) -> bool:
        """Tell whether a message may be taken."""
        return bool(self._waiting or self._turns)

    # ------------------------------------------------------------------ in

    def put(self, items: Iterable[LeasedEnvelope]) -> None:
        plain = [lease for lease in items if not self._queue(lease)]
        if plain:
            super().put(plain)

    def put_back(self, items: Sequence[LeasedEnvelope]) -> None:
        """Put messages back at the head of their queues, in their order. They stay out until they are settled."""
        plain = [lease for lease in reversed(items) if not self._queue(lease, front=True)]
        if plain:
            super().put_back(plain[::-1])

    def _queue(self, lease: LeasedEnvelope, *, front: bool = False) -> bool:
        """False when it belongs into the plain queue."""
        key = lease.ordering_key
        if key is None and self._share_of is None:
            return False
        with self._lock:
            self._queued += 1
            if key is None:
                share = self._share(lease)
                (share.plain.appendleft if front else share.plain.append)(lease)
            elif (waiting := self._keys.get(key)) is not None:
                (waiting.appendleft if front else waiting.append)(lease)
            else:
                self._keys[key] = deque([lease])
                if key not in self._busy:
                    self._share(lease).keys.append(key)
        return True

    def _share(self, lease: LeasedEnvelope) -> _Share:
        """Return the share in which a message waits, with a place in the row."""
        name = self._share_of(lease.envelope) if self._share_of else ""
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = _Share(self._weights.get(name, 1))
            self._turns.append(name)
        return share

    # ------------------------------------------------------------------ out

    def full_batch_waits(self, batch_size: int, batch_bytes: int) -> bool:
        ready = sum(len(share.keys) + len(share.plain) for share in self._shares.values())
        return len(self._waiting) + ready >= batch_size or super().full_batch_waits(batch_size, batch_bytes)

    def take(self, batch_size: int, batch_bytes: int) -> list[LeasedEnvelope]:
        """Take the next batch. A key with taken messages is out: no more of its messages are taken until settled()."""
        if not self._turns:
            return super().take(batch_size, batch_bytes)
        self._plain_first = not self._plain_first
        batch = super().take(batch_size, batch_bytes) if self._plain_first else []
        size = sum(lease.weight_bytes for lease in batch)
        with self._lock:
            while self._turns and len(batch) < batch_size:
                taken = self._next(batch_size - len(batch), batch_bytes - size, is_first=not batch)
                if not taken:
                    break
                batch += taken
                size += sum(lease.weight_bytes for lease in taken)
        if len(batch) < batch_size and size < batch_bytes and not self._plain_first:
            batch += super().take(batch_size - len(batch), batch_bytes - size)
        return batch

    def _next(self, at_most: int, room_bytes: int, *, is_first: bool) -> list[LeasedEnvelope]:
        """Hand out the next messages of the share whose turn it is: one message, or a run of one key. Return none when
        they are too large, unless they are the first of the batch.
        """
        name = self._turns[0]
        share = self._shares[name]
        of_key = bool(share.keys) and (share.keys_first or not share.plain)
        head = self._keys[share.keys[0]][0] if of_key else share.plain[0]
        if head.weight_bytes > room_bytes and not is_first:
            return []
        share.keys_first = not of_key
        if of_key:
            taken = self._start(share.keys.popleft(), min(at_most, self._run), room_bytes)
        else:
            taken = [share.plain.popleft()]
        self._queued -= len(taken)
        share.left -= len(taken)
        if not (share.keys or share.plain):
            self._turns.popleft()
            del self._shares[name]
        elif share.left <= 0:
            share.left = share.weight
            self._turns.rotate(-1)
        return taken

    def _start(self, key: str, at_most: int, room_bytes: int) -> list[LeasedEnvelope]:
        """The head of a key, with those behind it that may go with it."""
        waiting = self._keys[key]
        self._busy.add(key)
        taken = [waiting.popleft()]
        size = taken[0].weight_bytes
        while waiting and len(taken) < at_most and not (self._alone(taken[0]) or self._alone(waiting[0])):
            size += waiting[0].weight_bytes
            if size > room_bytes:
                break
            taken.append(waiting.popleft())
        if not waiting:
            del self._keys[key]
        return taken

    def settled(self, items: Iterable[LeasedEnvelope]) -> set[str]:
        """Settle messages that were out, so that their keys go on. Returns the keys without any message here."""
        keys = {lease.ordering_key for lease in items if lease.ordering_key is not None}
        with self._lock:
            for key in keys & self._busy:
                self._busy.discard(key)
                if waiting := self._keys.get(key):
                    self._share(waiting[0]).keys.append(key)
            return {key for key in keys if key not in self._keys}

    def withdraw(self, keys: Collection[str]) -> list[LeasedEnvelope]:
        """Take away everything that waits of these keys. It is not out: there is nothing to settle."""
        with self._lock:
            withdrawn = list(chain.from_iterable(self._keys.pop(key, ()) for key in keys))
            self._queued -= len(withdrawn)
            for name, share in list(self._shares.items()):
                share.keys = deque(key for key in share.keys if key in self._keys)
                if not (share.keys or share.plain):
                    del self._shares[name]
                    self._turns.remove(name)
        return withdrawn

    def take_all(self) -> list[LeasedEnvelope]:
        """Take all waiting messages."""
        with self._lock:
            shared = chain.from_iterable(share.plain for share in self._shares.values())
            everything = [*self._waiting, *shared, *chain.from_iterable(self._keys.values())]
            self._waiting.clear()
            self._waiting_bytes = self._queued = 0
            self._keys.clear()
            self._shares.clear()
            self._turns.clear()
        return everything

    def waiting(self) -> list[LeasedEnvelope]:
        with self._lock:
            shared = chain.from_iterable(share.plain for share in self._shares.values())
            return [*self._waiting, *shared, *chain.from_iterable(self._keys.values())]
