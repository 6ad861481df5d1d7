"""HTTP between two services: listeners, apps that are mounted, senders, and who trusts whom."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Message

from durable import Bus, failpoints, message
from durable.embedded import Embedded
from durable.errors import ConnectionFailed, InvalidSetting, PeerTimeout, ProtocolViolation, TransportError
from durable.outcomes import DUPLICATE, STORED, Rejected
from durable.settings import Settings, load_settings
from durable.testing import eventually
from durable.transports.base import Listener
from durable.transports.http import auth as http_auth
from durable.transports.http import server as http_server
from durable.transports.http.transport import HttpTransport
from durable.transports.http.wire import OUTCOMES, encode_outcomes
from tests.support.raw_http import FakeHttpServer, RawHttpClient, request, response, saying
from tests.support.receivers import MemoryReceiver, envelope, envelopes
from tests.support.tables import Tables, shared_tables
from tests.support.tls import Pem, issue

HERE = "http://127.0.0.1:0"
SECRET, OTHER = "correct-horse-battery", "staple-staple-staple"
SETTINGS = load_settings(
    connect_timeout=timedelta(seconds=3),
    send_timeout=timedelta(seconds=10),
    frame_timeout=timedelta(seconds=5),
    drain_timeout=timedelta(seconds=5),
)


def transport(settings: Settings = SETTINGS, **changes: Any) -> HttpTransport:
    changed = load_settings(**{**settings.model_dump(exclude_unset=True), **changes})
    return HttpTransport(changed, service="billing", messages=dict)


@pytest.fixture
def receiver() -> MemoryReceiver:
    return MemoryReceiver()


@asynccontextmanager
async def listening(receiver: MemoryReceiver, uri: str = HERE, **changes: Any) -> AsyncIterator[Listener]:
    listener = transport(**changes).listener(uri, "billing-in")
    await listener.serve(receiver)
    try:
        yield listener
    finally:
        receiver.release()
        await listener.close()


async def send(to: str, **changes: Any) -> None:
    """Send a batch to this URI and have it stored, and ping."""
    async with transport(**changes).sender(to) as sender:
        assert await sender.send(envelopes(2)) == [STORED] * 2
        await sender.ping()


# Listeners --------------------------------------------------------------------------------------------------------


async def test_listener_tells_its_address_and_serves_only_below_its_path(receiver: MemoryReceiver) -> None:
    async with listening(receiver, f"{HERE}/durable/in") as listener:
        port = int(listener.address.split(":")[2].partition("/")[0])
        assert listener.address == f"http://127.0.0.1:{port}/durable/in"
        assert port
        await send(listener.address)
        with pytest.raises(TransportError, match="404 Not Found"):
            await send(f"http://127.0.0.1:{port}/durable")
        assert receiver.endpoints == {"billing-in"}


async def test_listener_counts_connections_batches_envelopes_and_refusals(receiver: MemoryReceiver) -> None:
    async with listening(receiver) as listener:
        await send(listener.address)
        async with RawHttpClient(listener.address) as client:
            assert (await client.ask(request("/nowhere"))).status == 404
        assert listener.statistics() == {
            "connections": 2,
            "dropped": 0,
            "batches": 1,
            "envelopes": 2,
            "calls": 0,
            "refused": 1,
        }


async def test_listeners_share_a_port_when_all_set_reuse_port(receiver: MemoryReceiver) -> None:
    async with listening(receiver, f"{HERE}?reuse_port=1") as first:
        async with listening(receiver, f"{first.address}?reuse_port=1") as second:
            assert first.address == second.address
            for _ in range(20):
                await send(first.address)
            assert first.statistics()["batches"] + second.statistics()["batches"] == 20
        with pytest.raises(InvalidSetting, match=r"cannot listen here.*one machine, add \?reuse_port=1 to the address"):
            await transport().listener(first.address, "x").serve(receiver)
    async with listening(receiver, HERE) as alone:
        with pytest.raises(InvalidSetting, match=r"another process listens here without \?reuse_port=1"):
            await transport().listener(f"{alone.address}?reuse_port=1", "x").serve(receiver)


async def test_answers_do_not_wait_for_delayed_acknowledgements(
    receiver: MemoryReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_delay: list[int] = []
    made = http_server.Connection.connection_made

    def look(connection: http_server.Connection, transport: asyncio.Transport) -> None:
        no_delay.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(connection, transport)

    monkeypatch.setattr(http_server.Connection, "connection_made", look)
    async with listening(receiver) as listener:
        await send(listener.address)
    assert no_delay == [1]


async def test_signals_and_the_access_log_stay_with_the_application(
    receiver: MemoryReceiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    access = logging.getLogger("uvicorn.access")
    own = logging.NullHandler()
    monkeypatch.setattr(access, "handlers", [own])
    monkeypatch.setattr(access, "propagate", True)
    async with listening(receiver) as listener:
        with caplog.at_level(logging.INFO):
            await send(listener.address)
        assert "uvicorn.access" not in [record.name for record in caplog.records]
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert access.handlers == [own]
    assert access.propagate


async def test_context_variables_of_the_start_are_not_seen_by_requests(
    receiver: MemoryReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look() -> bool:
        seen.append(in_scope.get())
        return True

    in_scope, seen = ContextVar("in_scope", default="nothing"), list[str]()
    monkeypatch.setattr(receiver, "ready", look)
    token = in_scope.set("a unit of work")
    async with listening(receiver) as listener:
        in_scope.reset(token)
        await send(listener.address)
    assert seen == ["nothing"]


@pytest.mark.parametrize(("host", "bound"), [("[::1]", "[::1]"), ("localhost", "127.0.0.1")])
async def test_listener_binds_every_name_of_this_machine(receiver: MemoryReceiver, host: str, bound: str) -> None:
    async with listening(receiver, f"http://{host}:0") as listener:
        assert listener.address.startswith(f"http://{bound}:")
        await send(listener.address)


async def test_listener_can_be_closed_at_once(receiver: MemoryReceiver) -> None:
    listener = transport().listener(HERE, "billing-in")
    await listener.serve(receiver)
    await listener.close()
    with pytest.raises(ConnectionFailed):
        await send(listener.address)


async def test_closing_listener_ends_idle_connections(receiver: MemoryReceiver) -> None:
    async with listening(receiver) as listener, RawHttpClient(listener.address) as client:
        assert (await client.ask(request("/health/live", method="GET"))).status == 204
        await listener.close()
        assert await client.cut() == b""


@pytest.mark.parametrize("uri", ["http://0.0.0.0:0", "http://[::]:0", "https://0.0.0.0:0", "http://billing.example:0"])
def test_listener_reachable_from_other_machines_needs_a_secret(uri: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^shared_secret: .* can be reached from other machines"):
        transport().listener(uri, "billing-in")


async def test_listener_with_a_secret_serves_other_machines(receiver: MemoryReceiver) -> None:
    async with listening(receiver, "http://0.0.0.0:0", shared_secret=SECRET) as listener:
        reached = listener.address.replace("0.0.0.0", "127.0.0.1")
        await send(reached, shared_secret=SECRET)
        with pytest.raises(TransportError, match=r"401 Unauthorized.*check shared_secret"):
            await send(reached)


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("http://127.0.0.1", "write the port"),
        ("http://127.0.0.1:0/a%20b", "without percent-encoding"),
        ("https://127.0.0.1:0", "^tls_certificate: .* needs a certificate"),
    ],
)
def test_unusable_listener_address_is_an_invalid_setting(uri: str, reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        transport().listener(uri, "billing-in")


# TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Pem:
    return issue(tmp_path_factory.mktemp("tls"))


@pytest.fixture
async def encrypted(receiver: MemoryReceiver, pem: Pem) -> AsyncIterator[str]:
    settings: dict[str, Any] = {"tls_certificate": pem.certificate, "tls_key": pem.key}
    async with listening(receiver, "https://127.0.0.1:0/in", **settings) as listener:
        yield listener.address


async def test_https_sender_trusts_a_certificate_signed_by_tls_ca(encrypted: str, pem: Pem) -> None:
    assert encrypted.startswith("https://127.0.0.1:")
    await send(encrypted, tls_ca=pem.ca)
    await send(encrypted, tls_ca=pem.ca, shared_secret=SECRET, http_auth="bearer")


async def test_a_certificate_of_another_authority_is_not_trusted(encrypted: str) -> None:
    with pytest.raises(ConnectionFailed, match="certificate verify failed"):
        await send(encrypted)


async def test_a_certificate_for_another_name_is_not_trusted(receiver: MemoryReceiver, pem: Pem) -> None:
    settings: dict[str, Any] = {"tls_certificate": pem.certificate, "tls_key": pem.key}
    async with listening(receiver, "https://127.0.0.2:0/in", **settings) as listener:
        with pytest.raises(ConnectionFailed, match=r"certificate verify failed.*127\.0\.0\.2"):
            await send(listener.address, tls_ca=pem.ca)


async def test_silent_tls_handshake_is_cut_at_its_deadline(receiver: MemoryReceiver, pem: Pem) -> None:
    settings: dict[str, Any] = {"tls_certificate": pem.certificate, "tls_key": pem.key, "connect_timeout": 0.2}
    async with (
        listening(receiver, "https://127.0.0.1:0", **settings) as listener,
        RawHttpClient(listener.address) as client,
    ):
        assert await client.cut() == b""


async def test_server_without_a_tls_handshake_costs_one_timeout_and_no_connection() -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(wait, "127.0.0.1", 0)
    address = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, transport(send_timeout=0.2).sender(address) as sender:
        with pytest.raises(PeerTimeout, match=r"no answer within 0\.2 seconds"):
            await sender.ping()
        await ended.wait()


async def test_plain_http_is_not_answered_on_an_encrypted_port(encrypted: str, receiver: MemoryReceiver) -> None:
    with pytest.raises(ConnectionFailed):
        await send(encrypted.replace("https", "http"))
    assert receiver.batches == []


def test_unusable_certificate_files_are_invalid_settings(tmp_path: Path, pem: Pem) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    with pytest.raises(InvalidSetting, match=r"^tls_ca: .*nowhere\.pem cannot be used: No such file"):
        transport(tls_ca=tmp_path / "nowhere.pem").sender("https://billing.example")
    with pytest.raises(InvalidSetting, match=r"^tls_ca: .*empty\.pem cannot be used"):
        transport(tls_ca=empty).sender("https://billing.example")
    with pytest.raises(InvalidSetting, match=r"^tls_certificate, tls_key: .*empty\.pem cannot be used"):
        transport(tls_certificate=empty, tls_key=pem.key).listener("https://127.0.0.1:0", "x")


# Apps that are mounted --------------------------------------------------------------------------------------------


def alone(app: ASGIApp) -> ASGIApp:
    return app


def in_fastapi(app: ASGIApp) -> ASGIApp:
    outer = FastAPI()
    outer.mount("/durable", app)
    return outer


def in_two_mounts(app: ASGIApp) -> ASGIApp:
    return Starlette(routes=[Mount("/a b", routes=[Mount("/{tenant}", app=app)])])


@asynccontextmanager
async def served(app: ASGIApp, **options: Any) -> AsyncIterator[str]:
    """The app in uvicorn, as an application runs it; the URI of its root."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, **options))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=[bound]), name="uvicorn")
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
            server.should_exit = True


@pytest.mark.parametrize(
    ("mount", "path"),
    [(alone, ""), (in_fastapi, "/durable"), (in_two_mounts, "/a%20b/t%20x")],
    ids=["alone", "in FastAPI", "in two mounts"],
)
async def test_app_receives_under_any_mount(
    receiver: MemoryReceiver, mount: Callable[[ASGIApp], ASGIApp], path: str
) -> None:
    app = transport(shared_secret=SECRET).app("shop-in", lambda: receiver)
    async with served(mount(app)) as root:
        await send(root + path, shared_secret=SECRET)
        await send(root + path, shared_secret=SECRET, http_auth="bearer", allow_plaintext=True)
    assert receiver.endpoints == {"shop-in"}


async def test_app_behind_a_prefix_stripping_proxy_uses_its_root_path(
    receiver: MemoryReceiver,
) -> None:
    app = transport(shared_secret=SECRET).app("shop-in", lambda: receiver)
    said = http_auth.unsigned(b"", to="billing", at="https://billing", timestamp=int(time.time()), nonce="n" * 16)
    signed = http_auth.sign(SECRET, said, "POST", b"/api/ping", 0)
    async with served(app, root_path="/api") as root, RawHttpClient(root) as client:
        assert (await client.ask(request("/ping", authorization=str(signed)))).status == 204


async def test_an_app_without_a_receiver_is_not_ready(receiver: MemoryReceiver) -> None:
    app = transport().app("shop-in", lambda: None, allow_local=True)
    async with served(app) as root, RawHttpClient(root) as client:
        with pytest.raises(ConnectionFailed, match="503 Service Unavailable: this process is not ready"):
            await send(root)
        refusal = await client.ask(request("/health/ready", method="GET"))
        assert (refusal.problem["status"], refusal.headers["retry-after"]) == (503, "1")
        assert (await client.ask(request("/health/live", method="GET"))).status == 204


async def test_health_is_open_to_all_and_reports_a_receiver_unable_to_store(receiver: MemoryReceiver) -> None:
    app = transport(shared_secret=SECRET).app("shop-in", lambda: receiver)
    async with served(app) as root, RawHttpClient(root) as client:
        assert (await client.ask(request("/health/ready", method="GET"))).status == 204
        receiver.is_ready = False
        assert (await client.ask(request("/health/ready", method="GET"))).problem["detail"] == (
            "nothing can be stored now"
        )
        assert (await client.ask(request("/health/live", method="GET"))).status == 204


HOST = [(b"host", b"localhost")]


@pytest.mark.parametrize(
    ("server", "client"),
    [
        (("10.0.0.1", 80), ("127.0.0.1", 5)),
        (("127.0.0.1", 80), ("203.0.113.9", 5)),
        (("/run/app.sock", None), None),
        (None, None),
    ],
    ids=["another address", "a client behind a proxy", "a socket file", "unknown"],
)
async def test_app_without_a_secret_answers_only_its_own_machine(
    receiver: MemoryReceiver, server: Any, client: Any
) -> None:
    answers: list[Message] = []

    async def answer(sent: Message) -> None:
        answers.append(sent)

    async def ask() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/ping", "query_string": b"", "headers": HOST}
    app = transport().app("shop-in", lambda: receiver, allow_local=True)
    await app({**scope, "server": server, "client": client}, ask, answer)
    assert answers[0]["status"] == 401
    assert b"set shared_secret on both ends" in answers[1]["body"]
    answers.clear()
    await app({**scope, "server": ("127.0.0.1", 80), "client": ("::1", 5)}, ask, answer)
    assert answers[0]["status"] == 204


async def test_websockets_are_refused(receiver: MemoryReceiver) -> None:
    answers: list[Message] = []

    async def answer(sent: Message) -> None:
        answers.append(sent)

    async def ask() -> Message:
        return {"type": "websocket.connect"}

    app = transport().app("shop-in", lambda: receiver, allow_local=True)
    await app({"type": "websocket", "path": "/batches", "headers": []}, ask, answer)
    assert [sent["type"] for sent in answers] == ["websocket.close"]


async def test_request_refused_inside_an_application_gets_a_problem(
    receiver: MemoryReceiver,
) -> None:
    app = transport().app("shop-in", lambda: receiver, allow_local=True)
    async with served(in_fastapi(app)) as root, RawHttpClient(root) as client:
        assert (await client.ask(request("/durable/nowhere"))).problem["status"] == 404
        refusal = await client.ask(request("/durable/batches", method="GET"))
        assert (refusal.problem["status"], refusal.headers["allow"]) == (405, "POST")


# Who trusts whom --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hmac", "bearer"])
async def test_secret_is_rotated_without_an_interruption(receiver: MemoryReceiver, how: str) -> None:
    async with listening(receiver, shared_secret=OTHER, previous_shared_secret=SECRET) as listener:
        await send(listener.address, shared_secret=SECRET, http_auth=how, allow_plaintext=True)
        await send(listener.address, shared_secret=OTHER, http_auth=how, allow_plaintext=True)
        with pytest.raises(TransportError, match=r"401 Unauthorized.*check shared_secret"):
            await send(listener.address, shared_secret="a-third-secret-unknown", http_auth=how, allow_plaintext=True)


async def test_peer_may_have_its_own_secret(receiver: MemoryReceiver) -> None:
    async with listening(receiver, f"{HERE}/in", peers={"billing": OTHER}) as listener:
        at = listener.address.removesuffix("/in")
        await send(listener.address, shared_secret=SECRET, peers={"billing": {"secrets": {"1": OTHER}, "at": [at]}})
        with pytest.raises(TransportError, match="401"):
            await send(listener.address, shared_secret=SECRET, peers={"stock": {"secrets": {"1": OTHER}}})
    assert receiver.endpoints == {"billing-in<-billing"}


async def test_a_sender_with_a_secret_believes_no_listener_without(receiver: MemoryReceiver) -> None:
    async with listening(receiver) as listener:
        with pytest.raises(ProtocolViolation, match="is not signed with the secret"):
            await send(listener.address, shared_secret=SECRET)


@pytest.mark.parametrize("at", ["billing:80", "http://billing:80?query", "http://user@billing:80", ""])
def test_a_peer_at_no_address_is_an_invalid_setting(at: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^peers: "):
        transport(peers={"billing": {"secrets": {"1": SECRET}, "at": [at]}})


def test_bearer_secret_is_refused_over_plain_http_to_other_machines() -> None:
    open_to_all = "http://billing.example/in"
    shown = transport(shared_secret=SECRET, http_auth="bearer")
    for refused in (lambda: shown.sender(open_to_all), lambda: shown.resolve(open_to_all, "any")):
        with pytest.raises(InvalidSetting, match=r"^http_auth: http://billing.example/in is not encrypted"):
            refused()
    with pytest.raises(InvalidSetting, match="answer for the peer"):
        shown.sender("http://127.0.0.1:80")
    shown.sender("https://billing.example/in")
    assert shown.resolve("https://billing.example/in", "any") == "https://billing.example/in"
    transport(shared_secret=SECRET, http_auth="bearer", allow_plaintext=True).sender(open_to_all)
    transport(shared_secret=SECRET).sender(open_to_all)
    transport(http_auth="bearer").sender(open_to_all)


@pytest.mark.parametrize("secret", ["line\r\nfeed: in a secret", "a secret with spaces", "ein Geheimnis für alle"])
async def test_secret_unfit_for_a_header_can_only_sign(receiver: MemoryReceiver, secret: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^shared_secret: .*visible ASCII"):
        transport(shared_secret=secret, http_auth="bearer").sender("https://127.0.0.1:1")
    async with listening(receiver, shared_secret=secret) as listener:
        await send(listener.address, shared_secret=secret)


# Senders ----------------------------------------------------------------------------------------------------------

ANSWER = response("200 OK", encode_outcomes([STORED] * 2), content_type=OUTCOMES)


async def test_a_sender_keeps_its_connection(receiver: MemoryReceiver) -> None:
    async with listening(receiver) as listener, transport().sender(listener.address) as sender:
        for _ in range(10):
            await sender.send(envelopes(2))
            await sender.ping()
        assert listener.statistics()["connections"] == 1


async def test_connection_closed_by_the_peer_meanwhile_is_replaced_without_a_failure() -> None:
    async def close_at_the_second_request(writer: asyncio.StreamWriter) -> None:
        known.add(writer) if writer not in known else writer.transport.abort()
        writer.write(ANSWER)

    known: set[asyncio.StreamWriter] = set()
    async with FakeHttpServer(close_at_the_second_request) as server, transport().sender(server.uri) as sender:
        for _ in range(3):
            assert await sender.send(envelopes(2)) == [STORED] * 2
        assert (len(server.requests), server.connections) == (5, 3)


async def test_fresh_connection_breaking_is_a_failure_at_once() -> None:
    async def break_off(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with FakeHttpServer(break_off) as server, transport().sender(server.uri) as sender:
        with pytest.raises(ConnectionFailed):
            await sender.send(envelopes(2))
        assert len(server.requests) == 1


async def test_refused_connection_is_reported_in_the_words_of_the_system() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionFailed, match=f"connecting to http://127.0.0.1:{port}: .*Connect call failed"):
        await send(f"http://127.0.0.1:{port}")


async def test_batch_too_large_for_the_peer_goes_in_parts_and_a_too_large_envelope_is_rejected(
    receiver: MemoryReceiver,
) -> None:
    small: dict[str, Any] = {"max_frame_bytes": 80 << 10, "max_message_bytes": 16 << 10}
    async with listening(receiver, **small) as listener, transport().sender(listener.address) as sender:
        batch = [*envelopes(5, body=b"x" * 10_000), envelope(body=b"x" * 90_000), *envelopes(3, body=b"x" * 10_000)]
        outcomes = await sender.send(batch)
        match outcomes.pop(5):
            case Rejected(reason):
                assert "413" in reason
                assert str(batch.pop(5).id) in reason
            case other:
                pytest.fail(f"unexpected: {other}")
        assert outcomes == [STORED] * 8
        assert list(receiver.stored.values()) == batch
        refused = listener.statistics()["refused"]
        assert await sender.send(batch) == [DUPLICATE] * 8
        assert listener.statistics()["refused"] == refused  # it knows now what is too large


async def test_envelope_alone_is_sent_even_above_the_learned_limit() -> None:
    async def refuse_the_first(writer: asyncio.StreamWriter) -> None:
        writer.write(response("413 Content Too Large") if len(server.requests) == 1 else stored)

    stored = response("200 OK", encode_outcomes([STORED]), content_type=OUTCOMES)
    async with FakeHttpServer(refuse_the_first) as server, transport().sender(server.uri) as sender:
        assert await sender.send(envelopes(2, body=b"x" * 20_000)) == [STORED] * 2
        assert await sender.send(envelopes(1, body=b"x" * 50_000)) == [STORED]


async def test_unencodable_envelope_is_rejected_alone(receiver: MemoryReceiver) -> None:
    torn = msgspec.structs.replace(envelope(), partition_key="\ud800")
    async with listening(receiver) as listener, transport().sender(listener.address) as sender:
        first, second, third = await sender.send([envelope(), torn, envelope()])
        assert (first, third) == (STORED, STORED)
        assert isinstance(second, Rejected)


async def test_proxy_of_the_environment_is_ignored(receiver: MemoryReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with listening(receiver) as listener:
        await send(listener.address)


async def test_sender_cannot_be_used_outside_its_context() -> None:
    with pytest.raises(ConnectionFailed, match="the sender was closed"):
        await transport().sender("http://127.0.0.1:1").send(envelopes(1))


# Crashes ----------------------------------------------------------------------------------------------------------

DIES = """
import asyncio, sys
from durable.settings import load_settings
from durable.transports.http.transport import HttpTransport
from durable.testing.transports.receivers import MemoryReceiver, envelopes

async def send(uri):
    async with transport.sender(uri) as sender:
        await sender.send(envelopes(3, body=b"x" * 100_000))

async def listen():
    listener = transport.listener("http://127.0.0.1:0", "billing-in")
    await listener.serve(MemoryReceiver())
    print(listener.address, flush=True)
    await asyncio.sleep(60)

transport = HttpTransport(load_settings(), service="orders", messages=dict)
asyncio.run(send(sys.argv[1]) if sys.argv[1:] else listen())
"""


async def dying(failpoint: str, *arguments: str) -> asyncio.subprocess.Process:
    """A process that reaches this failpoint."""
    environment = {**os.environ, "DURABLE_FAILPOINT": failpoint}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", DIES, *arguments, env=environment, stdout=asyncio.subprocess.PIPE
    )


@pytest.mark.parametrize(("failpoint", "arrives"), [("C6", False), ("C7", True), ("C11", True)])
async def test_dying_sender_leaves_all_of_a_batch_or_nothing(
    receiver: MemoryReceiver, failpoint: str, arrives: bool
) -> None:
    async with listening(receiver) as listener:
        sender = await dying(failpoint, listener.address)
        await sender.communicate()
        assert sender.returncode == failpoints.EXIT_STATUS
        if arrives:
            await receiver.arrived(1)
        else:
            await eventually(lambda: listener.statistics()["refused"] == 1, what="the end of half a batch")
        assert len(receiver.stored) == (3 if arrives else 0)


async def test_listener_dying_before_its_answer_raises_connection_failed() -> None:
    listener = await dying("C10")
    assert listener.stdout is not None
    address = (await listener.stdout.readline()).decode().strip()
    with pytest.raises(ConnectionFailed):
        await send(address)
    await listener.communicate()
    assert listener.returncode == failpoints.EXIT_STATUS


# With a database --------------------------------------------------------------------------------------------------


@message("http.placed")
class Placed(msgspec.Struct):
    number: int


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    return database


def outgoing(tables: Tables) -> list[Any]:
    return tables.rows("SELECT attempts FROM durable.outgoing_envelopes")


@pytest.mark.parametrize(
    "answer",
    [
        response("200 OK", b"<h1>It works</h1>", content_type="text/html"),
        response("307 Temporary Redirect", location="/elsewhere"),
        response("200 OK", encode_outcomes([STORED] * 2), content_type=OUTCOMES),
    ],
    ids=["HTML", "a redirect", "another number of outcomes"],
)
async def test_a_bad_answer_deletes_nothing_and_the_message_is_delivered_later(tables: Tables, answer: bytes) -> None:
    async def answer_well(writer: asyncio.StreamWriter) -> None:
        is_ping = server.requests[-1].startswith(b"POST /ping ")
        writer.write(response("204 No Content", content_length="") if is_ping else good)

    good = response("200 OK", encode_outcomes([STORED]), content_type=OUTCOMES)
    async with FakeHttpServer(saying(answer)) as server:
        bus = Bus("orders", tables.url, ping_interval=timedelta(milliseconds=50), failures_to_latch=2)
        bus.route(Placed, to=server.uri)
        async with bus:
            async with bus.unit_of_work():
                bus.send(Placed(1))
            await eventually(lambda: tables.count("circuits") == 1, within=15, what="the latch")
            assert outgoing(tables) == [2]
            server.handle = answer_well
            await eventually(lambda: outgoing(tables) == [], within=15, what="the delivery")
        assert tables.dead_letters() == []


async def test_a_message_goes_from_one_service_to_another(make_database: Callable[[str], str]) -> None:
    handled: list[int] = []
    settings: dict[str, Any] = {"poll_interval": timedelta(milliseconds=30), "shared_secret": SECRET}
    billing = Bus("billing", make_database("billing"), **settings)
    billing.listen(f"{HERE}/durable")

    @billing.handles(Placed)
    async def bill(placed: Placed) -> None:
        handled.append(placed.number)

    async with billing:
        assert billing.runtime.node is not None
        orders = Bus("orders", make_database("orders"), **settings)
        orders.route(Placed, to=billing.runtime.node.listeners[0].address)
        async with orders:
            async with orders.unit_of_work():
                for number in range(250):
                    orders.send(Placed(number))
            await eventually(lambda: len(handled) == 250, within=30, what="the handling")
    assert sorted(handled) == list(range(250))
