"""The door to web applications, in plain ASGI: a unit of work for each request, and the bus in the lifespan.

    app = FastAPI()
    app.add_middleware(DurableMiddleware, bus=bus)

    @app.post("/orders", status_code=201)
    async def place(order: NewOrder, uow: Annotated[UnitOfWork, Depends(unit_of_work)]) -> None:
        uow.session.add(Order(...))
        bus.send(OrderPlaced(...))

A request's unit of work begins when it is first asked for, and ends before the response starts: a client that reads
a status below 400 knows that everything was committed.

    not begun --unit_of_work(), send()--> begun --response below 400----------------> committed, over
        |                                   |--400 or above, exception, cancelled,
        |                                   |  the client has left------------------> rolled back, over
        +--the response starts--> over: send() raises NoUnitOfWork

An exception that the application itself answers is seen as its response alone.

In the lifespan the bus starts when the application has started, and drains before the application shuts down.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

from durable.arguments import checked_class
from durable.asgi.lifespan import ASGIApp, Lifespan, Message, Receive, Send
from durable.bus import Bus
from durable.errors import NoUnitOfWork
from durable.outbox.outbox import Outbox
from durable.outbox.unit_of_work import UnitOfWork
from durable.telemetry import log

__all__ = ["DurableMiddleware", "unit_of_work"]

_OVER: Final = (
    "the response has started, so the unit of work of this request is over: in a background task or a streaming body, "
    "open another by `async with bus.unit_of_work()`"
)
_OUTSIDE: Final = (
    "this is no HTTP request inside DurableMiddleware: call app.add_middleware(DurableMiddleware, bus=bus), or open a "
    "unit of work by `async with bus.unit_of_work()`, in a WebSocket for instance"
)
_TURNS = 5  # of the event loop; so many does a message take through one BaseHTTPMiddleware of Starlette's


@checked_class
class DurableMiddleware:
    """Gives each HTTP request a unit of work of `bus`, and runs the bus in the application's lifespan.

    With lifespan=False the application starts and stops the bus by itself. WebSockets pass through untouched.
    """

    def __init__(self, app: ASGIApp, *, bus: Bus, lifespan: bool = True) -> None:
        self._app = app
        self._bus = bus
        self._lifespan = lifespan

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _Request(self._bus, receive, send).run(self._app, scope)
        elif scope["type"] == "lifespan" and self._lifespan:
            await Lifespan(self._bus, receive, send).run(self._app, scope)
        else:
            await self._app(scope, receive, send)


async def unit_of_work() -> UnitOfWork:
    """Return the unit of work of this request, begun if need be: `Annotated[UnitOfWork, Depends(unit_of_work)]` in
    FastAPI.

    The middleware commits and closes it. You may commit it yourself, to answer when the database refuses the data: the
    messages sent so far go with that commit, and the next statement begins another transaction. Raises NoUnitOfWork
    outside of a request, or when the response has started.
    """
    request = _current_request.get()
    if request is None:
        raise NoUnitOfWork(_OUTSIDE)
    return request.begin()


_current_request: ContextVar[_Request | None] = ContextVar("durable.request", default=None)


class _Request:
    """Request over HTTP: messages that its application receives and sends pass through here."""

    def __init__(self, bus: Bus, receive: Receive, send: Send) -> None:
        self._bus = bus
        self._receive = receive
        self._send = send
        self._uow: UnitOfWork | None = None
        self._beginning = threading.Lock()  # threads that the request waits for may send at once
        self._is_over = False
        self._ending: asyncio.Task[Any] | None = None
        self._taken: deque[Message] = deque()
        self._client_left = False

    async def run(self, app: ASGIApp, scope: MutableMapping[str, Any]) -> None:
        token = _current_request.set(self)
        try:
            with self._bus.runtime.sessions.scope.entered(self._outbox):
                await app(scope, self.receive, self.send)
        finally:
            _current_request.reset(token)
            await self._end(commit=False)

    # ------------------------------------------------------------------ the unit of work

    def begin(self) -> UnitOfWork:
        """The unit of work, begun when it is first asked for. From any thread; raises NoUnitOfWork when it is over."""
        if self._is_over or (self._ending is not None and self._ending is not _current_task()):
            raise NoUnitOfWork(_OVER)
        with self._beginning:
            if self._uow is None:
                self._uow = self._bus.unit_of_work().begin()
            return self._uow

    def _outbox(self) -> Outbox:
        return self.begin().outbox

    async def _end(self, *, commit: bool) -> None:
        if self._uow is not None and self._ending is None:
            if commit and await self._has_client_left():
                log.info("the client has left before its response: its unit of work is rolled back")
                commit = False
            self._ending = asyncio.current_task()  # listeners of its flush may still send, other tasks may not
            await self._uow.end(commit=commit)
        self._is_over = True

    # ------------------------------------------------------------------ for the application

    async def receive(self) -> Message:
        message = self._taken.popleft() if self._taken else await self._receive()
        self._client_left |= message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._end(commit=message["status"] < 400)
        await self._send(message)

    # ------------------------------------------------------------------ the client

    async def _has_client_left(self) -> bool:
        """Look, without waiting, at what the client does next. What is taken too early is kept for receive()."""
        while not self._client_left:
            message = await self._received_by_now()
            if message is None:
                break
            self._taken.append(message)
            self._client_left = message["type"] == "http.disconnect"
            if message.get("more_body", False):  # it is still sending
                break
        return self._client_left

    async def _received_by_now(self) -> Message | None:
        async with asyncio.TaskGroup() as tasks:
            look = tasks.create_task(_result_of(self._receive()), name="see whether the client has left")
            for _ in range(_TURNS):
                await asyncio.sleep(0)
                if look.done():
                    break
            look.cancel()
        return None if look.cancelled() else look.result()


async def _result_of(awaitable: Awaitable[Message]) -> Message:
    return await awaitable


def _current_task() -> asyncio.Task[Any] | None:
    """The task that runs here; None in another thread than the loop's."""
    return asyncio.current_task() if asyncio._get_running_loop() is not None else None
