"""Delivery of messages that a handling agent has taken: handled, given up, or handed back for another attempt.

    taken --> may it begin? --> decode --> attempt, of a group or alone --> handled
                  |                              |
                  |               the policy decides: again at once, later, never, or the handler stops
                  +--> handed back, or expired

With `max_batch=N` up to N messages share one transaction; when one of them fails it rolls back, and each is run alone,
as long as nothing has stopped the handler meanwhile. Each attempt decodes its message anew. With `max_batch="auto"` the
rule of durable.agents.group_size says how many. There a message that has failed before is alone, and of a group that
fails only the one that failed is run at once; the others go back to the queue, so that any worker may take them.

Any error of a handler is a failed attempt, also a BaseException. A failure of the infrastructure is none: without a
connection or a thread a message goes back uncounted, and when the database goes away in an attempt it runs again, as
durable.agents.patience says. So it does, for some times, when the database says that it must be repeated because of
other transactions.

A message whose nodes died again and again is a suspect. Its attempts are counted before they run, and a node runs one
suspect at a time: so the one that kills its process is found and comes to its end, and its neighbours are handled.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from contextlib import nullcontext
from datetime import timedelta
from typing import Final, NamedTuple

from durable.agents.at_once import AtOnce
from durable.agents.attempts import Attempts, Group, Task, is_suspect
from durable.agents.context import AgentContext
from durable.agents.group_size import GroupSize
from durable.agents.handler_circuit import HandlerCircuit
from durable.agents.pace import Pace
from durable.agents.patience import Patience
from durable.agents.runner import NoRoom, Outage, Shortage
from durable.agents.settling import Settling
from durable.application.handlers import Handler
from durable.application.retry import DeadLetter, Pause, Policy, RunAgain, RunLater
from durable.encryption.decoding import decode
from durable.envelope import LeasedEnvelope
from durable.errors import LeaseLost, MissingKey, place_of, said, told_by
from durable.grammar import several
from durable.storage.inbox import Lateness
from durable.storage.outages import is_conflict, met_lock
from durable.storage.rows import UNCOUNTED, Failure, Letter, Tried
from durable.telemetry import Event, log

BREATH: Final = 1.0  # seconds until more is begun where there was no connection or thread, or a worker has failed
_FREE_CONFLICTS: Final = 20  # of one message, in a row; the database rolls back one of two transactions by chance
_CONFLICT_PAUSE: Final = 0.01  # seconds at most after the first conflict, twice as many after each that follows
_LONGEST_CONFLICT_PAUSE: Final = 1.0


class BlockedKeys(set[str]):
    """Ordering keys of which nothing more may be begun now."""

    def __init__(self, keys: Iterable[str | None] = ()) -> None:
        super().__init__(key for key in keys if key is not None)

    def hold(self, lease: LeasedEnvelope) -> None:
        if lease.ordering_key is not None:
            self.add(lease.ordering_key)


PutBack = Callable[[Sequence[LeasedEnvelope]], None]
"""Takes messages that were not begun back into the queue, for any worker."""


class NoRoomSpell(NamedTuple):
    """Attempts for which there was no room, one after another; monotonic seconds."""

    first: float
    last: float
    reason: str


class Delivery:
    """Brings messages of one handler to their end, or to their next attempt."""

    def __init__(
        self,
        handler: Handler,
        attempts: Attempts,
        context: AgentContext,
        policy: Policy,
        *,
        suspects: asyncio.Lock,
        changed: asyncio.Event,
        end_if_cancelled: Callable[[], None],
    ) -> None:
        """`changed` is set when it has stopped its handler; `end_if_cancelled` raises CancelledError for its agent."""
        settings = context.settings
        self.circuit = HandlerCircuit(handler.message_type, handler.circuit_breaker, context)
        self.settling = Settling(handler, context)
        self.pace = Pace(f"handling {handler.message_type}", settings.step_timeout.total_seconds())
        self.paused_versions: Collection[str] = ()
        self.parked: Set[str] = frozenset()
        self.stopping = False
        self.cut_off: list[LeasedEnvelope] = []
        """Messages whose handler was running when its agent was cancelled."""
        self.no_room: NoRoomSpell | None = None
        self._has_shortage = False
        """Has the last end of an attempt met a shortage?"""
        self._handler = handler
        self._attempts = attempts
        self._database = context.database
        self._settings = settings
        self._clock = context.clock
        self._counters = context.counters
        self._policy = policy
        self._ring = context.ring
        self._suspects = suspects
        self._changed = changed
        self._end_if_cancelled = end_if_cancelled
        self._workers = handler.concurrency or settings.concurrency
        self._max_batch = handler.batch(settings.max_batch)
        self._budget = settings.group_time.total_seconds()
        self._size = GroupSize(self._budget)
        self._at_once = AtOnce(self._workers)
        self._longest_attempt = (settings.step_timeout + (handler.timeout or settings.handler_timeout)).total_seconds()

    def at_most(self, waiting: int) -> int:
        """Return the number of messages that a worker may take, when so many wait."""
        return self._max_batch if isinstance(self._max_batch, int) else self._size.at_most(waiting, self._workers)

    @property
    def is_sized(self) -> bool:
        """Tell whether messages may share a transaction, as many as take little time."""
        return self._max_batch == "auto" and self._budget > 0 and not self._size.stays_alone

    def at_once(self, waiting: int) -> int:
        """Return the number of workers that may be at work, when so many wait. Also of messages that are alone: those
        of too many workers take longer, because they share the loop, and would stay alone for that.
        """
        if not self.is_sized or waiting <= self._workers:
            self._at_once.rest()
            return self._workers
        return self._at_once.count

    async def handle(self, taken: Sequence[LeasedEnvelope], put_back: PutBack) -> BlockedKeys:
        """Deliver messages. Returns the held keys: a message of theirs has not come to its end, so no later one may
        follow.
        """
        held = BlockedKeys()
        taken = self._of_one_transaction(await self._with_keys(taken, held), put_back)
        sound = [lease for lease in taken if not is_suspect(lease)]
        tasks = [task for lease in sound if (task := await self._prepare(lease, held)) is not None]
        if len(tasks) == 1:
            await self._handle_alone(tasks[0], held)
        elif tasks:
            for task in await self._handle_together(tasks, held, put_back):
                # What became of those before may have stopped it.
                if await self._may_begin(task.lease, held, has_threads=self._attempts.has_last_threads):
                    await self._handle_alone(task, held)
        for lease in taken:
            if is_suspect(lease):
                await self._handle_suspect(lease, held)
        return held

    def _of_one_transaction(self, taken: Sequence[LeasedEnvelope], put_back: PutBack) -> Sequence[LeasedEnvelope]:
        """Return the messages that this worker handles now. With "auto", one that has failed before is alone."""
        marked = next((lease for lease in taken if lease.attempts or lease.interruptions), None)
        if marked is None or self._max_batch != "auto":
            return taken
        put_back([lease for lease in taken if lease is not marked])
        return [marked]

    async def _with_keys(self, taken: Sequence[LeasedEnvelope], held: BlockedKeys) -> Sequence[LeasedEnvelope]:
        """Return the messages whose encryption keys are here, or that are readable; the others are parked."""
        missing: dict[str, list[LeasedEnvelope]] = {}
        for lease in taken:
            if (key_id := self._ring.missing(lease.envelope.body)) is not None:
                missing.setdefault(key_id, []).append(lease)
        if not missing:
            return taken
        for key_id, leases in missing.items():
            for lease in leases:
                held.hold(lease)
            await self.settling.park(leases, key_id)
        left = {lease.key for leases in missing.values() for lease in leases}
        return [lease for lease in taken if lease.key not in left]

    async def _may_begin(
        self,
        lease: LeasedEnvelope,
        held: BlockedKeys,
        tried: Tried | None = None,
        *,
        has_threads: bool | None = None,
    ) -> bool:
        """Tell whether a message may begin, or again after it was `tried`: its turn has come, its handler runs, and it
        is not too late. Otherwise it is handed back, or ends.
        """
        release = self.settling.hand_back if tried is None else self.settling.give_back
        if lease.ordering_key in self.parked or self._is_stopped(lease, has_threads=has_threads):
            held.hold(lease)
            await release([lease])
            return False
        if lease.ordering_key in held:
            await release([lease])
            return False
        is_late = lease.envelope.is_late(self._clock.now())
        return not (is_late and await self.settling.expire(lease, Lateness(tried=tried or UNCOUNTED)))

    def _is_stopped(self, lease: LeasedEnvelope, *, has_threads: bool | None = None) -> bool:
        """Tell whether messages of this kind are stopped now. A trial runs all the same: it finds out whether the
        handler works again.
        """
        is_open = self.circuit.is_open and not self.circuit.is_trial(lease)
        rests = is_open or not (self._attempts.has_threads if has_threads is None else has_threads)
        return rests or self.stopping or lease.envelope.message_type in self.paused_versions

    async def _prepare(self, lease: LeasedEnvelope, held: BlockedKeys) -> Task | None:
        """The message, unless it has expired, cannot be decoded, has killed too many processes, or must wait."""
        if not await self._may_begin(lease, held):
            return None
        attempt = lease.attempts + 1
        if is_suspect(lease):
            if lease.attempts >= self._policy.max_attempts:
                reason = f"its node died, or met an error of its own, {lease.interruptions} times while it held it"
                letter = Letter.because(reason, "killed its node", lease.envelope.message_type)
                await self._dead_letter(lease, letter, UNCOUNTED, held)
                return None
            counted = await self.settling.begin_suspect_attempt(lease)
            if counted is None:
                held.hold(lease)
                return None
            attempt = counted
        return await self._decode(lease, attempt, held)

    async def _decode(self, lease: LeasedEnvelope, attempt: int, held: BlockedKeys) -> Task | None:
        """Return a copy of the message as it was sent; each attempt has its own. None when it cannot be decoded."""
        try:
            return Task(lease, decode(self._ring, lease, self._handler.cls), attempt)
        except MissingKey as error:  # it was there when the message was taken
            held.hold(lease)
            await self.settling.park([lease], error.key_id)
            return None
        except BaseException as error:  # also what validators and upcasters of the application raise
            self._end_if_cancelled()
            await self._dead_letter(
                lease, Letter.from_error(error), self._tried(1, [self._failure(error, attempt)]), held
            )
            return None

    async def _dead_letter(self, lease: LeasedEnvelope, letter: Letter, tried: Tried, held: BlockedKeys) -> None:
        await self.settling.dead_letter(lease, letter, tried)
        if self.settling.parks:
            held.hold(lease)

    # ------------------------------------------------------------------ attempts, and what follows

    async def _attempt(self, group: Group) -> BaseException | None:
        """Run these in one transaction; return why they were not handled, or None."""
        error = await self._run_attempt(group)
        if not isinstance(error, NoRoom):
            self.no_room = None
        asked = self._attempts.take_asked()
        if error is not None and len(group.tasks) > 1:
            return error  # its messages run again, and ask again
        if asked and await self.circuit.pause(asked):
            self._stop_here()
        return error

    async def _run_attempt(self, group: Group) -> BaseException | None:
        began = time.perf_counter()
        try:
            with self.pace.step("an attempt", self._longest_attempt):
                await self._attempts.run(group)
        except BaseException as error:
            if self._attempts.is_cancelled():
                self.cut_off += [task.lease for task in group.in_handler]
            self._end_if_cancelled()
            return self._as_failure(error)
        finally:
            elapsed = time.perf_counter() - began
            self._counters.durations.observe(elapsed)
            for seconds in group.seconds or [elapsed] * min(group.begun, 1):
                self._size.took(seconds)
            if group.trace:
                self._stay_alone(logging.INFO, group.trace)
        return None

    def _as_failure(self, error: BaseException) -> BaseException:
        """Return the error that decides what follows. One that cannot be asked all that is asked of it stands for a
        fault of its own: otherwise its message would run again and again, uncounted.
        """
        try:
            told = told_by(error)
            self._policy.outlook(self._policy.decide(told, 1), told, 1)
            _ = met_lock(told), is_conflict(told), said(told), place_of(told), Letter.from_error(told)
        except Exception as fault:
            return RuntimeError(f"error of class {_class_of(error)}: fails when it is asked what it is: {said(fault)}")
        if isinstance(told, asyncio.CancelledError):
            failure = RuntimeError("something that the handler awaited was cancelled")
            failure.__cause__ = told
            return failure
        return told

    async def _handle_together(self, tasks: Sequence[Task], held: BlockedKeys, put_back: PutBack) -> Sequence[Task]:
        """Handle them in one transaction. Returns those that are to be run alone, decoded anew, because it failed."""
        is_sized = self._max_batch == "auto"
        group = Group(tasks, self._budget if is_sized else None, is_watched=is_sized)

        def cut() -> None:
            put_back([task.lease for task in group.cut()])

        ends = None if group.budget is None else asyncio.get_running_loop().call_later(group.budget, cut)
        try:
            error = await self._attempt(group)
        finally:
            if ends is not None:
                ends.cancel()
        if isinstance(error, NoRoom):
            await self._give_back(group.tasks, error, held)
            return []
        if error is None or group.budget is not None:
            cut()
        if error is None:
            self._size.committed()
            self._at_once.handled(len(group.tasks), time.perf_counter())
            await self._handled([task.lease for task in group.tasks])
            return []
        if len(group.tasks) > 1:
            log.info("a group of %d rolled back, each is run alone: %s", len(group.tasks), said(error))
        again = group.tasks
        if group.budget is not None:
            self._note_rollback(group.conflict or error, has_timed_out=len(group.tasks) > 1 and group.timeout.expired())
            again = again[-1:]
            put_back([task.lease for task in group.tasks[:-1]])
        if isinstance(error, Outage):
            await self._wait_for_database()
        decoded = [await self._decode(task.lease, task.attempt, held) for task in again]
        return [task for task in decoded if task is not None]

    def _note_rollback(self, error: BaseException, *, has_timed_out: bool) -> None:
        """Let the messages after it be alone for a while; for good, where those of a group may wait for each other."""
        self._size.rolled_back()
        if has_timed_out:
            self._stay_alone(logging.WARNING, f"a transaction of several messages met its timeout: {said(error)}")
        self._note_locks(error)

    def _note_locks(self, error: BaseException) -> None:
        if self._max_batch == "auto" and met_lock(error):
            self._stay_alone(logging.WARNING, f"it met a lock: {said(error)}")

    def _stay_alone(self, level: int, reason: str) -> None:
        if not self._size.stays_alone:
            self._size.stay_alone()
            log.log(level, "handler %s: each message is alone from now on: %s", self._handler.name, reason)

    async def _give_back(self, tasks: Sequence[Task], error: NoRoom, held: BlockedKeys) -> None:
        """Hand messages back to any node, uncounted: there was no room for their attempt."""
        log.warning(
            "handler %s hands %s back uncounted: %s", self._handler.name, several(len(tasks), "messages"), error
        )
        now = time.monotonic()
        self.no_room = NoRoomSpell(self.no_room.first if self.no_room else now, now, str(error))
        for task in tasks:
            held.hold(task.lease)
        await self.settling.give_back([task.lease for task in tasks])
        await asyncio.sleep(BREATH)

    async def _wait_for_database(self) -> None:
        await self._database.transaction_with_retry(self._attempts.end_nothing)

    async def _handle_suspect(self, lease: LeasedEnvelope, held: BlockedKeys) -> None:
        """Handle a suspect while no other suspect is counted: if the node dies now, the cause is this message, or
        accident.
        """
        async with self._suspects:
            if self.stopping:  # it is released with all that this node owns
                held.hold(lease)
                return
            task = await self._prepare(lease, held)
            if task is not None:
                await self._handle_alone(task, held)

    async def _handle_alone(self, first: Task, held: BlockedKeys) -> None:
        task: Task | None = first
        lease, failures, patience, conflicts = first.lease, list[Failure](), Patience(), 0
        while task is not None:
            group, attempt = Group([task], is_watched=self.is_sized), task.attempt
            error = await self._attempt(group)
            if error is None:
                self._at_once.handled(1, time.perf_counter())
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
            if isinstance(error, Outage) and patience.bears(error):
                self._tell_outage(lease, error)
                await patience.pause(error)
                await self._wait_for_database()
                if not await self._may_begin(lease, held, self._tried(task.uncounted, failures)):
                    return
            elif (group.conflict is not None or is_conflict(error)) and conflicts < _FREE_CONFLICTS:
                longest = min(_CONFLICT_PAUSE * 2**conflicts, _LONGEST_CONFLICT_PAUSE)
                conflicts += 1
                self._note_locks(group.conflict or error)
                log.debug("handler %s runs message %s again: %s", self._handler.name, lease.envelope.id, said(error))
                await asyncio.sleep(random.uniform(0, longest))
                if not await self._may_begin(lease, held, self._tried(task.uncounted, failures)):
                    return
            else:
                patience.renew()
                conflicts = 0
                failures = [*failures, self._failure(error, attempt)][-self._settings.kept_attempts :]
                if not await self._runs_again(task, error, failures, held):
                    return
                attempt += 1
            task = await self._decode(lease, attempt, held)

    def _tell_outage(self, lease: LeasedEnvelope, error: Outage) -> None:
        """Log why a message runs again; once for all that meet the same shortage."""
        level = logging.DEBUG if self._has_shortage and isinstance(error, Shortage) else logging.WARNING
        self._has_shortage = isinstance(error, Shortage)
        log.log(level, "handler %s runs message %s again: %s", self._handler.name, lease.envelope.id, error)

    async def _runs_again(
        self, task: Task, error: BaseException, failures: Sequence[Failure], held: BlockedKeys
    ) -> bool:
        """Settle a failed attempt as the policy decides. True when the message is to run again at once."""
        lease, attempt = task.lease, task.attempt
        now = await self.settling.now() if self._policy.asks_for_age else self._clock.now()
        decision = self._policy.decide(error, attempt, now - lease.envelope.due_at)
        self._counters.add(Event.ATTEMPT_FAILED)
        log.warning(
            "handler %s failed on message %s, attempt %d: %s; %s",
            self._handler.name,
            lease.envelope.id,
            attempt,
            said(error) if (place := place_of(error)) is None else f"{said(error)} ({place})",
            self._policy.outlook(decision, error, attempt),
        )
        if isinstance(decision, RunAgain):
            if not (self._is_stopped(lease) or lease.envelope.is_late(now)):
                return True
            decision = RunLater(timedelta(0))
        if self.settling.parks or not isinstance(decision, DeadLetter):
            held.hold(lease)
        tried = self._tried(task.uncounted + 1, failures)
        with self.circuit.generation.writing() if isinstance(decision, Pause) else nullcontext():
            await self.settling.settle(lease, decision, error, tried)
        await self.circuit.failed(lease, error)
        if isinstance(decision, Pause):
            self._stop_here()
        return False

    async def _handled(self, owned: Sequence[LeasedEnvelope]) -> None:
        self._has_shortage = False
        self._counters.add(Event.HANDLED, len(owned))
        await self.circuit.handled(owned)

    def _tried(self, counted: int, failures: Sequence[Failure]) -> Tried:
        return Tried(counted, failures, self._settings.kept_attempts)

    def _failure(self, error: BaseException, attempt: int) -> Failure:
        return Failure.from_error(error, number=attempt, failed_at=self._clock.now())

    def _stop_here(self) -> None:
        """The handler is stopped by now for every node, this one included."""
        if self.circuit.observe(True, probing=False):
            self._changed.set()


def _class_of(error: BaseException) -> str:
    return str(type.__getattribute__(type(error), "__qualname__"))
