"""Connections to RabbitMQ brokers: named, opened when first needed, and shared.

    Brokers --- Broker `default` --+-- publishing   one connection for all senders of this process
                                   +-- consuming    one for all listeners: a broker that blocks publishers stops no acks

Plain connections of aio-pika, not its robust ones: those restore channels and consumers without telling the senders
that unanswered messages are lost. Here a broken connection is gone, and senders and listeners open the next one when
they need it.

Channels are those of aiormq, on which aio-pika is built: publishing and acknowledging a whole batch in one write,
without a task for each message, takes a third of the time (see rabbitmq_publisher and rabbitmq_consumers).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from socket import gethostname
from typing import Final, Generic, Self, TypeVar

import aio_pika
from aio_pika.abc import AbstractConnection
from aiormq.channel import Channel
from aiormq.exceptions import InvalidFrameError
from yarl import URL

from durable.errors import PeerTimeout, TransportError, again
from durable.settings import Settings
from durable.transports.rabbitmq.address import broker_url
from durable.transports.rabbitmq.channel import error_of, translated
from durable.transports.rabbitmq.logs import ours
from durable.transports.rabbitmq.socket import CANNOT_BE_READ, Socket

T = TypeVar("T")

CLOSING_SECONDS: Final = 5.0
"""Time for the broker to confirm that a connection is closed; the connection is cut off then."""
_HEARTBEATS_TO_BE_LOST: Final = 3  # aiormq drops a connection after three intervals, and three seconds, of silence


class Shared(Generic[T]):
    """Resource that its first user opens; all waiting users share its failure."""

    def __init__(self, open_: Callable[[], Awaitable[T]], is_usable: Callable[[T], bool]) -> None:
        self._open = open_
        self._is_usable = is_usable
        self._lock = asyncio.Lock()
        self._attempts = 0
        self._failure: TransportError | None = None
        self.newest: T | None = None

    @property
    def usable(self) -> T | None:
        return self.newest if self.newest is not None and self._is_usable(self.newest) else None

    async def get(self) -> T:
        """Open the connection. Raises TransportError when it cannot be opened."""
        waiting_for = self._attempts
        if (found := self.usable) is not None:
            return found
        async with self._lock:
            if (found := self.usable) is not None:
                return found
            if self._attempts > waiting_for and self._failure is not None:
                raise again(self._failure)
            try:
                self.newest = opened = await self._open()
            except TransportError as error:
                self._failure = error
                self._attempts += 1
                raise
            return opened


class Connection:
    """Connection that is shared: an async context manager for each user; the last to leave closes it."""

    def __init__(self, broker: str, url: str, name: str, settings: Settings) -> None:
        self._broker = f"broker {broker}"
        self._url = _with_defaults(url, settings)
        self._name = name
        self._seconds = settings.connect_timeout.total_seconds()
        self._shared = Shared(self._open, lambda opened: opened.is_open)
        self._users = 0

    async def __aenter__(self) -> Self:
        self._users += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._users -= 1
        if not self._users and (opened := self._shared.newest) is not None:
            self._shared.newest = None
            await opened.close()

    async def get(self) -> AbstractConnection:
        """The connection, or a new one; raises TransportError when the broker cannot be reached."""
        return (await self._get()).connection

    async def channel(self, *, confirms: bool) -> Channel:
        """A new channel. A connection on which the broker opens none is dropped, unless the broker blocks it."""
        opened = await self._get()
        try:
            with ours(), translated(f"{self._broker}: opening a channel"):
                async with asyncio.timeout(self._seconds):
                    channel = await opened.underlay.channel(publisher_confirms=confirms, on_return_raises=confirms)
        except PeerTimeout:
            if not await opened.is_blocked():
                opened.drop()
            raise
        assert isinstance(channel, Channel)
        return channel

    def drop(self) -> None:
        """Cut the connection off at once, for all its users: the broker delivers unacknowledged messages again."""
        if (opened := self._shared.newest) is not None:
            opened.drop()

    async def is_blocked(self) -> bool:
        """True while the broker, short of memory or disk, takes nothing from this connection."""
        return (opened := self._shared.usable) is not None and await opened.is_blocked()

    async def _get(self) -> _Opened:
        if not self._users:
            raise RuntimeError("a connection is used inside `async with`")
        return await self._shared.get()

    async def _open(self) -> _Opened:
        if (broken := self._shared.newest) is not None:
            await broken.close()
        connection = aio_pika.Connection(self._url, client_properties={"connection_name": self._name})
        socket = Socket(mending=broken is not None and broken.was_unreadable)
        connection.kwargs["transport_factory"] = socket
        try:
            with ours(), translated(f"{self._broker}: connecting"):
                async with asyncio.timeout(self._seconds):
                    await connection.connect()
        except BaseException:
            socket.abort()
            await _neutralise(connection)
            raise
        return _Opened(connection, socket)


class _Opened:
    """Open connection, with the internals of aio-pika that durable needs."""

    def __init__(self, connection: aio_pika.Connection, socket: Socket) -> None:
        assert connection.transport is not None
        self.connection = connection
        self.underlay = connection.transport.connection
        self._socket = socket
        self._dropped = False

    @property
    def is_open(self) -> bool:
        return self.underlay.is_opened and not self._dropped

    def drop(self) -> None:
        """Cut the connection off at once; its waiting callers get an error."""
        self._dropped = True
        self._socket.abort()

    @property
    def was_unreadable(self) -> bool:
        """Tell whether the broker sent data that closed the connection."""
        closing = self.underlay.closing
        return closing.done() and isinstance(error_of(closing), (InvalidFrameError, *CANNOT_BE_READ))

    async def is_blocked(self) -> bool:
        try:
            async with asyncio.timeout(0):
                await self.underlay.ready()
        except TimeoutError:
            return True
        return False

    async def close(self) -> None:
        try:
            with contextlib.suppress(TransportError), ours(), translated("closing"):
                async with asyncio.timeout(CLOSING_SECONDS):
                    await self.connection.close()
        finally:
            self.drop()
            await _neutralise(self.connection)


async def _neutralise(connection: aio_pika.Connection) -> None:
    """Make aio-pika treat a cut connection as closed, without waiting.

    Its destructor would begin to close the connection, in whatever thread the garbage collector runs.
    """
    connection.transport = None
    await connection.close()


class Broker:
    """Broker with the connections of this process."""

    def __init__(self, name: str, url: str, settings: Settings, service: str) -> None:
        self._name = name
        self._url = url
        self._settings = settings
        self._service = service
        self.publishing = self.connection("publish")
        self.consuming = self.connection("consume")

    def connection(self, purpose: str) -> Connection:
        """A connection besides those that are shared. Its purpose is part of the name that the broker shows."""
        name = f"{self._service} {purpose} ({gethostname()}:{os.getpid()})"
        return Connection(self._name, self._url, name, self._settings)


class Brokers:
    """The brokers of this process by the name that addresses give them."""

    def __init__(self, settings: Settings, service: str) -> None:
        self._settings = settings
        self._service = service
        self._known: dict[str, Broker] = {}

    def __getitem__(self, name: str) -> Broker:
        """Look up a broker. Raises InvalidSetting for a name that is not in the settings."""
        if name not in self._known:
            self._known[name] = Broker(name, broker_url(self._settings, name), self._settings, self._service)
        return self._known[name]


def _with_defaults(url: str, settings: Settings) -> URL:
    """Return the URL with durable's own defaults: heartbeats often enough that a silent broker is noticed in time."""
    given = URL(url)
    idle_seconds = settings.idle_timeout.total_seconds()
    defaults = {"heartbeat": str(max(1, int(idle_seconds / _HEARTBEATS_TO_BE_LOST) - 1))}
    if settings.tls_ca is not None:
        defaults["cafile"] = str(settings.tls_ca)
    return given.update_query({name: value for name, value in defaults.items() if name not in given.query})
