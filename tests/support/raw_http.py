"""HTTP by hand: a client that says what no library would, and a server that answers with whatever it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

Handle = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class RawResponse:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def problem(self) -> dict[str, Any]:
        """The body, which must be a problem (RFC 9457) that says this status."""
        assert self.headers["content-type"] == "application/problem+json"
        said: dict[str, Any] = json.loads(self.body)
        assert set(said) == {"type", "title", "status", "detail"}
        assert said["status"] == self.status
        return said


def request(
    target: str, body: bytes = b"", method: str = "POST", *, length: int | str | None = None, **headers: str
) -> bytes:
    """A request with whatever is asked for in it, and the length of the body unless another is given.

    `content_type=...` is the header Content-Type; an empty value leaves a header out.
    """
    announced = str(len(body) if length is None else length)
    named = {"host": "127.0.0.1", "content_length": announced, **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in named.items() if value]
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


class RawHttpClient:
    """One connection to an http:// URI. An async context manager."""

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        self.path = parts.path
        self._at = parts.hostname, parts.port

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(*self._at)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    async def flush(self) -> None:
        await self._writer.drain()

    async def still_listens(self) -> bool:
        """Flush, and tell whether the other side has not closed the connection."""
        with contextlib.suppress(ConnectionError):
            await self.flush()
            await asyncio.sleep(0)
            return not self._reader.at_eof() and not self._writer.is_closing()
        return False

    def end(self) -> None:
        """Say no more, and go on listening."""
        self._writer.write_eof()

    def reset_when_closed(self) -> None:
        """Leave as a machine does that crashes, without a word of goodbye."""
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def hear(self) -> RawResponse:
        """The next response; a test fails when the connection is closed instead."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        return RawResponse(int(status.split()[1]), headers, body)

    async def ask(self, data: bytes) -> RawResponse:
        self.say(data)
        return await self.hear()

    async def cut(self) -> bytes:
        """What came before the other side closed the connection."""
        try:
            return await self._reader.read()
        except ConnectionResetError:
            return b""


class FakeHttpServer:
    """Reads requests, and does `handle` for each. An async context manager."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.requests: list[bytes] = []
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.uri = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._tasks.__aexit__(None, None, None)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        self._tasks.create_task(self._serve(reader, writer), name="fake server")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                self.requests.append(head + await reader.readexactly(int(length.partition(b":")[2])))
                await self.handle(writer)
                await writer.drain()
        writer.transport.abort()


def saying(data: bytes) -> Handle:
    """Answers with these bytes and keeps the connection."""

    async def handle(writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return handle


def response(status: str, body: bytes = b"", **headers: str) -> bytes:
    """`content_type=...` is the header Content-Type."""
    named = {"content_length": str(len(body)), **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in named.items() if value]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode("latin-1") + body
