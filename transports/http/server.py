"""uvicorn as a guest of this process: it serves one app on a socket, in the event loop that is there.

    socket --> Connection (h11) --> _Requests --> app

Signals and logging stay with the application. The resources of a client are bounded: connections in number, by the
doorkeeper; each TLS handshake, each request from its first byte to its last, and the reading of each answer in time,
however slowly the bytes arrive. A connection on which no request has shown a secret has seconds between its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from durable.settings import Settings
from durable.tasks.crew import contained
from durable.telemetry import log
from durable.transports.doorkeeper import Doorkeeper
from durable.transports.http.problems import CLOSE, problem
from durable.transports.http.strict import StrictConnection
from durable.transports.visits import CLIENT, Visit

BACKLOG: Final = 256

_MOST_HEAD_BYTES: Final = 16 << 10
_LINGER_SECONDS: Final = 1.0
"""Time to tell a client that it was too slow, or is refused."""

_MOST_DISCARDED_BYTES: Final = 256 << 10


_log: Final = logging.getLogger("uvicorn.error.durable")
_log.addFilter(lambda record: record.levelno > logging.WARNING)  # of bad requests: those are counted, and logged, here


class Server(uvicorn.Server):
    """uvicorn's server, as a guest of this process."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        listener: str,
        counts: Counter[str],
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
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
        self.listener = listener
        self._keeper = Doorkeeper(listener, settings, counts, known=settings.http_connections, tls=tls)
        self._deadlines = Deadlines(
            greeting=math.ceil(settings.connect_timeout.total_seconds()),
            transfer=settings.frame_timeout.total_seconds(),
        )

    def open(self, listening: socket.socket, tasks: asyncio.TaskGroup) -> asyncio.Task[None]:
        """Serve on this socket, by tasks of this group. Returns the one that ends when all is answered."""
        self._listening, self._tasks = listening, tasks
        return tasks.create_task(contained(self.serve(sockets=[listening])), name=f"serve {self.listener}")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving. uvicorn's own start takes every connection and gives a TLS handshake a minute."""
        self.servers = []
        if not self.should_exit:  # it may have been closed already
            self._keeper.open(self._listening, self._tasks, self._connection)
        self.started = True

    def leave(self) -> None:
        """Accept nothing new, at once: uvicorn alone would look only ten times a second."""
        self._keeper.close()
        self.should_exit = True

    def give_up(self) -> None:
        """Break off all requests under way."""
        for connection in self.server_state.connections:
            connection.transport.abort()
        self._requests.give_up()

    def _connection(self, visit: Visit) -> Connection:
        return Connection(self.config, self.server_state, self._keeper, visit, self._deadlines)


class Serving:
    """A server at work on a socket, until end()."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def begin(self, listening: socket.socket) -> None:
        """Serve in a task of its own."""
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._task = self._server.open(listening, self._tasks)

    async def end(self, patience: float) -> None:
        """Accept nothing new, answer the requests under way within these seconds, and break off the others."""
        self._server.leave()
        try:
            await asyncio.wait([self._task], timeout=patience)
        finally:
            if not self._task.done():
                log.warning(
                    "server of %s closes with requests under way, which were not answered in time",
                    self._server.listener,
                )
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


class Deadlines(NamedTuple):
    """Seconds for a stranger's next request to begin, and for a request or an answer to pass whole."""

    greeting: int
    transfer: float


class Connection(H11Protocol):
    """Connection whose requests arrive whole, and whose answers are taken, in time."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        keeper: Doorkeeper,
        visit: Visit,
        deadlines: Deadlines,
    ) -> None:
        super().__init__(config, server_state, app_state={CLIENT: self})
        # Not by the Config, which would take the handlers from the logger that the application's own uvicorn may use.
        self.access_log = False
        self.logger = _log
        self._strict = self.conn = StrictConnection(_MOST_HEAD_BYTES)
        self._keeper = keeper
        self._visit = visit
        self._deadlines = deadlines
        self._greeting = _Deadline(deadlines.greeting, lambda: self._cut("no request came in time"))
        # A request has longer than its body alone, which the app counts: the client is to hear of the 408.
        self._arriving = _Deadline(
            deadlines.transfer + _LINGER_SECONDS, lambda: self._cut("a request did not arrive whole in time")
        )
        self._leaving = _Deadline(deadlines.transfer, lambda: self._cut("an answer was not taken in time"))
        self._lingering = _Deadline(_LINGER_SECONDS, lambda: self.transport.abort())
        self._discarded_bytes = 0
        self._served, self.app = self.app, self._serve

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = _Parting(transport, self)
        self._visit.cut = transport.abort
        self._visit.name = f"{self.client[0]}:{self.client[1]}" if self.client else self._visit.name
        if self._visit.is_over:  # it gave way in its TLS handshake
            transport.abort()
            return
        transport.set_write_buffer_limits(high=1, low=0)  # an answer is taken when the last byte of it is
        self._greeting.set()

    @property
    def is_known(self) -> bool:
        """True once the client has shown a secret."""
        return self._visit.is_known

    @property
    def _idle_seconds(self) -> int:
        seconds = self.config.timeout_keep_alive
        return seconds if self._visit.is_known else min(seconds, self._deadlines.greeting)

    def prove(self) -> None:
        """Give the client a place among the known, if there is one."""
        self._keeper.prove(self._visit)

    def data_received(self, data: bytes) -> None:
        if self._lingering.is_set:
            self._discard(len(data))
            return
        self._greeting.clear()
        self._visit.is_idle = False
        self._arriving.set()
        super().data_received(data)
        if self.is_whole():
            self._arriving.clear()

    def on_response_complete(self) -> None:
        """Wait for the next request, of a stranger for a short time."""
        self.timeout_keep_alive = self._idle_seconds
        super().on_response_complete()
        self._visit.is_idle = self._is_idle()

    def eof_received(self) -> None:
        """A client that says no more in the middle of a body hears 400; uvicorn alone would just close."""
        if self._lingering.is_set:
            self.transport.abort()
        elif self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.SEND_RESPONSE:
            self._strict.refusal = "the client has ended its request in the middle of the body"
            super().data_received(b"")

    def pause_writing(self) -> None:
        self._leaving.set()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._leaving.clear()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for deadline in (self._greeting, self._arriving, self._leaving, self._lingering):
            deadline.clear()
        self._keeper.leave(self._visit)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, unless an answer is under way already, and close."""
        reason = self._strict.refusal or "this is no request of HTTP/1.1"
        self._keeper.count(self._visit, reason)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            status = self._strict.status
            refusal = problem(status, reason, CLOSE)
            for event in (
                h11.Response(status_code=status, headers=refusal.raw_headers, reason=status.phrase.encode()),
                h11.Data(data=bytes(refusal.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        cycle = cast("RequestResponseCycle | None", self.cycle)  # there is none before the first request
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # the app, which waits for the body, may say no more
            cycle.message_event.set()
        self.linger()

    def is_whole(self) -> bool:
        """True when no request has arrived in part only."""
        if self.conn.their_state is h11.IDLE:
            return not self.conn.trailing_data[0]
        return self.conn.their_state is not h11.SEND_BODY

    def linger(self) -> None:
        """Say no more, and take what the client still says for a moment: else it would lose the answer."""
        if self._lingering.is_set:
            return
        self._arriving.clear()
        self._lingering.set()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has gone already
                self.transport.write_eof()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app. An answer to a request that is not whole is the last one: its body is not read for nothing. Each
        other one tells for how long the connection is kept.
        """

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = (b"keep-alive", b"timeout=%d" % self._idle_seconds) if self.is_whole() else CLOSE_HEADER
                message = {**message, "headers": [*message["headers"], kept]}
            await send(message)

        await self._served(scope, receive, answer)

    def _discard(self, size_bytes: int) -> None:
        self._discarded_bytes += size_bytes
        if self._discarded_bytes > _MOST_DISCARDED_BYTES:
            self.transport.abort()

    def _is_idle(self) -> bool:
        """True between two requests."""
        return self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    def _cut(self, reason: str) -> None:
        self._keeper.drop(self._visit, reason)


class _Parting(asyncio.Transport):
    """Transport of a connection that lingers where it is closed in the middle of a request."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__()
        self._transport = transport
        self._connection = connection
        self._is_closing = False

    def close(self) -> None:
        self._is_closing = True
        if self._connection.is_whole():
            self._transport.close()
        else:
            self._connection.linger()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        self._transport.write_eof()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def abort(self) -> None:
        self._transport.abort()


class _Deadline:
    """Calls `expire` so many seconds after it was set, unless it is cleared first. Setting it again moves nothing."""

    def __init__(self, seconds: float, expire: Callable[[], None]) -> None:
        self._seconds = seconds
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
