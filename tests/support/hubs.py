"""Processes that know of each other: a listener with a directory, and connections to those of others. No database."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, Self

from durable.calls.connections import Connections
from durable.calls.contract import contract_of
from durable.calls.hub import Hub
from durable.calls.places import this_machine
from durable.calls.provider import CallProvider
from durable.calls.registry import Registry
from durable.errors import ConnectionFailed
from durable.settings import Settings, load_settings
from durable.testing.transports import MemoryReceiver
from durable.transports.frames import (
    Announce,
    Connect,
    Content,
    Directory,
    Frame,
    Listing,
    Offer,
    Refused,
    Reset,
    Signature,
)
from durable.transports.tcp.address import parse
from durable.transports.tcp.client_side import ClientState
from durable.transports.tcp.connecting import ConnectingSide
from durable.transports.tcp.dialer import open_stream
from durable.transports.tcp.entrance import Entrances
from durable.transports.tcp.stream import FrameStream
from durable.transports.tcp.transport import TcpListener, TcpTransport
from durable.transports.wire import encode
from tests.support.calling import Inventory, Stock

SINCE = datetime(2026, 1, 1, tzinfo=UTC)
QUICK = {"call_lease_shortest": 0.3, "call_lease_longest": 60, "reconnect_pause": 0.05, "reconnect_pause_longest": 0.2}
"""Settings of processes whose leases are short, and which connect again soon."""


@dataclass
class Process:
    """Process of a service."""

    service: str
    node: int
    settings: Settings
    provider: CallProvider
    registry: Registry
    hub: Hub
    connections: Connections
    receiver: MemoryReceiver = field(default_factory=MemoryReceiver)
    listener: TcpListener | None = None

    @property
    def address(self) -> str:
        assert self.listener is not None
        return self.listener.address

    @property
    def counts(self) -> Mapping[str, int]:
        assert self.listener is not None
        return self.listener.statistics()

    def unsent_bytes(self) -> int:
        """Return the bytes that the connection with the most of them has not sent yet."""
        assert self.listener is not None
        return max((each._stream.unsent_bytes for each in self.listener._connections), default=0)

    def known(self) -> list[tuple[str, str]]:
        """Return the application and the service of all providers that are known here."""
        return sorted((each.application, each.offer.service) for each in self.registry.listings())


@asynccontextmanager
async def process(
    service: str, node: int = 1, *, at: str | None = "tcp://127.0.0.1:0", offers: bool = False, **own: Any
) -> AsyncIterator[Process]:
    """Run a process of a service, which listens `at` an address; `offers`: the inventory. `own` are settings."""
    settings = load_settings(drain_timeout=2, **{**QUICK, **own})
    provider = CallProvider(lambda: settings)

    def listings() -> Sequence[Listing]:
        addresses = [made.address] if made.listener is not None else []
        return [
            Listing(each.offer, service, node, addresses, SINCE, machine=this_machine()) for each in provider.contracts
        ]

    registry = Registry(listings)
    hub = Hub(
        registry,
        settings,
        service,
        machine=this_machine(),
        own_addresses=lambda: [made.address] if made.listener is not None else [],
    )
    transport = TcpTransport(settings, service, node, provider, hub)
    connections = Connections(registry, lambda _: transport, settings, service, own=listings)
    made = Process(service, node, settings, provider, registry, hub, connections)
    provider.watch(registry.tell)
    if offers:
        provider.offer(contract_of(Inventory), Stock())
    async with AsyncExitStack() as stack:
        if at is not None:
            made.listener = transport.listener(at, service)
            await made.listener.serve(made.receiver)
            stack.push_async_callback(made.listener.close)
        stack.push_async_callback(connections.close_all, 5)
        stack.push_async_callback(provider.stop, 5)
        yield made


def listing(
    service: str, application: str = "stock", node: int = 7, at: str = "tcp://127.0.0.1:1", **own: Any
) -> Listing:
    """A listing with one method."""
    offer = Offer(service, "1.0", [Signature("reserve", b"digest", "reserve() -> None")])
    return Listing(offer, application, node, [at], SINCE, **own)


class Raw:
    """A client that says what it is told to, and keeps what it hears. `opened` are those that a test must close."""

    opened: ClassVar[list[Raw]] = []

    def __init__(self, stream: FrameStream, side: ConnectingSide) -> None:
        self.stream = stream
        self.side = side
        self.heard: list[Content] = []

    @classmethod
    async def connect(cls, uri: str, service: str = "stock", node: int = 7, **own: Any) -> Self:
        """Say HELLO and hear WELCOME."""
        settings = load_settings(**own)
        address = parse(uri)
        entrance = Entrances(settings, service).of_sender(address)
        stream = await open_stream(address, entrance, settings)
        proof = entrance.proof_of_sender(stream)
        raw = cls(stream, ConnectingSide(service, node, settings.max_frame_bytes, proof, most_bytes=1 << 30))
        cls.opened.append(raw)
        await stream.say(raw.side.greet())
        while raw.side.state is ClientState.GREETING:
            if not (received := await stream.read()):
                raise ConnectionFailed("the peer closed the connection before WELCOME")
            for item in received:
                answer = raw.side.hear(item)
                if answer is not None:
                    await stream.say(answer.frame)  # type: ignore[union-attr]
        return raw

    async def join(self, *listings: Listing, lease: float | None = None) -> None:
        """Say CONNECT, RESET and ANNOUNCE."""
        await self.say(Connect("raw", "0"))
        if lease is not None:
            await self.say(Reset(lease))
        if listings:
            await self.say(Announce(list(listings)))

    async def say(self, content: Content, channel: int = 5) -> None:
        await self.stream.say(Frame(content, channel))

    def post(self, content: Content, channel: int = 5) -> None:
        self.stream.post(encode(Frame(content, channel)))

    async def is_ended(self) -> None:
        """Hear what there is until the peer has closed the connection."""
        with contextlib.suppress(EOFError, ConnectionFailed):
            while True:
                await self.hear(Connect)

    async def hear(self, *kinds: type[Any]) -> Any:
        """Return the next content of one of these kinds, by default a directory.

        Raises TransportError, or EOFError at the end of the connection.
        """
        while True:
            for position, content in enumerate(self.heard):
                if isinstance(content, kinds or Directory):
                    del self.heard[: position + 1]
                    return content
            received = await self.stream.read()
            if not received:
                raise EOFError("the peer closed the connection")
            self.heard += [item.content for item in received if isinstance(item, Frame)]  # type: ignore[misc]

    async def refusal(self) -> str:
        refused: Refused = await self.hear(Refused)
        return refused.reason

    async def close(self) -> None:
        await self.stream.close()

    @classmethod
    async def close_all(cls) -> None:
        opened = list(cls.opened)
        cls.opened.clear()
        for raw in opened:
            raw.stream.abort()
            await raw.stream.close()


async def _provide(uri: str, hub: str, lease: str) -> None:
    async with process("stock", 7, at=uri, offers=True, call_lease=lease) as stock:
        stock.connections.open(hub)
        print(stock.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_provide(*sys.argv[1:]))
