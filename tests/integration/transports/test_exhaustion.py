"""Strangers without a secret who want all of a running node: its connections, descriptors, memory and log.

Each attack goes on while a good peer, who was not connected before, sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from durable import Bus
from durable.outcomes import STORED
from durable.settings import Settings, load_settings
from durable.testing import eventually
from durable.transports.base import Sender
from durable.transports.frames import Frame, Hello, Welcome
from durable.transports.http.auth import sign, unsigned
from durable.transports.http.transport import HttpTransport
from durable.transports.http.wire import BATCH, encode_batch
from durable.transports.tcp.transport import TcpTransport
from durable.transports.wire import MAGIC, Decoder, encode
from tests.support.http_shop import Sold
from tests.support.raw_http import request
from tests.support.receivers import envelope
from tests.support.tables import Tables
from tests.support.tls import Pem, issue

SECRET = "correct horse battery"
TLS = "tcp over TLS"
STRANGERS = 20
MANY = 200
LONG = timedelta(minutes=5)  # no deadline ends an attack: the newcomers must find room by themselves


@dataclass
class Fortress:
    """A running node that listens, and the ways into it."""

    bus: Bus
    tables: Tables
    pem: Pem

    @property
    def addresses(self) -> dict[str, str]:
        node = self.bus.runtime.node
        assert node is not None
        return {_scheme(each.address): each.address for each in node.listeners}

    def dropped(self) -> int:
        node = self.bus.runtime.node
        assert node is not None
        return sum(each.statistics()["dropped"] for each in node.listeners)

    def sender(self, scheme: str) -> Sender:
        settings = load_settings(shared_secret=SECRET, tls_ca=self.pem.ca, send_timeout=timedelta(seconds=20))
        if scheme == "tcp":
            settings = load_settings(send_timeout=timedelta(seconds=20))
        if scheme in ("tcp", TLS):
            return TcpTransport(settings, "till", 1).sender(self.addresses[scheme])
        return HttpTransport(settings, service="till", messages=dict).sender(self.addresses[scheme])

    async def is_open_to_peers(self, scheme: str) -> None:
        """A peer who comes now, and whose connection is new, has a message stored and handled."""
        async with self.sender(scheme) as peer:
            assert await peer.send([envelope("web.sold", b'{"number": 1}')]) == [STORED]


@asynccontextmanager
async def fortress(tables: Tables, folder: Path, *schemes: str, **settings: Any) -> AsyncIterator[Fortress]:
    tables.clear()
    pem = issue(folder)
    given = {"connect_timeout": LONG, "idle_timeout": LONG, "frame_timeout": LONG, "stranger_connections": STRANGERS}
    secured = {"shared_secret": SECRET, "tls_certificate": pem.certificate, "tls_key": pem.key}
    if schemes == ("tcp",):  # whose peers prove who they are by HELLO alone
        secured = {}
    bus = Bus("shop", tables.url, poll_interval=timedelta(milliseconds=30), **{**secured, **given, **settings})
    for scheme in schemes:
        bus.listen("tcp://127.0.0.1:0?tls=1" if scheme == TLS else f"{scheme}://127.0.0.1:0")

    @bus.handles(Sold)
    async def sell(sold: Sold) -> None:
        pass

    async with bus:
        yield Fortress(bus, tables, pem)


def _scheme(address: str) -> str:
    return TLS if address.endswith("?tls=1") else urlsplit(address).scheme


class Crowd:
    """Connections that say a thing, or nothing, and stay."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []

    async def come(self, uri: str, count: int, said: bytes = b"", *, come_from: str = "127.0.0.1") -> None:
        parts = urlsplit(uri)
        loop = asyncio.get_running_loop()
        for _ in range(count):
            one = socket.socket()
            one.setblocking(False)
            one.bind((come_from, 0))
            self.sockets.append(one)
            await loop.sock_connect(one, (parts.hostname, parts.port))
            with contextlib.suppress(OSError):  # it was closed already
                await loop.sock_sendall(one, said)

    def staying(self) -> int:
        """Connections that the node has not closed."""
        return sum(not _is_closed(one) for one in self.sockets)

    def leave(self) -> None:
        for one in self.sockets:
            one.close()


def _is_closed(one: socket.socket) -> bool:
    try:
        while one.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@pytest.fixture
async def crowd() -> AsyncIterator[Crowd]:
    crowd = Crowd()
    yield crowd
    crowd.leave()


LIVE = request("/health/live", method="GET")
HALF_A_HELLO = bytes.fromhex("16030100ca010000c60303")
UNSIGNED = request("/batches", b"x" * 100, content_type="application/json")
ATTACKS: Sequence[tuple[str, str, bytes]] = [
    ("silent TLS handshakes", "https", b""),
    ("half a TLS hello", "https", HALF_A_HELLO),
    ("silent TLS handshakes over TCP", TLS, b""),
    ("half a TLS hello over TCP", TLS, HALF_A_HELLO),
    ("silent HTTP connections", "http", b""),
    ("keep-alive connections that ask for the health", "http", LIVE),
    ("keep-alive connections without a secret", "http", UNSIGNED),
    ("half a head", "http", LIVE[:-2]),
    ("silent TCP connections", "tcp", b""),
    ("half a HELLO", "tcp", MAGIC + b"\x00\x00"),
]


@pytest.mark.parametrize(("scheme", "said"), [each[1:] for each in ATTACKS], ids=[each[0] for each in ATTACKS])
async def test_crowd_of_strangers_keeps_no_peer_out(
    tables: Tables, tmp_path: Path, crowd: Crowd, scheme: str, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with fortress(tables, tmp_path, scheme, http_connections=5, tcp_connections=5) as node:
        await node.is_open_to_peers(scheme)
        caplog.clear()
        await crowd.come(node.addresses[scheme], MANY, said)
        await eventually(lambda: crowd.staying() <= STRANGERS, what="room for strangers alone")
        await node.is_open_to_peers(scheme)
        await crowd.come(node.addresses[scheme], MANY, said)
        await node.is_open_to_peers(scheme)
        await eventually(lambda: crowd.staying() <= STRANGERS)
        if said != UNSIGNED:  # these connections end with their 401
            assert node.dropped() >= 2 * (MANY - STRANGERS)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) < 20, "a line for each second, not for each connection"
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


@pytest.mark.parametrize("scheme", ["http", "tcp"])
async def test_connected_peer_keeps_its_connection_and_its_share_of_the_room_in_a_crowd(
    tables: Tables, tmp_path: Path, crowd: Crowd, scheme: str
) -> None:
    async with fortress(tables, tmp_path, scheme, connections_per_address=1_000) as node, node.sender(scheme) as peer:
        assert await peer.send([envelope("web.sold", b'{"number": 1}')]) == [STORED]
        before = _connections(node)
        await crowd.come(node.addresses[scheme], MANY)
        assert await peer.send([envelope("web.sold", b'{"number": 1}')]) == [STORED]
        await eventually(lambda: _connections(node) == before + MANY)
        if scheme == "tcp":
            assert await _credit(node.addresses["tcp"]) == node.bus.settings.buffer_size // 2


def _connections(node: Fortress) -> int:
    running = node.bus.runtime.node
    assert running is not None
    return sum(each.statistics()["connections"] for each in running.listeners)


async def _credit(uri: str) -> int:
    """Credit that a peer is granted by its welcome."""
    parts = urlsplit(uri)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(MAGIC + encode(Frame(Hello([1], "till", 1, 1 << 20))))
        decoder = Decoder(1 << 20)
        while True:
            for item in decoder.feed(await reader.read(1 << 16)):
                match item:
                    case Frame(Welcome() as welcome):
                        return welcome.credit
                    case _:
                        pass
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("scheme", ["http", "https", "tcp"])
async def test_one_address_has_its_share_of_the_connections_and_no_more(
    tables: Tables, tmp_path: Path, crowd: Crowd, scheme: str
) -> None:
    settings = {"connections_per_address": 5, "stranger_connections": 1_000}
    async with fortress(tables, tmp_path, scheme, **settings) as node:
        await crowd.come(node.addresses[scheme], 50, come_from="127.0.0.2")
        await eventually(lambda: crowd.staying() <= 5)
        others = Crowd()
        await others.come(node.addresses[scheme], 4, come_from="127.0.0.3")
        await node.is_open_to_peers(scheme)
        assert (crowd.staying(), others.staying()) == (5, 4)
        others.leave()


@pytest.mark.parametrize(("scheme", "said"), [("https", b""), ("http", LIVE), ("tcp", b"")])
async def test_stranger_has_seconds(tables: Tables, tmp_path: Path, crowd: Crowd, scheme: str, said: bytes) -> None:
    async with fortress(tables, tmp_path, scheme, connect_timeout=timedelta(seconds=0.5)) as node:
        await crowd.come(node.addresses[scheme], 5, said)
        await eventually(lambda: crowd.staying() == 0)


async def test_metrics_answer_in_a_crowd_of_keep_alive_connections(
    tables: Tables, tmp_path: Path, crowd: Crowd
) -> None:
    async with fortress(tables, tmp_path, "http", metrics_port=0) as node:
        address = node.bus.runtime.metrics_address
        assert address is not None
        await crowd.come(address, MANY, LIVE)
        await eventually(lambda: crowd.staying() <= STRANGERS)
        other = Crowd()
        await other.come(address, 1)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(other.sockets[0], LIVE)
        assert (await loop.sock_recv(other.sockets[0], 100)).startswith(b"HTTP/1.1 204")
        other.leave()
        await node.is_open_to_peers("http")


@pytest.mark.parametrize("said", [LIVE, MAGIC, b"\x00" * 100], ids=["HTTP", "the TCP protocol", "zeros"])
async def test_plain_text_on_a_tls_port_is_counted_and_logged_in_one_line(
    tables: Tables, tmp_path: Path, crowd: Crowd, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with fortress(tables, tmp_path, "https") as node:
        await crowd.come(node.addresses["https"], 10, said)
        await eventually(lambda: node.dropped() == 10)
        assert crowd.staying() == 0
        await node.is_open_to_peers("https")
    warnings = [record for record in caplog.records if "dropped" in record.getMessage()]
    assert len(warnings) <= 2
    assert "SSL" in warnings[0].getMessage()
    assert not [record for record in caplog.records if record.exc_info]


CHILD = """
import asyncio, resource, sys
from datetime import timedelta
from durable import Bus
from tests.support.http_shop import Sold

async def main():
    url, certificate, key, descriptors, secret = *sys.argv[1:4], int(sys.argv[4]), sys.argv[5]
    long = timedelta(minutes=5)
    own = dict(shared_secret=secret, tls_certificate=certificate, tls_key=key) if secret else {}
    bus = Bus("shop", url, **own,
        stranger_connections=10_000, connections_per_address=10_000, connect_timeout=long, idle_timeout=long)
    bus.listen("https://127.0.0.1:0" if secret else "tcp://127.0.0.1:0")

    @bus.handles(Sold)
    async def sell(sold: Sold) -> None:
        pass

    async with bus:
        for listener in bus.runtime.node.listeners:
            print(listener.address, flush=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
        print("limited", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("scheme", ["https", "tcp"])
async def test_node_without_descriptors_recovers_and_says_so_in_few_lines(
    tables: Tables, tmp_path: Path, crowd: Crowd, scheme: str
) -> None:
    secret = "" if scheme == "tcp" else SECRET
    async with _child(tables, tmp_path, descriptors=96, secret=secret) as node:
        await crowd.come(node.uris[scheme], 300)
        await eventually(lambda: "Too many open files" in node.log.read_text(), what="a word about it")
        own = {"shared_secret": SECRET, "tls_ca": node.ca} if secret else {}
        settings = load_settings(send_timeout=timedelta(seconds=60), **own)
        await _gets_in(settings, node.uris[scheme])
        assert len(node.log.read_text().splitlines()) < 40, node.log.read_text()[:4_000]
        assert "Traceback" not in node.log.read_text()


MIB = 1 << 20


async def test_frames_in_part_take_no_more_memory_than_the_buffer(tables: Tables, tmp_path: Path, crowd: Crowd) -> None:
    async with _child(tables, tmp_path, secret="") as node:
        before = node.memory_bytes()
        await crowd.come(node.uris["tcp"], 99, MAGIC + encode(Frame(Hello([1], "mallory", 66, MIB))))
        await eventually(lambda: all(map(_has_answer, crowd.sockets)), what="the welcomes")
        parts = [b"\x00\x40\x00\x00\x04" + bytes(4 * MIB - 10)] * len(crowd.sockets)  # all but a byte
        most = before

        def is_taken() -> bool:
            """Nothing more is read."""
            nonlocal most
            sent = [_send_some(one, part) for one, part in zip(crowd.sockets, parts, strict=True)]
            parts[:] = [part[count:] for part, count in zip(parts, sent, strict=True)]
            most = max(most, node.memory_bytes())
            return not any(sent)

        for _ in range(20):
            await eventually(is_taken)
            await asyncio.sleep(0.02)
        assert most - before < 150 * MIB
        crowd.leave()
        await _gets_in(load_settings(send_timeout=timedelta(seconds=60)), node.uris["tcp"])


async def test_bodies_of_strangers_keep_no_peer_out(tables: Tables, tmp_path: Path, crowd: Crowd) -> None:
    settings = {"buffer_bytes": 4 * MIB, "http_connections": 5}
    async with fortress(tables, tmp_path, "http", **settings) as node, node.sender("http") as peer:
        assert await peer.send([envelope("web.sold", b'{"number": 1}')]) == [STORED]
        said = unsigned(bytes(MIB), to="shop", at="https://shop", timestamp=int(time.time()), nonce="0" * 16)
        recorded = str(sign(SECRET, said, "POST", b"/batches", MIB))
        head = request("/batches", length=MIB, content_type=BATCH, authorization=recorded)
        await crowd.come(node.addresses["http"], STRANGERS, head + bytes(MIB // 4))
        note = b'{"number": 1, "note": "%s"}' % (b"x" * (MIB // 2))
        assert await peer.send([envelope("web.sold", note)]) == [STORED]
        async with node.sender("http") as newcomer:
            assert await newcomer.send([envelope("web.sold", note)]) == [STORED]


async def test_repeated_request_proves_nothing(tables: Tables, tmp_path: Path, crowd: Crowd) -> None:
    settings = {"buffer_bytes": 4 * MIB, "stranger_connections": 1_000}
    async with fortress(tables, tmp_path, "http", **settings) as node, node.sender("http") as peer:
        body = encode_batch([envelope("web.sold", b'{"number": 1, "note": "%s"}' % (b"x" * (MIB - 2_000)))])
        said = unsigned(body, to="shop", at="https://shop", timestamp=int(time.time()), nonce="0" * 16)
        signature = str(sign(SECRET, said, "POST", b"/batches", len(body)))
        recorded = request("/batches", body, content_type=BATCH, authorization=signature)
        for _ in range(6):  # one after the other: their bodies displace each other
            await crowd.come(node.addresses["http"], 1, recorded)
            await eventually(lambda: _has_answer(crowd.sockets[-1]))
        for one in crowd.sockets:
            await asyncio.get_running_loop().sock_sendall(one, recorded[:-1])
        note = b'{"number": 1, "note": "%s"}' % (b"x" * (MIB // 2))
        assert await peer.send([envelope("web.sold", note)]) == [STORED]
        assert await peer.send([envelope("web.sold", note)]) == [STORED]


def _has_answer(one: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return bool(one.recv(1, socket.MSG_PEEK))
    return False


def _send_some(one: socket.socket, data: bytes) -> int:
    with contextlib.suppress(OSError):
        return one.send(data)
    return 0


@dataclass
class Child:
    """A node in a process of its own."""

    pid: int
    uris: dict[str, str]
    log: Path
    ca: Path

    def memory_bytes(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


@asynccontextmanager
async def _child(
    tables: Tables, folder: Path, *, descriptors: int = 1_024, secret: str = SECRET
) -> AsyncIterator[Child]:
    """A node that listens on HTTPS, or without a secret on TCP."""
    tables.clear()
    pem = issue(folder)
    log = folder / "log"
    given = [tables.url, str(pem.certificate), str(pem.key), str(descriptors), secret]
    with log.open("wb") as lines:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CHILD, *given),
            stdout=subprocess.PIPE,
            stderr=lines,
            cwd=Path(__file__).parents[3],
        )
    try:
        assert process.stdout is not None
        said: list[str] = []
        while not said or said[-1] != "limited":
            line = await process.stdout.readline()
            assert line, log.read_text()
            said.append(line.decode().strip())
        yield Child(process.pid, {urlsplit(each).scheme: each for each in said}, log, pem.ca)
    finally:
        process.kill()
        await process.communicate()


async def _gets_in(settings: Settings, uri: str) -> None:
    transport: Callable[[], Any] = (
        (lambda: TcpTransport(settings, "till", 1))
        if uri.startswith("tcp")
        else lambda: HttpTransport(settings, service="till", messages=dict)
    )

    async def sent() -> bool:
        with contextlib.suppress(Exception):
            async with transport().sender(uri) as peer:
                return bool(await peer.send([envelope("web.sold", b'{"number": 1}')]) == [STORED])
        return False

    await eventually(sent, within=60, what="a peer's message")
