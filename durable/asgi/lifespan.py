"""The bus in the lifespan of an ASGI application.

    server                        bus                      application     phase
    startup ---------------------------------------------> starts          STARTING
    <----------- startup.complete starts <---------------- complete        RUNNING
    shutdown -------------------> drains ----------------> shuts down      STOPPING
    <----------------------------------------------------- complete        ENDED

When the bus cannot start, the application shuts down, and only then the server learns of startup.failed. The error is
raised after that: Starlette's TestClient takes an end without one for a start. What an application does not do of this
protocol, which is optional, is done in its place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from enum import Enum, auto
from typing import Any

from durable.bus import Bus
from durable.errors import DurableError, said
from durable.tasks.cancelling import raise_if_cancelled
from durable.telemetry import log

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class _Phase(Enum):
    NEW = auto()
    STARTING = auto()
    RUNNING = auto()
    STOPPING = auto()
    ENDED = auto()


class Lifespan:
    """Lifespan of one run: messages between the server and the application pass through here."""

    def __init__(self, bus: Bus, receive: Receive, send: Send) -> None:
        self._bus = bus
        self._receive = receive
        self._send = send
        self._phase = _Phase.NEW
        self._has_started_bus = False
        self._answer: Message | None = None
        """The message that the server gets at the end, instead of shutdown.complete."""
        self._failure: Exception | None = None

    async def run(self, app: ASGIApp, scope: MutableMapping[str, Any]) -> None:
        try:
            try:
                await app(scope, self.receive, self.send)
            except Exception as error:
                if self._phase not in (_Phase.NEW, _Phase.STARTING):
                    raise
                log.info("the application has no lifespan (%s): the bus starts without it", said(error))
            await self._go_on_alone()
            if self._failure is not None:
                raise self._failure
        finally:
            if self._phase is not _Phase.ENDED:  # hypercorn, which was told, looks at once whether this has ended
                await self._stop_bus()

    async def _go_on_alone(self) -> None:
        while self._phase is not _Phase.ENDED:
            match self._phase:
                case _Phase.NEW | _Phase.RUNNING:
                    await self.receive()
                case _Phase.STARTING:
                    await self.send({"type": "lifespan.startup.complete"})
                case _Phase.STOPPING:
                    await self.send({"type": "lifespan.shutdown.complete"})

    # ------------------------------------------------------------------ for the application

    async def receive(self) -> Message:
        if self._phase is _Phase.RUNNING and self._answer is not None:
            self._phase = _Phase.STOPPING
            return {"type": "lifespan.shutdown"}
        message = await self._receive()
        if message["type"] == "lifespan.startup":
            self._phase = _Phase.STARTING
        elif message["type"] == "lifespan.shutdown":
            await self._stop_bus()
            self._phase = _Phase.STOPPING
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "lifespan.startup.complete":
            await self._start_bus()
            self._phase = _Phase.RUNNING
            if self._answer is None:
                await self._send(message)
        else:
            await self._stop_bus()  # before the server knows: it may end at once, and this task with it
            self._phase = _Phase.ENDED
            await self._send(self._answer or message)

    async def _start_bus(self) -> None:
        try:
            await self._bus.__aenter__()
            self._has_started_bus = True
        except BaseException as error:  # whatever it is, the server must be told, or it goes on without the bus
            raise_if_cancelled(error)
            self._fail("startup", error, _told(error, "start"))

    async def _stop_bus(self) -> None:
        """Drain the bus, and close what units of work have opened outside its life. Does no harm when repeated."""
        if self._bus.runtime.is_running and not self._has_started_bus:
            return  # it is somebody else's
        try:
            await self._bus.__aexit__(None, None, None)
        except BaseException as error:
            raise_if_cancelled(error)
            self._fail("shutdown", error, _told(error, "stop"))

    def _fail(self, phase: str, error: BaseException, told: str) -> None:
        self._answer = {"type": f"lifespan.{phase}.failed", "message": told}
        self._failure = error if isinstance(error, Exception) else DurableError(told)


def _told(error: BaseException, verb: str) -> str:
    """Return the text that the server logs; a bug shows its traceback here."""
    if isinstance(error, DurableError):
        return f"the bus cannot {verb}: {error}"
    log.error("the bus cannot %s", verb, exc_info=error)
    return f"the bus cannot {verb}: {said(error)}"
