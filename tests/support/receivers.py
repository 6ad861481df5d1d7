"""A stand-in for the receiving agent: it stores in memory, and on request does what a database does to one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from uuid import UUID

from durable.envelope import Envelope, new_id
from durable.outcomes import BUSY, DUPLICATE, STORED, Outcome, Rejected

REJECTED_TYPE = "to be rejected"


class MemoryReceiver:
    """Stores by id. Rejects envelopes of REJECTED_TYPE; answers Busy when there is no room.

    What is stored takes room for ever, unless it `handles_at_once`.

    `hold()` keeps batches from being stored until `release()`, or until `release_batch(n)`, the n-th that arrived.
    """

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = room
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

    async def reject(self, endpoint: str, raw: bytes, reason: str, headers: Mapping[str, str] | None = None) -> None:
        self.endpoints.add(endpoint)
        self.letters.append((raw, reason, dict(headers or {})))
        await self._notify()

    async def ready(self) -> bool:
        return self.is_ready

    def credit(self) -> int:
        return max(0, self.room - self._unhandled - self._under_way)

    @property
    def _unhandled(self) -> int:
        return 0 if self.handles_at_once else len(self.stored)

    def hold(self) -> None:
        self._holding = True

    def release(self) -> None:
        self._holding = False
        for gate in self._gates:
            gate.set()

    def release_batch(self, number: int) -> None:
        self._gates[number].set()

    async def arrived(self, batches: int) -> None:
        """Return when so many batches have arrived, stored or not."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.batches) >= batches)

    def _store(self, envelope: Envelope) -> Outcome:
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
    return [envelope(body=body) for _ in range(count)]
