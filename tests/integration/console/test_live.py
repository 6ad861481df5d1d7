"""The flow of messages on the pages, and the overview that follows it, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
import pytest
import pytest_asyncio
import uvicorn
from starlette.applications import Starlette

from durable import Bus
from durable.console import Person, console_app
from durable.console import pages as console_pages
from durable.testing import eventually
from tests.integration.console.test_console import Ordered
from tests.integration.console.visiting import OPERATOR, TOKENS, VIEWER, submit
from tests.support.tables import Tables


@pytest_asyncio.fixture
async def bus(tables: Tables) -> AsyncIterator[Bus]:
    bus = Bus("shop", tables.url, poll_interval="50ms")
    bus.handles(Ordered, concurrency=3, max_batch=5)(handle)
    yield bus
    await bus.runtime.stop()


async def handle(ordered: Ordered) -> None: ...


@asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    """Serve the app on a port of its own, and give its address."""
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started, within=60, what="the console serves")
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


def client(address: str, token: str = OPERATOR) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=address, headers={"authorization": f"Bearer {token}"}, timeout=60)


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each event of a stream."""
    lines: list[str] = []
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            lines.append(line.removeprefix("data: "))
        elif lines:
            yield "\n".join(lines)
            lines = []


class TestFlow:
    async def test_pages_show_the_flow(self, bus: Bus, tables: Tables) -> None:
        async with bus:
            async with bus.unit_of_work() as uow:
                for number in range(30):
                    uow.send(Ordered(number))
            await eventually(lambda: tables.count("envelope_history") == 30, within=60, what="all are handled")
        async with served(console_app(bus, tokens=TOKENS)) as address, client(address) as browser:
            overview = (await browser.get("/")).text
            assert 'aria-label="Messages a minute. handled: last' in overview
            assert overview.count("<svg") == 3
            page = (await browser.get("/handlers")).text
            assert ("3 at once" in page, "up to 5 in a transaction" in page, " ms</td>" in page) == (True, True, True)

    async def test_page_shows_groups_by_the_setting(self, tables: Tables) -> None:
        bus = Bus("shop", tables.url, max_batch="auto")

        @bus.handles(Ordered)
        async def handle(ordered: Ordered) -> None: ...

        async with bus:
            async with bus.unit_of_work() as uow:
                uow.send(Ordered(1))
            await eventually(lambda: tables.count("envelope_history") == 1, within=60, what="it is handled")
        async with served(console_app(bus, tokens=TOKENS)) as address, client(address) as browser:
            assert "some in a transaction" in (await browser.get("/handlers")).text
        await bus.runtime.stop()

    async def test_key_is_resumed_and_unparked(self, bus: Bus, tables: Tables) -> None:
        paused, parked = '<button class="quiet" aria-label="Resume k"', '<button class="quiet" aria-label="Unpark k"'
        for is_parked in (False, True):
            tables.execute(
                "INSERT INTO durable.circuits (kind, key, reason, actor, parked) VALUES ('key', 'k', 'x', 'ada', %s)",
                is_parked,
            )
        app = console_app(bus, tokens=TOKENS)
        async with served(app) as address, client(address) as browser:
            for buttons in ((True, True), (False, True)):
                text = (await browser.get("/handlers")).text
                assert (paused in text, parked in text) == buttons
                form = {"kind": "key", "key": "k"}
                assert (await submit(browser, "/handlers", "/circuits/resume", **form)).status_code == 303
            assert "No key is parked" in (await browser.get("/handlers")).text
        async with served(app) as address, client(address, VIEWER) as browser:
            assert '<button class="quiet" aria-label' not in (await browser.get("/handlers")).text


class TestStream:
    async def test_stream_follows_changes(self, bus: Bus, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(console_pages, "_LIVE_SECONDS", 0.05)
        app = console_app(bus, tokens=TOKENS)
        async with served(app) as address, client(address) as browser, browser.stream("GET", "/live") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            told = events(response)
            assert "All is well" in await anext(told)
            tables.execute(
                "INSERT INTO durable.circuits (kind, key, reason, actor) "
                "VALUES ('destination', 'tcp://stock:2302', 'line one\nline two', 'ada')"
            )
            async with asyncio.timeout(60):
                async for part in told:
                    if "tcp://stock:2302" in part:
                        break

    async def test_stream_ends_with_the_login(self, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(console_pages, "_LIVE_SECONDS", 0.05)
        people = dict(TOKENS)
        app = console_app(bus, authorize=lambda request: _person(people, request.headers["authorization"]))
        async with served(app) as address, client(address) as browser, browser.stream("GET", "/live") as response:
            told = events(response)
            await anext(told)
            people.clear()
            async with asyncio.timeout(60):
                assert [part async for part in told][1:] == []  # one may have been on its way

    async def test_stream_ends_after_its_time(self, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(console_pages, "_LIVE_SECONDS", 0.05)
        monkeypatch.setattr(console_pages, "_STREAM_SECONDS", 0.3)
        app = console_app(bus, tokens=TOKENS)
        async with served(app) as address, client(address) as browser, browser.stream("GET", "/live") as response:
            async with asyncio.timeout(60):
                assert [part async for part in events(response)] != []

    async def test_number_of_streams_is_bounded(self, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(console_pages, "_MOST_STREAMS", 1)
        monkeypatch.setattr(console_pages, "_LIVE_SECONDS", 0.05)
        async with served(console_app(bus, tokens=TOKENS)) as address, client(address) as browser:
            async with browser.stream("GET", "/live") as first:
                await anext(events(first))
                assert (await browser.get("/live")).status_code == 503

            async def is_free() -> bool:
                async with browser.stream("GET", "/live") as again:
                    return again.status_code == 200

            await eventually(is_free, what="the stream that was left is over")

    async def test_stranger_gets_no_stream(self, bus: Bus) -> None:
        async with served(console_app(bus, tokens=TOKENS)) as address, client(address, "nobody") as browser:
            assert (await browser.get("/live")).status_code == 401

    async def test_stream_goes_on_when_the_database_is_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(console_pages, "_LIVE_SECONDS", 0.05)
        away = Bus("away", "postgresql://nobody@127.0.0.1:1/none")
        app = console_app(away, tokens=TOKENS)
        async with served(app) as address, client(address) as browser, browser.stream("GET", "/live") as response:
            told = events(response)
            assert "The database does not answer" in await anext(told)
            assert "The database does not answer" in await anext(told)
        await away.runtime.stop()

    async def test_open_streams_share_one_read(self, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(console_pages, "_LIVE_SECONDS", 0.05)
        reads = 0
        transaction = bus.runtime.database.transaction

        async def counting(*args: object, **options: object) -> object:
            nonlocal reads
            reads += 1
            return await transaction(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(bus.runtime.database, "transaction", counting)
        app = console_app(bus, tokens=TOKENS)
        async with served(app) as address, client(address) as browser:

            async def follow() -> None:
                async with browser.stream("GET", "/live") as response:
                    told = events(response)
                    for _ in range(8):
                        await anext(told)

            await asyncio.gather(*(follow() for _ in range(10)))
        assert reads <= 8  # one a second, where 80 parts were shown


async def _person(people: Mapping[str, Person], header: str) -> Person | None:
    return people.get(header.removeprefix("Bearer "))
