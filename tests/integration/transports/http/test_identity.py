"""Attacks on the identity of peers: who answers, who asks, and what of it is believed by a running node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from fastapi import FastAPI

from durable import Bus, message
from durable.asgi import DurableMiddleware
from durable.embedded import Embedded
from durable.errors import InvalidSetting
from durable.outcomes import DUPLICATE, STORED, Outcome, Rejected
from durable.settings import load_settings
from durable.telemetry import Event, Subject
from durable.testing import eventually
from durable.transports.http import auth as http_auth
from durable.transports.http.transport import HttpTransport
from durable.transports.http.wire import OUTCOMES, encode_outcomes
from tests.support.raw_http import FakeHttpServer, Handle, RawHttpClient, RawResponse, request, response
from tests.support.tables import Tables, shared_tables
from tests.support.web import served

SECRET, OTHER = "correct horse battery", "staple staple staple"
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
    return {"authentication_info": http_auth.sign_answer(OTHER, shown(asked), status, body)}


def the_request_itself(asked: bytes, status: int, body: bytes) -> dict[str, str]:
    return {"authentication_info": f"signature={shown(asked).digest}"}


def recorded(asked: bytes, status: int, body: bytes) -> dict[str, str]:
    """The peer's own answer to another request of this sender."""
    before = http_auth.sign(SECRET, "POST", b"/batches", b"before", timestamp=1, nonce="0123456789abcdef")
    return {"authentication_info": http_auth.sign_answer(SECRET, before, status, body)}


def of_another_body(asked: bytes, status: int, body: bytes) -> dict[str, str]:
    return {"authentication_info": http_auth.sign_answer(SECRET, shown(asked), status, b"")}


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


@pytest.mark.parametrize("say", [nothing, another_secret, the_request_itself, recorded], ids=lambda say: say.__name__)
@pytest.mark.parametrize(
    "outcome", [STORED, DUPLICATE, Rejected("never"), None], ids=["stored", "duplicate", "rejected", "413"]
)
async def test_impostor_on_the_port_of_a_peer_loses_no_message(
    orders: Tables, billing: Tables, say: Say, outcome: Outcome | None
) -> None:
    async with FakeHttpServer(lambda _: asyncio.sleep(0)) as server:
        server.handle = impostor(server, say, outcome)
        bus = Bus("orders", orders.url, http_secret=SECRET, **QUICK)
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
    there = Bus("billing", billing.url, http_secret=SECRET, **QUICK)
    there.listen(f"http://127.0.0.1:{port_of(server)}")

    @there.handles(Placed)
    async def bill(placed: Placed) -> None:
        handled.append(placed.number)

    async with there, bus:
        await eventually(lambda: handled == [17], within=30, what="the delivery")
        await eventually(lambda: orders.count("outgoing_envelopes") == 0, within=20, what="the deletion")


async def test_answer_that_was_changed_on_the_way_loses_no_message(orders: Tables) -> None:
    async with FakeHttpServer(lambda _: asyncio.sleep(0)) as server:
        server.handle = impostor(server, of_another_body, STORED)
        bus = Bus("orders", orders.url, http_secret=SECRET, **QUICK)
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
        (lambda bus: bus.route(Placed, to="http://192.0.2.7:8001/in"), {"http_secret": SECRET}),
        (lambda bus: bus.listen("http://0.0.0.0:0"), {"http_secret": SECRET}),
        (lambda bus: bus.listen("http://[::]:0"), {"http_secret": SECRET}),
        (lambda bus: bus.route(Placed, to="rabbitmq://default/queue/q"), {"amqp_url": "amqp://u:tops3cret@mq.example"}),
        (
            lambda bus: bus.route(Placed, to="rabbitmq://second/queue/q"),
            {"amqp_brokers": {"second": "amqp://u:tops3cret@192.0.2.7"}},
        ),
    ],
    ids=["http", "signed http", "listen", "listen on IPv6", "amqp", "another broker"],
)
def test_plaintext_to_other_hosts_starts_only_where_it_is_allowed(
    declare: Callable[[Bus], None], settings: dict[str, Any]
) -> None:
    def check(**more: Any) -> None:
        bus = Bus("orders", "postgresql://127.0.0.1:1/none", **settings, **more)
        declare(bus)
        bus.runtime._check_wiring()

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
async def listening(bus: Bus) -> AsyncIterator[str]:
    bus.listen("http://127.0.0.1:0")
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
        assert "set http_secret on both ends, or say bus.asgi(allow_local=True)" in refusal.problem["detail"]
        async with RawHttpClient(url) as client:
            assert (await client.ask(request("/durable/health/ready", method="GET"))).status == 204
        assert billing.count("received_ids") == 0
    assert "bus.asgi() has no secret and refuses every request" in caplog.text


async def test_proxies_change_nothing_for_who_knows_the_secret(billing: Tables) -> None:
    async with mounted(taking_placed(billing, http_secret=SECRET)) as url:
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
async def test_message_under_an_id_that_was_taken_is_no_silent_duplicate(
    billing: Tables, taken: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    bus = taking_placed(billing, http_secret=SECRET)
    async with listening(bus) as url:
        path = "/messages/identity.placed"
        key = {"idempotency_key": "order-17", "content_type": "application/json", "authorization": f"Bearer {SECRET}"}
        async with RawHttpClient(url) as client:
            assert (await client.ask(request(path, REAL, **key, **taken))).status == 202
            refusal = await client.ask(request(path, REAL, **key))
            assert (refusal.status, (await client.ask(request(path, REAL, **key, **taken))).status) == (422, 200)
        assert "another body, other headers or other times" in refusal.problem["detail"]
        assert billing.rows("SELECT body FROM durable.dead_letters") == [REAL]
        assert "another message was received under the same id before" in caplog.text
        assert bus.statistics().tallies[Subject.ENDPOINT]["billing"].counts[Event.QUARANTINED] == 1
        async with RawHttpClient(url) as client:
            assert (await client.ask(request(path, REAL, **key))).status == 422
        assert billing.count("dead_letters") == 1


async def test_peers_message_under_an_id_that_was_taken_is_kept(orders: Tables, billing: Tables) -> None:
    """The id of the outbox is known to somebody, who is faster."""
    there = taking_placed(billing, http_secret=SECRET)
    async with listening(there) as url:
        bus = Bus("orders", orders.url, http_secret=SECRET, **QUICK)
        bus.route(Placed, to=url)
        async with bus.unit_of_work():
            bus.send(Placed(17))
        [body] = orders.rows("SELECT body FROM durable.outgoing_envelopes")
        taken = {"idempotency_key": str(orders.one("SELECT id FROM durable.outgoing_envelopes"))}
        assert (await post(url, authorization=f"Bearer {SECRET}", **taken, durable_time_to_live="0")).status == 202
        async with bus:
            await eventually(lambda: orders.count("outgoing_envelopes") == 0, within=20, what="the answer")
        assert billing.rows("SELECT body FROM durable.dead_letters") == [body]
