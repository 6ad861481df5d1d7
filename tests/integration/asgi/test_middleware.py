"""The middleware and the mounted endpoint on a real server and a real Postgres."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Annotated, Any

import anyio
import httpx
import msgspec
import psutil
import pytest
from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, DurableError, UnitOfWork, message
from durable.asgi import DurableMiddleware, unit_of_work
from durable.embedded import Embedded
from durable.outbox import sessions
from durable.outbox.outbox import Outbox
from durable.storage.engines import make_async_engine
from durable.testing import eventually
from tests.support.tables import Tables, shared_tables
from tests.support.web import served

ADD_NOTE = text("INSERT INTO notes (number) VALUES (:number)")
QUICK: dict[str, Any] = {"poll_interval": timedelta(milliseconds=50), "delete_linger": timedelta(milliseconds=2)}
POOL = 3

Uow = Annotated[UnitOfWork, Depends(unit_of_work)]


@message("asgi-integration.noted")
class Noted(msgspec.Struct):
    number: int


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        tables.execute("CREATE TABLE notes (number integer UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        tables.execute("CREATE TABLE effects (number integer)")
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    database.execute("TRUNCATE notes, effects")
    return database


@pytest.fixture
def bus(tables: Tables) -> Bus:
    bus = Bus("shop", tables.url, pool_size=POOL, **QUICK)
    bus.handles(Noted)(record)
    return bus


async def record(noted: Noted, session: AsyncSession) -> None:
    await session.execute(text("INSERT INTO effects (number) VALUES (:number)"), {"number": noted.number})


@pytest.fixture
def app(bus: Bus) -> FastAPI:
    """Writes a note and sends a message, and answers with the status that it is asked for."""
    app = FastAPI()
    app.add_middleware(DurableMiddleware, bus=bus)
    app.mount("/durable", bus.asgi(allow_local=True))

    @app.post("/notes/{number}")
    async def note(number: int, uow: Uow, status: int = 200, seconds: float = 0) -> None:
        await uow.session.execute(ADD_NOTE, {"number": number})
        bus.send(Noted(number))
        if seconds:
            await uow.session.execute(text("SELECT pg_sleep(:seconds)"), {"seconds": seconds})
        if status != 200:
            raise HTTPException(status)

    return app


def effects(tables: Tables) -> list[int]:
    return tables.rows("SELECT number FROM effects ORDER BY number")


def notes(tables: Tables) -> list[int]:
    return tables.rows("SELECT number FROM notes ORDER BY number")


async def everything_is_handled(tables: Tables) -> None:
    """Each note that was committed has its effect, and there is no other."""
    await eventually(lambda: effects(tables) == notes(tables), within=20, what="an effect of each note")


async def the_pool_is_whole(bus: Bus, tables: Tables) -> None:
    """No connection is lent, and none has a transaction open."""
    pool: Any = bus.runtime.sessions.engine.pool
    await eventually(lambda: pool.checkedout() == 0, within=20, what="a pool with all its connections")
    idle = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in trans%%'"
    await eventually(lambda: tables.one(idle) == 0, within=20, what="no open transaction")


class TestRequests:
    async def test_unit_of_work_of_a_2xx_alone_is_committed_with_its_message(
        self, app: FastAPI, bus: Bus, tables: Tables
    ) -> None:
        async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
            for number, status in enumerate([200, 400, 200, 500]):
                response = await client.post(f"/notes/{number}", params={"status": status})
                assert response.status_code == status
                assert notes(tables) == [even for even in (0, 2) if even <= number]
            await everything_is_handled(tables)
            await the_pool_is_whole(bus, tables)

    async def test_commit_refused_by_the_database_is_a_500_without_effects(
        self, app: FastAPI, bus: Bus, tables: Tables
    ) -> None:
        """A deferred constraint: nobody knows before the commit."""
        async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
            assert [(await client.post("/notes/1")).status_code for _ in range(2)] == [200, 500]
            assert (await client.post("/notes/2")).status_code == 200
            await everything_is_handled(tables)
            assert effects(tables) == [1, 2]
            await the_pool_is_whole(bus, tables)

    @pytest.mark.parametrize(("status", "answer"), [(200, 500), (404, 404)])
    async def test_connection_dying_in_a_request_does_not_fail_the_next(
        self, app: FastAPI, bus: Bus, tables: Tables, status: int, answer: int
    ) -> None:
        @app.post("/die")
        async def die(uow: Uow) -> None:
            await uow.session.execute(ADD_NOTE, {"number": 1})
            bus.send(Noted(1))
            with pytest.raises(DBAPIError):
                await uow.session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
            if status != 200:
                raise HTTPException(status)

        async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
            for _ in range(2 * POOL):
                assert (await client.post("/die")).status_code == answer
            assert (await client.post("/notes/2")).status_code == 200
            await everything_is_handled(tables)
            assert effects(tables) == [2]

    async def test_client_leaving_before_the_response_has_written_nothing(
        self, app: FastAPI, bus: Bus, tables: Tables
    ) -> None:
        begun, left, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        @app.post("/slow")
        async def slow(uow: Uow) -> None:
            await uow.session.execute(ADD_NOTE, {"number": 1})
            bus.send(Noted(1))
            begun.set()
            await left.wait()

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)
            ended.set()

        async with served(watched) as url:
            _, writer = await connect(url, "/slow")
            await begun.wait()
            writer.transport.abort()
            await eventually(lambda: connections_of(url) == 0, what="a server that sees the client leave")
            left.set()
            await ended.wait()
            assert notes(tables) == []
            await the_pool_is_whole(bus, tables)

    async def test_clients_leaving_at_any_time_cost_no_connection(self, app: FastAPI, bus: Bus, tables: Tables) -> None:
        async with served(app) as url:

            async def leave_after(number: int) -> None:
                _, writer = await connect(url, f"/notes/{number}?seconds=0.004")
                await asyncio.sleep(number % 40 / 1_000)
                writer.transport.abort()

            for first in range(0, 200, 50):
                await asyncio.gather(*(leave_after(number) for number in range(first, first + 50)))
            await the_pool_is_whole(bus, tables)
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.post("/notes/1000")).status_code == 200
            await everything_is_handled(tables)
            assert 1000 in effects(tables)

    async def test_requests_cancelled_at_any_time_cost_no_connection(
        self, app: FastAPI, bus: Bus, tables: Tables
    ) -> None:
        """By anyio, which cancels every await until the scope is left."""

        async def limited(scope: Any, receive: Any, send: Any) -> None:
            with anyio.move_on_after(float(dict(scope.get("headers", ())).get(b"x-limit", b"inf"))):
                await app(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body"})

        statuses: list[int] = []
        async with served(limited) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:

            async def post(number: int) -> None:
                headers = {"X-Limit": str(number % 40 / 1_000)}
                response = await client.post(f"/notes/{number}?seconds=0.004", headers=headers)
                statuses.append(response.status_code)

            for first in range(0, 200, 50):
                await asyncio.gather(*(post(number) for number in range(first, first + 50)))
            assert statuses.count(503) > 20
            await the_pool_is_whole(bus, tables)
            assert (await client.post("/notes/1000")).status_code == 200
            await everything_is_handled(tables)
            assert 1000 in effects(tables)

    async def test_a_streaming_body_cannot_go_on_with_the_session_and_takes_no_connection(
        self, app: FastAPI, bus: Bus, tables: Tables
    ) -> None:
        async def body(session: AsyncSession) -> AsyncIterator[str]:
            with pytest.raises(InvalidRequestError, match="permanently closed"):
                await session.execute(ADD_NOTE, {"number": 2})
            yield "refused"

        @app.post("/stream")
        async def stream(uow: Uow) -> StreamingResponse:
            await uow.session.execute(ADD_NOTE, {"number": 1})
            return StreamingResponse(body(uow.session))

        async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
            assert (await client.post("/stream")).text == "refused"
            assert notes(tables) == [1]
            await the_pool_is_whole(bus, tables)

    @pytest.mark.parametrize("slow", [(Bus, "unit_of_work"), (Outbox, "_begin")], ids=lambda slow: slow[1])
    async def test_threads_of_one_request_send_in_its_unit_of_work(
        self, app: FastAPI, bus: Bus, tables: Tables, monkeypatch: pytest.MonkeyPatch, slow: tuple[type, str]
    ) -> None:
        original = getattr(*slow)

        def slowly(self: Any) -> Any:
            time.sleep(0.05)
            return original(self)

        @app.post("/threads")
        async def note() -> None:
            await asyncio.gather(*(asyncio.to_thread(bus.send, Noted(number)) for number in range(4)))

        monkeypatch.setattr(*slow, slowly)
        async with served(app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
            assert (await client.post("/threads")).status_code == 200
            await eventually(lambda: effects(tables) == [0, 1, 2, 3], within=20)

    async def test_concurrent_first_sync_endpoints_share_one_engine(
        self, app: FastAPI, bus: Bus, tables: Tables, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Any] = []
        all_here = threading.Barrier(4)

        def make_slowly(*arguments: Any, **options: Any) -> Any:
            time.sleep(0.05)
            made.append(make_async_engine(*arguments, **options))
            return made[-1]

        @app.post("/sync/{number}")
        def note(number: int) -> None:
            all_here.wait(20)
            bus.send(Noted(number))

        monkeypatch.setattr(sessions, "make_async_engine", make_slowly)
        async with served(app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
            responses = await asyncio.gather(*(client.post(f"/sync/{number}") for number in range(4)))
            assert {response.status_code for response in responses} == {200}
            await eventually(lambda: effects(tables) == [0, 1, 2, 3], within=20)
        assert len(made) == 1


class TestLifespan:
    async def test_the_bus_runs_between_the_startup_and_the_shutdown_of_the_application(
        self, bus: Bus, tables: Tables
    ) -> None:
        """Units of work work in both, and leave nothing open: what the last one sends is left to the next process."""
        registered: list[int] = []

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            registered.append(tables.count("nodes"))
            async with bus.unit_of_work():
                bus.send(Noted(1))
            yield
            registered.append(tables.count("nodes"))
            async with bus.unit_of_work():
                bus.send(Noted(2))

        app = FastAPI(lifespan=lifespan)
        app.add_middleware(DurableMiddleware, bus=bus)
        async with served(app):
            await eventually(lambda: effects(tables) == [1], within=20)
            assert tables.count("nodes") == 1
        assert registered == [0, 0]
        assert tables.rows("SELECT owner_id FROM durable.incoming_envelopes") == [0]
        async with served(app):
            await eventually(lambda: effects(tables) == [1, 1, 2], within=20)

    async def test_unmigrated_database_stops_the_server_with_the_command_to_run(self, tables: Tables) -> None:
        bus = Bus("shop", tables.url, db_schema="elsewhere")
        assert "durable-agent migrate" in await startup_failure(bus)

    async def test_unreachable_database_stops_the_server(self) -> None:
        bus = Bus("shop", "postgresql://nobody@127.0.0.1:1/nothing")
        assert "the bus cannot start: the database cannot be used" in await startup_failure(bus)

    async def test_running_bus_is_not_started_again_and_stays_usable(self, bus: Bus, tables: Tables) -> None:
        async with bus:
            assert "the bus runs already" in await startup_failure(bus)
            assert tables.count("nodes") == 1
            async with bus.unit_of_work():
                bus.send(Noted(1))
            await eventually(lambda: effects(tables) == [1], within=20)


class TestReceiving:
    async def test_a_peer_sends_to_the_mounted_app(self, app: FastAPI, tables: Tables) -> None:
        async with served(app) as url:
            sender = Bus("orders", tables.url, **QUICK)
            sender.route(Noted, to=f"{url}/durable")
            async with sender:
                for number in range(30):
                    async with sender.unit_of_work():
                        sender.send(Noted(number))
                await eventually(lambda: effects(tables) == list(range(30)), within=20)
        assert tables.count("outgoing_envelopes") == 0

    async def test_send_only_process_stores_arrivals_for_other_nodes(self, bus: Bus, tables: Tables) -> None:
        web = Bus("shop", tables.url, mode="send-only")
        web.handles(Noted)(record)
        app = FastAPI()
        app.add_middleware(DurableMiddleware, bus=web)
        app.mount("/durable", web.asgi(allow_local=True))
        async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/durable/health/ready")).status_code == 204
            posted = await client.post("/durable/messages/asgi-integration.noted", json={"number": 1})
            assert posted.status_code == 202
            assert tables.rows("SELECT owner_id FROM durable.incoming_envelopes") == [0]
            assert tables.count("nodes") == 0
            async with bus:
                await eventually(lambda: effects(tables) == [1], within=20)


async def connect(url: str, target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection over which this POST was sent, and nothing read."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n".encode())
    return reader, writer


def connections_of(url: str) -> int:
    """How many the server has."""
    port = int(url.rpartition(":")[2])
    mine = psutil.Process().net_connections("tcp4")
    return sum(each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in mine)


async def startup_failure(bus: Bus) -> str:
    """What a server is told when the application starts with this bus."""
    told: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(given: Any) -> None:
        told.append(given)

    with pytest.raises(DurableError):
        await DurableMiddleware(FastAPI(), bus=bus)({"type": "lifespan", "state": {}}, receive, send)
    (answer,) = told
    assert answer["type"] == "lifespan.startup.failed"
    return str(answer["message"])
