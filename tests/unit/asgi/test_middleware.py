"""The middleware between a server and an application, without either: on a bus in memory, driven by ASGI messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any
from unittest.mock import AsyncMock, Mock

import anyio
import httpx
import msgspec
import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException, WebSocket
from fastapi.responses import Response, StreamingResponse
from sqlalchemy import event
from sqlalchemy.exc import InvalidRequestError
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from durable import Bus, NoUnitOfWork, UnitOfWork, message
from durable.asgi import DurableMiddleware, unit_of_work
from durable.testing import InMemoryBus

BILLING = "tcp://127.0.0.1:2302"
REQUEST: Message = {"type": "http.request", "body": b"", "more_body": False}
GONE: Message = {"type": "http.disconnect"}

Uow = Annotated[UnitOfWork, Depends(unit_of_work)]


@message("asgi.placed")
class Placed(msgspec.Struct):
    number: int


@message("asgi.shipped")
class Shipped(msgspec.Struct):
    number: int


class Sessions:
    """A session factory that counts, whose sessions stand in for those of a database."""

    def __init__(self) -> None:
        self.made: list[AsyncMock] = []

    def __call__(self) -> Any:
        self.made.append(AsyncMock())
        return self.made[-1]

    @property
    def ends(self) -> list[list[str]]:
        """How each session ended: what was called, in order."""
        return [[name for name, _, _ in session.method_calls] for session in self.made]


@pytest.fixture
def bus() -> Bus:
    bus = Bus("shop")
    bus.route(Placed, to=BILLING)
    return bus


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


@pytest.fixture
async def memory(bus: Bus, sessions: Sessions) -> AsyncIterator[InMemoryBus]:
    async with InMemoryBus(bus, sessions) as memory:
        yield memory


def numbers(memory: InMemoryBus) -> list[int]:
    return [placed.number for placed in memory.sent(Placed)]


class Server:
    """What a server is to an application, for one request: it has these messages for it, and then nothing for now."""

    def __init__(self, *messages: Message) -> None:
        self.sent: list[Message] = []
        self.waiting = 0
        self.answered = asyncio.Event()
        self.unread = list(messages)
        self._more = asyncio.Event()

    async def __call__(self, app: ASGIApp, **scope: Any) -> None:
        await app({"type": "http", "method": "POST", "path": "/", "headers": [], **scope}, self.receive, self.send)

    def put(self, given: Message) -> None:
        self.unread.append(given)
        self._more.set()

    async def receive(self) -> Message:
        self.waiting += 1
        try:
            while not self.unread:
                self._more.clear()
                await self._more.wait()
            first = self.unread[0]
            return first if first == GONE else self.unread.pop(0)
        finally:
            self.waiting -= 1

    async def send(self, given: Message) -> None:
        self.sent.append(given)
        self.answered.set()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


async def respond(send: Send, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def placing(bus: Bus, status: int = 200, *, reads: bool = True) -> ASGIApp:
    """An application that sends a message in each request, and answers with this status."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if reads:
            await receive()
        bus.send(Placed(1))
        await respond(send, status)

    return app


def client_of(app: ASGIApp, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, **options), base_url="http://localhost")


class TestUnitOfWorkOfARequest:
    @pytest.mark.parametrize("status", [200, 204, 303, 399])
    async def test_unit_of_work_is_committed_by_a_response_below_400_before_its_start(
        self, bus: Bus, memory: InMemoryBus, sessions: Sessions, status: int
    ) -> None:
        sent_by_then: list[list[int]] = []

        class Watching(Server):
            async def send(self, given: Message) -> None:
                sent_by_then.append(numbers(memory))
                await super().send(given)

        server = Watching(REQUEST)
        await server(DurableMiddleware(placing(bus, status), bus=bus))
        assert sent_by_then == [[1], [1]]
        assert (server.status, sessions.ends) == (status, [["commit", "close"]])

    @pytest.mark.parametrize("status", [400, 404, 500])
    async def test_unit_of_work_is_rolled_back_by_a_response_from_400(
        self, bus: Bus, memory: InMemoryBus, sessions: Sessions, status: int
    ) -> None:
        server = Server(REQUEST)
        await server(DurableMiddleware(placing(bus, status), bus=bus))
        assert (server.status, numbers(memory), sessions.ends) == (status, [], [["rollback", "close"]])

    async def test_unit_of_work_is_rolled_back_by_an_exception_and_the_exception_is_raised(
        self, bus: Bus, memory: InMemoryBus, sessions: Sessions
    ) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            bus.send(Placed(1))
            raise LookupError

        with pytest.raises(LookupError):
            await Server()(DurableMiddleware(app, bus=bus))
        assert (numbers(memory), sessions.ends) == ([], [["rollback", "close"]])

    @pytest.mark.parametrize(
        ("status", "rolls_back", "sent"), [(200, False, [1]), (200, True, []), (303, True, []), (409, False, [])]
    )
    async def test_unit_of_work_ends_by_the_response_of_an_exception_handler(
        self, bus: Bus, status: int, rolls_back: bool, sent: list[int]
    ) -> None:
        app = FastAPI()
        app.add_middleware(DurableMiddleware, bus=bus)

        @app.exception_handler(LookupError)
        async def answer(request: object, error: Exception) -> Response:
            if rolls_back:
                await (await unit_of_work()).session.rollback()
            return Response(status_code=status)

        @app.post("/")
        async def place() -> None:
            bus.send(Placed(1))
            raise LookupError

        async with InMemoryBus(bus) as memory, client_of(app) as client:
            assert (await client.post("/")).status_code == status
            assert numbers(memory) == sent

    async def test_unit_of_work_is_rolled_back_without_a_response(
        self, bus: Bus, sessions: Sessions, memory: object
    ) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            bus.send(Placed(1))

        await Server()(DurableMiddleware(app, bus=bus))
        assert sessions.ends == [["rollback", "close"]]

    async def test_unit_of_work_stays_open_during_early_hints(self, bus: Bus, memory: InMemoryBus) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            bus.send(Placed(1))
            await send({"type": "http.response.early_hint", "links": []})
            assert numbers(memory) == []
            bus.send(Placed(2))
            await respond(send)

        server = Server()
        await server(DurableMiddleware(app, bus=bus))
        assert server.sent[0]["type"] == "http.response.early_hint"
        assert numbers(memory) == [1, 2]

    async def test_unit_of_work_does_not_begin_in_a_request_without_database_access(
        self, bus: Bus, memory: InMemoryBus, sessions: Sessions
    ) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await respond(send)

        server = Server(REQUEST)
        await server(DurableMiddleware(app, bus=bus))
        assert (server.status, sessions.made) == (200, [])

    async def test_unit_of_work_with_a_failing_commit_answers_only_the_error(
        self, bus: Bus, sessions: Sessions
    ) -> None:
        def refusing() -> Any:
            session = sessions()
            session.commit.side_effect = ZeroDivisionError("the database refuses it")
            return session

        server = Server(REQUEST)
        async with InMemoryBus(bus, refusing) as memory:
            with pytest.raises(ZeroDivisionError, match="refuses"):
                await server(DurableMiddleware(placing(bus), bus=bus))
            assert numbers(memory) == []
        assert (server.sent, sessions.ends) == ([], [["commit", "close"]])

    async def test_unit_of_work_is_rolled_back_when_the_request_is_cancelled(
        self, bus: Bus, memory: InMemoryBus, sessions: Sessions
    ) -> None:
        begun = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            bus.send(Placed(1))
            begun.set()
            await asyncio.Event().wait()

        request = asyncio.ensure_future(Server()(DurableMiddleware(app, bus=bus)))
        await begun.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert (numbers(memory), sessions.ends) == ([], [["rollback", "close"]])

    async def test_unit_of_work_is_closed_despite_repeated_cancellation(
        self, bus: Bus, memory: InMemoryBus, sessions: Sessions
    ) -> None:
        """As anyio does: every await in a cancelled scope is cancelled."""
        closed: list[bool] = []

        async def slowly() -> None:
            for _ in range(5):
                await asyncio.sleep(0)
            closed.append(True)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            bus.send(Placed(1))
            sessions.made[0].rollback.side_effect = sessions.made[0].close.side_effect = slowly
            await anyio.sleep_forever()

        with anyio.move_on_after(0.01):
            await Server()(DurableMiddleware(app, bus=bus))
        assert closed

    async def test_unit_of_work_is_shared_by_all_tasks_of_the_request(
        self, bus: Bus, memory: InMemoryBus, sessions: Sessions
    ) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            uow = await unit_of_work()
            uow.send(Placed(1))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.to_thread(bus.send, Placed(2)))
            assert await unit_of_work() is uow
            bus.publish(Shipped(3))
            await respond(send)

        bus.subscribe(Shipped, to=BILLING)
        await Server()(DurableMiddleware(app, bus=bus))
        assert memory.sent_to(BILLING) == [Placed(1), Placed(2), Shipped(3)]
        assert len(sessions.made) == 1

    async def test_unit_of_work_is_not_shared_with_a_concurrent_request(
        self, bus: Bus, memory: InMemoryBus, sessions: Sessions
    ) -> None:
        count = 50
        all_here = asyncio.Barrier(count)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            uow = await unit_of_work()
            await all_here.wait()
            bus.send(Placed(scope["number"]))
            assert await unit_of_work() is uow
            await all_here.wait()
            await respond(send, 200 if scope["number"] % 2 else 409)

        middleware = DurableMiddleware(app, bus=bus)
        await asyncio.gather(*(Server()(middleware, number=number) for number in range(count)))
        assert sorted(numbers(memory)) == list(range(1, count, 2))
        assert sorted(sessions.ends) == [["commit", "close"]] * (count // 2) + [["rollback", "close"]] * (count // 2)

    async def test_unit_of_work_gives_way_to_one_of_the_application(self, bus: Bus, memory: InMemoryBus) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            bus.send(Placed(1))
            async with bus.unit_of_work():
                bus.send(Placed(2))
            with bus.enlist((await unit_of_work()).session):
                bus.send(Placed(3))
            await respond(send, 400)

        await Server()(DurableMiddleware(app, bus=bus))
        assert numbers(memory) == [2]

    async def test_unit_of_work_exists_for_each_of_two_buses(self, bus: Bus, memory: InMemoryBus) -> None:
        other = Bus("audit")

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            bus.send(Placed(1))
            other.send(Placed(2), to=BILLING)
            await respond(send)

        async with InMemoryBus(other) as other_memory:
            await Server()(DurableMiddleware(DurableMiddleware(app, bus=other), bus=bus))
            assert (numbers(memory), numbers(other_memory)) == ([1], [2])

    async def test_unit_of_work_stores_messages_sent_by_a_commit_listener(self, bus: Bus) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            session = (await unit_of_work()).session.sync_session
            event.listen(session, "before_commit", lambda _: bus.send(Placed(2)))
            bus.send(Placed(1))
            await respond(send)

        async with InMemoryBus(bus) as memory:
            await Server()(DurableMiddleware(app, bus=bus))
            assert numbers(memory) == [1, 2]


class TestOwnCommit:
    async def test_own_commit_stores_its_messages_and_begins_another_transaction(self, bus: Bus) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            uow = await unit_of_work()
            bus.send(Placed(1))
            await uow.session.commit()
            bus.send(Placed(2))
            await respond(send, scope["status"])

        middleware = DurableMiddleware(app, bus=bus)
        async with InMemoryBus(bus) as memory:
            await Server()(middleware, status=400)
            assert numbers(memory) == [1]
            await Server()(middleware, status=200)
            assert numbers(memory) == [1, 1, 2]

    async def test_session_closed_by_the_application_stays_closed(self, bus: Bus) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async with (await unit_of_work()).session as session:
                bus.send(Placed(1))
                await session.commit()
            with pytest.raises(NoUnitOfWork, match="the session is closed"):
                bus.send(Placed(2))
            await respond(send)

        server = Server()
        async with InMemoryBus(bus) as memory:
            await server(DurableMiddleware(app, bus=bus))
            assert (server.status, numbers(memory)) == (200, [1])


class TestAfterTheResponse:
    async def test_unit_of_work_is_over_after_the_response_has_started(
        self, bus: Bus, memory: InMemoryBus, sessions: Sessions
    ) -> None:
        refused: list[str] = []

        def refuses(action: Callable[[], object]) -> None:
            with pytest.raises(NoUnitOfWork, match=r"has started.* open another by `async with bus\.unit_of_work") as e:
                action()
            refused.append(str(e.value))

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["begins"]:
                bus.send(Placed(1))
            await send({"type": "http.response.start", "status": 200, "headers": []})
            refuses(lambda: bus.send(Placed(2)))
            await asyncio.to_thread(refuses, lambda: bus.send(Placed(3)))
            with pytest.raises(NoUnitOfWork):
                await unit_of_work()
            async with bus.unit_of_work():
                bus.send(Placed(4))

        for begins in (True, False):
            await Server()(DurableMiddleware(app, bus=bus), begins=begins)
        assert (numbers(memory), len(refused)) == ([1, 4, 4], 4)

    async def test_unit_of_work_kept_past_the_response_cannot_be_used(self, bus: Bus) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            uow = await unit_of_work()
            await respond(send)
            with pytest.raises(NoUnitOfWork, match="this unit of work is over"):
                uow.send(Placed(1))
            with pytest.raises(InvalidRequestError, match="permanently closed"):
                await uow.session.begin()

        async with InMemoryBus(bus) as memory:
            await Server()(DurableMiddleware(app, bus=bus))
            assert numbers(memory) == []

    async def test_another_task_cannot_send_during_the_commit(self, bus: Bus, sessions: Sessions) -> None:
        """It would come too late for this commit, and there is no other."""
        committing, go_on = asyncio.Event(), asyncio.Event()

        async def commit() -> None:
            committing.set()
            await go_on.wait()

        async def late() -> None:
            await committing.wait()
            try:
                with pytest.raises(NoUnitOfWork, match="has started"):
                    bus.send(Placed(2))
            finally:
                go_on.set()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            bus.send(Placed(1))
            sessions.made[0].commit.side_effect = commit
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(late())
                await respond(send)

        async with InMemoryBus(bus, sessions) as memory:
            await Server()(DurableMiddleware(app, bus=bus))
            assert numbers(memory) == [1]


class TestClientDisconnect:
    async def test_client_leaving_before_the_response_has_sent_nothing(self, bus: Bus, memory: InMemoryBus) -> None:
        await Server(REQUEST, GONE)(DurableMiddleware(placing(bus), bus=bus))
        assert numbers(memory) == []

    async def test_leaving_client_is_noticed_when_the_application_does_not_read_the_request(
        self, bus: Bus, memory: InMemoryBus
    ) -> None:
        await Server(REQUEST, GONE)(DurableMiddleware(placing(bus, reads=False), bus=bus))
        assert numbers(memory) == []

    async def test_leaving_client_is_noticed_when_the_application_has_read_the_disconnect(
        self, bus: Bus, memory: InMemoryBus
    ) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            assert await receive() == GONE
            bus.send(Placed(1))
            await respond(send)

        class SaysItOnce(Server):
            async def receive(self) -> Message:
                if not self.unread:
                    await asyncio.Event().wait()
                return self.unread.pop(0)

        await SaysItOnce(GONE)(DurableMiddleware(app, bus=bus))
        assert numbers(memory) == []

    async def test_leaving_client_is_noticed_through_other_middleware(self, bus: Bus, memory: InMemoryBus) -> None:
        async def dispatch(request: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
            return await call_next(request)

        app = BaseHTTPMiddleware(DurableMiddleware(placing(bus), bus=bus), dispatch)
        await Server(REQUEST, GONE)(app, query_string=b"")
        assert numbers(memory) == []
        await Server(REQUEST)(app, query_string=b"")
        assert numbers(memory) == [1]

    async def test_request_without_a_send_does_not_look_for_a_disconnect(self, bus: Bus, memory: object) -> None:
        server = Server(REQUEST, REQUEST)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await respond(send)

        await server(DurableMiddleware(app, bus=bus))
        assert len(server.unread) == 2

    async def test_staying_client_is_not_awaited(self, bus: Bus, memory: InMemoryBus) -> None:
        server = Server(REQUEST)
        await server(DurableMiddleware(placing(bus), bus=bus))
        assert (numbers(memory), server.waiting) == ([1], 0)

    async def test_request_parts_read_during_the_look_are_given_to_the_application(
        self, bus: Bus, memory: InMemoryBus
    ) -> None:
        parts: list[Message] = [
            {"type": "http.request", "body": b"one", "more_body": True},
            {"type": "http.request", "body": b"two", "more_body": True},
            {"type": "http.request", "body": b"three", "more_body": False},
        ]
        received: list[Message] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            for _ in range(scope["reads"]):
                received.append(await receive())
            bus.send(Placed(1))
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while len(received) < 4:
                received.append(await receive())

        for reads in range(4):
            received.clear()
            server = Server(*parts)
            request = asyncio.ensure_future(server(DurableMiddleware(app, bus=bus), reads=reads))
            await server.answered.wait()
            server.put(GONE)
            await request
            assert received == [*parts, GONE]
        assert numbers(memory) == [1] * 4

    async def test_look_for_a_disconnect_reads_at_most_one_part_of_a_body(self, bus: Bus, memory: InMemoryBus) -> None:
        server = Server(*({**REQUEST, "more_body": True} for _ in range(10)))
        await server(DurableMiddleware(placing(bus, reads=False), bus=bus))
        assert (numbers(memory), len(server.unread)) == ([1], 9)


class TestFastAPI:
    @pytest.fixture
    def app(self, bus: Bus) -> FastAPI:
        app = FastAPI()
        app.add_middleware(DurableMiddleware, bus=bus)
        return app

    async def test_endpoints_and_dependencies_are_given_the_unit_of_work(
        self, bus: Bus, memory: InMemoryBus, app: FastAPI, sessions: Sessions
    ) -> None:
        async def order(number: int, uow: Uow) -> None:
            uow.send(Placed(number))

        @app.post("/{number}", status_code=201, dependencies=[Depends(order)])
        async def place(number: int, uow: Uow) -> None:
            if number > 8:
                raise HTTPException(409)
            uow.send(Placed(number + 10))

        async with client_of(app) as client:
            statuses = [(await client.post(f"/{number}")).status_code for number in (7, 8, 9)]
        assert (statuses, numbers(memory), len(sessions.made)) == ([201, 201, 409], [7, 17, 8, 18], 3)

    async def test_sync_endpoints_and_dependencies_send_too(self, bus: Bus, memory: InMemoryBus, app: FastAPI) -> None:
        def order(number: int) -> None:
            bus.send(Placed(number))

        @app.post("/{number}", dependencies=[Depends(order)])
        def place(number: int) -> None:
            bus.send(Placed(number + 1))

        async with client_of(app) as client:
            await client.post("/1")
        assert numbers(memory) == [1, 2]

    async def test_failing_commit_is_answered_with_500(self, bus: Bus, app: FastAPI, sessions: Sessions) -> None:
        @app.post("/")
        async def place(uow: Uow) -> None:
            sessions.made[-1].commit.side_effect = ZeroDivisionError

        async with InMemoryBus(bus, sessions), client_of(app, raise_app_exceptions=False) as client:
            assert (await client.post("/")).status_code == 500

    async def test_background_tasks_and_streams_cannot_use_the_unit_of_work(
        self, bus: Bus, memory: InMemoryBus, app: FastAPI
    ) -> None:
        late: list[str] = []

        def send_late() -> None:
            with pytest.raises(NoUnitOfWork):
                bus.send(Placed(2))
            late.append("background")

        async def stream() -> AsyncIterator[bytes]:
            with pytest.raises(NoUnitOfWork):
                bus.send(Placed(3))
            late.append("stream")
            async with bus.unit_of_work():
                bus.send(Placed(4))
            yield b"."

        @app.post("/")
        async def place(background: BackgroundTasks) -> StreamingResponse:
            bus.send(Placed(1))
            background.add_task(send_late)
            return StreamingResponse(stream(), background=background)

        async with client_of(app) as client:
            await client.post("/")
        assert (late, numbers(memory)) == (["stream", "background"], [1, 4])

    async def test_the_dependency_can_be_overridden(self, app: FastAPI) -> None:
        stand_in = Mock(UnitOfWork)

        @app.post("/")
        async def place(uow: Uow) -> None:
            uow.send(Placed(1))

        app.dependency_overrides[unit_of_work] = lambda: stand_in
        async with client_of(app) as client:
            await client.post("/")
        stand_in.send.assert_called_once_with(Placed(1))

    async def test_missing_middleware_is_named_in_the_error(self) -> None:
        app = FastAPI()

        @app.post("/")
        async def place(uow: Uow) -> None: ...

        async with client_of(app) as client:
            with pytest.raises(NoUnitOfWork, match=r"app\.add_middleware\(DurableMiddleware, bus=bus\)"):
                await client.post("/")

    async def test_websockets_pass_through_and_use_a_unit_of_work_of_their_own(
        self, bus: Bus, memory: InMemoryBus, app: FastAPI
    ) -> None:
        refused: list[str] = []

        @app.websocket("/")
        async def talk(websocket: WebSocket) -> None:
            await websocket.accept()
            for action in (unit_of_work, lambda: asyncio.to_thread(bus.send, Placed(1))):
                with pytest.raises(NoUnitOfWork) as error:
                    await action()
                refused.append(str(error.value))
            async with bus.unit_of_work():
                bus.send(Placed(2))

        server = Server({"type": "websocket.connect"})
        await server(app, type="websocket", query_string=b"")
        assert ([sent["type"] for sent in server.sent], numbers(memory)) == (["websocket.accept"], [2])
        assert "in a WebSocket" in refused[0]
        assert "async with bus.unit_of_work()" in refused[1]

    async def test_building_an_application_opens_no_connection(self, bus: Bus, app: FastAPI) -> None:
        """Workers are forked after it was imported."""
        tasks = asyncio.all_tasks()
        app.build_middleware_stack()
        opened = (bus.runtime._database, bus.runtime.sessions._made, bus.runtime.sessions._made_sync)
        assert opened == (None, None, None)
        assert asyncio.all_tasks() == tasks


class TestReceiving:
    """`bus.asgi()`: the endpoints themselves are tested with the HTTP transport."""

    @pytest.fixture
    def seen(self, bus: Bus) -> list[int]:
        seen: list[int] = []

        @bus.handles(Shipped)
        async def handle(shipped: Shipped) -> None:
            seen.append(shipped.number)

        return seen

    async def test_message_posted_to_a_bus_in_memory_waits_for_drain(
        self, bus: Bus, memory: InMemoryBus, seen: list[int]
    ) -> None:
        app = FastAPI()
        app.add_middleware(DurableMiddleware, bus=bus)
        app.mount("/durable", bus.asgi(allow_local=True))
        async with client_of(app) as client:
            for _ in range(2):
                posted = await client.post(
                    "/durable/messages/asgi.shipped", json={"number": 1}, headers={"Idempotency-Key": "one"}
                )
                assert posted.is_success, posted.text
            assert (await client.get("/durable/health/ready")).status_code == 204
        assert seen == []
        await memory.drain()
        assert (seen, memory.duplicates) == ([1], 1)

    async def test_unstorable_delivery_becomes_a_dead_letter(self, bus: Bus, memory: InMemoryBus) -> None:
        receiver = bus.runtime.receiver
        assert receiver is not None
        await receiver.reject("shop", b"no envelope", "it has no id", {"from": "somewhere"})
        (letter,) = memory.dead_letters
        assert (letter.message, letter.reason) == (None, "it has no id")
        assert (letter.envelope.body, letter.envelope.headers) == (b"no envelope", {"from": "somewhere"})

    async def test_name_of_the_app_scopes_the_keys_of_repeats(
        self, bus: Bus, memory: InMemoryBus, seen: list[int]
    ) -> None:
        for app in (
            bus.asgi(allow_local=True),
            bus.asgi("shop", allow_local=True),
            bus.asgi("other", allow_local=True),
        ):
            async with client_of(app) as client:
                key = {"Idempotency-Key": "2f1d4f0e-6c44-4c1e-9c0f-8a5c2b9d7e61"}
                await client.post("/messages/asgi.shipped", json={"number": 1}, headers=key)
        await memory.drain()
        assert (seen, memory.duplicates) == ([1, 1], 1)

    async def test_one_app_follows_the_bus_from_runtime_to_runtime(self, bus: Bus, seen: list[int]) -> None:
        async with client_of(bus.asgi(allow_local=True)) as client:

            async def post() -> int:
                return (await client.post("/messages/asgi.shipped", json={"number": 1})).status_code

            assert await post() == 503
            for _ in range(2):
                async with InMemoryBus(bus) as memory:
                    assert await post() == 202
                    await memory.drain()
                assert await post() == 503
            assert seen == [1, 1]
            assert (await client.get("/health/live")).status_code == 204
            assert (await client.get("/health/ready")).status_code == 503
