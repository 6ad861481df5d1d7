"""Callers: an object with the methods of a contract, each of which calls a provider.

What a caller is told, by what became of its call:

    not sent            NoProvider, IncompatibleService, InvalidCall (too large, or without an encoding)
    sent, not run       Overloaded, CallExpired, InvalidCall (the arguments)
    run                 the result, RemoteError, InvalidCall (the result)
    nobody can tell     CallTimeout, ProviderGone

A call is sent once: to call again is the caller's decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from durable.arguments import length_of_time, refuse_unknown
from durable.calls.contract import Contract, Method, Options, decoded_result
from durable.duration import Duration
from durable.errors import (
    CallExpired,
    CallFailed,
    CallTimeout,
    InvalidCall,
    InvalidMessage,
    InvalidSetting,
    NoProvider,
    Overloaded,
    ProviderGone,
    RemoteError,
    TransportError,
)
from durable.kinds import shown
from durable.redaction import shown as tidied
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
}


class Place(Protocol):
    """The place that is called: an address, or this process."""

    name: str

    async def caller(self) -> Caller:
        """Return what sends the calls. Raises WiringError when the bus does not run."""
        ...


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
    ) -> None:
        refuse_unknown("caller", options, list(contract.methods), "method")
        self._contract = contract
        self._place = place
        self._timeout = timeout
        self._on_error = on_error
        self._options = {name: _options(each, options.get(name, {})) for name, each in contract.methods.items()}
        self._checked: Offers | None = None
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

    def _function(self, method: Method) -> Callable[..., Awaitable[Any]]:
        options = self._options[method.name]
        timeout = self._timeout if options.timeout is None else options.timeout
        expiry = min(timeout if options.expiry is None else options.expiry, _LONGEST_EXPIRY)
        bind, arguments = method.bind, method.arguments
        service, name = self._contract.name, method.name
        awaited = not options.fire_and_forget

        async def invoke(*args: Any, **named: Any) -> Any:
            try:
                body = arguments.write(bind(*args, **named))
            except TypeError as error:
                raise TypeError(f"{method.full_name}: {error}") from None
            except InvalidMessage as error:
                raise InvalidCall(f"{method.full_name}: the arguments {error}") from error
            call = Call(service, name, body, expiry, awaited)
            if awaited:
                return await self._call(method, call, timeout)
            self._forget(method, call)
            return None

        invoke.__name__, invoke.__qualname__ = name, method.full_name
        invoke.__doc__ = method.__doc__
        return invoke

    async def _call(self, method: Method, call: Call, seconds: float | None) -> Any:
        """Call within so many seconds; None: for as long as the provider is there."""
        caller: Caller | None = None
        try:
            async with asyncio.timeout(seconds):
                caller = await self._reach()
                answer = await self._send(caller, call)
        except TimeoutError:
            if caller is None:
                raise NoProvider(
                    f"service {call.service}: no answer at {self._place.name} within {seconds} s"
                ) from None
            raise CallTimeout(f"{method.full_name}: no result of {self._place.name} within {seconds} s") from None
        if isinstance(answer, Result):
            try:
                return decoded_result(method, answer.body)
            except InvalidMessage as error:
                raise InvalidCall(str(error)) from error
        raise self._error(method, answer)

    async def _reach(self) -> Caller:
        """Return what sends calls to a provider that fits the contract."""
        caller = await self._place.caller()
        try:
            offers = await caller.offers()
        except TransportError as error:
            raise NoProvider(f"service {self._contract.name}: no answer at {self._place.name}: {error}") from error
        if offers is not self._checked:
            offered = next((each for each in offers.offers if each.service == self._contract.name), None)
            self._contract.check(offered, self._place.name)
            self._checked = offers
        return caller

    async def _send(self, caller: Caller, call: Call) -> Answer:
        try:
            return await caller.call(call)
        except InvalidMessage as error:
            raise InvalidCall(f"{call.service}.{call.method}: {error}") from error
        except TransportError as error:
            raise ProviderGone(
                f"call of {call.service}.{call.method}: no answer, it may have been run: {error}"
            ) from error

    def _error(self, method: Method, fault: Fault) -> CallFailed:
        if fault.kind is FaultKind.RAISED:
            return RemoteError(tidied(fault.error), tidied(fault.text, _LONGEST_REASON), self._place.name)
        return _ERRORS[fault.kind](f"{method.full_name}: {self._place.name}: {fault.text}")

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
                log.warning("call failed, for whose result nobody waits: %s", error)
                return
            try:
                self._on_error(error)
            except Exception:
                log.exception("on_error of a caller of %s failed", self._contract.name)


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
