"""Provider: the services that this process offers, and the calls that run or wait for their turn.

    a call arrives -> runs at once, while fewer than `call_concurrency` run
                   -> waits, while fewer than `call_backlog` wait, and their bytes are within `buffer_bytes`
                   -> is refused as Overloaded

A call that waits is not run once it has expired or was cancelled. Calls have nothing to do with the database: what a
method does there is its own business.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from durable.calls.contract import Contract, Method, refuse_misfit
from durable.errors import InvalidMessage, InvalidSetting, text_of
from durable.redaction import shown
from durable.settings import Settings
from durable.tasks.crew import contained, end
from durable.telemetry import log
from durable.transports.base import Answer
from durable.transports.frames import MAX_OFFERS, Call, Fault, FaultKind, Offers, Result

_LONGEST_TEXT: Final = 1_000
_LONGEST_ERROR: Final = 200
_OVERLOADED: Final = "too many calls wait for their turn"
_GONE: Final = Fault(FaultKind.GONE, "the provider is ending")


@dataclass(eq=False, slots=True)
class _Waiting:
    """A call that was accepted, until it is answered or cancelled."""

    method: Method
    function: Callable[..., Any]
    body: bytes
    answer: Callable[[Answer], None]
    expires_at: float | None
    is_cancelled: bool = False
    task: asyncio.Task[Answer] | None = None


class CallProvider:
    """A `durable.transports.base.Provider`: calls by listeners, and by this process itself."""

    def __init__(self, settings: Callable[[], Settings] = Settings) -> None:
        self._settings = settings
        self._offered: dict[str, tuple[Contract, dict[str, Callable[..., Any]]]] = {}
        self._watching: dict[object, Callable[[], None]] = {}
        self._running: set[_Waiting] = set()
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0

    # ------------------------------------------------------------------ what is offered

    def offer(self, contract: Contract, implementation: object) -> None:
        """Offer a service. Raises InvalidSetting when its name is offered already, or the object lacks a method."""
        if contract.name in self._offered:
            raise InvalidSetting(f"offer: {contract.name} is offered already; withdraw it first")
        if len(self._offered) == MAX_OFFERS:
            raise InvalidSetting(f"offer: {MAX_OFFERS:,} services are offered already; withdraw one first")
        refuse_misfit(contract, implementation)
        _ = contract.offer
        self._offered[contract.name] = contract, {name: getattr(implementation, name) for name in contract.methods}
        self._tell()

    def withdraw(self, contract: Contract) -> None:
        """Take an offer back; calls under way are finished. Raises InvalidSetting when it is not offered."""
        if self._offered.pop(contract.name, None) is None:
            raise InvalidSetting(f"withdraw: {contract.name} is not offered")
        self._tell()

    @property
    def contracts(self) -> list[Contract]:
        """Contracts of the offered services."""
        return [contract for contract, _ in self._offered.values()]

    def offers(self) -> Offers:
        return Offers([contract.offer for contract, _ in self._offered.values()])

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
    def bytes(self) -> int:
        """Bytes of the arguments of calls that run or wait."""
        return self._bytes

    def begin(self, call: Call, peer: str | None, answer: Callable[[Answer], None]) -> Callable[[], None]:
        """See `durable.transports.base.Provider`. Call it in the event loop."""
        offered, functions = self._offered.get(call.service, (None, {}))
        function = functions.get(call.method)
        if offered is None or function is None:
            answer(Fault(FaultKind.UNKNOWN, f"no {shown(call.service)}.{shown(call.method)} is offered here"))
            return _nothing
        entry = _Waiting(offered.methods[call.method], function, call.body, answer, _expiry(call))
        runs_now = len(self._running) < self._settings().call_concurrency
        if not (runs_now or self._has_room(len(call.body))):
            answer(Fault(FaultKind.OVERLOADED, _OVERLOADED))
            return _nothing
        self._bytes += len(call.body)
        if runs_now:
            self._start(entry)
        else:
            self._queue.append(entry)
        return lambda: self._cancel(entry)

    def _has_room(self, size_bytes: int) -> bool:
        return (
            len(self._queue) < self._settings().call_backlog
            and self._bytes + size_bytes <= self._settings().buffer_bytes
        )

    def _start(self, entry: _Waiting) -> None:
        self._running.add(entry)
        entry.task = asyncio.create_task(_run(entry), name=f"call {entry.method.full_name}")
        entry.task.add_done_callback(lambda task: self._ended(entry, task))

    def _ended(self, entry: _Waiting, task: asyncio.Task[Answer]) -> None:
        self._running.discard(entry)
        self._bytes -= len(entry.body)
        if not entry.is_cancelled:
            entry.answer(_GONE if task.cancelled() else task.result())
        while self._queue and len(self._running) < self._settings().call_concurrency:
            self._next(self._queue.popleft())

    def _next(self, entry: _Waiting) -> None:
        if entry.expires_at is None or asyncio.get_running_loop().time() < entry.expires_at:
            self._start(entry)
            return
        self._bytes -= len(entry.body)
        entry.answer(Fault(FaultKind.EXPIRED, "the call waited for its turn for too long"))

    def _cancel(self, entry: _Waiting) -> None:
        if entry.is_cancelled:
            return
        entry.is_cancelled = True
        if entry.task is not None:
            entry.task.cancel()
        elif entry in self._queue:
            self._queue.remove(entry)
            self._bytes -= len(entry.body)

    async def stop(self, within: float) -> None:
        """Answer what waits, and cancel what runs, for so many seconds."""
        while self._queue:
            entry = self._queue.popleft()
            self._bytes -= len(entry.body)
            entry.answer(_GONE)
        left = await end([entry.task for entry in self._running if entry.task is not None], within=within)
        for task in left:
            log.warning("call does not end when it is cancelled: %s", task.get_name())


def _expiry(call: Call) -> float | None:
    return None if call.expires_in is None else asyncio.get_running_loop().time() + call.expires_in


async def _run(entry: _Waiting) -> Answer:
    """Run the call, and return what becomes of it."""
    method = entry.method
    try:
        calling = method.call(entry.function, entry.body)
    except InvalidMessage as error:
        return _fault(FaultKind.INVALID, f"{method.full_name}: the arguments {error}")
    except Exception as error:
        return _raised(error)
    try:
        result = await contained(calling)
    except Exception as error:
        return _raised(error)
    try:
        return Result(method.result.write(result))
    except InvalidMessage as error:
        return _fault(FaultKind.INVALID, f"{method.full_name}: the result {error}")


def _raised(error: Exception) -> Fault:
    cause = error.__cause__ if error.__cause__ is not None and type(error).__name__ == "BrokeOff" else error
    return Fault(FaultKind.RAISED, shown(text_of(cause), _LONGEST_TEXT), type(cause).__qualname__[:_LONGEST_ERROR])


def _fault(kind: FaultKind, text: str) -> Fault:
    return Fault(kind, shown(text, _LONGEST_TEXT))


def _nothing() -> None:
    pass
