"""The handling agent: one for each handler, between the inbox and the application.

    stored / claimed --> buffer --> worker --> attempt: [ handler, its sends, its completion ] one transaction
                                                  |
                                failure: the policy decides (durable.application.retry), after the rollback
                                lease lost: rolled back and forgotten, another node has it

The completion deletes the inbox row where owner and epoch are still this node's; when it meets no row the whole
transaction rolls back, so a node that was paused and declared dead leaves no second effect. Messages of one ordering
key are handled one after another; one that does not come to its end holds the key, and those behind it go back to the
table (durable.messages.ordering). What becomes of the messages that a worker takes is in durable.agents.delivery.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any

from durable.agents.attempts import Attempts, is_suspect
from durable.agents.context import AgentContext
from durable.agents.delivery import BREATH, BlockedKeys, Delivery
from durable.agents.fair_queue import FairQueue
from durable.agents.pace import Standing
from durable.application.handlers import Handler
from durable.application.retry import Policy
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, LeaseKey, NodeId
from durable.failpoints import failpoint
from durable.statistics import HandlingStatistics
from durable.tasks.cancelling import current_task
from durable.tasks.crew import Crew
from durable.telemetry import log


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
            run=handler.run_of_key,
            share_of=handler.share_of,
            weights=handler.weights,
            alone=is_suspect,
        )
        self.claim_pending = False
        self._attempts = attempts
        self._node = context.node
        self._settings = settings
        self._on_capacity = on_capacity
        self._trials: list[LeasedEnvelope] = []
        self._on_key_released = on_key_released
        self._unwanted: list[LeasedEnvelope] = []
        self._working: set[LeaseKey] = set()
        self._at_work: set[object] = set()
        """Marks of the workers that count towards those that may be at work at once."""
        self._changed = asyncio.Event()
        self._delivery = Delivery(
            handler,
            attempts,
            context,
            policy,
            suspects=suspects or asyncio.Lock(),
            changed=self._changed,
            end_if_cancelled=self._end_if_cancelled,
        )
        self.circuit = self._delivery.circuit
        self.pace = self._delivery.pace
        self._running: asyncio.Task[Any] | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._concurrency = handler.concurrency or settings.concurrency
        attempts.when_freed = self._go_on
        attempts.is_cancelled = self._is_cancelled
        self._delivery.settling.on_delayed = self._ask_when_due

    # ------------------------------------------------------------------ what others tell it

    def reserve(self, envelope: Envelope) -> NodeId:
        """Keep room for an envelope that is about to be stored, or leave it to any node. From any thread."""
        takes_it = not self._delivery.stopping and self.takes(envelope.message_type)
        return self._node if takes_it and self.buffer.reserve([envelope]) else ANY_NODE

    def accept(self, claimed: Sequence[LeasedEnvelope]) -> None:
        """Handle these: they are committed, owned by this node, and have room."""
        self.buffer.put(claimed)
        self._changed.set()

    def take(self, claimed: Sequence[LeasedEnvelope]) -> None:
        """Handle these, which were claimed as far as there was room."""
        self.buffer.reserve_unchecked(claimed)
        self.accept(claimed)

    def observe_circuits(self, is_probing: Mapping[str, bool], generation: int) -> None:
        """Follow the open circuits as read from this generation of its own on; older readings are ignored. Messages of
        a paused older version wait alone.
        """
        if not self.circuit.generation.is_current(generation):
            return
        own = self.handler.message_type
        self._delivery.paused_versions = is_probing.keys() - {own}
        self.observe_circuit(own in is_probing, probing=is_probing.get(own, False))

    def takes(self, message_type: str) -> bool:
        """Tell whether messages of this type may be claimed for this handler."""
        return self._attempts.has_threads and not self.is_stopped(message_type)

    def is_stopped(self, message_type: str) -> bool:
        """Tell whether no message of this type may be handled now, on any node."""
        return self.circuit.is_open or self.is_paused(message_type)

    @property
    def rests(self) -> bool:
        """Tell whether this agent begins no message now: it is stopped, or all its threads are stuck."""
        return self.circuit.is_open or not self._attempts.has_threads

    def tries(self, message_type: str) -> bool:
        """Tell whether the handler is given single messages of this type, to find out whether it works again."""
        return self.circuit.probing and self._attempts.has_threads and not self.is_paused(message_type)

    def is_paused(self, message_type: str) -> bool:
        """Tell whether this older version is to wait, while the others are handled."""
        return message_type in self._delivery.paused_versions

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
        """Apply `circuits`: no message of these ordering keys is begun, and their waiting messages are handed back."""
        self._delivery.parked = keys
        if keys:
            waiting = {lease.ordering_key for lease in self.buffer.waiting() if lease.ordering_key}
            self._unwanted += self.buffer.withdraw(waiting & keys)
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

    def cut_off(self) -> Sequence[LeasedEnvelope]:
        """Return the messages whose handler was running when this agent was cancelled."""
        return self._delivery.cut_off

    def works_in(self, task: asyncio.Task[Any]) -> bool:
        """Tell whether this task is one of its workers."""
        return task in self._workers

    def problems(self) -> list[str]:
        """Return the problems for the health check."""
        limit, spell = self._settings.health_unattended.total_seconds(), self._delivery.no_room
        if spell is None or spell.last - spell.first < limit or time.monotonic() - spell.last >= limit:
            return []
        seconds = time.monotonic() - spell.first
        return [f"handler {self.handler.message_type} has begun nothing for {seconds:.0f} s: {spell.reason}"]

    def _go_on(self) -> None:
        self._changed.set()
        self._on_capacity()

    def _ask_when_due(self, delay: timedelta) -> None:
        """Ask for a message that is due again before the next poll, which knows of no delay that begins after it."""
        if timedelta(0) < delay < self._settings.poll_interval:
            asyncio.get_running_loop().call_later(delay.total_seconds(), self._on_capacity)

    def stop(self) -> None:
        """Finish the messages in handling, take no more, then end run()."""
        self._delivery.stopping = True
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
                    tasks.cancel(sharing)
            await self._attempts.finish()
        finally:
            self._attempts.close()

    async def _run_workers(self) -> None:
        async with Crew() as workers:
            self._workers = [
                workers.create_task(self._work(), name=f"handle {self.handler.message_type} {number}")
                for number in range(self._concurrency)
            ]

    async def _work(self) -> None:
        while not self._delivery.stopping:
            self._end_if_cancelled()
            try:
                await self._work_once()
            except BaseException as error:  # also a cancellation that a handler has left behind
                self._end_if_cancelled()
                if isinstance(error, KeyboardInterrupt):
                    raise
                log.exception("a worker of %s failed and goes on", self.handler.message_type)
                with suppress(asyncio.CancelledError):  # a handler may have left several of them behind
                    await asyncio.sleep(BREATH)

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
        elif self._may_take() and (
            taken := self.buffer.take(self._delivery.at_most(len(self.buffer)), self._settings.batch_bytes)
        ):
            await self._work_on(taken)
            await asyncio.sleep(0)  # whoever was woken for the connection takes it, also where the pool is no fair one
        else:
            self._changed.clear()
            await self._changed.wait()

    def _may_take(self) -> bool:
        return len(self._at_work) < self._delivery.at_once(len(self.buffer))

    async def _work_on(self, taken: Sequence[LeasedEnvelope]) -> None:
        """Handle these. A worker counts for as long as a group may take: a long message keeps no other one waiting."""
        if not self._delivery.is_sized:
            await self.handle(taken)
            return
        work = object()
        self._at_work.add(work)
        too_long = asyncio.get_running_loop().call_later(self._settings.group_time.total_seconds(), self._leave, work)
        try:
            await self.handle(taken)
        finally:
            too_long.cancel()
            self._leave(work)

    def _leave(self, work: object) -> None:
        """Let another worker take what waits."""
        self._at_work.discard(work)
        if len(self.buffer) and self._may_take():
            self._changed.set()

    def _put_back(self, left: Sequence[LeasedEnvelope]) -> None:
        """Let any worker take messages that were taken and not begun."""
        if left:
            self._working.difference_update(lease.key for lease in left)
            self.buffer.put_back(left)
            self.buffer.settled(left)
            self._changed.set()

    def _end_if_cancelled(self) -> None:
        """Raise CancelledError when this agent was cancelled, whatever was raised instead on the way.

        A worker whose handler has cancelled the task that it runs in goes on.
        """
        if self._is_cancelled():
            raise asyncio.CancelledError
        worker = current_task()
        while worker is not None and worker.cancelling():
            worker.uncancel()

    def _is_cancelled(self) -> bool:
        agent = self._running or current_task()
        return agent is not None and agent.cancelling() > 0

    async def _try(self, lease: LeasedEnvelope) -> None:
        self.circuit.begin_trial(lease)
        try:
            await self.handle([lease])
        finally:
            await self.circuit.end_trial(lease)

    async def _stay_paused(self) -> None:
        """Hold nothing, until something changes."""
        self._changed.clear()
        if waiting := self.buffer.take_all():
            await self._hand_back(waiting)
        else:
            await self._changed.wait()

    async def _hand_back(self, waiting: Sequence[LeasedEnvelope]) -> None:
        """Hand messages that were not begun back to any node."""
        if waiting:
            try:
                await self._delivery.settling.hand_back(waiting)
            finally:  # what was not handed back is released as forgotten
                self.buffer.done(waiting)

    async def handle(self, taken: Sequence[LeasedEnvelope]) -> None:
        """Bring these, which were taken from the buffer, to an end or to their next attempt."""
        failpoint("C14")
        self._working.update(lease.key for lease in taken)
        held = BlockedKeys(lease.ordering_key for lease in taken)
        own, interrupted = {lease.key: lease for lease in taken}, list[LeasedEnvelope]()

        def put_back(left: Sequence[LeasedEnvelope]) -> None:
            for lease in left:
                del own[lease.key]
            self._put_back(left)

        try:
            try:
                held = await self._delivery.handle(taken, put_back)
            except BaseException as error:
                self._end_if_cancelled()
                if isinstance(error, KeyboardInterrupt):
                    raise
                # Not the handler's failure, which the delivery settles, but ours, or a cancellation that the handler
                # has left behind: another attempt follows. Where it happens again and again, the message is a suspect.
                ids = [str(lease.envelope.id) for lease in own.values()]
                log.exception("internal error while handling %s; will retry", ids)
                interrupted = list(own.values())
            behind = self.buffer.withdraw(held)
            try:
                if interrupted:
                    await self._delivery.settling.hand_back(interrupted, is_interrupted=True)
            finally:
                await self._hand_back(behind)
        finally:
            self._working.difference_update(own)
            self.buffer.done(list(own.values()))
            for key in self.buffer.settled(own.values()) - held:
                self._on_key_released(key)
            if self.claim_pending and self.buffer.room_for_claim(self._settings.batch_size):
                self.claim_pending = False
                self._on_capacity()
