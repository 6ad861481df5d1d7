"""Calls over HTTP: what a request may be, and what becomes of it; the pool of connections of a caller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpcore
import httpx
import msgspec
import pytest
from msgspec.structs import replace

from durable.calls.caller import RemoteService
from durable.calls.contract import contract_of
from durable.calls.hub import Hub
from durable.calls.links import Links
from durable.calls.places import Elsewhere
from durable.calls.provider import CallProvider
from durable.calls.registry import Registry
from durable.errors import InvalidCall, NoProvider, ProviderGone
from durable.settings import load_settings
from durable.testing import eventually
from durable.testing.transports import MemoryReceiver
from durable.transports.frames import Offer
from durable.transports.http.caller import MOST_CONNECTIONS
from durable.transports.http.transport import HttpTransport
from durable.transports.http.wire import ARGUMENTS, DIRECTORY, OFFERS, RESULT, decode_directory, decode_offers
from tests.support.calling import SOON, Inventory, Offering, Reservation, Stock, offering
from tests.support.hubs import listing
from tests.support.providing import Named, Who

SECRETS = {"orders": "the-secret-of-orders-alone", "other": "the-secret-of-another-one"}


@pytest.fixture
async def stock(tmp_path: Path) -> AsyncIterator[Offering]:
    async with offering("http", tmp_path) as found:
        yield found


@pytest.fixture
async def client(stock: Offering) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stock.place.name) as client:
        yield client


def arguments(*values: Any) -> bytes:
    return msgspec.msgpack.encode(list(values))


RESERVE = "/calls/inventory/reserve"
KIND = {"Content-Type": ARGUMENTS}

# ---------------------------------------------------------------- requests


async def test_call_is_one_post(client: httpx.AsyncClient) -> None:
    response = await client.post(RESERVE, content=arguments("A-1", 3), headers=KIND)
    assert (response.status_code, response.headers["content-type"]) == (200, RESULT)
    assert msgspec.msgpack.decode(response.content, type=Reservation) == Reservation("A-1", 3)


@pytest.mark.parametrize(
    ("path", "body", "status", "fault", "detail"),
    [
        ("/calls/inventory/steal", arguments(), 404, "unknown", "no inventory.steal is offered here"),
        ("/calls/nothing/reserve", arguments(), 404, "unknown", "no nothing.reserve is offered here"),
        (RESERVE, arguments(1), 422, "invalid", "the arguments do not fit"),
        (RESERVE, b"\xc1", 422, "invalid", "the arguments do not fit"),
        ("/calls/inventory/fail", arguments("no A-1"), 500, "raised", "no A-1"),
    ],
)
async def test_fault_is_a_problem(
    client: httpx.AsyncClient, path: str, body: bytes, status: int, fault: str, detail: str
) -> None:
    response = await client.post(path, content=body, headers=KIND)
    said = response.json()
    assert (response.status_code, said["status"], said["fault"]) == (status, status, fault)
    assert detail in said["detail"]
    assert "Traceback" not in response.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, 415),
        ({"Content-Type": RESULT}, 415),
        ({**KIND, "Content-Encoding": "gzip"}, 415),
        ({**KIND, "Durable-Expires-In": "0"}, 400),
        ({**KIND, "Durable-Expires-In": "nan"}, 400),
        ({**KIND, "Durable-Expires-In": "1_0"}, 400),
        ({**KIND, "Durable-Awaited": "perhaps"}, 400),
        ({**KIND, "Durable-Epoch": "-1"}, 400),
        ({**KIND, "Durable-Epoch": str(2**63)}, 400),
        ({**KIND, "Durable-Expires-Inn": "1"}, 400),
        ({**KIND, "Durable-Source": "orders"}, 400),
        ({**KIND, "Durable-Header-Colour": "red"}, 400),
    ],
)
async def test_malformed_request_is_refused_before_the_call(
    stock: Offering, client: httpx.AsyncClient, headers: dict[str, str], status: int
) -> None:
    response = await client.post("/calls/inventory/slow", content=arguments("A"), headers=headers)
    assert response.status_code == status
    assert "fault" not in response.json()
    assert stock.stock.began == []


async def test_arguments_beyond_the_limit_are_refused_unread(tmp_path: Path) -> None:
    async with offering("http", tmp_path, max_frame_bytes=70_000, max_message_bytes=1_000) as stock:
        async with httpx.AsyncClient(base_url=stock.place.name) as client:
            response = await client.post("/calls/inventory/echo", content=bytes(80_000), headers=KIND)
            assert response.status_code == 413
        links = Links(lambda _: HttpTransport(load_settings(), service="orders", messages=dict))
        place = Elsewhere(stock.place.name, lambda: links)
        caller = RemoteService(contract_of(Inventory), place, timeout=SOON, options={}, on_error=None).stub()
        with pytest.raises(InvalidCall, match="413"):
            await caller.echo(bytes(80_000))
        with pytest.raises(InvalidCall, match="larger than max_frame_bytes"):
            await caller.prices(place="x" * 69_992)
        await links.close()


async def test_misspelt_header_is_told_with_its_name(client: httpx.AsyncClient) -> None:
    response = await client.post(RESERVE, content=arguments("A"), headers={**KIND, "Durable-Expires-Inn": "1"})
    assert response.json()["detail"] == "unknown header: 'durable-expires-inn'; did you mean 'durable-expires-in'?"
    twice = [*KIND.items(), ("Durable-Epoch", "0"), ("Durable-Epoch", "0")]
    response = await client.post(RESERVE, content=arguments("A"), headers=twice)
    assert (response.status_code, response.json()["detail"]) == (
        400,
        "the header 'durable-epoch' comes twice; send it once",
    )


async def test_closed_request_cancels_its_call(stock: Offering, client: httpx.AsyncClient) -> None:
    async def call(name: str, awaited: str) -> None:
        headers = {**KIND, "Durable-Awaited": awaited}
        await client.post("/calls/inventory/slow", content=arguments(name), headers=headers)

    calls = [asyncio.create_task(call("a", "yes")), asyncio.create_task(call("b", "no"))]
    await eventually(lambda: sorted(stock.stock.began) == ["a", "b"])
    for each in calls:
        each.cancel()
    await eventually(lambda: stock.stock.cancelled == ["a"])
    stock.stock.go.set()
    await eventually(lambda: stock.stock.ended == ["b"])


# ---------------------------------------------------------------- lists


async def test_offers_are_told_again_when_they_have_changed(stock: Offering, client: httpx.AsyncClient) -> None:
    first = await client.get("/offers")
    assert first.headers["content-type"] == OFFERS
    assert [each.service for each in decode_offers(first.content).offers] == ["inventory"]
    known = {"If-None-Match": first.headers["etag"]}
    assert (await client.get("/offers", headers=known)).status_code == 304
    waiting = asyncio.create_task(client.get("/offers", headers={**known, "Prefer": "wait=20"}))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    stock.provider.withdraw(contract_of(Inventory))
    second = await waiting
    assert (second.status_code, decode_offers(second.content).offers) == (200, [])


async def test_waiting_for_a_change_ends_in_time(client: httpx.AsyncClient) -> None:
    known = {"If-None-Match": (await client.get("/offers")).headers["etag"], "Prefer": "wait=1"}
    began = time.monotonic()
    assert (await client.get("/offers", headers=known)).status_code == 304
    assert 0.9 < time.monotonic() - began < 10


async def test_directory_shows_a_peer_only_allowed_services() -> None:
    peers: dict[str, Any] = {name: {"secrets": {"1": secret}} for name, secret in SECRETS.items()}
    peers["orders"]["types"] = ["inventory.*"]
    settings = load_settings(peers=peers)
    registry = Registry()
    transport = HttpTransport(
        settings,
        service="hub",
        messages=dict,
        provider=CallProvider(),
        directory=Hub(registry, settings, "hub"),
    )
    listener = transport.listener("http://127.0.0.1:0", "hub")
    await listener.serve(MemoryReceiver())
    registry.announce("x", [listing("inventory"), listing("billing")])
    registry.learn("far", [listing("learned", application="far")])
    async with httpx.AsyncClient(base_url=listener.address) as client:
        for name, seen in {"orders": ["inventory"], "other": ["inventory", "billing"]}.items():
            response = await client.get("/directory", headers={"Authorization": f"Bearer {SECRETS[name]}"})
            assert response.headers["content-type"] == DIRECTORY
            assert [each.offer.service for each in decode_directory(response.content)] == seen
        assert (await client.get("/directory")).status_code == 401
    await listener.close()


async def test_lists_show_a_peer_only_callable_methods() -> None:
    peers: dict[str, Any] = {name: {"secrets": {"1": secret}} for name, secret in SECRETS.items()}
    peers["orders"]["types"] = ["inventory.reserve", "shop.*", "billing.*"]
    settings = load_settings(peers=peers)
    provider, registry = CallProvider(lambda: settings), Registry()
    provider.offer(contract_of(Inventory), Stock())
    provider.offer(contract_of(Who), Named("one"))
    registry.announce("x", [replace(listing("inventory"), offer=contract_of(Inventory).offer), listing("other")])
    transport = HttpTransport(
        settings,
        service="hub",
        messages=lambda: {"shop.reservation": Reservation, "secret.reservation": Reservation},
        provider=provider,
        directory=Hub(registry, settings, "hub"),
    )
    listener = transport.listener("http://127.0.0.1:0", "hub")
    await listener.serve(MemoryReceiver())
    async with httpx.AsyncClient(base_url=listener.address) as client:

        async def told(name: str, path: str) -> httpx.Response:
            return await client.get(path, headers={"Authorization": f"Bearer {SECRETS[name]}"})

        def methods(offers: Sequence[Offer]) -> dict[str, list[str]]:
            return {each.service: [method.method for method in each.signatures] for each in offers}

        offers = decode_offers((await told("orders", "/offers")).content).offers
        assert methods(offers) == {"inventory": ["reserve"]}
        listings = decode_directory((await told("orders", "/directory")).content)
        assert methods([each.offer for each in listings]) == {"inventory": ["reserve"]}
        described = (await told("orders", "/openapi.json")).text
        assert "shop.reservation" in described
        assert "secret.reservation" not in described
        offers = decode_offers((await told("other", "/offers")).content).offers
        assert methods(offers) == {"inventory": list(contract_of(Inventory).methods), "who": ["name", "wait"]}
        assert "secret.reservation" in (await told("other", "/openapi.json")).text
    await listener.close()


# ---------------------------------------------------------------- the caller


@asynccontextmanager
async def calling(server: dict[str, Any], caller: dict[str, Any]) -> AsyncIterator[tuple[Any, Stock]]:
    """The inventory over HTTP, with settings of its own for each end."""
    settings = load_settings(drain_timeout=1, **server)
    provider, stock = CallProvider(lambda: settings), Stock()
    provider.offer(contract_of(Inventory), stock)
    transport = HttpTransport(settings, service="stock", messages=dict, provider=provider)
    listener = transport.listener("http://127.0.0.1:0", "stock")
    await listener.serve(MemoryReceiver())
    own = HttpTransport(load_settings(**caller), service="orders", messages=dict)
    links = Links(lambda _: own)
    place = Elsewhere(listener.address, lambda: links)
    yield RemoteService(contract_of(Inventory), place, timeout=SOON, options={}, on_error=None).stub(), stock
    await links.close()
    await listener.close()
    await provider.stop(1)


@pytest.mark.parametrize("http_auth", ["hmac", "bearer"])
async def test_secret_of_a_peer_is_shown_and_its_types_hold(http_auth: str) -> None:
    own = {"secrets": {"1": SECRETS["orders"]}}
    server = {"peers": {"orders": {**own, "types": ["inventory.reserve"]}}}
    caller = {"peers": {"orders": own}, "http_auth": http_auth, "allow_plaintext": True}
    async with calling(server, caller) as (inventory, stock):
        assert await inventory.reserve("A-1", 2) == Reservation("A-1", 2)
        with pytest.raises(NoProvider, match=r"orders may not call inventory\.slow"):
            await inventory.slow("A")
        assert stock.began == []


async def test_wrong_secret_calls_nothing() -> None:
    async with calling({"shared_secret": SECRETS["orders"]}, {"shared_secret": SECRETS["other"]}) as (inventory, stock):
        with pytest.raises(NoProvider):
            await inventory.slow("A")
        assert stock.began == []


@pytest.mark.parametrize("own", [{}, {"shared_secret": SECRETS["orders"]}], ids=["unsigned", "signed"])
async def test_calls_made_at_once_all_have_results(own: dict[str, Any], tmp_path: Path) -> None:
    async with offering("http", tmp_path, call_concurrency=MOST_CONNECTIONS, **own) as stock:
        inventory = stock.caller()
        calls = [asyncio.create_task(inventory.slow(str(number))) for number in range(200)]
        await eventually(lambda: stock.provider.running == MOST_CONNECTIONS)
        stock.stock.go.set()
        assert await asyncio.gather(*calls) == [str(number) for number in range(200)]
        for number in range(50):
            assert await inventory.reserve("A", number) == Reservation("A", number)
        assert stock.listener is not None
        assert stock.listener.statistics()["connections"] == MOST_CONNECTIONS


async def test_request_looks_at_its_own_connection_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many others are open, and how many requests wait, costs a call nothing."""
    looked = 0
    is_idle = httpcore.AsyncHTTPConnection.is_idle

    def look(connection: httpcore.AsyncHTTPConnection) -> bool:
        nonlocal looked
        looked += 1
        return is_idle(connection)

    async with offering("http", tmp_path) as stock:
        inventory = stock.caller()
        await asyncio.gather(*(inventory.reserve("A", number) for number in range(200)))
        monkeypatch.setattr(httpcore.AsyncHTTPConnection, "is_idle", look)
        await inventory.reserve("A", 1)
        alone = looked
        await asyncio.gather(*(inventory.reserve("A", number) for number in range(200)))
        assert looked - alone <= 200 * alone


async def test_calls_share_pooled_connections(tmp_path: Path) -> None:
    async with offering("http", tmp_path) as stock:
        inventory = stock.caller()
        for number in range(50):
            assert await inventory.reserve("A", number) == Reservation("A", number)
        assert stock.listener is not None
        assert stock.listener.statistics()["connections"] == 1
        await asyncio.gather(*(inventory.reserve("A", number) for number in range(300)))
        assert stock.listener.statistics()["connections"] <= 64
        assert stock.listener.statistics()["calls"] == 350


async def test_redirect_is_not_followed() -> None:
    served: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for own in ({}, {"shared_secret": SECRETS["orders"]}):
        transport = HttpTransport(load_settings(**own), service="orders", messages=dict)
        links = Links(lambda _, transport=transport: transport)  # type: ignore[misc]
        place = Elsewhere(f"http://127.0.0.1:{port}", lambda links=links: links)  # type: ignore[misc]
        caller = RemoteService(contract_of(Inventory), place, timeout=SOON, options={}, on_error=None).stub()
        with pytest.raises(NoProvider, match=r"307|not signed"):
            await caller.reserve("A")
        await links.close()
    assert len(served) == 2
    server.close()
    await server.wait_closed()


async def test_impostor_without_the_secret_is_not_believed() -> None:
    offers = msgspec.msgpack.encode([[contract_of(Inventory).offer]])
    reservation = msgspec.msgpack.encode(Reservation("A", 1))
    answers = {b"POST /ping": b"", b"GET /offers": offers, b"POST /calls": reservation}
    kinds = {b"POST /ping": b"text/plain", b"GET /offers": OFFERS.encode(), b"POST /calls": RESULT.encode()}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked = next(each for each in answers if head.startswith(each))
        status = b"200 OK" if answers[asked] else b"204 No Content"
        writer.write(b"HTTP/1.1 %b\r\nContent-Type: %b\r\nConnection: close\r\n" % (status, kinds[asked]))
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(answers[asked]), answers[asked]))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = HttpTransport(load_settings(shared_secret=SECRETS["orders"]), service="orders", messages=dict)
    links = Links(lambda _: transport)
    place = Elsewhere(f"http://127.0.0.1:{port}", lambda: links)
    caller = RemoteService(contract_of(Inventory), place, timeout=SOON, options={}, on_error=None).stub()
    with pytest.raises(NoProvider, match="not signed"):
        await caller.reserve("A")
    await links.close()
    server.close()
    await server.wait_closed()


async def test_call_is_sent_once_when_its_connection_breaks() -> None:
    posts = 0
    offers = msgspec.msgpack.encode([[contract_of(Inventory).offer]])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal posts
        while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n" % OFFERS.encode())
            writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(offers), offers))
            await writer.drain()
        posts += head.startswith(b"POST")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = HttpTransport(load_settings(), service="orders", messages=dict)
    links = Links(lambda _: transport)
    place = Elsewhere(f"http://127.0.0.1:{port}", lambda: links)
    caller = RemoteService(contract_of(Inventory), place, timeout=SOON, options={}, on_error=None).stub()
    with pytest.raises(ProviderGone):
        await caller.reserve("A")
    assert posts == 1
    await links.close()
    server.close()
    await server.wait_closed()
