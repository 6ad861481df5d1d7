"""Whether a handler may run on this node: what `circuits` says, and what its breaker adds to that.

Its failures are counted here and open the circuit for every node (durable.breaker is the rule). While it is open and
probing, recovery claims single messages for the node that is first to ask, and what becomes of such a trial closes
the circuit or puts the next one off. Only a trial closes it: another success may be of a message that was begun before.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from durable.breaker import CircuitBreaker, FailureWindow
from durable.circuit_control import PauseRequest
from durable.clock import Clock
from durable.duration import duration
from durable.envelope import Lease, Leased
from durable.errors import InvalidMessage, Verdict, said
from durable.outcomes import LONGEST_REASON, printable
from durable.storage import circuits
from durable.storage.circuits import Kind
from durable.storage.database import Database
from durable.telemetry import Counters, Event, log

_NEVER = CircuitBreaker()  # its times serve circuits that another version of the code has opened


class HandlerCircuit:
    """The circuit of one handler, as one node sees and keeps it."""

    def __init__(
        self,
        message_type: str,
        breaker: CircuitBreaker | None,
        *,
        database: Database,
        actor: str,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self.is_open = False
        self.probing = False
        """Is it for a single message to close it again?"""
        self.generation = 0
        """Changes when this node opens it: what was read of `circuits` before that is old news."""
        self._message_type = message_type
        self._breaker = breaker or _NEVER
        self._window = FailureWindow(breaker) if breaker is not None else None
        self._database = database
        self._actor = actor
        self._clock = clock
        self._counters = counters
        self._trials: set[Lease] = set()

    def observe(self, is_open: bool, *, probing: bool) -> bool:
        """What `circuits` says. True when the handler is to stop, or to go on."""
        changed = is_open != self.is_open
        self.is_open, self.probing = is_open, probing
        if changed:
            log.warning("%s is %s", self._message_type, "stopped" if is_open else "going on")
            if self._window is not None:
                self._window.clear()
        return changed

    def begin_trial(self, lease: Leased) -> None:
        self._trials.add(lease.key)

    def is_trial(self, lease: Leased) -> bool:
        """Is it the message that is tried?"""
        return lease.key in self._trials

    async def share_failures(self) -> None:
        """Tell the other nodes what was counted here, and hear from them."""

    async def end_trial(self, lease: Leased) -> None:
        """One that came to an end without telling anything: it had expired, say. The next may follow at once."""
        if lease.key in self._trials:
            self._trials.remove(lease.key)
            await self._database.insist(circuits.try_again, self._message_type)

    async def handled(self, owned: Sequence[Leased]) -> None:
        if self._trials and any(lease.key in self._trials for lease in owned):
            self._trials.difference_update(lease.key for lease in owned)
            if await self._database.insist(circuits.close_circuit, Kind.HANDLER, self._message_type):
                self._counters.add(Event.CIRCUIT_CLOSED)
        elif self._window is not None:
            self._window.handled(len(owned), self._clock.monotonic())

    async def failed(self, lease: Leased, error: BaseException) -> None:
        """Count it, and open the circuit when it is one too many."""
        if isinstance(error, Verdict | InvalidMessage):
            return
        if lease.key in self._trials:
            self._trials.remove(lease.key)
            await self._put_off(error)
        elif self._window is not None and not self.is_open:
            reason = self._window.failed(self._clock.monotonic())
            if reason is not None:
                self.observe(True, probing=True)  # at once: what fails meanwhile opens it no second time
                await self._open(f"{reason}, the last: {said(error)}")

    async def pause(self, asked: Sequence[PauseRequest]) -> bool:
        """As the handler has asked for. True when it was about itself."""
        for kind, key, time, reason in asked:
            if kind is Kind.HANDLER:
                key = self._message_type  # which may not be the message's: that may be an older version
            await self._database.insist(circuits.pause, kind, key, reason=reason, actor=self._actor, duration=time)
        self.generation += 1
        return any(request.kind is Kind.HANDLER for request in asked)

    async def _open(self, reason: str) -> None:
        log.error("circuit of %s opened: %s", self._message_type, reason)
        await self._database.insist(
            circuits.open_circuit,
            Kind.HANDLER,
            self._message_type,
            reason=printable(reason)[:LONGEST_REASON],
            actor=self._actor,
            duration=duration(self._breaker.open_for),
        )
        self.generation += 1
        self._counters.add(Event.CIRCUIT_OPENED)

    async def _put_off(self, error: BaseException) -> None:
        reason = f"still failing: {said(error)}"
        bounds: dict[str, timedelta] = {
            "shortest": duration(self._breaker.open_for),
            "longest": duration(self._breaker.longest),
        }
        await self._database.insist(
            circuits.put_off_probe, self._message_type, reason=printable(reason)[:LONGEST_REASON], **bounds
        )
