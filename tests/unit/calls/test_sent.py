"""What a caller is told of a call that fails: before its first byte is sent it was surely not run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, cast

import pytest

from durable.calls.caller import RemoteService
from durable.calls.choice import Origin
from durable.calls.contract import contract_of
from durable.calls.links import Links
from durable.calls.places import Elsewhere, here, this_machine
from durable.calls.provider import CallProvider
from durable.calls.providers import Anywhere, Providers
from durable.calls.registry import Registry
from durable.errors import (
    CallTimeout,
    ConnectionFailed,
    IncompatibleService,
    NoProvider,
    PeerTimeout,
    ProtocolViolation,
    ProviderGone,
    WiringError,
)
from durable.transports.base import Answer
from durable.transports.frames import Call, Fault, FaultKind, Offers, Result
from tests.integration.calls.test_bad_providers import listed
from tests.support.calling import SOON, Inventory

CONTRACT = contract_of(Inventory)
BAD, GOOD = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"
ERRORS = [ConnectionFailed("closed"), PeerTimeout("late"), ProtocolViolation("nonsense"), OSError("broken"), KeyError()]
failing = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


async def wait() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


class Failing:
    """A transport whose callers at BAD fail with an error, or answer nothing where there is none, before or after they
    have sent a call.
    """

    def __init__(self, error: Exception | None, *, is_sent: bool) -> None:
        self._error = error
        self._is_sent = is_sent
        self.called: list[str] = []

    def caller(self, uri: str) -> Any:
        return _Caller(self, uri)

    async def call(self, uri: str, sent: Callable[[], None]) -> Answer:
        self.called.append(uri)
        if self._is_sent or uri == GOOD:
            sent()
        if uri == GOOD:
            return Result(b"\xa1A")
        if self._error is None:
            await wait()
        raise self._error


class _Caller:
    def __init__(self, transport: Failing, uri: str) -> None:
        self._transport = transport
        self._uri = uri

    async def __aenter__(self) -> _Caller:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def offers(self) -> Offers:
        return Offers([CONTRACT.offer])

    async def call(self, call: Call, sent: Callable[[], None]) -> Answer:
        return await self._transport.call(self._uri, sent)


def links_of(transport: Failing) -> Links:
    return Links(lambda _: cast(Any, transport))


def pinned(transport: Failing, seconds: float = SOON) -> Any:
    links = links_of(transport)
    return RemoteService(CONTRACT, Elsewhere(BAD, lambda: links), timeout=seconds, options={}, on_error=None).stub()


def anywhere(transport: Failing, seconds: float = SOON) -> Any:
    """Return a caller of both, which begins with the bad one."""
    registry, links = Registry(), links_of(transport)
    registry.learn("hub", [listed(1, BAD), listed(2, GOOD)])
    origin = Origin("orders", 3, this_machine())
    providers = Providers(registry, lambda: origin, links=lambda: links, provider=CallProvider)
    place = Anywhere(CONTRACT, lambda: providers)
    return RemoteService(CONTRACT, place, timeout=seconds, options={}, on_error=None).stub()


@failing
async def test_failed_call_has_no_provider_when_not_sent(error: Exception) -> None:
    with pytest.raises(NoProvider, match="no answer at"):
        await pinned(Failing(error, is_sent=False)).slow("A")


@failing
async def test_failed_call_goes_to_another_provider_when_not_sent(error: Exception) -> None:
    transport = Failing(error, is_sent=False)
    assert await anywhere(transport).slow("A") == "A"
    assert transport.called == [BAD, GOOD]


@pytest.mark.parametrize("make", [pinned, anywhere])
@failing
async def test_failed_call_may_have_been_run_when_sent(error: Exception, make: Callable[..., Any]) -> None:
    transport = Failing(error, is_sent=True)
    with pytest.raises(ProviderGone, match="it may have been run"):
        await make(transport).slow("A")
    assert transport.called == [BAD]


async def test_unanswered_call_has_no_provider_when_not_sent() -> None:
    with pytest.raises(NoProvider, match="no answer at"):
        await pinned(Failing(None, is_sent=False), 0.05).slow("A")


async def test_unanswered_call_goes_to_another_provider_when_not_sent() -> None:
    transport = Failing(None, is_sent=False)
    assert await anywhere(transport, 0.4).slow("A") == "A"
    assert transport.called == [BAD, GOOD]


@pytest.mark.parametrize("make", [pinned, anywhere])
async def test_unanswered_call_may_have_been_run_when_sent(make: Callable[..., Any]) -> None:
    transport = Failing(None, is_sent=True)
    with pytest.raises(CallTimeout):
        await make(transport, 0.05).slow("A")
    assert transport.called == [BAD]


class Refusing(Failing):
    """A transport whose callers at BAD reach a provider of another version by now."""

    def __init__(self) -> None:
        super().__init__(None, is_sent=True)

    async def call(self, uri: str, sent: Callable[[], None]) -> Answer:
        if uri == GOOD:
            return await super().call(uri, sent)
        self.called.append(uri)
        sent()
        return Fault(FaultKind.INCOMPATIBLE, "another first number")


async def test_misfit_goes_to_another_provider_when_told_by_the_first() -> None:
    transport = Refusing()
    caller = anywhere(transport)
    assert [await caller.slow("A") for _ in range(3)] == ["A", "A", "A"]
    assert transport.called == [BAD, GOOD, GOOD, GOOD]


async def test_misfit_is_told_when_one_address_is_called() -> None:
    with pytest.raises(IncompatibleService, match="another first number"):
        await pinned(Refusing()).slow("A")


async def test_target_in_this_process_is_closed_when_the_bus_ends_meanwhile() -> None:
    links: Links | None = links_of(Refusing())
    target = here(CallProvider, lambda: links)
    await target.caller()
    links = None
    with pytest.raises(WiringError, match="does not run"):
        await target.caller()
