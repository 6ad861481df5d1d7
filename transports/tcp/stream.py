"""Frames over one asyncio connection, with a deadline for everything that a peer could make us wait for.

    idle_timeout    of silence between frames
    frame_timeout   for a frame, once begun, to be whole, whatever trickles in; for the peer to take what we write

Errors of the network become TransportErrors here, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from durable.errors import ConnectionFailed, PeerTimeout
from durable.settings import Settings
from durable.transports.frames import Frame, Received
from durable.transports.tcp.address import READ_BYTES, Streams
from durable.transports.wire import MAGIC, Decoder, encode

SMALL_FRAME_BYTES: Final = 16 << 10
"""Size of the frames of a peer that has not proved yet who it is, and of those that need no room to be read."""

LINGER_SECONDS: Final = 1.0
"""Time to send the written bytes, and for the peer to close its end, when a connection ends in order."""


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Translate errors of the network to TransportErrors. TimeoutError of asyncio.timeout() becomes PeerTimeout."""
    try:
        yield
    except TimeoutError as error:
        raise PeerTimeout(f"{doing}: the peer took too long") from error
    except OSError as error:
        raise ConnectionFailed(f"{doing}: {error.strerror or error}") from error


class FrameStream:
    """Frames over one connection. Several tasks may write, each a whole frame at a time; one reads.

    `reserve` is called with the size of each large frame before the rest of it is read.
    """

    def __init__(self, streams: Streams, settings: Settings, max_frame_bytes: int | None = None) -> None:
        self._reader, self._writer = streams
        self._decoder = Decoder(settings.max_frame_bytes if max_frame_bytes is None else max_frame_bytes)
        self.reserve: Callable[[int], Awaitable[None]] | None = None
        self._is_reserved = False
        self._idle_seconds = settings.idle_timeout.total_seconds()
        self._frame_seconds = settings.frame_timeout.total_seconds()
        self._greeting = MAGIC
        self._loop = asyncio.get_running_loop()
        self.written_at = self._loop.time()

    def allow(self, max_frame_bytes: int) -> None:
        """Take frames of this size from now on."""
        self._decoder.max_frame_bytes = max_frame_bytes

    async def read(self) -> list[Received]:
        """The next frames, at least one; none when the peer has closed between two frames.

        Raises PeerTimeout at a deadline, ProtocolViolation for what is no frame, ConnectionFailed when the connection
        breaks, also in the middle of a frame.
        """
        # What preceded a violation was returned first; the violation is due now, not when the peer says more.
        received = self._decoder.feed(b"")
        begun = self._decoder.pending
        deadline = self._loop.time() + (self._frame_seconds if begun else self._idle_seconds)
        while not received:
            deadline += await self._reserve_frame()
            data = await self._read_until(deadline)
            if not data and begun:
                raise ConnectionFailed("connection lost: the peer closed the connection in the middle of a frame")
            if not data:
                return []
            received = self._decoder.feed(data)
            if not begun:  # a frame has its deadline from its first byte; more bytes do not move it
                begun, deadline = True, self._loop.time() + self._frame_seconds
        self._is_reserved = False
        return received

    async def _reserve_frame(self) -> float:
        """Reserve room for the frame that has begun. Returns the seconds of waiting, which are not the peer's."""
        size_bytes = self._decoder.announced_bytes
        if self.reserve is None or self._is_reserved or size_bytes <= SMALL_FRAME_BYTES:
            return 0.0
        began = self._loop.time()
        await self.reserve(size_bytes)
        self._is_reserved = True
        return self._loop.time() - began

    async def _read_until(self, deadline: float) -> bytes:
        with translated("reading"):
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._reader.read(READ_BYTES)
            except TimeoutError:
                # Perhaps this loop was late, not the peer: what has arrived meanwhile is returned without waiting.
                async with asyncio.timeout(0):
                    return await self._reader.read(READ_BYTES)

    async def write(self, data: bytes) -> None:
        """Write a whole frame. A peer that does not read loses the connection: PeerTimeout.

        A caller that is cancelled leaves a whole frame behind: it is in the buffer before the first wait.
        """
        self.post(data)
        await self.flush()

    async def flush(self) -> None:
        """Wait until few of the written bytes are still to be sent."""
        try:
            with translated("writing"):
                async with asyncio.timeout(self._frame_seconds):
                    await self._writer.drain()
        except PeerTimeout:
            self.abort()
            raise

    def post(self, data: bytes) -> None:
        """Write without waiting: for small frames that the peer's own frames keep few."""
        self._writer.write(self._greeting + data)
        self._greeting = b""
        self.written_at = self._loop.time()

    async def say(self, frame: Frame) -> None:
        await self.write(encode(frame))

    def abort(self) -> None:
        """Close at once; unsent bytes are lost."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close when all written bytes are sent, or after a moment when the peer does not take them."""
        self._writer.close()
        try:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._writer.wait_closed()
        finally:
            self.abort()
