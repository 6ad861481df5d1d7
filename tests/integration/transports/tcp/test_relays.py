"""Programs between two ends that know a secret: none can pass on a proof, whether it means well or not.

The impostor of these tests knows no secret. It holds the port of a peer that is down, has each word of the handshake
answered by a living node that knows the secret, and after WELCOME answers "stored" itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
import pytest

from durable import Bus, message
from durable.embedded import Embedded
from durable.embedded.ports import free_port
from durable.errors import ConnectionFailed
from durable.outcomes import STORED
from durable.settings import load_settings
from durable.testing import eventually
from durable.transports.frames import Batch, Frame, Hello, Outcomes, PartlyReadable, Ping, Pong, Proof, Welcome
from durable.transports.tcp.transport import TcpTransport
from durable.transports.wire import MAGIC, Decoder, encode
from tests.support.proxy import ChaosProxy
from tests.support.receivers import MemoryReceiver, envelope
from tests.support.tables import Tables, shared_tables

SECRET = "correct horse battery"
SHARED: dict[str, Any] = {"shared_secret": SECRET}
QUICK: dict[str, Any] = {
    "poll_interval": timedelta(milliseconds=30),
    "ping_interval": timedelta(milliseconds=50),
    "failures_to_latch": 2,
}


@message("tcp.relays.placed")
class Placed(msgspec.Struct):
    number: int


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def oracles(database: Tables) -> Tables:
    database.clear()
    return database


@dataclass
class Impostor:
    """A listener at the port that gives the words of the handshake on to the oracle. An async context manager."""

    port: int
    oracle: int
    stolen: list[bytes] = field(default_factory=list)
    relayed: int = 0
    may_relay: asyncio.Event = field(default_factory=asyncio.Event)

    connections: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave_port()
        for task in self.connections:
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    def leave_port(self) -> None:
        """Let another program listen there; connections that were accepted go on."""
        self._server.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(self._tasks.create_task(self._relay(reader, writer)))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.may_relay.wait()
        with contextlib.suppress(OSError):
            from_oracle, to_oracle = await asyncio.open_connection("127.0.0.1", self.oracle)
            to_oracle.write(MAGIC)
            writer.write(MAGIC)
            try:
                async with asyncio.TaskGroup() as both:
                    answers = both.create_task(self._give_answers(from_oracle, writer))
                    async for frame in _frames(reader):
                        self._take(frame, to_oracle, writer)
                    answers.cancel()
            finally:
                to_oracle.transport.abort()
                writer.transport.abort()

    async def _give_answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            async for frame in _frames(reader):
                writer.write(encode(frame))
                self.relayed += 1
                if isinstance(frame.content, Welcome):
                    return

    def _take(self, frame: Frame, to_oracle: asyncio.StreamWriter, writer: asyncio.StreamWriter) -> None:
        match frame.content:
            case Hello() | Proof():
                to_oracle.write(encode(frame))
            case Batch() | PartlyReadable() as batch:
                self.stolen += [each.body for each in batch.envelopes]
                writer.write(encode(Frame(Outcomes([STORED] * batch.count, batch.count), frame.channel)))
            case Ping():
                writer.write(encode(Frame(Pong(True), frame.channel)))
            case _:
                pass


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[Frame]:
    decoder = Decoder(8 << 20)
    while data := await reader.read(65536):
        for frame in decoder.feed(data):
            assert isinstance(frame, Frame)
            yield frame


@asynccontextmanager
async def listening(service: str, tables: Tables, port: int, handled: list[int], **own: Any) -> AsyncIterator[None]:
    bus = Bus(service, tables.url, **QUICK, **own)
    bus.listen(f"tcp://127.0.0.1:{port}")

    @bus.handles(Placed)
    async def handle(placed: Placed) -> None:
        handled.append(placed.number)

    async with bus:
        yield


def shared(port: int, oracle: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the sender, and of the oracle."""
    return SHARED, SHARED


def of_one_peer(port: int, oracle: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The oracle is another listener of the peer that is down."""
    at = [f"tcp://127.0.0.1:{each}" for each in (port, oracle)]
    return {"peers": {"billing": {"secrets": {"1": SECRET}, "at": at}}}, {"peers": {"orders": SECRET}}


@pytest.mark.parametrize(
    ("service", "settings"), [("shop", shared), ("billing", of_one_peer)], ids=["another service", "the same peer"]
)
async def test_impostor_with_a_living_oracle_loses_no_message(
    make_database: Any, oracles: Tables, service: str, settings: Any
) -> None:
    port, oracle, handled = free_port(), free_port(), list[int]()
    ours, theirs = settings(port, oracle)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(listening(service, oracles, oracle, handled, **theirs))
        impostor = await stack.enter_async_context(Impostor(port, oracle))
        await loses_nothing(make_database("orders"), impostor, ours)
        assert oracles.count("received_ids") == 0
        assert not handled


async def test_impostor_with_the_sender_as_oracle_loses_no_message(make_database: Any) -> None:
    port, oracle = free_port(), free_port()
    async with Impostor(port, oracle) as impostor:
        await loses_nothing(make_database("orders"), impostor, SHARED, listen=oracle)


async def loses_nothing(database: str, impostor: Impostor, settings: dict[str, Any], listen: int = 0) -> None:
    """A node sends to the impostor, and keeps the row."""
    impostor.may_relay.set()
    uri = f"tcp://127.0.0.1:{impostor.port}"
    orders = Bus("orders", database, **QUICK, **settings)
    orders.route(Placed, to=uri)
    if listen:
        orders.listen(f"tcp://127.0.0.1:{listen}")
    async with orders:
        async with orders.unit_of_work():
            orders.send(Placed(17))
        await eventually(
            lambda: bool(impostor.stolen) or orders.statistics().sending[uri].latched, within=20, what="the latch"
        )
        assert impostor.relayed, "the oracle was not asked"
        assert impostor.stolen == []
        assert orders.statistics().sending[uri].latched


async def test_connection_from_before_the_restart_of_a_peer_is_not_relayed(
    make_database: Any, oracles: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    """The impostor accepts, gives the port back, and relays to the peer that now listens where it did."""
    port, handled = free_port(), list[int]()
    uri = f"tcp://127.0.0.1:{port}"
    orders = Bus("orders", make_database("orders"), **QUICK, **SHARED, connect_timeout=timedelta(seconds=60))
    orders.route(Placed, to=uri)
    async with Impostor(port, oracle=port) as impostor, orders:
        async with orders.unit_of_work():
            orders.send(Placed(17))
        await eventually(lambda: len(impostor.connections) == 1, within=20, what="the connection")
        impostor.leave_port()
        async with listening("billing", oracles, port, handled, **SHARED):
            impostor.may_relay.set()
            await eventually(lambda: bool(impostor.stolen) or handled == [17], within=30, what="the delivery")
            assert impostor.relayed, "the peer was not asked"
            assert impostor.stolen == []
            assert "no proof of the secret" in caplog.text


async def test_proxy_without_tls_is_named_as_a_cause_at_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    settings, receiver = load_settings(**SHARED), MemoryReceiver()
    listener = TcpTransport(settings, "billing", 2).listener("tcp://127.0.0.1:0", "in")
    await listener.serve(receiver)
    async with ChaosProxy(listener.address) as proxy:
        async with TcpTransport(settings, "orders", 1).sender(proxy.uri) as sender:
            with pytest.raises(ConnectionFailed, match=r"something between the two .* changes its address; use TLS"):
                await sender.send([envelope()])
        await eventually(lambda: listener.statistics()["dropped"] == 1, within=20, what="the refusal")
    await listener.close()
    assert "no proof of the secret" in caplog.text
    assert "use TLS there" in caplog.text
    assert not receiver.stored


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "[::1]", "localhost"])
async def test_peers_without_tls_prove_the_secret_at_every_name_of_this_machine(host: str) -> None:
    settings, receiver = load_settings(**SHARED), MemoryReceiver()
    listener = TcpTransport(settings, "billing", 2).listener(f"tcp://{host}:0", "in")
    await listener.serve(receiver)
    uri = f"tcp://{host}:{urlsplit(listener.address).port}"
    async with TcpTransport(settings, "orders", 1).sender(uri) as sender:
        assert await sender.send([envelope()]) == [STORED]
    await listener.close()
