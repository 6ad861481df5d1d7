"""The one usable connection to a destination, opened when it is first needed and again after it has ended.

Each connection is a task: it is opened, runs until the peer, an error or the end of the dialer ends it, and its end is
told to those who wait on it. After the peer's GOODBYE a connection only finishes what is under way on it, beside its
successor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from durable.errors import ConnectionFailed, TransportError, again, said
from durable.settings import Settings
from durable.telemetry import log
from durable.transports.tcp.address import Address
from durable.transports.tcp.client_side import ClientSide
from durable.transports.tcp.entrance import Entrance
from durable.transports.tcp.proofs import ClientProof
from durable.transports.tcp.stream import FrameStream, translated


class Connection(Protocol):
    """A connection, from HELLO to its end."""

    @property
    def is_usable(self) -> bool:
        """True while something new may be begun on the connection."""
        ...

    async def greet(self) -> None:
        """Say HELLO and hear WELCOME. Raises TransportError, and closes the connection, when that fails."""
        ...

    async def run(self) -> None:
        """Read until the end of the connection, and tell it to those who wait."""
        ...


C = TypeVar("C", bound=Connection)
S = TypeVar("S", bound=ClientSide)


class Dialer(Generic[C, S]):
    """Connections to one address: `side` makes their state, and `connection` puts it on a stream."""

    def __init__(
        self,
        address: Address,
        entrance: Entrance,
        settings: Settings,
        *,
        side: Callable[[ClientProof | None], S],
        connection: Callable[[FrameStream, S], C],
    ) -> None:
        self._address = address
        self._entrance = entrance
        self._settings = settings
        self._side = side
        self._connection = connection
        self._tasks: asyncio.TaskGroup | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._newest: asyncio.Future[C] | None = None
        self._connected: C | None = None

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        for task in self._connections:
            task.cancel()
        await tasks.__aexit__(None, None, None)  # without the body's error, which must not become a group

    @property
    def open(self) -> C | None:
        """The connection that is open now."""
        connection = self._connected
        return connection if connection is not None and connection.is_usable else None

    async def dial(self) -> C:
        """The newest connection, or a new one. All who wait for it share its failure: none queues for a dead peer."""
        if self._newest is None or not _is_usable(self._newest):
            self._newest = self._open()
        return await asyncio.shield(self._newest)

    def hang_up(self) -> None:
        """Close the connection, on which nothing is under way; the next dial opens another."""
        self._newest = self._connected = None
        for task in self._connections:
            task.cancel()

    def _open(self) -> asyncio.Future[C]:
        if self._tasks is None:
            raise ConnectionFailed(f"{self._address}: the sender was closed")
        opened: asyncio.Future[C] = asyncio.get_running_loop().create_future()
        task = self._tasks.create_task(self._converse(opened), name=f"connection to {self._address}")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        # Not at the end of the task: one that is cancelled before it has begun never comes there.
        task.add_done_callback(lambda _: fail(opened, ConnectionFailed(f"{self._address}: the sender was closed")))
        return opened

    async def _converse(self, opened: asyncio.Future[C]) -> None:
        """Life of one connection. The waiting callers are told its end; it is never raised."""
        try:
            connection = await self._connect()
            self._connected = connection
            opened.set_result(connection)
            await connection.run()
        except TransportError as error:
            fail(opened, error)
        except Exception as error:  # a fault of ours must not end whoever has opened the first connection
            log.exception("internal error on the connection to %s", self._address)
            fail(opened, ConnectionFailed(f"{self._address}: internal error: {said(error)}"))

    async def _connect(self) -> C:
        with translated(f"connecting to {self._address}"):
            async with asyncio.timeout(self._settings.connect_timeout.total_seconds()):
                stream = await open_stream(self._address, self._entrance, self._settings)
                try:
                    connection = self._connection(stream, self._side(self._entrance.proof_of_sender(stream)))
                    await connection.greet()
                except BaseException:
                    stream.abort()
                    raise
        return connection


async def open_stream(address: Address, entrance: Entrance, settings: Settings) -> FrameStream:
    """Connect to an address, whose certificate or user is checked. The caller sets the deadline, and translates errors
    of the network. Raises ConnectionFailed for another user.
    """
    context = entrance.for_sender()
    stream = FrameStream(await address.connect(context.tls if context is not None else None), settings)
    if refusal := entrance.refusal_of_user(stream):
        stream.abort()
        raise ConnectionFailed(refusal)
    return stream


def _is_usable(opened: asyncio.Future[C]) -> bool:
    """A connection that is being opened will be usable, as far as anybody knows."""
    return not opened.done() or (opened.exception() is None and opened.result().is_usable)


def fail(future: asyncio.Future[Any], error: TransportError) -> None:
    """End a future with an error like this, of its own, unless it is done."""
    if not future.done():
        future.set_exception(again(error))
        future.exception()  # it counts as retrieved: whoever waited may have been cancelled meanwhile
