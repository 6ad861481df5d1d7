"""The handling agent: one for each handler, between the inbox and the application.

    stored / claimed --> buffer --> worker --> attempt: [ handler, its sends, its completion ] one transaction
                                                  |
                                failure: the policy decides (durable.application.retry), after the rollback
                                lease lost: rolled back and forgotten, another node has it

The completion deletes the inbox row where owner and epoch are still this node's; when it meets no row the whole
transaction rolls back, so a node that was paused and declared dead leaves no second effect. With `max_batch=N` up to N
waiting messages share one transaction; when one of them fails it rolls back, and each is run alone, as long as nothing
has stopped the handler meanwhile. Each attempt decodes its message anew. Messages of one ordering key are handled one
after another; one that does not come to its end holds the key, and those behind it go back to the table
(durable.messages.ordering).

Any error of a handler is a failed attempt, also a BaseException. A failure of the infrastructure is none: without a
connection or a thread a message goes back uncounted, and when the database goes away in an attempt it runs again.

A message whose nodes died again and again is a suspect. Its attempts are counted before they run, and a node runs one
suspect at a time: so the one that kills its process is found and comes to its end, and its neighbours are handled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

from durable.agents.attempts import Attempts, Task
from durable.agents.context import AgentContext
from durable.agents.fair_queue import FairQueue
from durable.agents.handler_circuit import HandlerCircuit
from durable.agents.pace import Pace, Standing
from durable.agents.runner import NoRoom, Outage
from durable.agents.settling import Settling
from durable.application.handlers import Handler
from durable.application.retry import DeadLetter, Pause, Policy, RunAgain, RunLater
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, LeaseKey, NodeId
from durable.errors import LeaseLost, said
from durable.failpoints import failpoint
from durable.messages import upcasting
from durable.statistics import HandlingStatistics
from durable.storage.database import answer
from durable.storage.rows import UNCOUNTED, Failure, Letter, Tried
from durable.tasks.cancelling import current_task
from durable.tasks.crew import Crew
from durable.telemetry import Event, log

_SUSPICIOUS = 2  # deaths; one is an accident, and what the dead node had in memory is handled at full speed
_FREE_OUTAGES = 2  # of one message, in a row; a handler that breaks its connection each time comes to its end
_BREATH = 1.0  # seconds until more is begun where there was no connection or thread, or a worker has failed


class BlockedKeys(set[str]):
    """Ordering keys of which nothing more may be begun now."""

    def __init__(self, keys: Iterable[str | None] = ()) -> None:
        super().__init__(key for key in keys if key is not None)

    def hold(self, lease: LeasedEnvelope) -> None:
        if lease.ordering_key is not None:
            self.add(lease.ordering_key)


class NoRoomSpell(NamedTuple):
    """Attempts for which there was no room, one after another; monotonic seconds."""

    first: float
    last: float
    reason: str


class HandlingAgent:
    """Runs one handler over the messages of its type, and those upcast to it, that this node owns."""

    def __init__(
        self,
        handler: Handler,
        attempts: Attempts,
        context: AgentContext,
        *,
        policy: Policy,
        on_capacity: Callable[[], None],
        suspects: asyncio.Lock | None = None,
        on_key_released: Callable[[str], None] = lambda key: None,
    ) -> None:
        settings = context.settings
        self.handler = handler
        self.buffer = FairQueue(
            settings.buffer_size,
            settings.buffer_bytes,
            run=handler.max_batch,
            share_of=handler.share_of,
            weights=handler.weights,
            alone=_is_suspect,
        )
        self.claim_pending = False
        self.circuit = HandlerCircuit(handler.message_type, handler.circuit_breaker, context)
        self._paused_versions: Collection[str] = ()
        self._attempts = attempts
        self._database = context.database
        self._settling = Settling(handler, context)
        self._policy = policy
        self._node = context.node
        self._settings = settings
        self._clock = context.clock
        self._counters = context.counters
        self._on_capacity = on_capacity
        self._suspects = suspects or asyncio.Lock()
        self._trials: list[LeasedEnvelope] = []
        self._on_key_released = on_key_released
        self._parked: Set[str] = frozenset()
        self._unwanted: list[LeasedEnvelope] = []
        self._working: set[LeaseKey] = set()
        self._changed = asyncio.Event()
        self._stopping = False
        self.pace = Pace(f"handling {handler.message_type}", settings.step_timeout.total_seconds())
        self._longest_attempt = (settings.step_timeout + (handler.timeout or settings.handler_timeout)).total_seconds()
        self._running: asyncio.Task[Any] | None = None
        self._concurrency = handler.concurrency or settings.concurrency
        self._no_room: NoRoomSpell | None = None
        attempts.when_freed = self._go_on

    # ------------------------------------------------------------------ what others tell it

    def reserve(self, envelope: Envelope) -> NodeId:
        """Keep room for an envelope that is about to be stored, or leave it to any node. From any thread."""
        takes_it = not self._stopping and self.takes(envelope.message_type)
        return self._node if takes_it and self.buffer.reserve([envelope]) else ANY_NODE

    def accept(self, claimed: Sequence[LeasedEnvelope]) -> None:
        """Handle these: they are committed, owned by this node, and have room."""
        self.buffer.put(claimed)
        self._changed.set()

    def observe_circuits(self, is_probing: Mapping[str, bool], generation: int) -> None:
        """Follow what `circuits` said of the open ones at a time when this one was at `generation`; older news is
        ignored. Those of older versions wait alone."""
        if generation != self.circuit.generation:
            return
        own = self.handler.message_type
        self._paused_versions = is_probing.keys() - {own}
        self.observe_circuit(own in is_probing, probing=is_probing.get(own, False))

    def takes(self, message_type: str) -> bool:
        """May messages of this type be claimed for it?"""
        return self._attempts.has_threads and not self.is_stopped(message_type)

    def is_stopped(self, message_type: str) -> bool:
        """Is nothing of this type to be handled now, on any node?"""
        return self.circuit.is_open or self.is_paused(message_type)

    @property
    def rests(self) -> bool:
        """Does it begin nothing now: because it is stopped, or all its threads are stuck?"""
        return self.circuit.is_open or not self._attempts.has_threads

    def tries(self, message_type: str) -> bool:
        """Is it to be given single messages of this type, to find out whether its handler works again?"""
        return self.circuit.probing and self._attempts.has_threads and not self.is_paused(message_type)

    def is_paused(self, message_type: str) -> bool:
        """Is this older version to wait, while the others are handled?"""
        return message_type in self._paused_versions

    def observe_circuit(self, is_open: bool, *, probing: bool = False) -> None:
        """Follow what `circuits` says: while it is open nothing new is begun, and what waits goes back to any node.

        With `probing` it is for this agent to try single messages, which probe() gives to it.
        """
        if self.circuit.observe(is_open, probing=probing):
            self._changed.set()
            if not is_open:
                self._on_capacity()

    def probe(self, claimed: LeasedEnvelope) -> None:
        """Try with this message whether the handler works again."""
        self.buffer.reserve_unchecked([claimed])
        self._trials.append(claimed)
        self._changed.set()

    def observe_parked(self, keys: Set[str]) -> None:
        """Follow what `circuits` says: nothing of these keys is begun, and what waits of them goes back."""
        self._parked = keys
        if keys:
            of_them = [lease for lease in self.buffer.waiting() if lease.envelope.partition_key in keys]
            self._unwanted += self.buffer.withdraw({lease.ordering_key for lease in of_them if lease.ordering_key})
            self._changed.set()

    def slowest(self) -> Standing | None:
        """The step that is nearest to its bound; threads that are all stuck are one, too."""
        steps = [step for step in (self.pace.slowest(), self._attempts.standing()) if step is not None]
        return max(steps, key=lambda step: step.share, default=None)

    def stuck(self) -> asyncio.Task[None] | None:
        """A task that ends when the stuck threads come back, if they are why this agent stands."""
        standing = self._attempts.standing()
        if standing is None or standing.share < 1:
            return None
        name = f"{self._attempts.stuck_threads} threads of handler {self.handler.message_type}"
        return asyncio.create_task(self._attempts.stuck_threads_end(), name=name)

    def problems(self) -> list[str]:
        """What health is told of."""
        limit, spell = self._settings.health_unattended.total_seconds(), self._no_room
        if spell is None or spell.last - spell.first < limit or time.monotonic() - spell.last >= limit:
            return []
        seconds = time.monotonic() - spell.first
        return [f"handler {self.handler.message_type} has begun nothing for {seconds:.0f} s: {spell.reason}"]

    def _go_on(self) -> None:
        self._changed.set()
        self._on_capacity()

    def stop(self) -> None:
        """Finish what is being handled, take nothing new, then end run()."""
        self._stopping = True
        self._changed.set()

    def held(self) -> set[LeaseKey]:
        return {lease.key for lease in chain(self.buffer.waiting(), self._unwanted, self._trials)} | self._working

    def statistics(self) -> HandlingStatistics:
        first = self.buffer.first
        return HandlingStatistics(
            waiting=len(self.buffer) + len(self._trials),
            running=len(self._working),
            buffer_bytes=self.buffer.used_bytes,
            paused=self.circuit.is_open,
            oldest_sent_at=first.envelope.sent_at if first else None,
            stuck_threads=self._attempts.stuck_threads,
        )

    # ------------------------------------------------------------------ its workers

    async def run(self) -> None:
        self._running = current_task()
        try:
            async with Crew() as tasks:
                sharing = tasks.create_task(
                    self.circuit.share_counts(), name=f"share counts of {self.handler.message_type}"
                )
                try:
                    await self._run_workers()
                finally:
                    sharing.cancel()
            await self._attempts.finish()
        finally:
            self._attempts.close()

    async def _run_workers(self) -> None:
        async with asyncio.TaskGroup() as workers:
            for number in range(self._concurrency):
                workers.create_task(self._work(), name=f"handle {self.handler.message_type} {number}")

    async def _work(self) -> None:
        while not self._stopping:
            self._end_if_cancelled()
            try:
                await self._work_once()
            except Exception:
                self._end_if_cancelled()
                log.exception("a worker of %s failed and goes on", self.handler.message_type)
                await asyncio.sleep(_BREATH)

    async def _work_once(self) -> None:
        if self._unwanted:
            unwanted, self._unwanted = self._unwanted, []
            await self._hand_back(unwanted)
        elif not self._attempts.has_threads:
            trials, self._trials = self._trials, []
            await self._hand_back(trials)
            await self._stay_paused()
        elif self._trials:
            await self._try(self._trials.pop())
        elif self.circuit.is_open:
            await self._stay_paused()
        elif taken := self.buffer.take(self.handler.max_batch, self._settings.batch_bytes):
            await self.handle(taken)
        else:
            self._changed.clear()
            await self._changed.wait()

    def _end_if_cancelled(self) -> None:
        """Raise CancelledError when this agent was cancelled, whatever was raised instead on the way.

        A worker whose handler has cancelled the task that it runs in goes on.
        """
        worker = current_task()
        agent = self._running or worker
        if agent is not None and agent.cancelling():
            raise asyncio.CancelledError
        while worker is not None and worker.cancelling():
            worker.uncancel()

    async def _try(self, lease: LeasedEnvelope) -> None:
        self.circuit.begin_trial(lease)
        await self.handle([lease])
        await self.circuit.end_trial(lease)

    async def _stay_paused(self) -> None:
        """Hold nothing, until something changes."""
        self._changed.clear()
        if waiting := self.buffer.take_all():
            await self._hand_back(waiting)
        else:
            await self._changed.wait()

    async def _hand_back(self, waiting: Sequence[LeasedEnvelope]) -> None:
        """What has not been begun, to any node."""
        if waiting:
            await self._settling.hand_back(waiting)
            self.buffer.done(waiting)

    async def handle(self, taken: Sequence[LeasedEnvelope]) -> None:
        """Bring these, which were taken from the buffer, to an end or to their next attempt."""
        failpoint("C14")
        self._working.update(lease.key for lease in taken)
        held = BlockedKeys(lease.ordering_key for lease in taken)
        try:
            try:
                held = await self._handle(taken)
            except Exception:
                self._end_if_cancelled()
                # Not the handler's failure, which _handle_alone settles, but ours. The rows stay owned, and are
                # released as forgotten, so another attempt follows.
                log.exception("handling of %s broke off", [str(lease.envelope.id) for lease in taken])
            await self._hand_back(self.buffer.withdraw(held))
        finally:
            self._working.difference_update(lease.key for lease in taken)
            self.buffer.done(taken)
            for key in self.buffer.settled(taken) - held:
                self._on_key_released(key)
            if self.claim_pending and self.buffer.room >= min(self._settings.batch_size, self._settings.buffer_size):
                self.claim_pending = False
                self._on_capacity()

    async def _handle(self, taken: Sequence[LeasedEnvelope]) -> BlockedKeys:
        """Returns the keys that are held: one of their messages has not come to its end, so that none may follow."""
        held = BlockedKeys()
        sound = [lease for lease in taken if not _is_suspect(lease)]
        tasks = [task for lease in sound if (task := await self._prepare(lease, held)) is not None]
        if len(tasks) == 1:
            await self._handle_alone(tasks[0], held)
        elif tasks:
            for task in await self._handle_together(tasks, held):
                # What became of those before may have stopped it.
                if await self._may_begin(task.lease, held, has_threads=self._attempts.has_last_threads):
                    await self._handle_alone(task, held)
        for lease in taken:
            if _is_suspect(lease):
                await self._handle_suspect(lease, held)
        return held

    async def _may_begin(self, lease: LeasedEnvelope, held: BlockedKeys, *, has_threads: bool | None = None) -> bool:
        """Is it this message's turn, is its handler to run, and is it not too late? Otherwise it goes back, or ends."""
        if lease.envelope.partition_key in self._parked or self._is_stopped(lease, has_threads=has_threads):
            held.hold(lease)
            await self._settling.hand_back([lease])
            return False
        if lease.ordering_key in held:
            await self._settling.hand_back([lease])
            return False
        return not (lease.envelope.is_late(self._clock.now()) and await self._settling.expire(lease))

    def _is_stopped(self, lease: LeasedEnvelope, *, has_threads: bool | None = None) -> bool:
        """Is nothing of this message to be begun now? A trial is what finds out whether its handler works again."""
        is_open = self.circuit.is_open and not self.circuit.is_trial(lease)
        rests = is_open or not (self._attempts.has_threads if has_threads is None else has_threads)
        return rests or self._stopping or self.is_paused(lease.envelope.message_type)

    async def _prepare(self, lease: LeasedEnvelope, held: BlockedKeys) -> Task | None:
        """The message, unless it has expired, cannot be decoded, has killed too many processes, or must wait."""
        if not await self._may_begin(lease, held):
            return None
        attempt = lease.attempts + 1
        if _is_suspect(lease):
            counted = await self._settling.begin_suspect_attempt(lease)
            if counted is None:
                held.hold(lease)
                return None
            attempt = counted
            if attempt > self._policy.max_attempts:
                reason = f"its node died {lease.interruptions} times while it was being handled"
                await self._dead_letter(lease, Letter.because(reason, "killed its node"), UNCOUNTED, held)
                return None
        return await self._decode(lease, attempt, held)

    async def _decode(self, lease: LeasedEnvelope, attempt: int, held: BlockedKeys) -> Task | None:
        """The message as it was sent: each attempt may change what it is given. None when it cannot be decoded."""
        try:
            return Task(lease, upcasting.decode(lease.envelope, self.handler.cls), attempt)
        except BaseException as error:  # also what validators and upcasters of the application raise
            self._end_if_cancelled()
            await self._dead_letter(
                lease, Letter.from_error(error), self._tried(1, [self._failure(error, attempt)]), held
            )
            return None

    async def _dead_letter(self, lease: LeasedEnvelope, letter: Letter, tried: Tried, held: BlockedKeys) -> None:
        await self._settling.dead_letter(lease, letter, tried)
        if self._settling.parks:
            held.hold(lease)

    # ------------------------------------------------------------------ attempts, and what follows

    async def _attempt(self, tasks: Sequence[Task]) -> BaseException | None:
        """Run these in one transaction; return why they were not handled, or None."""
        error = await self._run_attempt(tasks)
        if not isinstance(error, NoRoom):
            self._no_room = None
        asked = self._attempts.take_asked()
        if asked and await self.circuit.pause(asked):
            self.observe_circuit(True)
        return error

    async def _run_attempt(self, tasks: Sequence[Task]) -> BaseException | None:
        began = time.perf_counter()
        try:
            with self.pace.step("an attempt", self._longest_attempt):
                await self._attempts.run(tasks)
        except BaseException as error:
            self._end_if_cancelled()
            return _as_failure(error)
        finally:
            self._counters.durations.observe(time.perf_counter() - began)
        return None

    async def _handle_together(self, tasks: Sequence[Task], held: BlockedKeys) -> Sequence[Task]:
        """Handle them in one transaction. Returns those that are to be run alone, decoded anew, because it failed."""
        error = await self._attempt(tasks)
        if error is None:
            await self._handled([task.lease for task in tasks])
            return []
        if isinstance(error, NoRoom):
            await self._give_back(tasks, error, held)
            return []
        log.info("a group of %d rolled back, each is run alone: %s", len(tasks), said(error))
        if isinstance(error, Outage):
            await self._wait_for_database()
        again = [await self._decode(task.lease, task.attempt, held) for task in tasks]
        return [task for task in again if task is not None]

    async def _give_back(self, tasks: Sequence[Task], error: NoRoom, held: BlockedKeys) -> None:
        """There was no room for their attempt: any node may try, and they have lost none."""
        log.warning("%d messages of %s go back uncounted: %s", len(tasks), self.handler.name, error)
        now = time.monotonic()
        self._no_room = NoRoomSpell(self._no_room.first if self._no_room else now, now, str(error))
        for task in tasks:
            held.hold(task.lease)
            if _is_suspect(task.lease):
                await self._settling.take_back_attempt(task.lease)
        if sound := [task.lease for task in tasks if not _is_suspect(task.lease)]:
            await self._settling.hand_back(sound)
        await asyncio.sleep(_BREATH)

    async def _wait_for_database(self) -> None:
        await self._database.transaction_with_retry(answer)

    async def _handle_suspect(self, lease: LeasedEnvelope, held: BlockedKeys) -> None:
        """With no other suspect counted meanwhile: if the node dies now, it was this one, or accident."""
        async with self._suspects:
            if self._stopping:  # it is released with all that this node owns
                held.hold(lease)
                return
            task = await self._prepare(lease, held)
            if task is not None:
                await self._handle_alone(task, held)

    async def _handle_alone(self, first: Task, held: BlockedKeys) -> None:
        task: Task | None = first
        lease, failures, outages = first.lease, list[Failure](), 0
        while task is not None:
            error, attempt = await self._attempt([task]), task.attempt
            if error is None:
                await self._handled([lease])
                return
            if isinstance(error, LeaseLost):
                self._counters.add(Event.LEASE_LOST)
                log.warning("lease of %s lost: rolled back", lease.envelope.id)
                held.hold(lease)
                return
            if isinstance(error, NoRoom):
                await self._give_back([task], error, held)
                return
            if isinstance(error, Outage) and outages < _FREE_OUTAGES:
                outages += 1
                log.warning("%s of %s runs again: %s", self.handler.name, lease.envelope.id, error)
                await self._wait_for_database()
                if not await self._may_begin(lease, held):
                    return
            else:
                outages = 0
                failures = [*failures, self._failure(error, attempt)][-self._settings.kept_attempts :]
                if not await self._runs_again(lease, attempt, error, failures, held):
                    return
                attempt += 1
            task = await self._decode(lease, attempt, held)

    async def _runs_again(
        self, lease: LeasedEnvelope, attempt: int, error: BaseException, failures: Sequence[Failure], held: BlockedKeys
    ) -> bool:
        """Settle a failed attempt as the policy decides. True when the message is to run again at once."""
        now = self._clock.now()
        decision = self._policy.decide(error, attempt, now - lease.envelope.due_at)
        self._counters.add(Event.ATTEMPT_FAILED)
        log.warning("%s of %s failed, attempt %d: %s", self.handler.name, lease.envelope.id, attempt, said(error))
        if isinstance(decision, RunAgain):
            if not (self._is_stopped(lease) or lease.envelope.is_late(now)):
                return True
            decision = RunLater(timedelta(0))
        if self._settling.parks or not isinstance(decision, DeadLetter):
            held.hold(lease)
        counted_before = lease.attempts + (1 if _is_suspect(lease) else 0)
        tried = self._tried(attempt - counted_before, failures)
        await self._settling.settle(lease, decision, error, tried)
        await self.circuit.failed(lease, error)
        if isinstance(decision, Pause):
            self.circuit.generation += 1
            self.observe_circuit(True)
        return False

    async def _handled(self, owned: Sequence[LeasedEnvelope]) -> None:
        self._counters.add(Event.HANDLED, len(owned))
        await self.circuit.handled(owned)

    def _tried(self, counted: int, failures: Sequence[Failure]) -> Tried:
        return Tried(counted, failures, self._settings.kept_attempts)

    def _failure(self, error: BaseException, attempt: int) -> Failure:
        return Failure.from_error(error, number=attempt, failed_at=self._clock.now())


def _as_failure(error: BaseException) -> BaseException:
    if isinstance(error, asyncio.CancelledError):
        failure = RuntimeError("something that the handler awaited was cancelled")
        failure.__cause__ = error
        return failure
    return error


def _is_suspect(lease: LeasedEnvelope) -> bool:
    return lease.interruptions >= _SUSPICIOUS
