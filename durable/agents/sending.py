"""The sending agent: one for each destination, between the outbox and the peer.

committed / claimed --> buffer --> batch --> Sender --> outcomes
                          ^                               |
                          |   Busy, Failed, no answer     +--> Stored, Duplicate: deleted, many rows a statement
                          +-------------------------------+--> Rejected: dead letter with the peer's reason

N batches failed in a row: latched. Its rows go back to any node, only pings travel, the first that is answered
unlatches, and recovery claims what has gathered meanwhile. The latch is a row of `circuits`, which every node
obeys; what the agent holds in memory is bounded by its buffer, whatever the backlog.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import chain

from durable.agents.buffer import is_due
from durable.agents.context import AgentContext
from durable.agents.deletions import Deletions
from durable.agents.fair_queue import FairQueue
from durable.agents.latch import Generation, Latch
from durable.agents.pace import Pace
from durable.envelope import Envelope, LeasedEnvelope, LeaseKey
from durable.errors import ProtocolViolation, TransportError, said, text_of
from durable.failpoints import failpoint
from durable.grammar import several
from durable.messages.ordering import Fairness
from durable.outcomes import Busy, Duplicate, Failed, Outcome, Rejected, Stored
from durable.statistics import SendingStatistics
from durable.storage import circuits, leases, outbox
from durable.storage.circuits import CircuitKind
from durable.storage.expiry import bury_outgoing
from durable.storage.rows import Letter
from durable.storage.sql.recovery import OUTGOING
from durable.tasks.cancelling import raise_if_cancelled
from durable.tasks.crew import Crew
from durable.tasks.forgiving import forgiving
from durable.tasks.waiting import is_set_within
from durable.telemetry import BatchSpans, Event, log
from durable.transports.base import Sender, keeps_order


class SendingAgent:
    """Sends the envelopes of one destination that this node owns. Runs until stop(), or until it is cancelled."""

    def __init__(
        self,
        destination: str,
        sender: Sender,
        context: AgentContext,
        *,
        on_capacity: Callable[[], None],
        spans: BatchSpans | None = None,
        on_key_released: Callable[[str], None] = lambda key: None,
        fairness: Fairness | None = None,
    ) -> None:
        settings = context.settings
        self.destination = destination
        self.circuit = Latch(settings.failures_to_latch)
        run = settings.batch_size if keeps_order(sender) else 1
        self.weights: Mapping[str, int] = fairness.weights if fairness else {}
        share_of = fairness.share_of if fairness else None
        self.buffer = FairQueue(
            settings.buffer_size, settings.buffer_bytes, run=run, share_of=share_of, weights=self.weights
        )
        self.claim_pending = False
        self.paused = False
        self.pace = Pace(f"sending to {destination}", settings.step_timeout.total_seconds())
        self.generation = Generation()
        self._sender = sender
        self._database = context.database
        self._node = context.node
        self._settings = settings
        self._failures = context.failures
        self._counters = context.counters
        self._on_capacity = on_capacity
        self._clock = context.clock
        self._spans = spans
        self._on_key_released = on_key_released
        self._in_flight: dict[int, Sequence[LeasedEnvelope]] = {}
        self._deletions = Deletions(context, self._done)
        self._changed = asyncio.Event()
        self._stopping = False
        self._busy_pause = 0.0
        self._first_busy_pause = settings.busy_pause.total_seconds()
        self._longest_busy_pause = settings.busy_pause_longest.total_seconds()
        self._busy_until = 0.0
        self.accepted_count = 0
        """The number of envelopes accepted so far; a changed number shows that the address was used."""

    # ------------------------------------------------------------------ what others tell it

    @property
    def sends(self) -> bool:
        """False while its destination is latched or paused: then nothing is claimed for it."""
        return not (self.circuit.latched or self.paused)

    def reserve(self, envelope: Envelope) -> bool:
        """Keep room for an envelope that is about to be committed. From any thread."""
        return self.sends and not self._stopping and self.buffer.reserve([envelope])

    def abandon(self, envelopes: Sequence[Envelope]) -> None:
        """Give back the room of envelopes whose transaction was rolled back; from any thread."""
        self.buffer.done(envelopes)

    def accept(self, claimed: Sequence[LeasedEnvelope]) -> None:
        """Send these: they are committed, owned by this node, and have room."""
        self.accepted_count += len(claimed)
        self.buffer.put(claimed)
        self._changed.set()

    def take(self, claimed: Sequence[LeasedEnvelope]) -> None:
        """Send these, which were claimed as far as there was room."""
        self.buffer.reserve_unchecked(claimed)
        self.accept(claimed)

    def observe_circuit(self, latched: bool, generation: int) -> None:
        """Apply `circuits` as read from this generation on; older news is ignored."""
        if not self.generation.is_current(generation) or latched == self.circuit.latched:
            return
        if latched:
            self.circuit.latch()
        else:
            self.circuit.unlatch()
        self._changed.set()

    def observe_pause(self, paused: bool) -> None:
        """Apply a pause of an operator or a handler: no envelope is sent while it lasts, not even a ping."""
        if paused != self.paused:
            log.warning("destination %s paused" if paused else "destination %s resumed", self.destination)
            self.paused = paused
            self._changed.set()
            self._on_capacity()

    def stop(self) -> None:
        """Send the envelopes in memory, then end run()."""
        self._stopping = True
        self._changed.set()

    def retire(self) -> bool:
        """Take nothing any more and end run(), if nothing is here now; False otherwise."""
        if self.held() or not self.buffer.close():
            return False
        self.stop()
        return True

    def held(self) -> set[LeaseKey]:
        """Return the keys of all rows that this agent works on."""
        batches = chain.from_iterable(self._in_flight.values())
        return {lease.key for lease in chain(self.buffer.waiting(), batches, self._deletions.under_way())}

    def statistics(self) -> SendingStatistics:
        first = self.buffer.first
        return SendingStatistics(
            waiting=len(self.buffer),
            in_flight=sum(map(len, self._in_flight.values())),
            batches_in_flight=len(self._in_flight),
            acknowledged=len(self._deletions.under_way()),
            buffer_bytes=self.buffer.used_bytes,
            latched=self.circuit.latched,
            paused=self.paused,
            oldest_sent_at=first.envelope.sent_at if first else None,
        )

    # ------------------------------------------------------------------ its loops

    async def run(self) -> None:
        async with AsyncExitStack() as opened, Crew() as tasks:
            if not await self._open(opened):
                return
            tasks.create_task(self._deletions.run(), name=f"delete sent to {self.destination}")
            async with Crew() as batches:
                await self._send_batches(batches)
            self._deletions.close()

    async def _open(self, opened: AsyncExitStack) -> bool:
        """Open the sender, trying again for as long as that fails. False when the agent is stopped before."""
        while not self._stopping:
            try:
                await opened.enter_async_context(self._sender)
                return True
            except BaseException as error:
                raise_if_cancelled(error)
                log.exception("destination %s cannot be opened; will retry", self.destination)
            self._changed.clear()
            await is_set_within(self._changed, self._settings.ping_interval.total_seconds())
        return False

    async def _send_batches(self, batches: Crew) -> None:
        limits = self._settings
        while not (self._stopping and not (self.sends and len(self.buffer))):
            self._changed.clear()
            if self.paused:
                await self._stay_paused()
            elif self.circuit.latched:
                await self._stay_latched()
            elif (pause := self._busy_until - asyncio.get_running_loop().time()) > 0:
                await is_set_within(self._changed, pause)
            elif is_due(
                self.buffer,
                len(self._in_flight),
                batch_size=limits.batch_size,
                batch_bytes=limits.batch_bytes,
                batches_in_flight=limits.batches_in_flight,
            ):
                batch = self.buffer.take(limits.batch_size, limits.batch_bytes)
                self._in_flight[id(batch)] = batch
                batches.create_task(self._send(batch), name=f"send {len(batch)} to {self.destination}")
            else:
                await self._changed.wait()

    async def _send(self, batch: list[LeasedEnvelope]) -> None:
        failpoint("C5")
        ticket = self.circuit.ticket
        try:
            if timely := await self._without_late(batch):
                await self._send_timely(timely, ticket)
        finally:
            del self._in_flight[id(batch)]
            if self.buffer.settled(batch):  # nothing is left of a key: the rest of it is claimed once these are deleted
                self._deletions.hurry()
            self._changed.set()

    async def _send_timely(self, batch: Sequence[LeasedEnvelope], ticket: int) -> None:
        began = time.perf_counter()
        try:
            with self.pace.step("send a batch"):
                outcomes = await self._deliver([lease.envelope for lease in batch])
        except TransportError as error:
            raise_if_cancelled(error)
            await self._batch_failed(batch, text_of(error), ticket)
        except BaseException as error:  # the transport's fault, or the tracer's: whether it arrived is unknown
            raise_if_cancelled(error)
            log.exception("internal error while sending to %s; will retry", self.destination)
            await self._batch_failed(batch, f"{type(error).__name__}: {text_of(error)}", ticket)
        else:
            self._counters.durations.observe(time.perf_counter() - began)
            await self._settle(batch, outcomes, ticket)

    async def _without_late(self, batch: Sequence[LeasedEnvelope]) -> Sequence[LeasedEnvelope]:
        """Return the envelopes still to be sent; the others expired while they waited here."""
        now = self._clock.now()
        late = [lease for lease in batch if lease.envelope.is_late(now)]
        if not late:
            return batch
        keep_body = self._settings.history_bodies
        expire = bury_outgoing if self._settings.on_expiry == "dead-letter" else outbox.expire
        found = await self._database.transaction_with_retry(expire, self._node, late, keep_body=keep_body)
        self._counters.add(Event.EXPIRED, len(found.expired))
        gone = {lease.key for lease in late if lease.envelope.id not in found.timely}
        self._done([lease for lease in batch if lease.key in gone])
        return [lease for lease in batch if lease.key not in gone]

    async def _deliver(self, batch: Sequence[Envelope]) -> list[Outcome]:
        if self._spans is None:
            outcomes = await self._sender.send(batch)
        else:
            with forgiving(partial(self._spans.sending, self.destination, batch)):
                outcomes = await self._sender.send(batch)
        if len(outcomes) != len(batch):
            raise ProtocolViolation(
                f"transport fault: {several(len(outcomes), 'outcomes')} for {several(len(batch), 'envelopes')}"
            )
        return outcomes

    async def _settle(self, batch: Sequence[LeasedEnvelope], outcomes: Sequence[Outcome], ticket: int) -> None:
        stored: list[LeasedEnvelope] = []
        keep: list[LeasedEnvelope] = []
        failed: list[LeasedEnvelope] = []
        rejected: list[tuple[LeasedEnvelope, Letter]] = []
        reason = ""
        for lease, outcome in zip(batch, outcomes, strict=True):
            match outcome:
                case Stored() | Duplicate():
                    stored.append(lease)
                case Rejected(reason=why):
                    kind = "rejected by the peer"
                    rejected.append((lease, Letter.because(why, kind, lease.envelope.message_type)))
                case Busy():
                    keep.append(lease)
                case Failed(reason=reason):
                    keep.append(lease)
                    failed.append(lease)
        if stored:
            self._deletions.add(stored)
        if rejected:
            await self._dead_letter(rejected)
        if len(failed) == len(batch):
            await self._batch_failed(batch, f"the peer could not store it: {reason}", ticket)
            return
        if failed:
            await self._count_failure(failed)
        if keep:
            self._slow_down(len(keep) - len(failed), took_some=len(keep) < len(batch))
        else:
            self._busy_pause = 0.0
        if len(keep) < len(batch):
            self.circuit.batch_succeeded()
        self.buffer.put_back(keep)

    def _slow_down(self, busy_count: int, *, took_some: bool) -> None:
        """The peer did not take all of it: no failure of the batch, but a pause before the next. It doubles each time
        that the peer takes nothing, and is halved when it takes a part: then it works, as fast as it can."""
        self._counters.add(Event.BUSY, busy_count)
        pause = self._busy_pause / 2 if took_some else self._busy_pause * 2
        self._busy_pause = min(self._longest_busy_pause, max(self._first_busy_pause, pause))
        self._busy_until = asyncio.get_running_loop().time() + self._busy_pause

    async def _batch_failed(self, batch: Sequence[LeasedEnvelope], reason: str, ticket: int) -> None:
        log.warning("batch of %d to %s failed: %s", len(batch), self.destination, reason)
        self._counters.add(Event.SEND_FAILED, len(batch))
        await self._count_failure(batch)
        self.buffer.put_back(batch)
        if self.circuit.batch_failed(ticket):
            await self._latch(reason)

    async def _count_failure(self, batch: Sequence[LeasedEnvelope]) -> None:
        async with self._failures:
            await self._database.transaction_with_retry(outbox.count_failed_attempt, self._node, batch)

    async def _dead_letter(self, rejected: Sequence[tuple[LeasedEnvelope, Letter]]) -> None:
        await self._database.transaction_with_retry(
            outbox.dead_letter, self._node, rejected, keep_body=self._settings.history_bodies
        )
        self._counters.add(Event.REJECTED, len(rejected))
        self._done([lease for lease, _ in rejected])

    # ------------------------------------------------------------------ the latch

    async def _latch(self, reason: str) -> None:
        log.error("latched %s: %s", self.destination, reason)
        self._counters.add(Event.LATCHED)
        with self.generation.writing():
            async with self._failures:
                await self._database.transaction_with_retry(
                    circuits.open_circuit,
                    CircuitKind.DESTINATION,
                    self.destination,
                    reason=reason,
                    actor=f"node {self._node}",
                )

    async def _stay_latched(self) -> None:
        """Hold nothing, ping, and leave the latch when a ping is answered or another node has left it."""
        await self._release_waiting()
        interval = self._settings.ping_interval.total_seconds()
        await is_set_within(self._changed, interval * random.uniform(0.8, 1.2))
        if not self.circuit.latched or self._stopping:
            return
        try:
            with self.pace.step("ping"):
                await self._sender.ping()
        except BaseException as error:
            raise_if_cancelled(error)
            level = logging.DEBUG if isinstance(error, TransportError) else logging.ERROR
            log.log(level, "ping of %s failed: %s", self.destination, said(error))
            return
        with self.generation.writing():
            await self._database.transaction_with_retry(
                circuits.close_circuit, CircuitKind.DESTINATION, self.destination
            )
        if self.circuit.ping_succeeded():
            log.info("unlatched %s", self.destination)
            self._counters.add(Event.UNLATCHED)
        self._on_capacity()

    async def _stay_paused(self) -> None:
        """Hold nothing, until something changes; a batch that is under way may still bring some of it back."""
        if len(self.buffer):
            await self._release_waiting()
        else:
            await self._changed.wait()

    async def _release_waiting(self) -> None:
        waiting = self.buffer.take_all()
        if waiting:
            async with self._failures:
                await self._database.transaction_with_retry(
                    leases.release, OUTGOING, self._node, [lease.key for lease in waiting]
                )
            self._done(waiting)

    # ------------------------------------------------------------------ small things

    def _done(self, finished: Sequence[LeasedEnvelope]) -> None:
        self.buffer.done(finished)
        for key in {lease.ordering_key for lease in finished}:
            if key is not None:
                self._on_key_released(key)
        if self.claim_pending and self.buffer.room_for_claim(self._settings.batch_size):
            self.claim_pending = False
            self._on_capacity()
