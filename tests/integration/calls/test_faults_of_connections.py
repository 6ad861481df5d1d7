"""Faults on connections of calls: whoever opened the connection goes on, and nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, cast

import pytest

from durable.errors import ConnectionFailed, PeerTimeout, TransportError
from durable.settings import load_settings
from durable.transports.base import Spoke
from durable.transports.tcp.address import parse
from durable.transports.tcp.connecting import ConnectingSide
from durable.transports.tcp.dialer import Dialer, open_stream
from durable.transports.tcp.entrance import Entrances
from durable.transports.tcp.spoke import _Connection
from durable.transports.tcp.stream import FrameStream
from tests.support.hubs import Process, process


@pytest.fixture
async def hub() -> AsyncIterator[Process]:
    async with process("hub") as found:
        yield found


async def stream_to(hub: Process) -> FrameStream:
    settings = load_settings()
    address = parse(hub.address)
    return await open_stream(address, Entrances(settings, "shop").of_sender(address), settings)


async def test_fault_of_a_connection_ends_no_task_but_its_own(hub: Process) -> None:
    settings, address, faults = load_settings(), parse(hub.address), [ValueError("a fault of ours")]

    class Talk:
        is_usable = True

        def __init__(self, stream: FrameStream) -> None:
            self._stream = stream

        async def greet(self) -> None:
            if faults:
                raise faults.pop()

        async def run(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await self._stream.close()

    dialer: Dialer[Talk, Any] = Dialer(
        address,
        Entrances(settings, "shop").of_sender(address),
        settings,
        side=lambda proof: None,
        connection=lambda stream, side: Talk(stream),
    )
    async with dialer:
        with pytest.raises(ConnectionFailed, match="internal error: ValueError: a fault of ours"):
            await dialer.dial()
        assert isinstance(await dialer.dial(), Talk)


async def test_spoke_leaves_no_watcher_after_a_failed_announcement(
    hub: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchers = set[object]()

    class Offers:
        name, lease = ("shop", 1), 1.0

        def watch(self, told: Callable[[], None]) -> Callable[[], None]:
            watchers.add(told)
            return lambda: watchers.discard(told)

    stream = await stream_to(hub)
    settings = load_settings()
    side = ConnectingSide("shop", 1, settings.max_frame_bytes, None, most_bytes=settings.buffer_bytes)
    connection = _Connection(stream, side, settings, cast(Spoke, Offers()), hub.address)
    await connection.greet()

    async def say(data: bytes) -> NoReturn:
        raise ConnectionFailed("writing: the peer closed the connection")

    monkeypatch.setattr(stream, "say", say)
    with pytest.raises(ConnectionFailed):
        await connection.run()
    assert not watchers


async def test_spoke_closes_its_connection_when_cancelled_twice(hub: Process) -> None:
    class Offers:
        name, lease = "shop", 1.0

        def watch(self, told: Callable[[], None]) -> Callable[[], None]:
            return lambda: None

        def listings(self) -> list[object]:
            return []

        def learn(self, listings: object) -> None:
            is_connected.set()

    is_connected = asyncio.Event()
    stream = await stream_to(hub)
    settings = load_settings()
    side = ConnectingSide("shop", 1, settings.max_frame_bytes, None, most_bytes=settings.buffer_bytes)
    connection = _Connection(stream, side, settings, cast(Spoke, Offers()), hub.address)
    await connection.greet()
    running = asyncio.create_task(connection.run(), name="spoke")
    async with asyncio.timeout(20):
        await is_connected.wait()
    running.cancel()
    await asyncio.sleep(0)  # its tasks are about to end
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert stream._writer.is_closing()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), ConnectionFailed),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), ConnectionFailed),
        (None, PeerTimeout),
    ],
    ids=["given up by the kernel", "reset", "silent"],
)
async def test_end_of_a_connection_is_told_with_its_cause(
    hub: Process, error: OSError | None, told: type[TransportError], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await stream_to(hub)
    if error is None:
        monkeypatch.setattr(stream, "_idle_seconds", 0.05)
    else:
        stream._reader.set_exception(error)
    with pytest.raises(told) as raised:
        await stream.read()
    assert type(raised.value) is told
    stream.abort()
