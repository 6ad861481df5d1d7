"""Calls over TCP, over a Unix socket and within a process: one contract, one behaviour, one list of errors."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
from pydantic import SecretStr

from durable import Bus
from durable.calls import service
from durable.calls.contract import contract_of
from durable.calls.links import Links
from durable.calls.places import Elsewhere
from durable.errors import (
    CallExpired,
    CallFailed,
    CallTimeout,
    IncompatibleService,
    InvalidCall,
    InvalidSetting,
    NoProvider,
    Overloaded,
    ProviderGone,
    RemoteError,
    WiringError,
)
from durable.setting_types import Peer
from durable.settings import load_settings
from durable.statistics import CallSide
from durable.testing import eventually
from durable.testing.transports import envelopes
from durable.transports.tcp.transport import TcpTransport
from tests.support.calling import SOON, Inventory, Offering, Reservation, Stock, offering

PLACES = ("tcp", "unix", "http", "here")


@pytest.fixture(params=PLACES)
async def stock(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Offering]:
    """The inventory, offered at each kind of place in turn; two calls run at once, and two wait."""
    async with offering(request.param, tmp_path, call_concurrency=2, call_backlog=2) as found:
        yield found


@pytest.fixture
async def wide(tmp_path: Path) -> AsyncIterator[Offering]:
    """The inventory over TCP, with the usual limits."""
    async with offering("tcp", tmp_path) as found:
        yield found


# ---------------------------------------------------------------- results and errors


async def test_result_is_returned_by_the_method(stock: Offering) -> None:
    inventory = stock.caller()
    assert await inventory.reserve("A-1", 3) == Reservation("A-1", 3)
    assert await inventory.reserve(count=2, sku="A-2") == Reservation("A-2", 2)
    assert await inventory.reserve("A-3") == Reservation("A-3", 1)
    assert await inventory.prices(place="north") == {"north": Decimal("1.50")}
    assert await inventory.echo(b"\x00" * 100_000) == b"\x00" * 100_000


async def test_error_of_the_method_is_told_without_its_traceback(stock: Offering) -> None:
    with pytest.raises(RemoteError) as raised:
        await stock.caller().fail("no A-1 here")
    assert (raised.value.error, raised.value.reason) == ("LookupError", "no A-1 here")
    assert raised.value.provider == stock.place.name
    assert "Traceback" not in str(raised.value)


async def test_quoted_traceback_in_an_error_is_reduced_to_the_last_line(stock: Offering) -> None:
    try:
        raise ValueError("no price")
    except ValueError:
        quoted = traceback.format_exc()
    for text, told in ((quoted, "ValueError: no price"), (f"priced: {quoted}", "priced: ValueError: no price")):
        with pytest.raises(RemoteError) as raised:
            await stock.caller().fail(text)
        assert raised.value.reason == told


@pytest.mark.parametrize(
    ("method", "arguments", "text"),
    [
        ("reserve", (1, 2), "Inventory.reserve: the arguments do not fit.*`str`, got `int`"),
        ("reserve", ("A", "many"), "`int`, got `str`"),
        ("reserve", ("A", 2**64), "cannot be encoded"),
        ("echo", (object(),), "cannot be encoded"),
        ("wrong", (), "the result does not fit.*`int`, got `str`"),
        ("unreadable", (), "the result cannot be encoded"),
    ],
)
async def test_misfit_is_refused(stock: Offering, method: str, arguments: tuple[Any, ...], text: str) -> None:
    inventory = stock.caller()
    with pytest.raises(InvalidCall, match=text):
        await getattr(inventory, method)(*arguments)
    assert await inventory.reserve("A-1") == Reservation("A-1", 1)


@pytest.mark.parametrize("given", [{"sku": "A", "place": "north"}, {"count": 3}])
async def test_arguments_of_another_signature_raise_as_the_method_would(stock: Offering, given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"Inventory\.reserve"):
        await stock.caller().reserve(**given)


async def test_calls_run_side_by_side(stock: Offering) -> None:
    inventory = stock.caller()
    slow = asyncio.create_task(inventory.slow("first"))
    await eventually(lambda: stock.stock.began == ["first"])
    assert await inventory.reserve("A-1") == Reservation("A-1", 1)
    stock.stock.go.set()
    assert await slow == "first"


# ---------------------------------------------------------------- time


async def test_cancelled_call_is_cancelled_at_the_provider(stock: Offering) -> None:
    slow = asyncio.create_task(stock.caller().slow("first"))
    await eventually(lambda: stock.stock.began == ["first"])
    slow.cancel()
    await eventually(lambda: stock.stock.cancelled == ["first"])
    assert stock.provider.running == 0


async def test_call_without_a_result_in_time_is_cancelled_and_its_neighbours_go_on(stock: Offering) -> None:
    inventory = stock.caller(slow={"timeout": 0.2})
    with pytest.raises(CallTimeout, match=r"Inventory\.slow: no result .* within 0.2 s"):
        await inventory.slow("first")
    await eventually(lambda: stock.stock.cancelled == ["first"])
    assert await inventory.reserve("A-1") == Reservation("A-1", 1)


async def test_cancelled_call_is_not_run_when_its_turn_comes(stock: Offering) -> None:
    inventory = stock.caller()
    running = [asyncio.create_task(inventory.slow(name)) for name in ("a", "b")]
    await eventually(lambda: stock.provider.running == 2)
    waiting = asyncio.create_task(inventory.slow("c"))
    await eventually(lambda: stock.provider.waiting == 1)
    waiting.cancel()
    await eventually(lambda: stock.provider.waiting == 0)
    stock.stock.go.set()
    assert await asyncio.gather(*running) == ["a", "b"]
    assert stock.stock.began == ["a", "b"]


async def test_expired_call_is_not_run_when_its_turn_comes(stock: Offering) -> None:
    inventory = stock.caller(slow={"expiry": 0.1})
    running = [asyncio.create_task(inventory.slow(name)) for name in ("a", "b")]
    await eventually(lambda: stock.provider.running == 2)
    waiting = asyncio.create_task(inventory.slow("c"))
    await eventually(lambda: stock.provider.waiting == 1)
    await asyncio.sleep(0.2)
    stock.stock.go.set()
    with pytest.raises(CallExpired, match="waited for its turn"):
        await waiting
    assert await asyncio.gather(*running) == ["a", "b"]
    assert stock.stock.began == ["a", "b"]


async def test_calls_beyond_the_backlog_are_refused(stock: Offering) -> None:
    inventory = stock.caller()
    accepted = [asyncio.create_task(inventory.slow(name)) for name in "abcd"]
    await eventually(lambda: (stock.provider.running, stock.provider.waiting) == (2, 2))
    with pytest.raises(Overloaded, match="too many calls"):
        await inventory.slow("e")
    stock.stock.go.set()
    assert await asyncio.gather(*accepted) == list("abcd")
    assert await inventory.slow("f") == "f"


async def test_ten_thousand_calls_are_bounded_at_a_slow_provider(wide: Offering) -> None:
    inventory = wide.caller()
    calls = [asyncio.create_task(inventory.slow(str(number))) for number in range(10_000)]
    await eventually(lambda: sum(task.done() for task in calls) == 8_900)
    assert (wide.provider.running, wide.provider.waiting) == (100, 1_000)
    wide.stock.go.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(each, Overloaded) for each in results) == 8_900
    assert sorted(wide.stock.ended, key=int) == [each for each in results if isinstance(each, str)]


# ---------------------------------------------------------------- fire and forget


async def test_call_without_a_result_returns_before_its_method(stock: Offering) -> None:
    await stock.caller().note("later")
    assert stock.stock.noted == []
    stock.stock.go.set()
    await eventually(lambda: stock.stock.noted == ["later"])


async def test_call_without_a_result_goes_on_beyond_the_timeout(stock: Offering) -> None:
    errors: list[CallFailed] = []
    await stock.caller(on_error=errors.append, note={"timeout": 0.05}).note("late")
    await eventually(lambda: stock.provider.running == 1)
    await asyncio.sleep(0.1)  # twice its timeout, which would end it
    assert (stock.provider.running, errors) == (1, [])
    stock.stock.go.set()
    await eventually(lambda: stock.stock.noted == ["late"])


async def test_error_of_a_call_without_a_result_goes_to_its_hook(stock: Offering) -> None:
    errors: list[CallFailed] = []
    await stock.caller(on_error=errors.append).note("")
    await eventually(lambda: len(errors) == 1)
    assert isinstance(errors[0], RemoteError)
    assert errors[0].error == "ValueError"


async def test_error_of_a_call_without_a_result_is_logged_where_no_hook_is(
    stock: Offering, caplog: pytest.LogCaptureFixture
) -> None:
    await stock.caller().note("")
    await eventually(lambda: "nothing to note" in caplog.text)
    assert "for whose result nobody waits" in caplog.text


# ---------------------------------------------------------------- connections


async def test_closed_caller_cancels_awaited_calls_alone(wide: Offering) -> None:
    links = Links(lambda _: TcpTransport(wide.settings, "orders", 3))
    leaving = Offering(wide.provider, wide.stock, Elsewhere(wide.place.name, lambda: links), wide.settings).caller()
    awaited = asyncio.create_task(leaving.slow("awaited"))
    await leaving.note("kept")
    await eventually(lambda: wide.provider.running == 2)
    await links.close()
    with pytest.raises(ProviderGone):
        await awaited
    await eventually(lambda: wide.stock.cancelled == ["awaited"])
    wide.stock.go.set()
    await eventually(lambda: wide.stock.noted == ["kept"])


async def test_stopping_provider_finishes_its_calls(wide: Offering) -> None:
    assert wide.listener is not None
    inventory = wide.caller()
    slow = asyncio.create_task(inventory.slow("first"))
    await eventually(lambda: wide.stock.began == ["first"])
    closing = asyncio.create_task(wide.listener.close())
    await asyncio.sleep(0.1)
    wide.stock.go.set()
    assert await slow == "first"
    await closing
    with pytest.raises(NoProvider, match="no answer"):
        await inventory.reserve("A-1")


async def test_stopping_provider_waits_for_no_cancelled_call(wide: Offering) -> None:
    assert wide.listener is not None
    slow = asyncio.create_task(wide.caller().slow("first"))
    await eventually(lambda: wide.stock.began == ["first"])
    closing = asyncio.create_task(wide.listener.close())
    await asyncio.sleep(0.1)
    slow.cancel()
    async with asyncio.timeout(wide.settings.drain_timeout.total_seconds() - 2):
        await closing
    assert wide.stock.cancelled == ["first"]


async def test_silent_address_has_no_provider_within_the_timeout(wide: Offering) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    at = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    links = Links(lambda _: TcpTransport(wide.settings, "orders", 3))
    silent = Offering(wide.provider, wide.stock, Elsewhere(at, lambda: links), wide.settings)
    with pytest.raises(NoProvider, match=r"no answer at .* within 0\.2 s"):
        await silent.caller(reserve={"timeout": 0.2}).reserve("A-1")
    await links.close()
    server.close()


async def test_expiry_of_a_thousand_years_is_sent(stock: Offering) -> None:
    inventory = stock.caller(reserve={"timeout": 86_400 * 36_500, "expiry": 86_400 * 36_500})
    assert await inventory.reserve("A-1") == Reservation("A-1", 1)


async def test_storm_of_calls_leaves_nothing_behind(stock: Offering) -> None:
    inventory = stock.caller(slow={"timeout": 0.01, "expiry": 0.005})
    stock.stock.go.set()
    calls = [asyncio.create_task(inventory.slow(str(number))) for number in range(300)]
    calls += [asyncio.create_task(inventory.fail("no")) for _ in range(300)]
    for call in calls[::7]:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, str | CallFailed | asyncio.CancelledError) for each in results)
    await eventually(lambda: (stock.provider.running, stock.provider.waiting, stock.provider.bytes) == (0, 0, 0))
    assert await stock.caller().reserve("A-1") == Reservation("A-1", 1)


async def test_error_of_a_call_is_told_in_one_line_without_secrets(stock: Offering) -> None:
    text = "line 1\nline 2 \x1b[31m postgresql://ada:hunter2@host/db " + "x" * 5_000
    with pytest.raises(RemoteError) as raised:
        await stock.caller().fail(text)
    assert "\n" not in str(raised.value)
    assert "\x1b" not in str(raised.value)
    assert "hunter2" not in str(raised.value)
    assert len(str(raised.value)) < 1_200


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), BaseException("odd"), GeneratorExit()])
async def test_error_of_any_kind_is_an_answer(stock: Offering, error: BaseException) -> None:
    class Odd(Stock):
        async def slow(self, name: str) -> str:
            raise error

    stock.provider.withdraw(contract_of(Inventory))
    stock.provider.offer(contract_of(Inventory), Odd())
    inventory = stock.caller()
    with pytest.raises(RemoteError, match=type(error).__name__):
        await inventory.slow("x")
    assert await inventory.reserve("A-1") == Reservation("A-1", 1)


async def test_address_without_a_listener_has_no_provider(wide: Offering) -> None:
    links = Links(lambda _: TcpTransport(wide.settings, "orders", 3))
    nobody = Offering(wide.provider, wide.stock, Elsewhere("tcp://127.0.0.1:1", lambda: links), wide.settings)
    with pytest.raises(NoProvider, match=r"no answer at tcp://127\.0\.0\.1:1"):
        await nobody.caller().reserve("A-1")
    await links.close()


async def test_offers_are_told_as_they_change(stock: Offering) -> None:
    inventory = stock.caller()
    assert await inventory.reserve("A-1")
    for _ in range(3):
        stock.provider.withdraw(contract_of(Inventory))
        with pytest.raises(NoProvider):
            await inventory.reserve("A-1")
        stock.provider.offer(contract_of(Inventory), Stock())
        await answers_again(inventory)


async def test_offers_are_told_in_the_end_when_they_change_all_the_time(wide: Offering) -> None:
    inventory = wide.caller()
    assert await inventory.reserve("A-1")
    for _ in range(500):
        wide.provider.withdraw(contract_of(Inventory))
        wide.provider.offer(contract_of(Inventory), wide.stock)
        await asyncio.sleep(0)
    await answers_again(inventory)


async def answers_again(inventory: Any) -> None:
    """Call until a provider is known."""
    async with asyncio.timeout(SOON):
        while True:
            try:
                assert await inventory.reserve("A-1") == Reservation("A-1", 1)
            except NoProvider:
                await asyncio.sleep(0.01)
            else:
                return


@service("inventory", version="1.2")
class Other(Protocol):
    async def reserve(self, sku: int) -> str: ...


@service("inventory", version="1.3")
class Newer(Protocol):
    async def reserve(self, sku: str, count: int = 1) -> Reservation: ...


@service("orders")
class Unknown(Protocol):
    async def reserve(self, sku: str) -> str: ...


@pytest.mark.parametrize(
    ("contract", "error", "text"),
    [
        (Other, IncompatibleService, "reserve differs: here .*int.*, there .*str.*"),
        (Newer, IncompatibleService, "offers 1.2: it is older"),
        (Unknown, NoProvider, "orders: not offered"),
    ],
)
async def test_caller_of_another_contract_is_refused_before_its_call(
    stock: Offering, contract: type, error: type[CallFailed], text: str
) -> None:
    with pytest.raises(error, match=text):
        await stock.caller(contract).reserve("A")
    assert stock.provider.running == 0


async def test_calls_and_batches_share_a_listener(wide: Offering) -> None:
    inventory = wide.caller()
    sender = TcpTransport(wide.settings, "orders", 2).sender(wide.place.name)

    async def send() -> None:
        async with sender:
            for _ in range(50):
                await sender.send(envelopes(100))

    async def ask() -> None:
        for number in range(1_000):
            await inventory.reserve("A", number)

    await asyncio.gather(send(), ask(), ask())
    assert wide.listener is not None
    counts = wide.listener.statistics()
    assert (counts["envelopes"], counts["calls"]) == (5_000, 2_000)


@pytest.mark.parametrize("bytes_each_way", [(80_000, 200_000), (200_000, 80_000)], ids=["call", "result"])
async def test_frame_beyond_the_limit_of_the_other_end_is_refused(
    tmp_path: Path, bytes_each_way: tuple[int, int]
) -> None:
    provider_bytes, caller_bytes = bytes_each_way
    async with offering("tcp", tmp_path, max_message_bytes=1_000, max_frame_bytes=provider_bytes) as found:
        settings = load_settings(max_message_bytes=1_000, max_frame_bytes=caller_bytes)
        links = Links(lambda _: TcpTransport(settings, "orders", 2))
        caller = Offering(found.provider, found.stock, Elsewhere(found.place.name, lambda: links), settings).caller()
        with pytest.raises(InvalidCall, match="frame"):
            await caller.echo(b"x" * 100_000)
        assert await caller.reserve("A-1") == Reservation("A-1", 1)
        await links.close()


async def test_peer_calls_only_methods_of_its_types(tmp_path: Path) -> None:
    secret = SecretStr("correct horse battery")
    peers = {"orders": Peer(secrets={"1": secret}, types=("inventory.reserve", "orders.*"))}
    async with offering("tcp", tmp_path, peers=peers) as found:
        settings = load_settings(peers={"orders": Peer(secrets={"1": secret})})
        links = Links(lambda _: TcpTransport(settings, "orders", 2))
        caller = Offering(found.provider, found.stock, Elsewhere(found.place.name, lambda: links), settings).caller()
        assert await caller.reserve("A-1") == Reservation("A-1", 1)
        with pytest.raises(NoProvider, match=r"orders may not call inventory\.echo"):
            await caller.echo(b"")
        await links.close()


async def test_stranger_calls_nothing(tmp_path: Path) -> None:
    async with offering("tcp", tmp_path, shared_secret=SecretStr("correct horse battery")) as found:
        links = Links(lambda _: TcpTransport(load_settings(), "orders", 2))
        stranger = Offering(found.provider, found.stock, Elsewhere(found.place.name, lambda: links), found.settings)
        with pytest.raises(NoProvider):
            await stranger.caller().reserve("A-1")
        assert found.listener is not None
        assert found.listener.statistics()["calls"] == 0
        await links.close()


# ---------------------------------------------------------------- the bus


@pytest.mark.parametrize("at", ["rabbitmq://default/queue", "http://127.0.0.1:0", "tcp://127.0.0.1:0", "here"])
def test_address_of_another_transport_is_refused(at: str) -> None:
    with pytest.raises(InvalidSetting):
        Bus("orders", allow_plaintext=True).caller(Inventory, at=at)


def test_options_of_a_caller_are_checked() -> None:
    bus = Bus("orders")
    wrong: list[dict[str, Any]] = [
        {"reserv": {"timeout": 3}},
        {"reserve": {"time": 3}},
        {"reserve": {"timeout": 0}},
        {"reserve": 3},
    ]
    for options in wrong:
        with pytest.raises(InvalidSetting, match="caller"):
            bus.caller(Inventory, **options)


async def test_bus_calls_no_address_before_its_start() -> None:
    with pytest.raises(WiringError, match="does not run"):
        await Bus("orders").caller(Inventory, at="tcp://127.0.0.1:1").reserve("A-1")


async def test_service_is_offered_once() -> None:
    bus = Bus("stock")
    bus.offer(Inventory, Stock())
    with pytest.raises(InvalidSetting, match="offered already"):
        bus.offer(Inventory, Stock())
    bus.withdraw(Inventory)
    with pytest.raises(InvalidSetting, match="is not offered"):
        bus.withdraw(Inventory)


async def test_two_services_on_postgres_call_each_other(make_database: Any, tmp_path: Path) -> None:
    at = f"unix://{tmp_path}/stock"
    stock, orders = Bus("stock", make_database("stock")), Bus("orders", make_database("orders"))
    stock.listen(at)
    stock.offer(Inventory, Stock())
    inventory = orders.caller(Inventory, at=at)
    async with stock, orders:
        assert await inventory.reserve("A-1", 3) == Reservation("A-1", 3)
    async with orders:
        with pytest.raises(NoProvider):
            await inventory.reserve("A-1", 3)
    async with stock, orders:
        assert await inventory.reserve("A-1", 3) == Reservation("A-1", 3)


# ---------------------------------------------------------------- bounds of each place


@pytest.mark.parametrize("place", PLACES)
async def test_call_larger_than_a_frame_is_refused(place: str, tmp_path: Path) -> None:
    async with offering(place, tmp_path, max_frame_bytes=70_000, max_message_bytes=1_000) as stock:
        inventory = stock.caller()
        assert await inventory.echo(bytes(60_000)) == bytes(60_000)
        with pytest.raises(InvalidCall, match="bytes"):
            await inventory.slow("x" * 80_000)
        assert stock.stock.began == []
        with pytest.raises(InvalidCall):
            await inventory.double(bytes(40_000))
        assert await inventory.double(bytes(30_000)) == bytes(60_000)


async def test_method_cancelling_its_own_task_is_a_remote_error(stock: Offering) -> None:
    with pytest.raises(RemoteError, match="has cancelled its own task") as raised:
        await stock.caller().give_up()
    assert raised.value.error == "CancelledError"
    assert await stock.caller().reserve("A-1") == Reservation("A-1", 1)


async def test_many_failures_without_a_hook_are_two_lines(stock: Offering, caplog: pytest.LogCaptureFixture) -> None:
    """Of a bus, whichever of its callers has met them."""
    failed = stock.telemetry.of(CallSide.CLIENT, "inventory", "note").outcomes

    def has_failed(times: int) -> bool:
        return sum(failed.values()) == times

    for number in range(5):
        await stock.caller().note("")
        await eventually(partial(has_failed, number + 1))
    stock.telemetry.unheard.flush()
    lines = [each.getMessage() for each in caplog.records if "nobody waits" in each.getMessage()]
    assert len(lines) == 2
    assert "4 more" in lines[1]
