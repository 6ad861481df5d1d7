"""A service to call, and listeners that offer it: over TCP, over a Unix socket, and in the caller's own process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

from durable.calls import call, service
from durable.calls.caller import OnError, Place, RemoteService
from durable.calls.contract import contract_of
from durable.calls.links import Links
from durable.calls.places import Elsewhere, Here
from durable.calls.provider import CallProvider
from durable.calls.telemetry import CallTelemetry
from durable.duration import Duration
from durable.settings import Settings, load_settings
from durable.testing.transports import MemoryReceiver
from durable.transports.base import Listener
from durable.transports.http.transport import HttpTransport
from durable.transports.tcp.transport import TcpTransport

SOON = 30.0  # seconds; no measure


@dataclass
class Reservation:
    sku: str
    count: int


@service("inventory", version="1.2")
class Inventory(Protocol):
    async def reserve(self, sku: str, count: int = 1) -> Reservation: ...

    async def prices(self, *, place: str) -> dict[str, Decimal]: ...

    async def echo(self, data: bytes) -> bytes: ...

    async def double(self, data: bytes) -> bytes: ...

    async def give_up(self) -> None: ...

    async def fail(self, text: str) -> None: ...

    async def wrong(self) -> int: ...

    async def unreadable(self) -> int: ...

    async def slow(self, name: str) -> str: ...

    @call(fire_and_forget=True)
    async def note(self, text: str) -> None: ...


@dataclass
class Stock:
    """Implementation. `slow` calls wait until they are let go."""

    began: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def reserve(self, sku: str, count: int) -> Reservation:
        return Reservation(sku, count)

    async def prices(self, *, place: str) -> dict[str, Decimal]:
        return {place: Decimal("1.50")}

    async def echo(self, data: bytes) -> bytes:
        return data

    async def double(self, data: bytes) -> bytes:
        return 2 * data

    async def give_up(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async def fail(self, text: str) -> None:
        raise LookupError(text)

    async def wrong(self) -> Any:
        return "no number"

    async def unreadable(self) -> Any:
        return object()

    async def slow(self, name: str) -> str:
        self.began.append(name)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        self.ended.append(name)
        return name

    async def note(self, text: str) -> None:
        if not text:
            raise ValueError("nothing to note")
        await self.go.wait()
        self.noted.append(text)


@dataclass
class Offering:
    """A provider, and the place at which it is called."""

    provider: CallProvider
    stock: Stock
    place: Place
    settings: Settings
    listener: Listener | None = None
    receiver: MemoryReceiver = field(default_factory=MemoryReceiver)
    telemetry: CallTelemetry = field(default_factory=CallTelemetry)
    """Of the callers; the provider has its own."""

    def caller(self, cls: Any = Inventory, on_error: OnError | None = None, **options: Mapping[str, Duration]) -> Any:
        """Return a caller that waits long, unless `options` say otherwise."""
        remote = RemoteService(
            contract_of(cls),
            self.place,
            timeout=SOON,
            options=options,
            on_error=on_error,
            telemetry=self.telemetry,
        )
        return remote.stub()


@asynccontextmanager
async def offering(kind: str, folder: Path, **own: Any) -> AsyncIterator[Offering]:
    """Offer the inventory: `tcp`, `tls`, `unix`, `http`, `https` or `here`. `own` are settings."""
    settings = load_settings(**{"drain_timeout": 5, **own})
    provider, stock = CallProvider(lambda: settings), Stock()
    provider.offer(contract_of(Inventory), stock)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(provider.stop, 5)
        if kind == "here":
            links = Links(lambda _: _transport("tcp", settings, "stock", 1))
            yield Offering(provider, stock, Here(lambda: provider, lambda: links), settings)
            return
        uri = {
            "tcp": "tcp://127.0.0.1:0",
            "tls": "tcp://127.0.0.1:0?tls=1",
            "unix": f"unix://{folder}/s",
            "http": "http://127.0.0.1:0",
            "https": "https://127.0.0.1:0",
        }[kind]
        listener = _transport(kind, settings, "stock", 1, provider).listener(uri, "stock")
        receiver = MemoryReceiver()
        await listener.serve(receiver)
        stack.push_async_callback(listener.close)
        calling = _transport(kind, settings, "orders", 2)
        links = Links(lambda _: calling)
        stack.push_async_callback(links.close)
        place = Elsewhere(listener.address, lambda: links)
        yield Offering(provider, stock, place, settings, listener, receiver)


def _transport(kind: str, settings: Settings, service: str, node: int, provider: CallProvider | None = None) -> Any:
    if kind.startswith("http"):
        return HttpTransport(settings, service=service, messages=dict, provider=provider)
    return TcpTransport(settings, service, node, provider)


async def _provide(uri: str) -> None:
    settings = load_settings()
    provider = CallProvider(lambda: settings)
    provider.offer(contract_of(Inventory), Stock())
    listener = TcpTransport(settings, "stock", 1, provider).listener(uri, "stock")
    await listener.serve(MemoryReceiver())
    print(listener.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_provide(sys.argv[1]))
