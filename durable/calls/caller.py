"""Callers: an object with the methods of a contract, each of which calls a provider.

What a caller is told, by what became of its call:

    not sent            NoProvider, IncompatibleService, InvalidCall (too large, or without an encoding)
    sent, not run       IncompatibleService (of a provider that has changed meanwhile), Overloaded,
                        ProviderSuperseded, CallExpired, InvalidCall (the arguments)
    run                 the result, RemoteError, InvalidCall (the result)
    nobody can tell     CallTimeout, ProviderGone

A call that may have been run is not sent again: to call again is the caller's decision. One that was surely not run, in
a place of several providers, goes to the next one. For the holder of a singleton it waits, within its timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from msgspec.structs import replace as replaced

from durable.arguments import length_of_time, refuse_unknown
from durable.calls.contract import Contract, Method, Options, decoded_result
from durable.calls.places import Target
from durable.calls.telemetry import CANCELLED, OK, CallTelemetry, outcome_of
from durable.duration import Duration
from durable.errors import (
    CallExpired,
    CallFailed,
    CallTimeout,
    IncompatibleService,
    InvalidCall,
    InvalidMessage,
    InvalidSetting,
    NoProvider,
    Overloaded,
    ProviderGone,
    ProviderSuperseded,
    RemoteError,
    WiringError,
)
from durable.grammar import several
from durable.kinds import shown
from durable.redaction import shown as tidied
from durable.statistics import CallSide
from durable.telemetry import log
from durable.transports.base import Answer, Caller
from durable.transports.frames import Call, Fault, FaultKind, Offers, Result

OnError = Callable[[CallFailed], None]

_MOST_FORGOTTEN: Final = 10_000
"""Calls without a result that one caller may have under way."""

_LONGEST_REASON: Final = 1_000
_LONGEST_EXPIRY: Final = 10.0**9  # seconds

_ERRORS: Final[Mapping[FaultKind, type[CallFailed]]] = {
    FaultKind.UNKNOWN: NoProvider,
    FaultKind.INVALID: InvalidCall,
    FaultKind.EXPIRED: CallExpired,
    FaultKind.OVERLOADED: Overloaded,
    FaultKind.FORBIDDEN: NoProvider,
    FaultKind.GONE: ProviderGone,
    FaultKind.ENDING: NoProvider,
    FaultKind.SUPERSEDED: ProviderSuperseded,
    FaultKind.INCOMPATIBLE: IncompatibleService,
}
_MISPLACED: Final = (FaultKind.INCOMPATIBLE, FaultKind.ENDING)
"""The provider is no good one for the next calls either."""
_FOR_THE_NEXT: Final = (FaultKind.UNKNOWN, FaultKind.OVERLOADED, *_MISPLACED, FaultKind.SUPERSEDED)
"""Another provider may run the call: this one surely has not."""

_SHORTEST_PAUSE: Final = 0.02  # seconds until the holder of a singleton is looked for again
_LONGEST_PAUSE: Final = 0.2
_MOST_CHECKED: Final = 1_000
_MOST_SHARES: Final = 3
"""Parts of the time that a call has left, of which the next target has one until the call is sent."""


class Place(Protocol):
    """The place that is called: an address, this process, or one of several providers."""

    name: str
    is_choice: bool
    """True when there may be another target after one that has not run a call."""

    @property
    def is_singleton(self) -> bool:
        """True when there is one target at a time: the next one comes when that has gone."""
        ...

    @property
    def looks(self) -> int | None:
        """Number of times that it was looked up what the targets are; None where it never is."""
        ...

    @property
    def is_learning(self) -> bool:
        """True while a connection that was just declared may tell of targets in a moment."""
        ...

    def check(self) -> None:
        """Raise WiringError when nothing can be called there, because the bus does not run."""
        ...

    def choose(self, tried: Collection[str]) -> Target | None:
        """Return what to call; None when there is no target but those that were tried."""
        ...

    def left(self, tried: Collection[str]) -> int:
        """Return the number of targets that were not tried, or any number above the most that share a call's time."""
        ...

    def nobody(self) -> CallFailed:
        """Return why there is no target."""
        ...

    def begun(self, target: Target) -> None: ...

    def ended(self, target: Target) -> None: ...

    def failed(self, target: Target) -> None:
        """Hear that this target did not answer."""
        ...

    def look_again(self) -> None:
        """Hear that what is known of the targets is out of date."""
        ...


@dataclass(slots=True)
class _Course:
    """Course of a call so far: where it is now, and why it was not run before."""

    ends_at: float | None
    asking: Target | None = None
    sent_to: Target | None = None
    refusal: CallFailed | None = None
    tried: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    looks: int | None = None
    was_singleton: bool = False
    pause: float = _SHORTEST_PAUSE
    began_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def share(self, targets: int) -> float | None:
        """Return when the next of so many targets has had its time; None: when the call has."""
        if self.ends_at is None or targets < 2:
            return None
        now = asyncio.get_running_loop().time()
        return now + (self.ends_at - now) / min(targets, _MOST_SHARES)

    def told(self, error: CallFailed) -> CallFailed:
        """Return the error with the number of those that were asked."""
        if len(self.asked) < 2:
            return error
        return type(error)(f"{error} ({several(len(self.asked), 'addresses', 'were')} asked)")


class RemoteService:
    """Calls of one contract at one place."""

    def __init__(
        self,
        contract: Contract,
        place: Place,
        *,
        timeout: float,
        options: Mapping[str, Mapping[str, Duration]],
        on_error: OnError | None,
        telemetry: CallTelemetry | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """`check` raises WiringError where no call may be made now."""
        refuse_unknown("caller", options, list(contract.methods), "method")
        self._contract = contract
        self._place = place
        self._timeout = timeout
        self._on_error = on_error
        self._options = {name: _options(each, options.get(name, {})) for name, each in contract.methods.items()}
        self._telemetry = telemetry or CallTelemetry()
        self._tallies = {name: self._telemetry.of(CallSide.CLIENT, contract.name, name) for name in contract.methods}
        self._check = check
        self._checked: dict[str, Offers] = {}
        self._forgotten: set[asyncio.Task[None]] = set()
        _ = contract.offer

    def stub(self) -> Any:
        """Return an object with the methods of the contract."""
        methods = {name: staticmethod(self._function(method)) for name, method in self._contract.methods.items()}
        named = f"<caller of {self._contract.title} at {self._place.name}>"
        return type(self._contract.cls.__name__, (), {**methods, "__repr__": lambda _: named, "__slots__": ()})()

    async def finish(self) -> None:
        """Wait for the calls for whose results nobody waits."""
        while self._forgotten:
            await asyncio.wait(self._forgotten)
        self._telemetry.unheard.flush()

    def _function(self, method: Method) -> Callable[..., Awaitable[Any]]:
        options = self._options[method.name]
        timeout = self._timeout if options.timeout is None else options.timeout
        expiry = min(timeout if options.expiry is None else options.expiry, _LONGEST_EXPIRY)
        bind, arguments = method.bind, method.arguments
        service, name = self._contract.name, method.name
        version, schema = self._contract.version, method.described.digest
        awaited = not options.fire_and_forget

        async def invoke(*args: Any, **named: Any) -> Any:
            self._check()
            self._place.check()
            try:
                body = arguments.write(bind(*args, **named))
            except TypeError as error:
                raise TypeError(f"{method.full_name}: {error}") from None
            except InvalidMessage as error:
                raise InvalidCall(f"{method.full_name}: the arguments {error}") from error
            call = Call(service, name, body, expiry, awaited, version=version, schema=schema)
            if awaited:
                return await self._call(method, call, timeout)
            self._forget(method, call)
            return None

        invoke.__name__, invoke.__qualname__ = name, method.full_name
        invoke.__doc__ = method.__doc__
        return invoke

    async def _call(self, method: Method, call: Call, seconds: float | None) -> Any:
        """Return the result of a call, and count what became of it."""
        began, outcome, spans = time.monotonic(), CANCELLED, self._telemetry.spans
        try:
            if spans is None:
                result = await self._result(method, call, seconds)
            else:
                with spans.calling(call.service, call.method, self._place.name) as context:
                    result = await self._result(method, replaced(call, **context._asdict()), seconds)
            outcome = OK
            return result
        except Exception as error:
            outcome = outcome_of(error)
            raise
        finally:
            self._telemetry.ended(self._tallies[method.name], began, outcome)

    async def _result(self, method: Method, call: Call, seconds: float | None) -> Any:
        """Call within so many seconds; None: for as long as the provider is there."""
        course = _Course(None if seconds is None else asyncio.get_running_loop().time() + seconds)
        try:
            async with asyncio.timeout_at(course.ends_at):
                answer = await self._answer(method, call, course)
        except TimeoutError:
            if course.asking is not None:
                self._place.failed(course.asking)
            if course.sent_to is not None:
                raise CallTimeout(
                    f"{method.full_name}: no result of {course.sent_to.name} within {seconds} s"
                ) from None
            raise course.told(
                course.refusal
                or NoProvider(f"service {call.service}: no answer at {self._place.name} within {seconds} s")
            ) from None
        if isinstance(answer, Result):
            try:
                return decoded_result(method, answer.body)
            except InvalidMessage as error:
                raise InvalidCall(str(error)) from error
        assert course.sent_to is not None
        raise self._error(method, answer, course.sent_to)

    async def _answer(self, method: Method, call: Call, course: _Course) -> Answer:
        """Return the answer of the first target that may have run the call."""
        while True:
            target = self._place.choose(course.tried)
            if target is None:
                await self._wait_for_target(call, course)
                continue
            self._place.begun(target)
            course.asking = target
            course.asked.add(target.name)
            try:
                answer = await self._answer_of(target, method, call, course)
            except ProviderGone:
                self._place.failed(target)
                raise
            finally:
                self._place.ended(target)
            if answer is not None:
                return answer
            course.asking = None
            assert course.refusal is not None
            if not self._place.is_choice:
                raise course.refusal
            course.tried.add(target.name)

    async def _wait_for_target(self, call: Call, course: _Course) -> None:
        """Wait a little: for a look at the registry or a directory, and longer for the next holder of a singleton.

        Raises CallFailed when there is no sense in it.
        """
        refusal = course.refusal if course.tried and course.refusal is not None else self._place.nobody()
        course.refusal = refusal
        if course.looks is None:
            course.looks = self._place.looks
        is_looking = self._place.looks is not None and self._place.looks == course.looks
        may_be_new = (is_looking or self._place.is_learning) and not course.tried
        is_singleton = self._place.is_singleton or course.was_singleton  # whose last holder may be forgotten by now
        may_move = is_singleton and isinstance(refusal, NoProvider | ProviderSuperseded)
        if not (may_be_new or may_move) or self._is_late(call, course):
            raise course.told(refusal)
        self._place.look_again()
        await asyncio.sleep(course.pause)
        course.pause = min(2 * course.pause, _LONGEST_PAUSE)
        course.tried.clear()

    def _is_late(self, call: Call, course: _Course) -> bool:
        """Tell whether a call that has no timeout has waited for as long as others do."""
        return not call.awaited and asyncio.get_running_loop().time() - course.began_at > self._timeout

    async def _answer_of(self, target: Target, method: Method, call: Call, course: _Course) -> Answer | None:
        """Return the answer of this target; None when it has surely not run the call, and another one may."""
        try:
            answer = await self._ask(target, call, course)
        except (NoProvider, IncompatibleService) as error:
            self._place.failed(target)
            course.refusal = error
            return None
        if not isinstance(answer, Fault) or answer.kind not in _FOR_THE_NEXT:
            return answer
        course.sent_to, course.refusal = None, self._error(method, answer, target)
        course.was_singleton = bool(target.epoch) and self._place.is_choice
        if answer.kind in _MISPLACED:
            self._place.failed(target)
        if answer.kind is not FaultKind.OVERLOADED:
            self._place.look_again()
        return None

    async def _ask(self, target: Target, call: Call, course: _Course) -> Answer:
        """Return the answer of a provider. Where there are others it has a share of the call's time, until the call is
        sent.
        """
        ends_at = course.share(self._place.left(course.tried)) if self._place.is_choice else None
        share = asyncio.timeout_at(ends_at)

        def sent() -> None:
            course.sent_to = target
            share.reschedule(None)

        if call.epoch != target.epoch:
            call = replaced(call, epoch=target.epoch)
        try:
            async with share:
                return await (await self._reach(target)).call(call, sent)
        except InvalidMessage as error:
            raise InvalidCall(f"{call.service}.{call.method}: {error}") from error
        except Exception as error:
            if _is_misuse(error) or isinstance(error, CallFailed):
                raise
            if course.sent_to is not None:
                raise ProviderGone(
                    f"call of {call.service}.{call.method}: no answer, it may have been run: {error}"
                ) from error
            if share.expired():
                raise NoProvider(f"service {self._contract.name}: no answer at {target.name} in time") from None
            raise NoProvider(f"service {self._contract.name}: no answer at {target.name}: {error}") from error

    async def _reach(self, target: Target) -> Caller:
        """Return what sends calls to a provider. Raises IncompatibleService when that does not fit the contract."""
        caller = await target.caller()
        offers = await caller.offers()
        if offers is not self._checked.get(target.name):
            offered = next((each for each in offers.offers if each.service == self._contract.name), None)
            self._contract.check(offered, target.name)
            if len(self._checked) >= _MOST_CHECKED:
                self._checked.clear()
            self._checked[target.name] = offers
        return caller

    def _error(self, method: Method, fault: Fault, target: Target) -> CallFailed:
        if fault.kind is FaultKind.RAISED:
            return RemoteError(tidied(fault.error), tidied(fault.text, _LONGEST_REASON), target.name)
        return _ERRORS[fault.kind](f"{method.full_name}: {target.name}: {fault.text}")

    def _forget(self, method: Method, call: Call) -> None:
        if len(self._forgotten) >= _MOST_FORGOTTEN:
            raise Overloaded(f"{method.full_name}: {_MOST_FORGOTTEN:,} calls are under way; wait before the next")
        task = asyncio.create_task(self._tell_failure(method, call), name=f"call {method.full_name}")
        self._forgotten.add(task)
        task.add_done_callback(self._forgotten.discard)

    async def _tell_failure(self, method: Method, call: Call) -> None:
        try:
            await self._call(method, call, None)
        except CallFailed as error:
            if self._on_error is None:
                self._telemetry.unheard.tell(method.full_name, error)
                return
            try:
                self._on_error(error)
            except Exception:
                log.exception("on_error of a caller of %s failed", self._contract.name)


def _is_misuse(error: Exception) -> bool:
    """Tell whether the caller's own program is at fault, such as one that does not run the bus. An address is not."""
    return isinstance(error, WiringError) and not isinstance(error, InvalidSetting)


def _options(method: Method, given: Mapping[str, Duration]) -> Options:
    of = f"caller: {method.full_name}"
    if not isinstance(given, Mapping):
        raise InvalidSetting(f'{of}={shown(given)}: give options, such as {{"timeout": 5}}')
    refuse_unknown(of, given, ("timeout", "expiry"), "option")
    seconds = {name: length_of_time(of, name, value).total_seconds() for name, value in given.items()}
    for name, value in seconds.items():
        if value <= 0:
            raise InvalidSetting(f"{of}: {name}={given[name]!r}: give a time above zero")
    own = method.options
    return replace(own, timeout=seconds.get("timeout", own.timeout), expiry=seconds.get("expiry", own.expiry))
