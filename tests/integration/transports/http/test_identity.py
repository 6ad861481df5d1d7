"""Attacks on the identity of peers: who answers, who asks, and what of it is believed by a running node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import pytest
from fastapi import FastAPI
from msgspec.structs import replace

from durable import Bus, message
from durable.asgi import DurableMiddleware
from durable.embedded import Embedded
from durable.embedded.ports import free_port
from durable.envelope import Envelope
from durable.errors import InvalidSetting, PauseListener, TransportError
from durable.outcomes import BUSY, DUPLICATE, STORED, Outcome, Rejected, Stored
from durable.settings import load_settings
from durable.telemetry import Event, Subject
from durable.testing import eventually
from durable.transports.http import auth as http_auth
from durable.transports.http.transport import HttpTransport
from durable.transports.http.wire import BATCH, OUTCOMES, decode_outcomes, encode_batch, encode_outcomes
from tests.support.raw_http import FakeHttpServer, Handle, RawHttpClient, RawResponse, request, response
from tests.support.receivers import envelope
from tests.support.tables import Tables, shared_tables
from tests.support.web import served

SECRET, OTHER, SHARED = "correct horse battery", "staple staple staple", "a secret of everybody"
QUICK: dict[str, Any] = {
    "poll_interval": timedelta(milliseconds=30),
    "ping_interval": timedelta(milliseconds=50),
    "failures_to_latch": 2,
}


@message("identity.placed")
class Placed(msgspec.Struct):
    number: int


@pytest.fixture(scope="module")
def orders_database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture(scope="module")
def billing_database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def orders(orders_database: Tables) -> Tables:
    orders_database.clear()
    return orders_database


@pytest.fixture
def billing(billing_database: Tables) -> Tables:
    billing_database.clear()
    return billing_database


def port_of(server: FakeHttpServer) -> str:
    return server.uri.rpartition(":")[2]


# Impostors --------------------------------------------------------------------------------------------------------

Say = Callable[[bytes, int, bytes], dict[str, str]]
"""Makes the headers of an impostor's answer, of the request, the status and the body."""


def shown(asked: bytes) -> http_auth.Signature:
    """The signature of a request, which whoever it reaches can read."""
    [line] = [line for line in asked.split(b"\r\n") if line.lower().startswith(b"authorization:")]
    signature = http_auth.parse(line.partition(b": ")[2].decode())
    assert isinstance(signature, http_auth.Signature)
    return signature


def nothing(asked: bytes, status: int, body: bytes) -> dict[str, str]:
    return {}


def another_secret(asked: bytes, status: int, body: bytes) -> dict[str, str]:
    return {"authentication_info": http_auth.sign_answer(OTHER, shown(asked), "billing", status, body)}


def the_request_itself(asked: bytes, status: int, body: bytes) -> dict[str, str]:
    return {"authentication_info": f"service=billing, signature={shown(asked).digest}"}


def recorded(asked: bytes, status: int, body: bytes) -> dict[str, str]:
    """The peer's own answer to another request of this sender."""
    said = http_auth.unsigned(b"before", to="billing", at="https://billing", timestamp=1, nonce="0123456789abcdef")
    before = http_auth.sign(SECRET, said, "POST", b"/batches", 6)
    return {"authentication_info": http_auth.sign_answer(SECRET, before, "billing", status, body)}


def of_another_body(asked: bytes, status: int, body: bytes) -> dict[str, str]:
    return {"authentication_info": http_auth.sign_answer(SECRET, shown(asked), "billing", status, b"x")}


def impostor(server: FakeHttpServer, say: Say, outcome: Outcome | None) -> Handle:
    """Answers everything with this outcome, or with 413."""

    async def handle(writer: asyncio.StreamWriter) -> None:
        asked = server.requests[-1]
        if asked.startswith(b"POST /ping "):
            writer.write(response("204 No Content", b"", **{"content_length": "", **say(asked, 204, b"")}))
        elif outcome is None:
            writer.write(response("413 Content Too Large", b"", **say(asked, 413, b"")))
        else:
            body = encode_outcomes([outcome])
            writer.write(response("200 OK", body, content_type=OUTCOMES, **say(asked, 200, body)))

    return handle


def billing_at(uri: str, secret: str = SECRET) -> dict[str, Any]:
    """The setting `peers` of a service that sends to billing at this address."""
    return {"billing": {"secrets": {"1": secret}, "at": [uri]}}


@pytest.mark.parametrize("say", [nothing, another_secret, the_request_itself, recorded], ids=lambda say: say.__name__)
@pytest.mark.parametrize(
    "outcome", [STORED, DUPLICATE, Rejected("never"), None], ids=["stored", "duplicate", "rejected", "413"]
)
async def test_impostor_on_the_port_of_a_peer_loses_no_message(
    orders: Tables, billing: Tables, say: Say, outcome: Outcome | None
) -> None:
    async with FakeHttpServer(lambda _: asyncio.sleep(0)) as server:
        server.handle = impostor(server, say, outcome)
        bus = Bus("orders", orders.url, peers=billing_at(server.uri), **QUICK)
        bus.route(Placed, to=server.uri)
        async with bus:
            async with bus.unit_of_work():
                bus.send(Placed(17))
            await eventually(lambda: orders.count("circuits") == 1, within=20, what="the latch")
            assert orders.rows("SELECT attempts FROM durable.outgoing_envelopes") == [2]
            assert "is not signed with the secret" in orders.one("SELECT reason FROM durable.circuits")
            pinged = len(server.requests)
            await eventually(lambda: len(server.requests) > pinged + 2, within=20, what="pings")
            assert orders.count("circuits") == 1
    assert orders.dead_letters() == []

    handled: list[int] = []
    there = Bus("billing", billing.url, peers={"orders": SECRET}, **QUICK)
    there.listen(f"http://127.0.0.1:{port_of(server)}")

    @there.handles(Placed)
    async def bill(placed: Placed) -> None:
        handled.append(placed.number)

    async with there, bus:
        await eventually(lambda: handled == [17], within=30, what="the delivery")
        await eventually(lambda: orders.count("outgoing_envelopes") == 0, within=20, what="the deletion")
        assert there.statistics().tallies[Subject.ENDPOINT]["billing"].counts[Event.RECEIVED] == 1


async def test_answer_changed_on_the_way_loses_no_message(orders: Tables) -> None:
    async with FakeHttpServer(lambda _: asyncio.sleep(0)) as server:
        server.handle = impostor(server, of_another_body, STORED)
        bus = Bus("orders", orders.url, peers=billing_at(server.uri), **QUICK)
        bus.route(Placed, to=server.uri)
        async with bus:
            async with bus.unit_of_work():
                bus.send(Placed(17))
            await eventually(lambda: orders.count("circuits") == 1, within=20, what="the latch")
            assert orders.count("outgoing_envelopes") == 1


# Plaintext --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declare", "settings"),
    [
        (lambda bus: bus.route(Placed, to="http://billing.example"), {}),
        (lambda bus: bus.route(Placed, to="http://192.0.2.7:8001/in"), {"shared_secret": SECRET}),
        (lambda bus: bus.listen("http://0.0.0.0:0"), {"shared_secret": SECRET}),
        (lambda bus: bus.listen("http://[::]:0"), {"shared_secret": SECRET}),
        (lambda bus: bus.route(Placed, to="rabbitmq://default/queue/q"), {"amqp_url": "amqp://u:tops3cret@mq.example"}),
        (
            lambda bus: bus.route(Placed, to="rabbitmq://second/queue/q"),
            {"amqp_brokers": {"second": "amqp://u:tops3cret@192.0.2.7"}},
        ),
    ],
    ids=["http", "signed http", "listen", "listen on IPv6", "amqp", "another broker"],
)
def test_plaintext_to_other_hosts_starts_only_when_allowed(
    declare: Callable[[Bus], None], settings: dict[str, Any]
) -> None:
    def check(**more: Any) -> None:
        bus = Bus("orders", "postgresql://127.0.0.1:1/none", **settings, **more)
        declare(bus)
        bus.runtime.check_wiring()

    with pytest.raises(InvalidSetting, match=r"^allow_plaintext: .*everybody on the way could read") as refused:
        check(allow_plaintext=False)
    assert "tops3cret" not in str(refused.value)
    check(allow_plaintext=True)


@pytest.mark.parametrize("uri", ["https://billing.example", "http://127.0.0.1:1", "http://[::1]:1", "http://localhost"])
def test_encrypted_and_local_addresses_need_no_permission(uri: str) -> None:
    HttpTransport(load_settings(), service="orders", messages=dict).check(uri)


# Without a secret -------------------------------------------------------------------------------------------------

FROM_STRANGERS = [
    {"forwarded": "for=203.0.113.9"},
    {"X-Forwarded-For": "203.0.113.9"},
    {"x-forwarded-for": "127.0.0.1"},
    {"X-Forwarded-Proto": "https"},
    {"x-forwarded-host": "orders.example"},
    {"Via": "1.1 tunnel"},
    {"x-real-ip": "127.0.0.1"},
    {"cf-connecting-ip": "203.0.113.9"},
    {"Origin": "https://page.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:8001"},
    {"Sec-Fetch-Site": "cross-site"},
    {"host": "rebound.example"},
    {"host": "rebound.example:8001"},
    {"host": "127.0.0.1.rebound.example"},
    {"host": "127.0.0.1@rebound.example"},
    {"host": "localhost:80:80"},
    {"host": "[::1]evil.example"},
    {"host": "[::1].rebound.example:80"},
    {"host": "127.0.0.1:8001.rebound.example"},
    {"host": ""},
    {"host": "10.0.0.7"},
]


@asynccontextmanager
async def mounted(bus: Bus, **options: Any) -> AsyncIterator[str]:
    app = FastAPI()
    app.add_middleware(DurableMiddleware, bus=bus)
    app.mount("/durable", bus.asgi(**options))
    async with served(app) as url:
        yield f"{url}/durable"


@asynccontextmanager
async def listening(bus: Bus, at: str = "http://127.0.0.1:0") -> AsyncIterator[str]:
    bus.listen(at)
    async with bus:
        assert bus.runtime.node is not None
        yield bus.runtime.node.listeners[0].address


def taking_placed(tables: Tables, **settings: Any) -> Bus:
    bus = Bus("billing", tables.url, **QUICK, **settings)

    @bus.handles(Placed)
    async def bill(placed: Placed) -> None: ...

    return bus


async def post(url: str, **headers: str) -> RawResponse:
    body = b'{"number":17}'
    path = f"{urlsplit(url).path}/messages/identity.placed"
    async with RawHttpClient(url) as client:
        data = request(path, body, content_type="application/json", **headers)
        if headers.get("host") == "":
            data = data.replace(b"HTTP/1.1", b"HTTP/1.0")
        return await client.ask(data)


@pytest.mark.parametrize("door", [lambda bus: mounted(bus, allow_local=True), listening], ids=["mounted", "listening"])
async def test_node_without_a_secret_takes_messages_of_local_programs_only(
    billing: Tables, door: Callable[[Bus], AbstractAsyncContextManager[str]]
) -> None:
    async with door(taking_placed(billing)) as url:
        for headers in FROM_STRANGERS:
            refusal = await post(url, **headers)
            assert (headers, refusal.status) == (headers, 401)
            assert "this service has no secret and answers only" in refusal.problem["detail"]
        assert billing.count("received_ids") == 0
        for host in ("127.0.0.1", "127.0.0.1:8001", "localhost", "LocalHost:1", "[::1]:1", "127.8.0.1"):
            assert (await post(url, host=host)).status == 202


async def test_mounted_app_without_a_secret_refuses_everybody(
    billing: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    async with mounted(taking_placed(billing)) as url:
        refusal = await post(url)
        assert refusal.status == 401
        assert "set shared_secret on both ends, or say bus.asgi(allow_local=True)" in refusal.problem["detail"]
        async with RawHttpClient(url) as client:
            assert (await client.ask(request("/durable/health/ready", method="GET"))).status == 204
        assert billing.count("received_ids") == 0
    assert "bus.asgi() has no secret and refuses every request" in caplog.text


async def test_proxies_change_nothing_for_holders_of_the_secret(billing: Tables) -> None:
    async with mounted(taking_placed(billing, shared_secret=SECRET)) as url:
        for headers in FROM_STRANGERS:
            assert (await post(url, authorization=f"Bearer {SECRET}", **headers)).status == 202


# Ids that were taken ----------------------------------------------------------------------------------------------

REAL = b'{"number": 17}'
# What somebody sends first under the id of another's message. Only the terms differ, at most.
TAKEN: dict[str, dict[str, str]] = {
    "with a time to live of nothing": {"durable_time_to_live": "0"},
    "with a deadline that has passed": {"durable_deliver_by": "2020-01-01T00:00:00Z"},
    "for much later": {"durable_execute_at": (datetime.now(UTC) + timedelta(days=5)).isoformat()},
    "with a key": {"durable_partition_key": "another"},
    "with a header": {"durable_header_reply_to": "http://127.0.0.1:1"},
}


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN.keys())
async def test_message_under_a_taken_id_is_no_silent_duplicate(
    billing: Tables, taken: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    bus = taking_placed(billing, shared_secret=SECRET)
    async with listening(bus) as url:
        path = "/messages/identity.placed"
        key = {"idempotency_key": "order-17", "content_type": "application/json", "authorization": f"Bearer {SECRET}"}
        async with RawHttpClient(url) as client:
            assert (await client.ask(request(path, REAL, **key, **taken))).status == 202
            refusal = await client.ask(request(path, REAL, **key))
            assert (refusal.status, (await client.ask(request(path, REAL, **key, **taken))).status) == (422, 200)
        assert "another body or version, other headers or other times" in refusal.problem["detail"]
        assert billing.rows("SELECT body FROM durable.dead_letters") == [REAL]
        assert "another message was received under the same id before" in caplog.text
        assert bus.statistics().tallies[Subject.ENDPOINT]["billing"].counts[Event.QUARANTINED] == 1
        async with RawHttpClient(url) as client:
            assert (await client.ask(request(path, REAL, **key))).status == 422
        assert billing.count("dead_letters") == 1


async def test_peers_message_under_a_taken_id_is_kept(orders: Tables, billing: Tables) -> None:
    """The id of the outbox is known to somebody, who is faster."""
    there = taking_placed(billing, shared_secret=SECRET)
    async with listening(there) as url:
        bus = Bus("orders", orders.url, shared_secret=SECRET, **QUICK)
        bus.route(Placed, to=url)
        async with bus.unit_of_work():
            bus.send(Placed(17))
        [body] = orders.rows("SELECT body FROM durable.outgoing_envelopes")
        taken = {"idempotency_key": str(orders.one("SELECT id FROM durable.outgoing_envelopes"))}
        assert (await post(url, authorization=f"Bearer {SECRET}", **taken, durable_time_to_live="0")).status == 202
        async with bus:
            await eventually(lambda: orders.count("outgoing_envelopes") == 0, within=20, what="the answer")
        assert billing.rows("SELECT body FROM durable.dead_letters") == [body]


# Peers ------------------------------------------------------------------------------------------------------------


async def batch_to(url: str, *envelopes: Envelope, **signed: str) -> RawResponse:
    """The answer to a batch that is signed like this."""
    async with RawHttpClient(url) as client:
        return await client.ask(signed_batch(url, *envelopes, **signed))


def signed_batch(
    url: str, *envelopes: Envelope, to: str = "billing", sender: str = "", key: str = "", secret: str = SECRET
) -> bytes:
    """A request with these envelopes, for this address."""
    body, target = encode_batch(envelopes), f"{urlsplit(url).path}/batches"
    now, parts = int(time.time()), urlsplit(url)
    at = f"{parts.scheme}://{parts.netloc}"
    said = http_auth.unsigned(body, to=to, at=at, timestamp=now, nonce=uuid4().hex, sender=sender, key=key)
    shown = http_auth.sign(secret, said, "POST", target.encode(), len(body))
    return request(target, body, content_type=BATCH, authorization=str(shown))


def placed(number: int = 17, **changes: Any) -> Envelope:
    given = {"message_type": "identity.placed", "body": b'{"number":%d}' % number, **changes}
    return replace(envelope(), **given)


async def test_recorded_request_is_refused_by_another_service(orders: Tables, billing: Tables) -> None:
    async with FakeHttpServer(lambda _: asyncio.sleep(0)) as wire:
        at = wire.uri
        bus = Bus("orders", orders.url, peers=billing_at(at), send_timeout=timedelta(seconds=1), **QUICK)
        bus.route(Placed, to=at)
        async with bus:
            async with bus.unit_of_work():
                bus.send(Placed(17))
            await eventually(lambda: bool(wire.requests), within=20, what="a request on the wire")
        recorded = wire.requests[0]
    assert recorded.startswith(b"POST /batches ")

    def service(name: str) -> Bus:
        made = Bus(name, billing.url, peers={"orders": SECRET}, **QUICK)
        made.handles(Placed)(nobody)
        return made

    async with listening(service("shipping")) as url, RawHttpClient(url) as mallory:
        refusal = await mallory.ask(recorded)
        assert (refusal.status, refusal.problem["detail"]) == (
            421, "this is the service shipping, and the request was signed for billing"
        )  # fmt: skip
        assert billing.count("received_ids") == billing.count("dead_letters") == 0
    async with listening(service("billing")) as url, RawHttpClient(url) as mallory:
        assert (await mallory.ask(recorded)).status == 421, "another address of this machine"
        assert billing.count("received_ids") == 0
    async with listening(service("billing"), at) as url, RawHttpClient(url) as client:
        assert (await client.ask(recorded)).status == 200
        assert (await client.ask(recorded)).status == 200
        assert billing.count("received_ids") == 1


async def test_recorded_request_is_refused_by_another_endpoint_of_the_service(billing: Tables) -> None:
    bus = taking_placed(billing, peers={"orders": SECRET})
    bus.listen("http://127.0.0.2:0", name="partners")
    async with listening(bus) as url:
        assert bus.runtime.node is not None
        at, here = url.partition("//")[2], signed_batch(url, placed(), sender="orders", key="1")
        [other] = [each.address for each in bus.runtime.node.listeners if at not in each.address]
        for address, status in ((other, 421), (url, 200), (url, 200), (other, 421)):
            async with RawHttpClient(address) as client:
                assert (await client.ask(here)).status == status
        assert billing.count("received_ids") == 1


@pytest.mark.parametrize("known", ["shared secret", "secrets of peers"])
@pytest.mark.parametrize(
    ("at", "signed"),
    [
        ("http://127.0.0.1:0", "http://127.0.0.1:0"),
        ("http://127.0.0.2:{port}", "http://127.0.0.1:{port}"),
        ("http://127.0.0.2:{port}", "http://localhost:{port}"),
    ],
    ids=["another port", "another address", "another address than the name"],
)
async def test_impostor_passing_requests_on_to_another_service_gets_none(
    orders: Tables, billing: Tables, known: str, at: str, signed: str
) -> None:
    """It knows no secret, and listens on the port of a peer that is down. The other service knows the secret."""
    handled: list[int] = []
    settings: dict[str, Any] = {"shared_secret": SECRET} if known == "shared secret" else {"peers": {"orders": SECRET}}
    there = Bus("shop", billing.url, **settings, **QUICK)

    @there.handles(Placed)
    async def take(placed: Placed) -> None:
        handled.append(placed.number)

    port = free_port()  # of both addresses
    async with listening(there, at.format(port=port)) as url, passing_on(url, to=signed) as (taken, heard):
        bus = Bus("orders", orders.url, **settings, **QUICK)
        bus.route(Placed, to=taken)
        async with bus:
            async with bus.unit_of_work():
                bus.send(Placed(17))
            await eventually(lambda: orders.count("circuits") == 1, within=20, what="the latch")
            assert heard
        assert orders.count("outgoing_envelopes") == 1
        assert handled == billing.dead_letters() == []


@asynccontextmanager
async def passing_on(url: str, to: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A listener at `to` that passes on all that it hears, and the answers back; its address, and what it has heard."""
    parts, heard = urlsplit(url), list[bytes]()
    taken = urlsplit(to.format(port=parts.port))

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: list[bytes]) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                said.append(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(parts.hostname, parts.port)
        await asyncio.gather(pipe(reader, forth, heard), pipe(back, writer, []))

    server = await asyncio.start_server(pass_on, "127.0.0.1", taken.port)
    try:
        yield f"http://{taken.hostname}:{server.sockets[0].getsockname()[1]}", heard
    finally:
        server.close()


async def nobody(placed: Placed) -> None: ...


async def test_sender_without_the_name_of_its_peer_signs_for_the_answering_service(billing: Tables) -> None:
    """With one secret for all, whoever knows it may be at the address: another one now, when it was moved there."""

    def service(name: str) -> Bus:
        made = Bus(name, billing.url, shared_secret=SECRET, **QUICK)
        made.handles(Placed)(nobody)
        return made

    async with AsyncExitStack() as until_the_end:
        async with listening(service("billing")) as url:
            transport = HttpTransport(load_settings(shared_secret=SECRET), service="orders", messages=dict)
            sender = await until_the_end.enter_async_context(transport.sender(url))
            assert await sender.send([placed()]) == [STORED]
        async with listening(service("invoices"), url):
            with pytest.raises(TransportError, match="421 Misdirected Request: this is the service invoices"):
                await sender.send([placed()])
            assert await sender.send([placed()]) == [STORED]
    assert billing.count("received_ids") == 2


FORGED: dict[str, dict[str, str]] = {
    "another peer's name": {"sender": "orders", "key": "1", "secret": OTHER},
    "a name without a secret": {"sender": "shop", "key": "2", "secret": OTHER},
    "an unknown name": {"sender": "mallory", "key": "1", "secret": OTHER},
    "no name": {"secret": OTHER},
    "no name with the secret of a peer": {"secret": SECRET},
}


async def test_peer_cannot_send_as_another(billing: Tables) -> None:
    async with listening(taking_placed(billing, peers={"orders": SECRET, "shop": OTHER})) as url:
        for name, forged in FORGED.items():
            assert (name, (await batch_to(url, placed(), **forged)).status) == (name, 401)
        assert billing.count("received_ids") == 0
        for sender, secret in (("orders", SECRET), ("shop", OTHER)):
            assert (await batch_to(url, placed(), sender=sender, key="1", secret=secret)).status == 200


async def test_secret_of_a_peer_is_changed_without_a_pause(billing: Tables) -> None:
    old, both, new = {"1": SECRET}, {"1": SECRET, "2": OTHER}, {"2": OTHER}
    steps = [(old, old), (old, both), (both, both), ({"2": OTHER, "1": SECRET}, both), (new, both), (new, new)]
    for sending, receiving in steps:
        async with listening(taking_placed(billing, peers={"orders": {"secrets": receiving}})) as url:
            peers = {"billing": {"secrets": sending, "at": [url]}}
            sender = HttpTransport(load_settings(peers=peers), service="orders", messages=dict).sender(url)
            async with sender:
                assert await sender.send([placed()]) == [STORED]
    async with listening(taking_placed(billing, peers={"orders": {"secrets": new}})) as url:
        assert (await batch_to(url, placed(), sender="orders", key="1")).status == 401


async def test_peer_sends_only_its_types_to_its_endpoints(orders: Tables, billing: Tables) -> None:
    may: dict[str, Any] = {
        "orders": {"secrets": {"1": SECRET}, "types": ["shop.*", "identity.paid"]},
        "shop": {"secrets": {"1": OTHER}, "types": ["identity.*"], "endpoints": ["elsewhere"]},
    }
    async with listening(taking_placed(billing, peers=may)) as url:
        assert (await post(url, authorization=f"Bearer {SECRET}")).status == 403
        assert (await post(url, authorization=f"Bearer {OTHER}")).status == 403
        assert (await batch_to(url, placed(), sender="shop", key="1", secret=OTHER)).status == 403
        bus = Bus("orders", orders.url, peers=billing_at(url), **QUICK)
        bus.route(Placed, to=url)
        async with bus:
            async with bus.unit_of_work():
                bus.send(Placed(17))
            await eventually(lambda: orders.count("dead_letters") == 1, within=20, what="the letter")
        assert orders.rows("SELECT reason FROM durable.dead_letters") == [
            "orders may not send messages of type identity.placed to billing"
        ]
        allowed = [placed(message_type="shop.sold"), placed(), placed(message_type="identity.paid")]
        answer = await batch_to(url, *allowed, sender="orders", key="1")
        assert [type(each) for each in decode_outcomes(answer.body, 3)] == [Stored, Rejected, Stored]
        assert billing.count("received_ids") == 2


@pytest.mark.parametrize(
    "destination", ["https://shipping.example/in", "rabbitmq://default/queue/x", "tcp://10.0.0.7:1"]
)
async def test_envelope_for_another_service_is_quarantined(billing: Tables, destination: str) -> None:
    peers: dict[str, Any] = {
        "orders": SECRET,
        "shipping": {"secrets": {"1": OTHER}, "at": ["https://shipping.example"]},
    }
    async with listening(taking_placed(billing, peers=peers)) as url:
        strayed = [placed(1, destination=url), placed(2, destination=destination), placed(3)]
        answer = await batch_to(url, *strayed, sender="orders", key="1")
        assert decode_outcomes(answer.body, 3) == [STORED] * 3
        assert billing.count("received_ids") == 2
        [reason] = billing.rows("SELECT reason FROM durable.dead_letters")
        assert reason == f"the envelope is for {destination}, which is not this service"


async def test_ids_of_peers_are_their_own(billing: Tables) -> None:
    """Whoever knows the id of another's message cannot take it away."""
    handled: list[int] = []
    bus = Bus("billing", billing.url, peers={"orders": SECRET, "mallory": OTHER}, **QUICK)

    @bus.handles(Placed)
    async def bill(placed: Placed) -> None:
        handled.append(placed.number)

    async with listening(bus) as url:
        real = placed(17)
        taken = replace(real, body=b'{"number":666}', execution_time=datetime.now(UTC) + timedelta(days=5))
        assert (await batch_to(url, taken, sender="mallory", key="1", secret=OTHER)).status == 200
        for expected in (STORED, DUPLICATE):
            answer = await batch_to(url, real, sender="orders", key="1")
            assert decode_outcomes(answer.body, 1) == [expected]
        await eventually(lambda: handled == [17], within=20, what="the handling")
        key = {"idempotency_key": "order-17"}
        for secret in (OTHER, SECRET):
            assert (await post(url, authorization=f"Bearer {secret}", **key)).status == 202
        assert billing.count("dead_letters") == 0
        assert set(billing.rows("SELECT DISTINCT endpoint FROM durable.undated_ids")) == {
            "billing<-orders", "billing<-mallory"
        }  # fmt: skip


async def test_listener_paused_by_a_message_of_a_peer_is_paused_for_all(billing: Tables) -> None:
    bus = Bus("billing", billing.url, peers={"orders": SECRET, "shop": OTHER}, **QUICK)

    @bus.handles(Placed)
    async def bill(placed: Placed) -> None:
        raise PauseListener(600)

    async with listening(bus) as url:
        assert (await batch_to(url, placed(), sender="orders", key="1")).status == 200

        async def is_busy() -> bool:
            answer = await batch_to(url, placed(), sender="shop", key="1", secret=OTHER)
            return decode_outcomes(answer.body, 1) == [BUSY]

        await eventually(is_busy, within=20, what="the pause")
        assert billing.rows("SELECT key FROM durable.circuits WHERE kind = 'listener'") == ["billing"]


@pytest.mark.parametrize(
    "peers",
    [
        {"orders": SECRET, "shop": SECRET},
        {"orders": {"secrets": {"1": OTHER, "2": SHARED}}},
        {"orders": "short"},
        {"orders": {"secrets": {}}},
        {"orders": {"secrets": {"1": SECRET}, "type": ["a"]}},
        {"a name": SECRET},
        {"orders": {"secrets": {"a key": SECRET}}},
        [SECRET],
        f'["{SECRET}"]',
        f'{{"orders": "{SECRET}"',
    ],
    ids=[
        "one secret for two",
        "the secret of everybody",
        "a short one",
        "none",
        "an unknown field",
        "a name",
        "a key",
        "a list",
        "JSON",
        "no JSON",
    ],
)
def test_indistinguishable_peers_are_an_invalid_setting(peers: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"^peers") as refused:
        HttpTransport(load_settings(peers=peers, shared_secret=SHARED), service="billing", messages=dict)
    assert SECRET not in str(refused.value)
    assert "short" not in str(refused.value).replace("should have", "")
