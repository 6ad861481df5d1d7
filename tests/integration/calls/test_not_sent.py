"""Calls that fail before their first byte is sent: they were surely not run, and go to another provider."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme

from durable.calls.caller import RemoteService
from durable.calls.contract import contract_of
from durable.calls.links import Links
from durable.calls.places import Elsewhere
from durable.errors import CallTimeout, NoProvider
from durable.settings import Settings
from durable.testing import eventually
from durable.transports.http.caller import MOST_CONNECTIONS
from durable.transports.http.transport import HttpTransport
from durable.transports.tcp.transport import TcpTransport
from tests.support.calling import SOON, Inventory, Reservation, offering
from tests.support.tls import Authority

CONTRACT = contract_of(Inventory)
NAME = "stock.example"
Fail = Callable[[str, AsyncExitStack], Awaitable[None]]


def port_of(address: str) -> int:
    port = urlsplit(address).port
    assert port is not None
    return port


async def refuse(address: str, stack: AsyncExitStack) -> None:
    """Nobody listens."""


async def forget_names(address: str, stack: AsyncExitStack) -> None:
    """No name of a host is known any more."""

    async def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)


def name_this_machine(stack: AsyncExitStack) -> None:
    """NAME is resolved."""
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def known(host: Any, port: Any, **options: Any) -> Any:
        is_ours = host in (NAME, NAME.encode())
        return await resolve("127.0.0.1" if is_ours else host, port, **options)

    stack.enter_context(pytest.MonkeyPatch.context()).setattr(loop, "getaddrinfo", known)


async def take_nobody(address: str, stack: AsyncExitStack) -> None:
    """The queue of those who wait for the listener is full."""
    listening = stack.enter_context(socket.socket())
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port_of(address)))
    listening.listen(0)
    for _ in range(3):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listening.getsockname())


async def hang_up(address: str, stack: AsyncExitStack) -> None:
    """Whoever listens closes each connection."""

    def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    await stack.enter_async_context(await asyncio.start_server(close, "127.0.0.1", port_of(address)))


async def show_another_certificate(address: str, stack: AsyncExitStack) -> None:
    """Whoever listens has a certificate that nobody trusts."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert(NAME).configure_cert(tls)

    def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    await stack.enter_async_context(await asyncio.start_server(close, "127.0.0.1", port_of(address), ssl=tls))


def links_of(kind: str, settings: Settings) -> Links:
    def transport_of(at: str) -> Any:
        if kind.startswith("http"):
            return HttpTransport(settings, service="orders", messages=dict)
        return TcpTransport(settings, "orders", 3)

    return Links(transport_of)


@pytest.mark.parametrize(
    ("kind", "fail"),
    [
        ("unix", refuse),
        *((kind, fail) for kind in ("tcp", "tls", "http", "https") for fail in (refuse, take_nobody)),
        *((kind, hang_up) for kind in ("tcp", "tls", "https")),
        *((kind, fail) for kind in ("tls", "https") for fail in (forget_names, show_another_certificate)),
    ],
)
async def test_call_has_no_provider_when_failing_before_its_first_byte(kind: str, fail: Fail, tmp_path: Path) -> None:
    """The caller knows what is offered from an earlier call."""
    is_encrypted = kind in ("tls", "https")
    own = Authority(tmp_path).issue(NAME).settings if is_encrypted else {}
    own |= {"shared_secret": "a-secret-of-the-two-services-alone"}
    async with AsyncExitStack() as stack, offering(kind, tmp_path, connect_timeout=0.5, **own) as stock:
        assert stock.listener is not None
        at = stock.listener.address.replace("127.0.0.1", NAME) if is_encrypted else stock.listener.address
        name_this_machine(stack)
        links = links_of(kind, stock.settings)
        stack.push_async_callback(links.close)
        place = Elsewhere(at, lambda: links)
        inventory = RemoteService(CONTRACT, place, timeout=SOON, options={}, on_error=None).stub()
        assert await inventory.reserve("A") == Reservation("A", 1)
        await stock.listener.close()
        await fail(at, stack)
        with pytest.raises(NoProvider, match="no answer at"):
            await inventory.reserve("A")


async def test_call_has_no_provider_when_its_time_ends_without_a_connection(tmp_path: Path) -> None:
    async with offering("http", tmp_path) as stock:
        inventory = stock.caller(reserve={"timeout": 0.2})
        slow = [asyncio.create_task(inventory.slow(str(number))) for number in range(MOST_CONNECTIONS)]
        await eventually(lambda: stock.provider.running == MOST_CONNECTIONS)
        with pytest.raises(NoProvider, match="no answer at"):
            await inventory.reserve("A")
        stock.stock.go.set()
        await asyncio.gather(*slow)
        assert stock.provider.running == 0


@pytest.mark.parametrize("kind", ["tcp", "unix", "http", "here"])
async def test_sent_call_may_have_been_run_when_its_time_ends(kind: str, tmp_path: Path) -> None:
    async with offering(kind, tmp_path) as stock:
        with pytest.raises(CallTimeout):
            await stock.caller(slow={"timeout": 0.2}).slow("A")
