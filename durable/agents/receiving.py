"""The receiving agent: what listeners bring is stored, and only then answered.

    listeners --> receive() --> arrivals --> one statement --> COMMIT --> an outcome for each envelope

While one batch is being stored the next ones gather, from all connections, and share a commit. A full node hands work
to its neighbours by the table (durable.agents.arrivals).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

from durable.agents.arrivals import ArrivalStore
from durable.agents.context import AgentContext
from durable.agents.intake import Intake
from durable.agents.pace import Pace
from durable.envelope import Envelope
from durable.errors import StorageUnavailable
from durable.failpoints import failpoint
from durable.messages.ordering import OrderingRules
from durable.messages.scope import listener_of
from durable.outcomes import BUSY, Duplicate, Failed, Outcome, Stored
from durable.statistics import ReceivingStatistics
from durable.storage.inbox import Unfit
from durable.tasks.cancelling import raise_if_cancelled
from durable.tasks.forgiving import forgiving
from durable.telemetry import BatchSpans, Event, Subject, log

_STORE_AT_ONCE = 1_000
_STOPPED = Failed("the receiver stopped before it was known to be stored")


class _Waiting:
    """A batch of one connection, until each of its envelopes has an outcome."""

    def __init__(self, endpoint: str, batch: Sequence[Envelope]) -> None:
        self.endpoint = endpoint
        self.batch = batch
        self.weight = sum(envelope.weight_bytes for envelope in batch)
        self.is_taken = False
        """Is it being stored? Then it keeps its room until it is, also when nobody waits for the answer any more."""
        self.answered: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()


class ReceivingAgent:
    """Agent that stores arrivals: the `Receiver` of every listener of this node."""

    def __init__(
        self,
        context: AgentContext,
        intake: Intake,
        *,
        spans: BatchSpans | None = None,
        places: OrderingRules | None = None,
        on_key_stored: Callable[[str], None] = lambda key: None,
    ) -> None:
        self._arrivals = ArrivalStore(context, intake, places, on_key_stored)
        self._database = context.database
        self._settings = context.settings
        self._counters = context.counters
        self._spans = spans
        self._queue: list[_Waiting] = []
        self._storing: Sequence[_Waiting] = ()
        self._queued_count = 0
        self._queued_bytes = 0
        self._changed = asyncio.Event()
        self._stopping = False
        self._cannot_store = ""
        self.pace = Pace("receiving", context.settings.step_timeout.total_seconds())
        self._paused: Set[str] = frozenset()

    # ------------------------------------------------------------------ for listeners

    async def receive(self, endpoint: str, batch: Sequence[Envelope]) -> list[Outcome]:
        waiting = _Waiting(endpoint, batch)
        if self._stopping or listener_of(endpoint) in self._paused or not self._has_room(len(batch), waiting.weight):
            return [BUSY] * len(batch)
        self._queue.append(waiting)
        self._queued_count += len(batch)
        self._queued_bytes += waiting.weight
        self._changed.set()
        try:
            if self._spans is None:
                return await waiting.answered
            with forgiving(partial(self._spans.receiving, endpoint, batch)):
                return await waiting.answered
        finally:
            if not waiting.is_taken:
                self._queue.remove(waiting)
                self._give_room_back(waiting)

    def _give_room_back(self, waiting: _Waiting) -> None:
        self._queued_count -= len(waiting.batch)
        self._queued_bytes -= waiting.weight

    def _has_room(self, count: int, weight: int) -> bool:
        """A batch that alone is more than all the bytes goes in while they are not used up: for lack of a smaller one
        its sender would wait for ever."""
        most = self._settings.buffer_bytes
        fits = self._queued_bytes < most if weight > most else self._queued_bytes + weight <= most
        return fits and count <= self.credit()

    async def reject(self, endpoint: str, raw: bytes, reason: str, headers: Mapping[str, str] | None = None) -> None:
        await self._arrivals.quarantine(Unfit(endpoint, raw, reason, headers=headers or {}))

    async def ready(self) -> bool:
        try:
            async with asyncio.timeout(self._settings.connect_timeout.total_seconds()):
                await self._database.ping()
        except (StorageUnavailable, TimeoutError):
            return False
        return not self._stopping

    def credit(self) -> int:
        return max(0, self._settings.buffer_size - self._queued_count)

    def statistics(self) -> ReceivingStatistics:
        return ReceivingStatistics(waiting=self._queued_count, waiting_bytes=self._queued_bytes)

    # ------------------------------------------------------------------ its loop

    def observe_circuits(self, paused: Set[str]) -> None:
        """Apply `circuits`: for these endpoints every answer is Busy."""
        self._paused = paused

    def stop(self) -> None:
        """Answer Busy to new arrivals; run() ends when those taken are answered."""
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        try:
            while not (self._stopping and not self._queue):
                self._changed.clear()
                if self._queue:
                    await self._store_waiting(self._next_round())
                else:
                    await self._changed.wait()
        finally:
            # After a cancellation nobody stores any more, and the listeners, which close later, wait for every batch.
            self._stopping = True
            for waiting in (*self._storing, *self._queue):
                _answer(waiting, [_STOPPED] * len(waiting.batch))

    def _next_round(self) -> list[_Waiting]:
        """Return whole batches, up to a size that one statement takes well; at least one."""
        count = size = 0
        for waiting in self._queue:
            size += len(waiting.batch)
            if count and size > _STORE_AT_ONCE:
                break
            count += 1
        taken, self._queue = self._queue[:count], self._queue[count:]
        for waiting in taken:
            waiting.is_taken = True
        return taken

    async def _store_waiting(self, taken: Sequence[_Waiting]) -> None:
        self._storing = taken
        try:
            await self._store(taken)
        finally:
            for waiting in taken:
                self._give_room_back(waiting)
        self._storing = ()

    async def _store(self, taken: Sequence[_Waiting]) -> None:
        failpoint("C8")
        outcomes: list[Outcome]
        try:
            with self.pace.step("store arrivals"):
                outcomes = await self._arrivals.store([(w.endpoint, envelope) for w in taken for envelope in w.batch])
            self._cannot_store = ""
        except BaseException as error:  # the loop's top: whatever it is, the senders keep their rows and must be told
            raise_if_cancelled(error)
            self._tell(error)
            failure = Failed(f"the receiver could not store the batch: {type(error).__name__}")
            outcomes = [failure] * sum(len(waiting.batch) for waiting in taken)
        failpoint("C9")
        position = 0
        for waiting in taken:
            answer = outcomes[position : position + len(waiting.batch)]
            position += len(waiting.batch)
            self._count(waiting.endpoint, answer)
            _answer(waiting, answer)

    def _tell(self, error: BaseException) -> None:
        """Once for each outage: the senders ask again and again."""
        is_new, self._cannot_store = str(error) != self._cannot_store, str(error)
        if not isinstance(error, StorageUnavailable):
            log.error("internal error while storing arrivals: %r", error, exc_info=error if is_new else None)
        elif is_new:
            log.warning("arrivals cannot be stored, and stay with their senders: %s", error)

    def _count(self, endpoint: str, outcomes: Sequence[Outcome]) -> None:
        kinds = Counter(map(type, outcomes))
        counters = self._counters.of(Subject.ENDPOINT, listener_of(endpoint))
        counters.add(Event.RECEIVED, kinds[Stored])
        counters.add(Event.DUPLICATE, kinds[Duplicate])


def _answer(waiting: _Waiting, outcomes: list[Outcome]) -> None:
    if not waiting.answered.done():  # its connection may have gone
        waiting.answered.set_result(outcomes)
