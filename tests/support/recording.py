"""A proxy that keeps every byte of both directions: what anybody on the way can read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Recording:
    """The bytes that went through."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.bytes = bytearray()


@asynccontextmanager
async def recording(host: str, port: int) -> AsyncIterator[Recording]:
    """Pass the connections of a block on to this address, and keep what they carry."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                kept.bytes.extend(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs, ours = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, ours), copy(theirs, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    kept = Recording(server.sockets[0].getsockname()[1])
    async with server:
        yield kept
