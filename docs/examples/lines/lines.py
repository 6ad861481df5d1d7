from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, InvalidSetting, PeerTimeout, TransportError
from durable.outcomes import BUSY, Outcome, Rejected
from durable.settings import Settings
from durable.transports.base import Receiver


class LineTransport:
    schemes: tuple[str, ...] = ("lines",)

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def check(self, uri: str) -> None:
        _host_and_port(uri)

    def resolve(self, uri: str, message_type: str) -> str:
        return uri

    def sender(self, destination: str) -> LineSender:
        return LineSender(*_host_and_port(destination), self._settings)

    def listener(self, uri: str, endpoint: str) -> LineListener:
        return LineListener(*_host_and_port(uri), endpoint, self._settings)


class LineSender:
    def __init__(self, host: str, port: int, settings: Settings) -> None:
        self._host, self._port = host, port
        self._most_bytes = settings.max_frame_bytes
        self._seconds = settings.send_timeout.total_seconds()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass  # a connection lives no longer than its batch

    async def send(self, batch: Sequence[Envelope]) -> list[Outcome]:
        """Halve what cannot be sent until it can: then only the impossible envelope is Rejected."""
        if not batch:
            return []
        line, why_not = _line(batch, self._most_bytes)
        if not why_not:
            return msgspec.json.decode(await self._ask(line), type=list[Outcome])
        if len(batch) == 1:
            return [Rejected(f"envelope {batch[0].id}: {why_not}")]
        middle = len(batch) // 2
        return [*await self.send(batch[:middle]), *await self.send(batch[middle:])]

    async def ping(self) -> None:
        if await self._ask(b"null\n") != b"true\n":
            raise TransportError("the peer cannot store anything now")

    async def _ask(self, line: bytes) -> bytes:
        """The peer's answer to one line, on a connection of its own."""
        try:
            async with asyncio.timeout(self._seconds):
                reader, writer = await asyncio.open_connection(self._host, self._port, limit=self._most_bytes)
                try:
                    writer.write(line)
                    answer = await reader.readline()
                finally:
                    writer.close()
        except TimeoutError:
            raise PeerTimeout(f"no answer within {self._seconds:g} seconds") from None
        except OSError as error:
            raise ConnectionFailed(str(error)) from error
        if not answer.endswith(b"\n"):
            raise ConnectionFailed("the peer closed the connection before its answer")
        return answer


class LineListener:
    def __init__(self, host: str, port: int, endpoint: str, settings: Settings) -> None:
        self.endpoint = endpoint
        self.address = f"lines://{host}:{port}"
        self._bind_to = (host, port)
        self._settings = settings
        self._server: asyncio.Server | None = None
        self._under_way: set[asyncio.Task[Any]] = set()
        self._counts = Counter(connections=0, dropped=0, batches=0, envelopes=0)

    def statistics(self) -> dict[str, int]:
        return dict(self._counts)

    async def serve(self, receiver: Receiver) -> None:
        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._under_way.add(task)
            self._counts["connections"] += 1
            try:
                await self._converse(receiver, reader, writer)
            except (OSError, ValueError, msgspec.MsgspecError):  # broken off, too long, or no envelopes
                self._counts["dropped"] += 1
            finally:
                writer.close()
                self._under_way.discard(task)

        try:
            self._server = await asyncio.start_server(converse, *self._bind_to, limit=self._settings.max_frame_bytes)
        except OSError as error:
            raise InvalidSetting(f"{self.address} cannot be bound: {error}") from error
        host, port = self._server.sockets[0].getsockname()
        self.address = f"lines://{host}:{port}"

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=self._settings.drain_timeout.total_seconds())
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _converse(self, receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._settings.frame_timeout.total_seconds()):
            line = await reader.readline()
        batch = msgspec.json.decode(line, type=list[Envelope] | None)
        answer = await receiver.ready() if batch is None else await self._store(receiver, batch)
        writer.write(msgspec.json.encode(answer) + b"\n")

    async def _store(self, receiver: Receiver, batch: list[Envelope]) -> list[Outcome]:
        fitting = batch[: receiver.credit()]
        outcomes = await receiver.receive(self.endpoint, fitting) if fitting else []
        self._counts["batches"] += 1
        self._counts["envelopes"] += len(fitting)
        return [*outcomes, *[BUSY] * (len(batch) - len(fitting))]


def _host_and_port(uri: str) -> tuple[str, int]:
    try:
        parts = urlsplit(uri)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if uri != f"lines://{host}:{port}" or not host or port is None:
        raise InvalidSetting(f"{uri}: write a host and a port, as in lines://127.0.0.1:2301")
    return host, port


def _line(batch: Sequence[Envelope], most_bytes: int) -> tuple[bytes, str]:
    """The batch as a line, or why it cannot be one."""
    try:
        line = msgspec.json.encode(batch) + b"\n"
    except (TypeError, ValueError) as error:  # such as a lone surrogate
        return b"", str(error)
    return (line, "") if len(line) <= most_bytes else (b"", f"it takes {len(line):,} bytes, {most_bytes:,} may be sent")
