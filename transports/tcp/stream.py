"""Frames over one asyncio connection, with a deadline for everything that a peer could make us wait for.

    idle_timeout    of silence between frames
    frame_timeout   for a frame, once begun, to be whole, whatever trickles in; for the peer to take what we write

Errors of the network become TransportErrors here, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from durable.errors import ConnectionFailed, PeerTimeout
from durable.settings import Settings
from durable.transports.frames import Frame, Received
from durable.transports.tcp.deadline import Deadline
from durable.transports.tcp.unix import READ_BYTES, Streams
from durable.transports.tls import Context, digest_of, fault, names_in
from durable.transports.wire import MAGIC, Decoder, encode

SMALL_FRAME_BYTES: Final = 16 << 10
"""Size of the frames of a peer that has not proved yet who it is, and of those that need no room to be read."""

_BACKED_UP_BYTES: Final = 1 << 18

LINGER_SECONDS: Final = 1.0
"""Time to send the written bytes, and for the peer to close its end, when a connection ends in order."""


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Translate errors of the network to TransportErrors. TimeoutError of asyncio.timeout() becomes PeerTimeout."""
    try:
        yield
    except ssl.SSLError as error:
        raise ConnectionFailed(f"{doing}: {fault(error)}") from error
    except OSError as error:
        if isinstance(error, TimeoutError) and not _is_of_system(error):
            raise PeerTimeout(f"{doing}: the peer took too long") from error
        reason = error.strerror or str(error) or "the peer closed the connection"
        raise ConnectionFailed(f"{doing}: {reason}") from error


def _is_of_system(error: TimeoutError) -> bool:
    """Tell whether the kernel has given the connection up (ETIMEDOUT), and not a deadline of ours."""
    return error.errno is not None


class _OverTls(asyncio.StreamReaderProtocol):
    """Protocol of a TLS connection. A peer may close it before asyncio has told the protocol that there is TLS."""

    def eof_received(self) -> bool:
        """Feed the end, and let the transport close: TLS knows no half-closed connection."""
        super().eof_received()
        return False


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
        self._plain: asyncio.StreamWriter | None = None
        self._is_lost = False
        self._soon: list[bytes] = []
        self._soon_bytes = 0
        self._has_written = False  # in this turn of the event loop
        self._deadline = Deadline(self._loop)
        self.written_at = self._loop.time()

    def allow(self, max_frame_bytes: int) -> None:
        """Take frames of this size from now on."""
        self._decoder.max_frame_bytes = max_frame_bytes

    def pause(self) -> None:
        """Read nothing yet: what arrives may belong to a TLS handshake."""
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()

    def resume(self) -> None:
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.resume_reading()

    async def secure(self, context: Context) -> None:
        """Go through the TLS handshake as the server. The caller sets the deadline.

        Raises ConnectionFailed when the peer speaks no TLS, or shows no certificate that is trusted, and when the
        connection is closed meanwhile, by either end.
        """
        if self._writer.transport.is_closing():  # asyncio would begin, and wait for a peer that is not there
            raise ConnectionFailed("TLS handshake: the connection was closed before it")
        reader = asyncio.StreamReader(limit=READ_BYTES // 4)  # TLS holds as much again
        protocol = _OverTls(reader)
        self._is_lost = True
        with translated("TLS handshake"):
            transport = await self._loop.start_tls(
                self._writer.transport, protocol, context.tls, server_side=True, ssl_shutdown_timeout=LINGER_SECONDS
            )
        if transport is None:  # aborted: asyncio returns no transport then, and raises nothing
            raise ConnectionFailed("TLS handshake: the connection was closed in the middle of it")
        self._is_lost = False
        protocol.connection_made(transport)
        self._plain = self._writer  # a writer that is collected closes its transport
        self._reader, self._writer = reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    @property
    def socket(self) -> Any:
        """The connection's socket, for its options."""
        return self._writer.get_extra_info("socket")

    @property
    def names(self) -> list[str]:
        """Names in the peer's certificate, which was checked; none where it showed none."""
        tls = self._writer.get_extra_info("ssl_object")
        return names_in(tls.getpeercert() or {}) if tls is not None else []

    @property
    def ends(self) -> tuple[Any, Any]:
        """Addresses of this end and of the other, as the socket has them."""
        return self._writer.get_extra_info("sockname"), self._writer.get_extra_info("peername")

    @property
    def peer_host(self) -> str:
        """Address of the machine at the other end; empty for this machine."""
        _, there = self.ends
        return outside_host(there)

    @property
    def own_host(self) -> str:
        """Address of this machine as the connection has it; empty where both ends are on it."""
        here, there = self.ends
        return outside_host(here) if outside_host(there) else ""

    @property
    def certificate(self) -> bytes:
        """Digest of the peer's certificate, which was checked; empty where it showed none."""
        tls = self._writer.get_extra_info("ssl_object")
        return digest_of(tls.getpeercert(binary_form=True)) if tls is not None else b""

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
        try:
            return await self._deadline.keep(deadline, self._reader.read(READ_BYTES))
        except TimeoutError as error:
            if _is_of_system(error):
                with translated("reading"):
                    raise
            # Perhaps this loop was late, not the peer: what has arrived meanwhile is returned without waiting.
            with translated("reading"):
                async with asyncio.timeout(0):
                    return await self._reader.read(READ_BYTES)
        except OSError:
            with translated("reading"):
                raise

    async def write(self, data: bytes) -> None:
        """Write a whole frame. A peer that does not read loses the connection: PeerTimeout.

        A caller that is cancelled leaves a whole frame behind: it is in the buffer before the first wait.
        """
        self.post(data)
        await self.flush()

    async def flush(self) -> None:
        """Wait until few of the written bytes are still to be sent."""
        self._post_gathered()
        try:
            with translated("writing"):
                async with asyncio.timeout(self._frame_seconds):
                    await self._writer.drain()
        except PeerTimeout:
            self.abort()
            raise

    def post(self, data: bytes) -> None:
        """Write without waiting: for small frames that the peer's own frames keep few. Nothing is written to an end
        that is closed: asyncio would log a line for each write.
        """
        if self._is_closed:
            return
        self._writer.write(self._greeting + data)
        self._greeting = b""
        self.written_at = self._loop.time()

    def post_soon(self, data: bytes) -> None:
        """Write without waiting: at once the first time in a turn of the event loop, and then all of it together."""
        if self._has_written:
            self._soon.append(data)
            self._soon_bytes += len(data)
            return
        self._has_written = True
        self._loop.call_soon(self._post_gathered)
        self.post(data)

    def _post_gathered(self) -> None:
        self._has_written = False
        if self._soon:
            gathered, self._soon, self._soon_bytes = self._soon, [], 0
            self.post(gathered[0] if len(gathered) == 1 else b"".join(gathered))

    @property
    def is_backed_up(self) -> bool:
        """True while the peer takes less than is written."""
        return self.unsent_bytes > _BACKED_UP_BYTES

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were written and are not sent yet."""
        return self._writer.transport.get_write_buffer_size() + self._soon_bytes

    @property
    def _is_closed(self) -> bool:
        """True when nothing reaches the peer any more. Over TLS both directions end with the first."""
        if self._writer.is_closing():
            return True
        return self._reader.at_eof() and self._writer.get_extra_info("ssl_object") is not None

    async def say(self, frame: Frame) -> None:
        await self.write(encode(frame))

    def abort(self) -> None:
        """Close at once; unsent bytes are lost."""
        self._deadline.close()
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close when all written bytes are sent, or after a moment when the peer does not take them."""
        if self._is_lost:  # nobody would tell this writer that its connection is closed
            self.abort()
            return
        self._writer.close()
        try:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._writer.wait_closed()
        finally:
            self.abort()


def outside_host(address: Any) -> str:
    """Return the host of a socket's address; empty for a Unix socket, and for this machine itself."""
    if not isinstance(address, tuple):
        return ""
    ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    plain = getattr(ip, "ipv4_mapped", None) or ip
    return "" if plain.is_loopback else str(plain)
