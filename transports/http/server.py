"""uvicorn as a guest of this process: it serves one app on a socket, in the event loop that is there.

    socket --> Connection (h11) --> _Requests --> app

Signals and logging stay with the application. The resources of a client are bounded: connections in number; each TLS
handshake, each request from its first byte to its last, and the reading of each answer in time, however slowly the
bytes arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from durable.settings import Settings
from durable.tasks.crew import contained
from durable.telemetry import log

BACKLOG: Final = 256

_MOST_HEAD_BYTES: Final = 16 << 10
_LINGER_SECONDS: Final = 1.0
"""Time to tell a slow client that it was too slow, and to end a TLS connection."""


class Server(uvicorn.Server):
    """uvicorn's server, as a guest of this process."""

    def __init__(self, app: ASGIApp, settings: Settings, tls: ssl.SSLContext | None, counts: Counter[str]) -> None:
        requests = _Requests(app)
        config = uvicorn.Config(
            requests,
            http="h11",
            ws="none",
            lifespan="off",
            interface="asgi3",
            workers=1,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=math.ceil(settings.idle_timeout.total_seconds()),
            h11_max_incomplete_event_size=_MOST_HEAD_BYTES,
            reset_contextvars=True,  # what is in scope where the bus is started is not in scope of the requests
        )
        super().__init__(config)
        self._requests = requests
        self.servers: list[asyncio.Server] = []
        self._tls = tls
        self._handshake_seconds = settings.connect_timeout.total_seconds()
        self._max_connections = settings.http_connections
        self._transfer_seconds = settings.frame_timeout.total_seconds()
        self._counts = counts

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving. uvicorn's own start gives a TLS handshake a minute."""
        for listening in sockets or []:
            server = await asyncio.get_running_loop().create_server(
                self._connection,
                sock=listening,
                backlog=BACKLOG,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_seconds if self._tls else None,
                ssl_shutdown_timeout=_LINGER_SECONDS if self._tls else None,
            )
            self.servers.append(server)
        self.started = True

    def leave(self) -> None:
        """Accept nothing new, at once: uvicorn alone would look only ten times a second."""
        for server in self.servers:
            server.close()
        self.should_exit = True

    def give_up(self) -> None:
        """Break off all requests under way."""
        for connection in self.server_state.connections:
            connection.transport.abort()
        self._requests.give_up()

    def _connection(self) -> Connection:
        return Connection(
            self.config,
            self.server_state,
            self._counts,
            transfer_seconds=self._transfer_seconds,
            max_connections=self._max_connections,
        )


class Serving:
    """A server at work on a socket, until end(). `name` is that of the log."""

    def __init__(self, server: Server, name: str) -> None:
        self._server = server
        self._name = name

    async def begin(self, listening: socket.socket) -> None:
        """Serve in a task of its own."""
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._task = self._tasks.create_task(
            contained(self._server.serve(sockets=[listening])), name=f"serve {self._name}"
        )

    async def end(self, patience: float) -> None:
        """Accept nothing new, answer the requests under way within these seconds, and break off the others."""
        self._server.leave()
        try:
            await asyncio.wait([self._task], timeout=patience)
        finally:
            if not self._task.done():
                log.warning("server of %s closes with requests under way, which were not answered in time", self._name)
                self._server.give_up()
            await self._tasks.__aexit__(None, None, None)


class _Requests:
    """The app, and the requests that it has under way."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._under_way: set[asyncio.Timeout] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._under_way.add(limit)
                try:
                    await self._app(scope, receive, send)
                finally:
                    self._under_way.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise

    def give_up(self) -> None:
        """End them now, without answers."""
        now = asyncio.get_running_loop().time()
        for limit in self._under_way:
            limit.reschedule(now)


class Connection(H11Protocol):
    """Connection whose requests arrive whole, and whose answers are taken, within `transfer_seconds` each."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        counts: Counter[str],
        *,
        transfer_seconds: float,
        max_connections: int,
    ) -> None:
        super().__init__(config, server_state, app_state={})
        # Not by the Config, which would take the handlers from the logger that the application's own uvicorn may use.
        self.access_log = False
        self._counts = counts
        self._max_connections = max_connections
        # A request has longer than its body alone, which the app counts: the client is to hear of the 408.
        self._arriving = _Deadline(
            transfer_seconds + _LINGER_SECONDS, lambda: self._cut("a request did not arrive whole in time")
        )
        self._leaving = _Deadline(transfer_seconds, lambda: self._cut("an answer was not taken in time"))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._counts["connections"] += 1
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)  # an answer is taken when the last byte of it is
        self._arriving.set()
        if len(self.connections) > self._max_connections:
            self._cut("there are too many connections")

    def data_received(self, data: bytes) -> None:
        self._arriving.set()
        super().data_received(data)
        if self._is_whole():
            self._arriving.clear()

    def eof_received(self) -> None:
        """A client that says no more in the middle of a body hears 400; uvicorn alone would just close."""
        if self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.SEND_RESPONSE:
            super().data_received(b"")

    def pause_writing(self) -> None:
        self._leaving.set()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._leaving.clear()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arriving.clear()
        self._leaving.clear()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._counts["dropped"] += 1
        super().send_400_response(msg)

    def _is_whole(self) -> bool:
        """True when no request has arrived in part only."""
        if self.conn.their_state is h11.IDLE:
            return not self.conn.trailing_data[0]
        return self.conn.their_state is not h11.SEND_BODY

    def _cut(self, reason: str) -> None:
        self._counts["dropped"] += 1
        log.warning("the connection of %s was cut: %s", self.client, reason)
        self.transport.abort()


class _Deadline:
    """Calls `expire` so many seconds after it was set, unless it is cleared first. Setting it again moves nothing."""

    def __init__(self, seconds: float, expire: Callable[[], None]) -> None:
        self._seconds = seconds
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
