"""Proxies at the connections of the nodes: what ChaosProxy does, small pieces, and lost answers of COMMIT."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

from durable.testing.transports.proxy import DOWN, UP, ChaosProxy

PIECE_PAUSE = 0.001  # seconds
COMMIT = b"COMMIT"


class Wire(ChaosProxy):
    """A proxy whose target may move, as that of a virtual address does at a failover."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(target)
        self.name = name
        self._piece_bytes = 0
        self._answer_seconds = 0.0
        self._silent: set[Any] = set()
        self.lost_answers = 0

    @property
    def port(self) -> int:
        return int(urlsplit(self.uri).port or 0)

    def lead_to(self, target: str) -> None:
        self._target = urlsplit(target)

    def slice(self, piece_bytes: int) -> None:
        """Pass bytes on in pieces of this size."""
        self._piece_bytes = piece_bytes

    def lose_answers(self, seconds: float) -> None:
        """Pass each COMMIT on, hold what the server answers for so long, and then cut the connection."""
        self._answer_seconds = seconds

    def restore(self) -> None:
        self._piece_bytes, self._answer_seconds = 0, 0.0
        super().restore()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Any, connection: Any
    ) -> None:
        watched: Any = _Watched(self, reader, connection) if way is self._ways[UP] else reader
        passed: Any = _Passed(self, writer, connection if way is self._ways[DOWN] else None)
        try:
            await super()._pump(watched, passed, way, connection)
        finally:
            self._silent.discard(connection)

    def has_committed(self, connection: Any) -> None:
        """Hear of a COMMIT on its way to the server."""
        if self._answer_seconds and connection not in self._silent:
            self.lost_answers += 1
            self._silent.add(connection)
            asyncio.get_running_loop().call_later(self._answer_seconds, connection.cut)

    def is_silent(self, connection: Any) -> bool:
        return connection in self._silent

    @property
    def piece_bytes(self) -> int:
        return self._piece_bytes


class _Watched:
    """Bytes of a client, in which a COMMIT is noticed."""

    def __init__(self, wire: Wire, reader: asyncio.StreamReader, connection: Any) -> None:
        self._wire = wire
        self._reader = reader
        self._connection = connection

    async def read(self, size: int) -> bytes:
        data = await self._reader.read(size)
        if COMMIT in data:
            self._wire.has_committed(self._connection)
        return data


class _Passed:
    """The other end, to which bytes go whole, in pieces, or not at all while an answer is held."""

    def __init__(self, wire: Wire, writer: asyncio.StreamWriter, answered: Any) -> None:
        self._wire = wire
        self._writer = writer
        self._answered = answered
        self._left = b""

    def write(self, data: bytes) -> None:
        if not self._wire.is_silent(self._answered):
            self._left += data

    async def drain(self) -> None:
        while self._left:
            size = self._wire.piece_bytes or len(self._left)
            self._writer.write(self._left[:size])
            self._left = self._left[size:]
            if self._wire.piece_bytes:
                await asyncio.sleep(PIECE_PAUSE)
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()
