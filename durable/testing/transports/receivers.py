"""A stand-in for the receiving agent: it stores in memory, and on request does what a database does to the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from uuid import UUID

from durable.envelope import Envelope, new_id
from durable.grammar import several
from durable.outcomes import BUSY, DUPLICATE, STORED, Failed, Outcome, Rejected

REJECTED_TYPE = "to be rejected"

_PATIENCE = 30.0  # seconds


class MemoryReceiver:
    """A `durable.transports.base.Receiver`. Stores by id; what is stored takes room for ever, unless `handles_at_once`.

    Envelopes of REJECTED_TYPE are Rejected, those beyond `room` are Busy, and everything is Failed while `broken` says
    why. `hold()` keeps batches from being stored until `release()`, or `release_batch(n)`, the n-th that arrived.

    `stored` has the envelopes by id, in the order in which they were stored; `batches` each batch as it arrived;
    `letters` what came as no envelope, with its reason and headers.
    """

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = room
        self.broken = ""
        self.is_ready = True
        self.handles_at_once = False
        self.stored: dict[UUID, Envelope] = {}
        self.batches: list[list[Envelope]] = []
        self.endpoints: set[str] = set()
        self.letters: list[tuple[bytes, str, dict[str, str]]] = []
        self.most_under_way = 0
        self._under_way = 0
        self._holding = False
        self._gates: list[asyncio.Event] = []
        self._changed = asyncio.Condition()

    # ------------------------------------------------------------------ for listeners

    async def receive(self, endpoint: str, batch: Sequence[Envelope]) -> list[Outcome]:
        self.endpoints.add(endpoint)
        self.batches.append(list(batch))
        self._under_way += len(batch)
        self.most_under_way = max(self.most_under_way, self._under_way)
        gate = asyncio.Event()
        self._gates.append(gate)
        if not self._holding:
            gate.set()
        await self._notify()
        try:
            await gate.wait()
            return [self._store(envelope) for envelope in batch]
        finally:
            self._under_way -= len(batch)
            await self._notify()

    async def reject(self, endpoint: str, raw: bytes, reason: str, headers: Mapping[str, str] | None = None) -> None:
        self.endpoints.add(endpoint)
        self.letters.append((raw, reason, dict(headers or {})))
        await self._notify()

    async def ready(self) -> bool:
        return self.is_ready

    def credit(self) -> int:
        return max(0, self.room - self._unhandled - self._under_way)

    # ------------------------------------------------------------------ for tests

    def hold(self) -> None:
        self._holding = True

    def release(self) -> None:
        self._holding = False
        for gate in self._gates:
            gate.set()

    def release_batch(self, number: int) -> None:
        self._gates[number].set()

    @property
    def envelopes(self) -> list[Envelope]:
        """Return the stored envelopes, in the order in which they were stored."""
        return list(self.stored.values())

    @property
    def arrivals(self) -> int:
        """Envelopes that have arrived, stored or not, again or for the first time."""
        return sum(map(len, self.batches))

    async def arrived(self, batches: int) -> None:
        """Return when so many batches have arrived, stored or not."""
        await self.until(lambda: len(self.batches) >= batches, f"{batches} batches to arrive")

    async def stores(self, envelopes: int) -> None:
        """Return when so many envelopes are stored."""
        await self.until(lambda: len(self.stored) >= envelopes, f"{envelopes} envelopes to be stored")

    async def until(self, condition: Callable[[], bool], what: str = "something") -> None:
        """Return when this is true of the receiver; raises AssertionError when it is not in time."""
        try:
            async with asyncio.timeout(_PATIENCE), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise AssertionError(
                f"waited {_PATIENCE:g} seconds for {what}; {self.arrivals} envelopes have arrived in "
                f"{several(len(self.batches), 'batches')}, stored: {len(self.stored)}, letters: {len(self.letters)}"
            ) from None

    # ------------------------------------------------------------------ storing

    @property
    def _unhandled(self) -> int:
        return 0 if self.handles_at_once else len(self.stored)

    def _store(self, envelope: Envelope) -> Outcome:
        if self.broken:
            return Failed(self.broken)
        if envelope.message_type == REJECTED_TYPE:
            return Rejected("a type that the test rejects")
        if envelope.id in self.stored:
            return DUPLICATE
        if self._unhandled >= self.room:
            return BUSY
        self.stored[envelope.id] = envelope
        return STORED

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def envelope(message_type: str = "order placed", body: bytes = b"{}") -> Envelope:
    """An envelope like any other."""
    return Envelope(
        id=new_id(),
        message_type=message_type,
        destination="billing",
        source="orders",
        correlation_id=new_id(),
        body=body,
        sent_at=datetime.now(UTC),
    )


def envelopes(count: int, body: bytes = b"{}") -> list[Envelope]:
    """Return this many envelopes with one body."""
    return [envelope(body=body) for _ in range(count)]
