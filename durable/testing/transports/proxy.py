"""A proxy for TCP and Unix sockets that does what networks do: cut, swallow, delay, hold.

    async with ChaosProxy("tcp://127.0.0.1:2301") as proxy:
        ...                             # connect to proxy.uri
        proxy.swallow(DOWN)             # a black hole for what the server says, its farewell included
        await proxy.swallowed(DOWN)     # ... has taken something

`UP` is from the client to the server, `DOWN` is back. Whatever is done holds for the connections that are open and
for those to come, until `restore()`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Direction(Enum):
    """The way of bytes through the proxy."""

    UP = "to the server"
    DOWN = "to the client"


UP = Direction.UP
DOWN = Direction.DOWN


class _Way:
    """Way of all connections in one direction. Bytes that were held count, when they are released, as passed too."""

    def __init__(self) -> None:
        self.swallowing = False
        self.delay_seconds = 0.0
        self.bytes = Counter[str]()
        self.open = asyncio.Event()
        self.open.set()


class _Connection:
    """A client's and a server's connection, joined."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self.writers = writers
        self.is_over = False
        self.is_stranded = False
        self._changed = asyncio.Event()

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.end()

    def end(self) -> None:
        self.is_over = True
        self._changed.set()

    def heed_restore(self) -> None:
        self._changed.set()

    async def may_end(self, way: _Way) -> None:
        """Return when the end of this way may be passed on: a black hole swallows that too."""
        while (way.swallowing or self.is_stranded) and not self.is_over:
            self._changed.clear()
            await self._changed.wait()


class ChaosProxy:
    """An async context manager; `uri` is where clients connect, on a free port unless `at` names another place."""

    def __init__(self, target: str, at: str = "tcp://127.0.0.1:0") -> None:
        self._target = urlsplit(target)
        self._at = urlsplit(at)
        self._ways = {UP: _Way(), DOWN: _Way()}
        self._open: set[_Connection] = set()
        self._refusing = False
        self._changed = asyncio.Condition()
        self._closed = 0
        self.connections = 0
        self.uri = ""

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        if self._at.scheme == "unix":
            self._server = await asyncio.start_unix_server(self._accept, self._at.path)
            self.uri = self._at.geturl()
        else:
            self._server = await asyncio.start_server(self._accept, self._at.hostname, self._at.port)
            self.uri = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.restore()
        self.cut()
        await self._tasks.__aexit__(None, None, None)

    def cut(self) -> None:
        """Reset every connection."""
        for connection in self._open:
            connection.cut()

    def refuse(self) -> None:
        """Reset every connection, and each new one at once."""
        self._refusing = True
        self.cut()

    def swallow(self, direction: Direction) -> None:
        """Read and drop all bytes that come this way."""
        self._ways[direction].swallowing = True

    def strand(self) -> None:
        """Read and drop all bytes of the open connections, both ways; new ones are not touched.

        A firewall that has forgotten them does the same.
        """
        for connection in self._open:
            connection.is_stranded = True

    def hold(self, direction: Direction) -> None:
        """Keep all bytes that come this way until `release`."""
        self._ways[direction].open.clear()

    def release(self, direction: Direction) -> None:
        self._ways[direction].open.set()

    def delay(self, direction: Direction, seconds: float) -> None:
        """Pass all bytes of this way on, each piece so much later."""
        self._ways[direction].delay_seconds = seconds

    def restore(self) -> None:
        """Be a plain proxy again."""
        self._refusing = False
        for way in self._ways.values():
            way.swallowing = False
            way.delay_seconds = 0.0
            way.open.set()
        for connection in self._open:
            connection.is_stranded = False
            connection.heed_restore()

    async def swallowed(self, direction: Direction, size_bytes: int = 1) -> None:
        """Return when so much has been swallowed this way since the start."""
        await self._until(lambda: self._ways[direction].bytes["swallowed"] >= size_bytes)

    async def held(self, direction: Direction, size_bytes: int = 1) -> None:
        """Return when so much is held, or has been."""
        await self._until(lambda: self._ways[direction].bytes["held"] >= size_bytes)

    def bytes_passed(self, direction: Direction) -> int:
        return self._ways[direction].bytes["passed"]

    async def passed(self, direction: Direction, size_bytes: int = 1) -> None:
        """Return when so much has been passed on this way since the start."""
        await self._until(lambda: self.bytes_passed(direction) >= size_bytes)

    async def closed(self, connections: int) -> None:
        """Return when so many connections have ended, from either end."""
        await self._until(lambda: self._closed >= connections)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._refusing:
            writer.transport.abort()
        else:
            self._tasks.create_task(self._connect((reader, writer)), name=f"proxied connection {self.connections}")

    async def _connect(self, client: Streams) -> None:
        try:
            server = await self._reach()
        except OSError:
            client[1].transport.abort()
            return
        connection = _Connection(client[1], server[1])
        self._open.add(connection)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(client[0], server[1], self._ways[UP], connection), name="pump up")
                pumps.create_task(self._pump(server[0], client[1], self._ways[DOWN], connection), name="pump down")
        finally:
            self._open.remove(connection)
            connection.cut()
            self._closed += 1
            await self._tell()

    async def _reach(self) -> Streams:
        if self._target.scheme == "unix":
            return await asyncio.open_unix_connection(self._target.path)
        return await asyncio.open_connection(self._target.hostname, self._target.port)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: _Way, connection: _Connection
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if way.swallowing or connection.is_stranded:
                    way.bytes["swallowed"] += len(data)
                    await self._tell()
                    continue
                if not way.open.is_set():
                    way.bytes["held"] += len(data)
                    await self._tell()
                    await way.open.wait()
                if way.delay_seconds:
                    await asyncio.sleep(way.delay_seconds)
                writer.write(data)
                await writer.drain()
                way.bytes["passed"] += len(data)
                await self._tell()
        await connection.may_end(way)
        writer.close()
        connection.end()
