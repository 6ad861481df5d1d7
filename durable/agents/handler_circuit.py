"""Circuit of a handler on this node: the shared state in `circuits`, with the failures that this node counts.

Its failures are counted over all nodes and open the circuit for each of them (its rule is a CircuitBreaker): a node
tells what it counts in one short transaction now and then, and hears the others. While the circuit is open and
probing, recovery claims single messages for the node that is first to ask, and what becomes of such a trial closes
the circuit or puts the next one off. Only a trial closes it: another success may be of a message that was begun before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta

from durable.agents.context import AgentContext
from durable.agents.latch import Generation
from durable.application.circuit_breaker import CircuitBreaker, FailureWindow
from durable.application.context import PauseRequest
from durable.duration import duration
from durable.envelope import LeasedEnvelope, LeaseKey
from durable.errors import InvalidMessage, Verdict, said
from durable.outcomes import LONGEST_REASON, printable
from durable.storage import circuits
from durable.storage.circuits import CircuitKind
from durable.tasks.cancelling import end_if_cancelled
from durable.telemetry import Event, log

_LONGEST_SILENCE = 1.0  # seconds between two times that a node tells what it counts
_SHARES = 20  # of a window, at least so many times
_NEVER = CircuitBreaker()  # its times serve circuits that another version of the code has opened


class HandlerCircuit:
    """The circuit of one handler, as one node sees and keeps it."""

    def __init__(self, message_type: str, breaker: CircuitBreaker | None, context: AgentContext) -> None:
        self.is_open = False
        self.probing = False
        """True if a single message is tried, to close the circuit again."""
        self.generation = Generation()
        self._message_type = message_type
        self._breaker = breaker or _NEVER
        self._window = FailureWindow(breaker) if breaker is not None else None
        self._database = context.database
        self._node = context.node
        self._actor = f"node {context.node}"
        self._told = 0, 0
        self._last_failure = "elsewhere"
        self._clock = context.clock
        self._counters = context.counters
        self._trials: set[LeaseKey] = set()

    def observe(self, is_open: bool, *, probing: bool) -> bool:
        """Apply the shared state of the circuit. True when the handler is to stop, or to resume."""
        changed = is_open != self.is_open
        self.is_open, self.probing = is_open, probing
        if changed:
            log.warning("handler %s stopped" if is_open else "handler %s resumed", self._message_type)
            if self._window is not None:
                self._window.clear()
        return changed

    def begin_trial(self, lease: LeasedEnvelope) -> None:
        self._trials.add(lease.key)

    def is_trial(self, lease: LeasedEnvelope) -> bool:
        """Tell whether this message is the trial."""
        return lease.key in self._trials

    async def share_counts(self) -> None:
        """Count together with the other nodes, until cancelled; without a breaker there is nothing to count."""
        if self._window is None:
            return
        pause = min(_LONGEST_SILENCE, duration(self._breaker.window).total_seconds() / _SHARES)
        while True:
            await asyncio.sleep(pause)
            try:
                await self._share(self._window)
            except Exception as error:
                end_if_cancelled()
                log.warning("counts of %s are not shared now: %s", self._message_type, said(error))

    async def _share(self, window: FailureWindow) -> None:
        counts, generation = window.counts(self._clock.monotonic()), self.generation.number
        if self.is_open or counts == self._told == (0, 0):
            return
        others = await self._database.transaction(
            circuits.share_counts,
            self._message_type,
            self._node,
            messages=counts[0],
            failures=counts[1],
            window=duration(self._breaker.window),
        )
        self._told = counts
        if self.is_open or not self.generation.is_current(generation):
            return
        await self._open_if(window.heard(*others, self._clock.monotonic()))

    async def end_trial(self, lease: LeasedEnvelope) -> None:
        """End a trial without a result, such as an expired message. The next trial may follow at once."""
        if lease.key in self._trials:
            self._trials.remove(lease.key)
            await self._database.transaction_with_retry(circuits.try_again, self._message_type)

    async def handled(self, owned: Sequence[LeasedEnvelope]) -> None:
        if self._trials and any(lease.key in self._trials for lease in owned):
            self._trials.difference_update(lease.key for lease in owned)
            if await self._database.transaction_with_retry(
                circuits.close_circuit, CircuitKind.HANDLER, self._message_type
            ):
                self._counters.add(Event.CIRCUIT_CLOSED)
        elif self._window is not None:
            self._window.handled(len(owned), self._clock.monotonic())

    async def failed(self, lease: LeasedEnvelope, error: BaseException) -> None:
        """Count it, and open the circuit when it is one too many."""
        if isinstance(error, Verdict | InvalidMessage):
            return
        if lease.key in self._trials:
            self._trials.remove(lease.key)
            await self._put_off(error)
        elif self._window is not None and not self.is_open:
            self._last_failure = said(error)
            await self._open_if(self._window.failed(self._clock.monotonic()))

    async def pause(self, asked: Sequence[PauseRequest]) -> bool:
        """Pause the targets that the handler has named. True when one of them was the handler itself."""
        pauses_itself = any(request.kind is CircuitKind.HANDLER for request in asked)
        with self.generation.writing() if pauses_itself else nullcontext():
            for request in asked:
                kind, key = request.of(self._message_type)
                await self._database.transaction_with_retry(
                    circuits.pause_at_least, kind, key, reason=request.reason, actor=self._actor, duration=request.time
                )
        return pauses_itself

    async def _open_if(self, reason: str | None) -> None:
        if reason is not None:
            self.observe(True, probing=True)  # at once: what fails meanwhile opens it no second time
            await self._open(f"{reason}, the last: {self._last_failure}")

    async def _open(self, reason: str) -> None:
        log.error("circuit of %s opened: %s", self._message_type, reason)
        with self.generation.writing():
            await self._database.transaction_with_retry(
                circuits.open_circuit,
                CircuitKind.HANDLER,
                self._message_type,
                reason=printable(reason)[:LONGEST_REASON],
                actor=self._actor,
                duration=duration(self._breaker.open_for),
            )
        self._counters.add(Event.CIRCUIT_OPENED)

    async def _put_off(self, error: BaseException) -> None:
        reason = f"still failing: {said(error)}"
        bounds: dict[str, timedelta] = {
            "shortest": duration(self._breaker.open_for),
            "longest": duration(self._breaker.longest),
        }
        await self._database.transaction_with_retry(
            circuits.put_off_probe, self._message_type, reason=printable(reason)[:LONGEST_REASON], **bounds
        )
