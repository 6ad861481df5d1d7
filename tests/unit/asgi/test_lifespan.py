"""The bus in an application's lifespan, between a server and applications that keep to the protocol more or less."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from durable import Bus, DurableError, WiringError, message
from durable.asgi import DurableMiddleware
from durable.testing import InMemoryBus


@message("lifespan.opened")
class Opened(msgspec.Struct):
    number: int


class RecordingBus(Bus):
    """Instead of running it tells when it would; `fails_to` start or stop."""

    def __init__(self, steps: list[str], *, fails_to: str = "") -> None:
        super().__init__("shop")
        self._steps = steps
        self._fails_to = fails_to
        self._runs = False

    async def __aenter__(self) -> RecordingBus:
        self._steps.append("bus starts")
        if self._fails_to == "start":
            raise WiringError("it is not configured")
        self._runs = True
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runs:
            self._runs = False
            self._steps.append("bus stops")
            if self._fails_to == "stop":
                raise ZeroDivisionError


class LifespanServer:
    """The server's side of the protocol, as uvicorn keeps to it."""

    def __init__(self, steps: list[str]) -> None:
        self._steps = steps
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._answered = asyncio.Event()
        self.answers: list[Message] = []
        self.task: asyncio.Task[None]

    async def start(self, app: Any) -> None:
        self.task = asyncio.create_task(app({"type": "lifespan", "state": {}}, self._messages.get, self._send))
        await self._say("lifespan.startup")

    async def shut_down(self) -> None:
        await self._say("lifespan.shutdown")
        await self.task

    async def _say(self, type_: str) -> None:
        self._steps.append(type_)
        self._answered.clear()
        self._messages.put_nowait({"type": type_})
        answered = asyncio.create_task(self._answered.wait())
        await asyncio.wait([self.task, answered], return_when=asyncio.FIRST_COMPLETED)
        answered.cancel()

    async def _send(self, answer: Message) -> None:
        self._steps.append(answer["type"])
        self.answers.append(answer)
        self._answered.set()


def living(steps: list[str], *, fails_to: str = "") -> ASGIApp:
    """An application that tells of its lifespan."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        steps.append("app starts")
        if fails_to == "start":
            await send({"type": "lifespan.startup.failed", "message": "the app cannot"})
            raise LookupError
        await send({"type": "lifespan.startup.complete"})
        await receive()
        steps.append("app stops")
        if fails_to == "stop":
            await send({"type": "lifespan.shutdown.failed", "message": "the app cannot"})
            raise LookupError
        await send({"type": "lifespan.shutdown.complete"})

    return app


async def raises_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    raise TypeError("only http is supported")


async def raises_after_reading(scope: Scope, receive: Receive, send: Send) -> None:
    raise TypeError(await receive())


async def returns_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    return


async def returns_when_started(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})


class TestLifespan:
    @pytest.fixture
    def steps(self) -> list[str]:
        return []

    async def test_the_bus_runs_while_the_application_does(self, steps: list[str]) -> None:
        server = LifespanServer(steps)
        await server.start(DurableMiddleware(living(steps), bus=RecordingBus(steps)))
        await server.shut_down()
        assert steps == [
            "lifespan.startup", "app starts", "bus starts", "lifespan.startup.complete",
            "lifespan.shutdown", "bus stops", "app stops", "lifespan.shutdown.complete",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "app",
        [raises_at_once, raises_after_reading, returns_at_once, returns_when_started],
        ids=lambda app: app.__name__,
    )
    async def test_an_application_without_a_lifespan_gets_one(self, steps: list[str], app: ASGIApp) -> None:
        server = LifespanServer(steps)
        await server.start(DurableMiddleware(app, bus=RecordingBus(steps)))
        await server.shut_down()
        assert steps == [
            "lifespan.startup", "bus starts", "lifespan.startup.complete",
            "lifespan.shutdown", "bus stops", "lifespan.shutdown.complete",
        ]  # fmt: skip

    @pytest.mark.parametrize("has_lifespan", [True, False])
    async def test_application_stops_and_the_server_is_told_when_the_bus_cannot_start(
        self, steps: list[str], has_lifespan: bool
    ) -> None:
        app = living(steps) if has_lifespan else raises_at_once
        server = LifespanServer(steps)
        await server.start(DurableMiddleware(app, bus=RecordingBus(steps, fails_to="start")))
        with pytest.raises(WiringError, match="it is not configured"):
            await server.task
        assert server.answers == [
            {"type": "lifespan.startup.failed", "message": "the bus cannot start: it is not configured"}
        ]
        own = ["app starts", "app stops"] if has_lifespan else []
        assert steps == ["lifespan.startup", *own[:1], "bus starts", *own[1:], "lifespan.startup.failed"]

    @pytest.mark.parametrize("error", [SystemExit(1), GeneratorExit(), asyncio.CancelledError()])
    async def test_server_is_told_when_the_start_of_the_bus_is_broken_off(
        self, steps: list[str], error: BaseException
    ) -> None:
        class BrokenBus(RecordingBus):
            async def __aenter__(self) -> Self:
                raise error

        server = LifespanServer(steps)
        await server.start(DurableMiddleware(living(steps), bus=BrokenBus(steps)))
        with pytest.raises(DurableError, match="the bus cannot start"):
            await server.task
        assert server.answers[-1]["type"] == "lifespan.startup.failed"

    async def test_application_stops_despite_a_failing_stop_of_the_bus(self, steps: list[str]) -> None:
        server = LifespanServer(steps)
        await server.start(DurableMiddleware(living(steps), bus=RecordingBus(steps, fails_to="stop")))
        with pytest.raises(ZeroDivisionError):
            await server.shut_down()
        assert steps[-3:] == ["bus stops", "app stops", "lifespan.shutdown.failed"]
        assert server.answers[-1]["message"] == "the bus cannot stop: ZeroDivisionError: "

    @pytest.mark.parametrize(
        ("fails_to", "ends"),
        [
            ("start", ["lifespan.startup", "app starts", "lifespan.startup.failed"]),
            ("stop", ["lifespan.shutdown", "bus stops", "app stops", "lifespan.shutdown.failed"]),
        ],
    )
    async def test_failing_application_reports_its_own_error(
        self, steps: list[str], fails_to: str, ends: list[str]
    ) -> None:
        server = LifespanServer(steps)
        await server.start(DurableMiddleware(living(steps, fails_to=fails_to), bus=RecordingBus(steps)))
        with pytest.raises(LookupError):
            await server.shut_down() if fails_to == "stop" else await server.task
        assert steps[-len(ends) :] == ends
        assert server.answers[-1]["message"] == "the app cannot"

    @pytest.mark.parametrize("ends_by", ["itself", "the server"])
    async def test_the_bus_stops_also_when_the_lifespan_breaks_off(self, steps: list[str], ends_by: str) -> None:
        break_off = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await returns_when_started(scope, receive, send)
            await break_off.wait()
            raise LookupError

        server = LifespanServer(steps)
        await server.start(DurableMiddleware(app, bus=RecordingBus(steps)))
        if ends_by == "itself":
            break_off.set()
        else:
            server.task.cancel()
        with pytest.raises((LookupError, asyncio.CancelledError)):
            await server.task
        assert steps[-1] == "bus stops"

    async def test_lifespan_ends_at_once_when_the_server_was_told(self, steps: list[str]) -> None:
        """hypercorn raises where it is told, and serves unless the lifespan has ended then."""

        class StoppingBus(RecordingBus):
            async def __aexit__(self, *_: object) -> None:
                steps.append("bus stops")

        async def receive() -> Message:
            return {"type": "lifespan.startup"}

        async def send(answer: Message) -> None:
            steps.append(answer["type"])
            raise LookupError

        with pytest.raises(LookupError):
            await DurableMiddleware(living(steps), bus=StoppingBus(steps, fails_to="start"))(
                {"type": "lifespan", "state": {}}, receive, send
            )
        assert steps[-2:] == ["bus stops", "lifespan.startup.failed"]

    @pytest.mark.filterwarnings("ignore:Using `httpx` with")
    @pytest.mark.parametrize("fails_to", ["start", "stop"])
    def test_test_client_of_starlette_raises_the_error_of_the_bus(self, steps: list[str], fails_to: str) -> None:
        from starlette.testclient import TestClient

        class Client(TestClient):
            async def wait_shutdown(self) -> None:
                if not self.task.done():  # else it would wait for ever
                    await super().wait_shutdown()

        entered: list[str] = []
        with (
            pytest.raises((WiringError, ZeroDivisionError)),
            Client(DurableMiddleware(Starlette(), bus=RecordingBus(steps, fails_to=fails_to))),
        ):
            entered.append("client")
        assert entered == ([] if fails_to == "start" else ["client"])

    async def test_lifespan_can_be_left_to_the_application(self, steps: list[str]) -> None:
        server = LifespanServer(steps)
        await server.start(DurableMiddleware(living(steps), bus=RecordingBus(steps), lifespan=False))
        await server.shut_down()
        assert "bus starts" not in steps
        assert server.answers[-1]["type"] == "lifespan.shutdown.complete"

    async def test_a_bus_in_memory_needs_no_start_and_works_all_the_time(self, steps: list[str]) -> None:
        bus = Bus("shop")
        middleware = DurableMiddleware(living(steps), bus=bus)
        async with InMemoryBus(bus) as memory:
            for number in range(2):
                server = LifespanServer(steps)
                await server.start(middleware)
                async with bus.unit_of_work():
                    bus.send(Opened(number), to="tcp://127.0.0.1:2302")
                await server.shut_down()
                assert server.answers[-1]["type"] == "lifespan.shutdown.complete"
            assert memory.sent(Opened) == [Opened(0), Opened(1)]
