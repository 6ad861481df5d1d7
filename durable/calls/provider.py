"""Provider: the services that this process offers, and the calls that run or wait for their turn.

    a call arrives -> runs at once, while fewer than `call_concurrency` run
                   -> waits, while fewer than `call_backlog` wait, and their bytes are within `buffer_bytes`
                   -> is refused as Overloaded

A call that waits is not run once it has expired or was cancelled. Calls have nothing to do with the database: what a
method does there is its own business.

A call of a singleton begins only while this process is sure that it holds it (durable.calls.singletons), in the epoch
that the caller means. That is looked at when the call comes, and again when it begins.

A call says which version and schema it was made against, since its arguments have no names: what the caller knows of
the offers may be out of date. One that does not fit what is offered now is refused.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import CancelledError
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from durable.calls.contract import Contract, Method, refuse_misfit
from durable.calls.singletons import Singletons
from durable.calls.telemetry import CANCELLED, CallTelemetry, Tally, outcome_in
from durable.clock import Clock, SystemClock
from durable.errors import InvalidMessage, InvalidSetting, text_of, told_by
from durable.redaction import shown
from durable.settings import Settings
from durable.statistics import CallSide
from durable.tasks.cancelling import is_cancelled
from durable.tasks.crew import end
from durable.tasks.enclosed import Enclosed
from durable.telemetry import log
from durable.transports.base import Answer
from durable.transports.frames import MAX_OFFERS, Call, Fault, FaultKind, Offers, Result

_LONGEST_TEXT: Final = 1_000
_TRACEBACK: Final = "Traceback (most recent call last):"
_LONGEST_ERROR: Final = 200
_OVERLOADED: Final = "too many calls wait for their turn"
_UNREAD: Final = Fault(FaultKind.OVERLOADED, "too many bytes of earlier results are unread on the connection")
_EXPIRED: Final = Fault(FaultKind.EXPIRED, "the call waited for its turn for too long")
_GONE: Final = Fault(FaultKind.GONE, "the provider has ended, and has cancelled the call")
_ENDING: Final = Fault(FaultKind.ENDING, "the provider is ending")
_BROKEN_OFF: Final = Fault(
    FaultKind.RAISED, "the method, or code that it called, has cancelled its own task", CancelledError.__qualname__
)


@dataclass(frozen=True, slots=True)
class Offered:
    """A service that is offered here."""

    contract: Contract
    functions: Mapping[str, Callable[..., Any]]
    since: datetime
    is_singleton: bool
    tallies: Mapping[str, Tally]


@dataclass(eq=False, slots=True)
class _Waiting:
    """A call that was accepted, until it is answered or cancelled."""

    call: Call
    is_fenced: bool
    method: Method
    function: Callable[..., Any]
    answer: Callable[[Answer], None]
    has_room: Callable[[], bool]
    expires_at: float | None
    tally: Tally
    began: float
    is_cancelled: bool = False
    is_given_up: bool = False
    task: asyncio.Task[None] | None = None


class CallProvider:
    """A `durable.transports.base.Provider`: calls by listeners, and by this process itself."""

    def __init__(self, settings: Callable[[], Settings] = Settings, telemetry: CallTelemetry | None = None) -> None:
        self.telemetry = telemetry or CallTelemetry()
        self.singletons = Singletons()
        self.clock: Clock = SystemClock()
        self._settings = settings
        self._offered: dict[str, Offered] = {}
        self._watching: dict[object, Callable[[], None]] = {}
        self._running: set[_Waiting] = set()
        self._queue: OrderedDict[_Waiting, None] = OrderedDict()
        self._fenced: Counter[str] = Counter()  # calls of singletons that run or wait, by service
        self._withdrawn: dict[str, str] = {}  # singletons that some of these calls still use, and their versions
        self._bytes = 0

    # ------------------------------------------------------------------ what is offered

    def offer(self, contract: Contract, implementation: object, *, singleton: bool = False) -> None:
        """Offer a service. Raises InvalidSetting when its name is offered already, or the object lacks a method."""
        if contract.name in self._offered:
            raise InvalidSetting(f"offer: {contract.name} is offered already; withdraw it first")
        if len(self._offered) == MAX_OFFERS:
            raise InvalidSetting(f"offer: {MAX_OFFERS:,} services are offered already; withdraw one first")
        refuse_misfit(contract, implementation)
        _ = contract.offer
        functions = {name: getattr(implementation, name) for name in contract.methods}
        tallies = {name: self.telemetry.of(CallSide.SERVER, contract.name, name) for name in contract.methods}
        self._offered[contract.name] = Offered(contract, functions, self.clock.now(), singleton, tallies)
        if singleton:  # another offer does not give up what calls of the last one still use
            self._withdrawn.pop(contract.name, None)
        self._want_singletons()
        self._tell()

    def withdraw(self, contract: Contract) -> None:
        """Take an offer back; calls under way are finished. Raises InvalidSetting when it is not offered."""
        offered = self._offered.pop(contract.name, None)
        if offered is None:
            raise InvalidSetting(f"withdraw: {contract.name} is not offered")
        if offered.is_singleton and self._fenced[contract.name]:
            self._withdrawn[contract.name] = contract.version
        self._want_singletons()
        self._tell()

    def begin_anew(self) -> object:
        """Forget the calls and singletons of the process that this one was forked from; they are returned."""
        before = self._running, self._queue, self.singletons
        self._running, self._queue, self._bytes = set(), OrderedDict(), 0
        self._fenced.clear()
        self._withdrawn.clear()
        self.singletons = Singletons()  # whose lock no thread of the parent held at the fork
        self._want_singletons()
        return before

    def use(self, clock: Clock) -> None:
        """Tell the time by this clock, as if all were offered now."""
        self.clock = clock
        self._offered = {name: replace(each, since=clock.now()) for name, each in self._offered.items()}
        self._tell()

    def _want_singletons(self) -> None:
        """Want those that are offered, or of which calls still run: the next holder begins after their end."""
        offered = {name: each.contract.version for name, each in self._offered.items() if each.is_singleton}
        self.singletons.want({**self._withdrawn, **offered})

    @property
    def contracts(self) -> list[Contract]:
        """Contracts of the offered services."""
        return [offered.contract for offered in self._offered.values()]

    @property
    def offered(self) -> Sequence[Offered]:
        """Services that are offered."""
        return list(self._offered.values())

    def offers(self) -> Offers:
        return Offers([offered.contract.offer for offered in self._offered.values()])

    def watch(self, told: Callable[[], None]) -> Callable[[], None]:
        key = object()
        self._watching[key] = told
        return lambda: self._watching.pop(key, None) and None

    def _tell(self) -> None:
        for told in list(self._watching.values()):
            told()

    # ------------------------------------------------------------------ calls

    @property
    def running(self) -> int:
        """Calls that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn."""
        return len(self._queue)

    @property
    def most_bytes(self) -> int:
        """Bytes that the arguments, or the result, of a call may have."""
        return self._settings().max_frame_bytes

    @property
    def load(self) -> int:
        """Calls that run or wait."""
        return len(self._running) + len(self._queue)

    @property
    def bytes(self) -> int:
        """Bytes of the arguments of calls that run or wait."""
        return self._bytes

    def begin(
        self,
        call: Call,
        peer: str | None,
        answer: Callable[[Answer], None],
        has_room: Callable[[], bool] = lambda: True,
    ) -> Callable[[], None]:
        """See `durable.transports.base.Provider`. Call it in the event loop."""
        offered = self._offered.get(call.service)
        function = offered.functions.get(call.method) if offered is not None else None
        if offered is None or function is None:
            text = f"no {shown(call.service)}.{shown(call.method)} is offered here"
            answer(self.telemetry.told(call) or Fault(FaultKind.UNKNOWN, text))
            return _nothing
        tally, began = offered.tallies[call.method], time.monotonic()
        is_fenced = offered.is_singleton or call.epoch > 0
        refusal = _misfit(offered.contract, call) or (self._superseded(call) if is_fenced else None)
        if refusal is not None:
            self.telemetry.ended(tally, began, outcome_in(refusal))
            answer(refusal)
            return _nothing
        method = offered.contract.methods[call.method]
        entry = _Waiting(call, is_fenced, method, function, answer, has_room, _expiry(call), tally, began)
        runs_now = len(self._running) < self._settings().call_concurrency
        if not (runs_now or self._has_room(len(call.body))):
            self._tell_answer(entry, Fault(FaultKind.OVERLOADED, _OVERLOADED))
            return _nothing
        if not has_room():
            self._tell_answer(entry, _UNREAD)
            return _nothing
        self._bytes += len(call.body)
        if is_fenced:
            self._fenced[call.service] += 1
        if runs_now:
            self._start(entry)
        else:
            self._queue[entry] = None
        return lambda: self._cancel(entry)

    def _superseded(self, call: Call) -> Fault | None:
        """Return why a call of a singleton must not begin now."""
        epoch = self.singletons.epoch_of(call.service)
        if not epoch:
            return Fault(FaultKind.SUPERSEDED, f"{call.service} is not held here, or not for sure")
        if call.epoch not in (0, epoch):
            return Fault(FaultKind.SUPERSEDED, f"{call.service} is held in epoch {epoch} here, not in {call.epoch}")
        return None

    def _leave(self, entry: _Waiting) -> None:
        """Count a call no longer."""
        self._bytes -= len(entry.call.body)
        service = entry.call.service
        if not entry.is_fenced:
            return
        self._fenced[service] -= 1
        if not self._fenced[service]:
            del self._fenced[service]
            if self._withdrawn.pop(service, None) is not None:
                self._want_singletons()

    def _has_room(self, size_bytes: int) -> bool:
        return (
            len(self._queue) < self._settings().call_backlog
            and self._bytes + size_bytes <= self._settings().buffer_bytes
        )

    def _start(self, entry: _Waiting) -> None:
        self._running.add(entry)
        entry.task = asyncio.create_task(self._run(entry), name=f"call {entry.method.full_name}")
        # One that is cancelled may not have begun.
        entry.task.add_done_callback(lambda _: self._ended(entry, _GONE if entry.is_given_up else _BROKEN_OFF))

    def _ended(self, entry: _Waiting, answer: Answer) -> None:
        if entry not in self._running:
            return
        self._running.discard(entry)
        self._leave(entry)
        if not entry.is_cancelled:
            self._tell_answer(entry, answer)
        while self._queue and len(self._running) < self._settings().call_concurrency:
            self._next(self._queue.popitem(last=False)[0])

    def _next(self, entry: _Waiting) -> None:
        is_late = entry.expires_at is not None and asyncio.get_running_loop().time() >= entry.expires_at
        if not is_late and entry.has_room():
            self._start(entry)
            return
        self._leave(entry)
        self._tell_answer(entry, _EXPIRED if is_late else _UNREAD)

    def _tell_answer(self, entry: _Waiting, answer: Answer) -> None:
        self.telemetry.ended(entry.tally, entry.began, outcome_in(answer))
        entry.answer(answer)

    async def _run(self, entry: _Waiting) -> None:
        """Run the call, and answer it at once: the end of a task is told only in the next turn of the event loop."""
        spans = self.telemetry.spans
        if spans is None:
            answer = await self._answer(entry)
        else:
            with spans.called(entry.call) as tell:
                answer = await self._answer(entry)
                tell(answer)
        self._ended(entry, answer)

    async def _answer(self, entry: _Waiting) -> Answer:
        """Run the call, and return what becomes of it."""
        if entry.is_fenced and (refusal := self._superseded(entry.call)) is not None:
            return refusal
        method = entry.method
        try:
            calling = method.call(entry.function, entry.call.body)
        except InvalidMessage as error:
            return _fault(FaultKind.INVALID, f"{method.full_name}: the arguments {error}")
        except BaseException as error:
            return _raised(error)
        try:
            result = await Enclosed(calling)
        except BaseException as error:
            if entry.is_cancelled or entry.is_given_up:
                raise
            is_own = isinstance(error, CancelledError) and is_cancelled()  # the method has cancelled its task
            return _BROKEN_OFF if is_own else _raised(error)
        try:
            return Result(method.result.write(result))
        except InvalidMessage as error:
            return _fault(FaultKind.INVALID, f"{method.full_name}: the result {error}")
        except BaseException as error:
            return _raised(error)

    def _cancel(self, entry: _Waiting) -> None:
        if entry.is_cancelled:
            return
        entry.is_cancelled = True
        self.telemetry.ended(entry.tally, entry.began, CANCELLED)
        if entry.task is not None:
            entry.task.cancel()
        elif entry in self._queue:
            del self._queue[entry]
            self._leave(entry)

    async def close_singletons(self, within: float) -> None:
        """Begin no call of a singleton any more, and cancel those that run, for so many seconds."""
        self.singletons.close()
        for entry in [entry for entry in self._queue if entry.is_fenced]:
            del self._queue[entry]
            self._leave(entry)
            self._tell_answer(entry, Fault(FaultKind.SUPERSEDED, f"{entry.call.service} is given up here"))
        running = self._give_up(entry for entry in self._running if entry.is_fenced)
        self.singletons.is_idle = not await end(running, within=within)

    async def drain(self, within: float) -> None:
        """Wait for the calls that run or wait now, for so many seconds; more may come meanwhile."""
        await self._finish({*self._running, *self._queue}, within)

    async def drain_singletons(self, within: float) -> None:
        """The same for the calls of singletons, which others wait for."""
        await self._finish({entry for entry in (*self._running, *self._queue) if entry.is_fenced}, within)

    async def _finish(self, left: set[_Waiting], within: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        while left and (seconds := deadline - loop.time()) > 0:
            tasks = [entry.task for entry in left & self._running if entry.task is not None]
            tasks = tasks or [entry.task for entry in self._running if entry.task is not None]
            if tasks:
                await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            else:  # what waits is begun in a moment
                await asyncio.sleep(0.01)
            left.intersection_update([*self._running, *self._queue])

    async def stop(self, within: float) -> None:
        """Answer what waits, and cancel what runs, for so many seconds; log the failures that are not told yet."""
        self.telemetry.unheard.flush()
        while self._queue:
            entry, _ = self._queue.popitem(last=False)
            self._leave(entry)
            self._tell_answer(entry, _ENDING)
        left = await end(self._give_up(self._running), within=within)
        for task in left:
            log.warning("call does not end when it is cancelled: %s", task.get_name())

    @staticmethod
    def _give_up(entries: Iterable[_Waiting]) -> list[asyncio.Task[None]]:
        """Return the tasks of these calls, which are to be cancelled because the provider ends."""
        given_up = [entry for entry in entries if entry.task is not None]
        for entry in given_up:
            entry.is_given_up = True
        return [entry.task for entry in given_up if entry.task is not None]


def _misfit(contract: Contract, call: Call) -> Fault | None:
    """Return why a call that was made against another contract must not run."""
    difference = contract.misfit(call)
    if not difference:
        return None
    return _fault(FaultKind.INCOMPATIBLE, f"{contract.title} is offered now: {difference}")


def _expiry(call: Call) -> float | None:
    return None if call.expires_in is None else asyncio.get_running_loop().time() + call.expires_in


def _raised(error: BaseException) -> Fault:
    cause = told_by(error)
    text = shown(_without_traceback(text_of(cause)), _LONGEST_TEXT)
    return Fault(FaultKind.RAISED, text, type(cause).__qualname__[:_LONGEST_ERROR])


def _without_traceback(text: str) -> str:
    """Leave out the frames of a traceback that an error quotes: files and code are nobody else's business."""
    said, traceback, quoted = text.partition(_TRACEBACK)
    return said + quoted.strip().rpartition("\n")[2] if traceback else text


def _fault(kind: FaultKind, text: str) -> Fault:
    return Fault(kind, shown(text, _LONGEST_TEXT))


def _nothing() -> None:
    pass
