"""Ends of callers and providers, and callers where no call may be made: none hangs, or gives another's answer."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from durable import Bus
from durable.calls.links import Links
from durable.calls.places import Elsewhere
from durable.envelope import new_id
from durable.errors import CallFailed, CallTimeout, NoProvider, ProviderGone, WiringError
from durable.settings import load_settings
from durable.testing import eventually
from durable.transports.http.transport import HttpTransport
from durable.transports.tcp.transport import TcpTransport
from tests.failure.workbench import QUICK
from tests.support.calling import Inventory, Offering, Reservation, Stock, offering
from tests.support.providing import Named, Who

AT_ONCE = 5.0  # seconds; no measure, but far from any timeout here


def another(stock: Offering) -> tuple[Links, Any]:
    """Another caller of the same provider, with connections of its own."""
    make = (
        (lambda _: HttpTransport(stock.settings, service="orders", messages=dict))
        if stock.place.name.startswith("http")
        else (lambda _: TcpTransport(stock.settings, "orders", 3))
    )
    links = Links(make)
    return links, Offering(stock.provider, stock.stock, Elsewhere(stock.place.name, lambda: links), stock.settings)


@pytest.fixture(params=["tcp", "unix", "http"])
async def stock(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Offering]:
    """The inventory, whose drain takes longer than any test."""
    async with offering(request.param, tmp_path, drain_timeout=60) as found:
        yield found


# ---------------------------------------------------------------- providers that stop


async def test_stopping_provider_waits_for_no_call_of_a_caller_gone_meanwhile(stock: Offering) -> None:
    assert stock.listener is not None
    links, leaving = another(stock)
    calls = [asyncio.create_task(leaving.caller().slow(str(number))) for number in range(5)]
    await eventually(lambda: stock.provider.running == 5)
    closing = asyncio.create_task(stock.listener.close())
    await asyncio.sleep(0.1)
    await links.close()
    assert {type(each) for each in await asyncio.gather(*calls, return_exceptions=True)} == {ProviderGone}
    async with asyncio.timeout(AT_ONCE):
        await closing


@pytest.mark.parametrize("place", ["tcp", "unix", "http", "here"])
async def test_waiting_calls_of_a_stopping_provider_are_surely_not_run(place: str, tmp_path: Path) -> None:
    async with offering(place, tmp_path, call_concurrency=1, call_backlog=5) as stock:
        inventory = stock.caller()
        calls = [asyncio.create_task(inventory.slow(str(number))) for number in range(4)]
        await eventually(lambda: stock.stock.began and stock.provider.waiting == 3)
        await stock.provider.stop(AT_ONCE)
        told = await asyncio.gather(*calls, return_exceptions=True)
        assert Counter(type(each) for each in told) == {ProviderGone: 1, NoProvider: 3}
        assert len(stock.stock.began) == 1


@pytest.mark.parametrize("place", ["tcp", "unix"])
async def test_call_to_a_leaving_provider_is_surely_not_run(place: str, tmp_path: Path) -> None:
    """The call crosses the provider's farewell on the way."""
    async with offering(place, tmp_path) as stock:
        inventory = stock.caller()
        slow = asyncio.create_task(inventory.slow("first"))
        await eventually(lambda: stock.stock.began == ["first"])
        assert stock.listener is not None
        closing = asyncio.create_task(stock.listener.close())
        crossing = [asyncio.create_task(inventory.reserve("A-1")) for _ in range(10)]
        told = await asyncio.gather(*crossing, return_exceptions=True)
        assert all(isinstance(each, Reservation | NoProvider) for each in told)
        stock.stock.go.set()
        assert await slow == "first"
        await closing


async def test_calls_go_on_while_providers_stop_in_turn(database_url: str) -> None:
    """No call of a service with two providers fails: what was not run goes to the other one."""
    settings: dict[str, Any] = {**QUICK, "call_timeout": 20}
    done, failed, over = Counter[str](), list[CallFailed](), asyncio.Event()

    def provider(name: str) -> Bus:
        bus = Bus("shop", database_url, **settings)
        bus.listen("tcp://127.0.0.1:0")
        bus.offer(Who, Named(name))
        return bus

    async with Bus("shop", database_url, **settings) as caller:
        who = caller.caller(Who)

        async def call() -> None:
            while not over.is_set():
                try:
                    done[await who.name()] += 1
                except CallFailed as error:
                    failed.append(error)

        async with provider("kept") as kept:
            assert await caller.caller(Who, name={"timeout": AT_ONCE}).name() == "kept"
            calling = [asyncio.create_task(call()) for _ in range(8)]
            for name in ("second", "third", "fourth", "fifth"):
                async with provider(name):
                    await eventually(partial(_is_called_often, done, name))
            over.set()
            await asyncio.gather(*calling)
            assert kept.runtime.application.offers.load == 0
    assert failed == []


def _is_called_often(done: Counter[str], name: str) -> bool:
    return done[name] > 50


async def test_calls_within_the_process_are_finished_when_the_bus_stops(database_url: str) -> None:
    stock = Stock()
    bus = Bus("shop", database_url, **dict[str, Any](QUICK, drain_timeout=30, call_concurrency=2))
    bus.offer(Inventory, stock)
    async with bus:
        inventory = bus.caller(Inventory, slow={"timeout": 30})
        calls = [asyncio.create_task(inventory.slow(str(number))) for number in range(6)]
        await eventually(lambda: len(stock.began) == 2)
        asyncio.get_running_loop().call_later(0.3, stock.go.set)
    assert await asyncio.gather(*calls) == ["0", "1", "2", "3", "4", "5"]


# ---------------------------------------------------------------- callers that stop


@pytest.mark.parametrize("place", ["tcp", "unix", "http"])
async def test_closed_caller_ends_all_its_calls_at_once(place: str, tmp_path: Path) -> None:
    """Over HTTP some of them have waited for a connection: they are not sent later."""
    async with offering(place, tmp_path, call_concurrency=1_000) as stock:
        links, leaving = another(stock)
        inventory = leaving.caller(slow={"timeout": 3_600})
        calls = [asyncio.create_task(inventory.slow(str(number))) for number in range(200)]
        await eventually(lambda: len(stock.stock.began) >= 64)
        async with asyncio.timeout(AT_ONCE):
            await links.close()
            told = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in told} <= {ProviderGone, NoProvider}
        began = len(stock.stock.began)
        await eventually(lambda: stock.provider.running == 0)
        assert len(stock.stock.began) == began
        with pytest.raises(NoProvider, match="is stopping"):
            await inventory.reserve("A-1")
        assert len(links) == 0


async def test_errors_of_many_callers_have_their_own_tracebacks(stock: Offering) -> None:
    links, leaving = another(stock)
    inventory = leaving.caller()
    calls = [asyncio.create_task(inventory.slow(str(number))) for number in range(20)]
    await eventually(lambda: stock.provider.running == 20)
    await links.close()
    told = await asyncio.gather(*calls, return_exceptions=True)
    assert len({id(each) for each in told}) == 20
    assert len({id(each.__cause__) for each in told if isinstance(each, ProviderGone)}) == 20


async def test_idle_connections_are_closed_although_their_closer_is_cancelled() -> None:
    open_: set[str] = set()
    go = asyncio.Event()

    class Slow:
        def __init__(self, uri: str) -> None:
            self._uri = uri

        async def __aenter__(self) -> Any:
            open_.add(self._uri)
            return self

        async def __aexit__(self, *_: object) -> None:
            await go.wait()
            open_.discard(self._uri)

    class Transport:
        def caller(self, uri: str) -> Any:
            return Slow(uri)

    links = Links(lambda _: Transport(), idle=timedelta(0))  # type: ignore[arg-type,return-value]
    for number in range(4):
        with suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await links.to(f"tcp://provider:{number}")
                await asyncio.sleep(1)
    go.set()
    await links.close()
    assert open_ == set()


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.1])
async def test_cancelled_stop_of_a_bus_goes_on_to_its_end(database_url: str, seconds: float) -> None:
    bus = Bus("shop", database_url, **QUICK)
    bus.listen("tcp://127.0.0.1:0")
    bus.offer(Who, Named("one"))
    before = asyncio.all_tasks()
    for _ in range(2):
        await bus.__aenter__()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await bus.__aexit__(None, None, None)
        assert not bus.runtime.is_running
    assert asyncio.all_tasks() == before


# ---------------------------------------------------------------- providers that stand still


async def test_standing_provider_costs_its_callers_no_memory(tmp_path: Path) -> None:
    """What is called while the provider reads nothing waits for its turn to be written, and is forgotten in time."""
    settings = load_settings()
    reading = asyncio.Event()
    reading.set()

    async def read(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while await reading.wait() and (data := await source.read(1 << 16)):
            sink.write(data)
            await sink.drain()
        sink.close()

    async with offering("tcp", tmp_path) as stock:
        host, port = stock.place.name.removeprefix("tcp://").split(":")

        async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            inner_source, inner_sink = await asyncio.open_connection(host, int(port))
            await asyncio.gather(read(source, inner_sink), read(inner_source, sink))

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        at = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        transport = TcpTransport(settings, "orders", 3)
        links = Links(lambda _: transport)
        inventory = Offering(stock.provider, stock.stock, Elsewhere(at, lambda: links), settings).caller(
            echo={"timeout": 0.3}
        )
        assert await inventory.echo(b"hello") == b"hello"
        connection = (await links.to(at))._caller._dialer.open  # type: ignore[attr-defined]
        reading.clear()
        for _ in range(4):
            calls = [inventory.echo(bytes(500_000)) for _ in range(50)]
            told = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(each) for each in told} <= {CallTimeout, NoProvider}
            assert NoProvider in {type(each) for each in told}
            assert connection._stream.unsent_bytes < 8 * 500_000, "of 100 MB"
        reading.set()
        await eventually(lambda: not connection._stream.is_backed_up)
        assert await inventory.echo(b"hello") == b"hello"
        await links.close()
        server.close()


# ---------------------------------------------------------------- callers where no call may be made


async def test_bus_is_used_in_its_own_event_loop_alone(database_url: str) -> None:
    bus = Bus("shop", database_url, **QUICK)
    bus.listen("tcp://127.0.0.1:0")
    bus.offer(Inventory, Stock())
    async with bus:
        assert bus.runtime.node is not None
        at = bus.runtime.node.listeners[0].address
        near, far, any_ = bus.caller(Inventory), bus.caller(Inventory, at=at), bus.caller(Inventory)
        uses: list[Callable[[], Awaitable[object]]] = [
            lambda: near.reserve("A-1"),
            lambda: far.reserve("A-1"),
            lambda: any_.note("A-1"),
            lambda: far.note("A-1"),
            lambda: bus.providers(Inventory),
            lambda: bus.wait_for(new_id()),
            lambda: bus.pause(key="k"),
            lambda: bus.resume(key="k"),
            lambda: bus.run_schedule("nightly"),
            lambda: _entered(bus),
            lambda: _done(lambda: bus.connect("tcp://127.0.0.1:1")),
            lambda: _done(lambda: bus.withdraw(Inventory)),
        ]
        told = await asyncio.to_thread(lambda: [asyncio.run(_outcome(use)) for use in uses])
        assert [type(each) for each in told] == [WiringError] * len(uses)
        assert await far.reserve("A-2") == await near.reserve("A-2") == Reservation("A-2", 1)


async def _entered(bus: Bus) -> None:
    async with bus.unit_of_work():
        pass


async def _done(use: Callable[[], object]) -> None:
    use()


async def _outcome(use: Callable[[], Awaitable[object]]) -> object:
    try:
        return await use()
    except Exception as error:
        return error


async def test_call_without_a_result_is_refused_when_the_bus_does_not_run() -> None:
    errors: list[Exception] = []
    caller = Bus("orders").caller(Inventory, at="tcp://127.0.0.1:1", on_error=errors.append)
    with pytest.raises(WiringError, match="does not run"):
        await caller.note("A-1")
    assert errors == []


async def test_service_of_the_process_is_called_while_the_bus_runs_and_not_before_or_after(database_url: str) -> None:
    bus, stock = Bus("shop", database_url, **QUICK), Stock()
    bus.offer(Inventory, stock)
    (provider,) = await bus.providers(Inventory)
    callers = bus.caller(Inventory), bus.caller(Inventory, at=provider)

    async def refuse() -> None:
        for caller in callers:
            for use in (lambda: caller.slow("A-1"), lambda: caller.note("A-1")):  # noqa: B023
                with pytest.raises(WiringError, match="does not run"):
                    await use()

    await refuse()
    async with bus:
        assert [await caller.reserve("A-1") for caller in callers] == 2 * [Reservation("A-1", 1)]
    await refuse()
    assert stock.began == []


async def test_bus_does_not_run_in_a_forked_child(database_url: str) -> None:
    """It would speak on the connections of its parent, and take the answers to the parent's questions."""
    bus = Bus("shop", database_url, **QUICK)
    bus.listen("tcp://127.0.0.1:0")
    bus.offer(Inventory, Stock())
    bus.offer(Who, Named("one"), singleton=True)
    async with bus:
        assert bus.runtime.node is not None
        at = bus.runtime.node.listeners[0].address
        far, who = bus.caller(Inventory, at=at), bus.caller(Who)
        assert await far.reserve("A-1") == Reservation("A-1", 1)
        await eventually(lambda: bus.runtime.application.offers.singletons.epoch_of("who"))
        async with bus.unit_of_work() as uow:
            await uow.session.connection()  # of a pool that the child must not use

        def in_child() -> list[str]:
            async def use() -> list[str]:
                told = [await _outcome(lambda: far.reserve("A-2")), await _outcome(who.name)]
                told += [bus.runtime.is_running, bus.runtime.application.offers.singletons.epoch_of("who")]
                async with bus.unit_of_work() as uow:
                    told.append((await uow.session.connection()).sync_connection is not None)
                return [type(each).__name__ if isinstance(each, Exception) else repr(each) for each in told]

            return asyncio.run(use())

        told = await asyncio.to_thread(_forked, in_child)
        assert told == ["WiringError", "WiringError", "False", "0", "True"]
        for number in range(20):
            assert await far.reserve(str(number)) == Reservation(str(number), 1)
            async with bus.unit_of_work() as uow:
                await uow.session.connection()


def _forked(work: Callable[[], list[str]]) -> list[str]:
    """Run this in a child process, and return what it returns."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, "\n".join(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        lines = told.read().split("\n")
    os.waitpid(child, 0)
    return lines
