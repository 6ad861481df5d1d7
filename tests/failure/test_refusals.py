"""A database that refuses new connections, in each place that meets it: an outage as any other, and no fault."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.applications import Starlette
from starlette.routing import Mount

from durable import Bus, message
from durable.console import console_app
from durable.embedded.ports import free_port
from durable.envelope import ANY_NODE, new_id
from durable.errors import StorageUnavailable
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK
from tests.integration.console.visiting import TOKENS, VIEWER, bearer
from tests.support.refusals import REFUSALS, refusing, with_parameters
from tests.support.roles import runtime_role

WAITED_FOR = [each for each in REFUSALS if each != "without a login"]  # a start waits for no right to log in
SHORT = timedelta(seconds=0.6)


@message("refusals.paid")
@dataclass
class Paid:
    number: int


@pytest.fixture(params=["asyncpg", "psycopg"])
def role_url(request: pytest.FixtureRequest, database_url: str) -> Iterator[str]:
    """The URL of the role of a node, for a server that can be written to where one is asked for."""
    with runtime_role(database_url) as url:
        yield url.replace("postgresql://", f"postgresql+{request.param}://", 1)


def asking(url: str, refusal: str) -> str:
    return with_parameters(url, dict(REFUSALS[refusal].parameters))


def faults(records: list[logging.LogRecord]) -> list[str]:
    """What the log calls a fault, besides the end of a membership."""
    told = [record.getMessage() for record in records if record.levelno >= logging.ERROR and record.name == "durable"]
    return [each for each in told if "is no member any more" not in each]


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_console_tells_of_a_refusal_and_looks_again(
    role_url: str, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    bus = Bus("shop", asking(role_url, refusal))
    stock = Bus("stock", "postgresql://nobody@127.0.0.1:1/none")
    app = Starlette(routes=[Mount("/console", console_app(bus, stock, tokens=TOKENS))])
    async with bearer(app, VIEWER) as client:
        for is_checked in (False, True):
            with refusing(role_url, refusal):
                for page in ("/shop/", "/shop/handlers", "/shop/dead-letters"):
                    response = await client.get(page)
                    assert (response.status_code, "database" in response.text) == (503, True), (page, is_checked)
                response = await client.get("/shop/services")
                assert (response.status_code, ">shop<" in response.text, ">stock<" in response.text) == (
                    200,
                    True,
                    True,
                )
            for page in ("/shop/", "/shop/handlers", "/shop/services"):
                assert (await client.get(page)).status_code == 200, (page, is_checked)
    await bus.runtime.stop()
    await stock.runtime.stop()
    assert not faults(caplog.records)


@pytest.mark.parametrize("mode", ["full", "send-only"])
@pytest.mark.parametrize("refusal", WAITED_FOR)
async def test_start_waits_for_the_end_of_a_refusal(
    role_url: str, refusal: str, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bus = Bus("shop", asking(role_url, refusal), mode=mode, start_timeout=timedelta(minutes=1))
    with refusing(role_url, refusal):
        starting = asyncio.create_task(bus.__aenter__())
        await eventually(lambda: "waiting for the database" in caplog.text)
        assert not starting.done()
    async with asyncio.timeout(30):
        await starting
    await bus.__aexit__(None, None, None)
    assert not faults(caplog.records)


@pytest.mark.parametrize("mode", ["full", "send-only"])
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_bus_raises_a_refusal_as_an_outage(role_url: str, refusal: str, mode: Any) -> None:
    said = REFUSALS[refusal].said
    bus = Bus("shop", asking(role_url, refusal), mode=mode, start_timeout=SHORT)
    with refusing(role_url, refusal), pytest.raises(StorageUnavailable, match=said):
        await bus.__aenter__()


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_calls_of_a_bus_raise_a_refusal_as_an_outage(role_url: str, refusal: str) -> None:
    said = REFUSALS[refusal].said
    async with Bus("shop", asking(role_url, refusal), mode="send-only") as bus:
        with refusing(role_url, refusal):
            for expected in (
                "the database cannot be used",
                said,
            ):  # first, one of the pool has ended
                with pytest.raises(StorageUnavailable, match=expected):
                    await bus.cancel(new_id())
        assert not await bus.cancel(new_id())


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_node_works_again_after_a_refusal(role_url: str, refusal: str, caplog: pytest.LogCaptureFixture) -> None:
    bus = Bus("shop", asking(role_url, refusal), **QUICK)
    seen: list[int] = []

    @bus.handles(Paid)
    async def handle(paid: Paid, session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        seen.append(paid.number)

    async def send(number: int) -> None:
        async with bus.unit_of_work() as uow:
            uow.send(Paid(number))

    async with bus:
        await send(1)
        await eventually(lambda: 1 in seen)  # its COMMIT may be refused, upon which it is handled again
        with refusing(role_url, refusal):
            await eventually(lambda: "no node now" in caplog.text)
        await eventually(joined(bus))
        await send(2)
        await eventually(lambda: 2 in seen)
    assert not faults(caplog.records)


def joined(bus: Bus) -> Callable[[], bool]:
    return lambda: bus.runtime.node_id != ANY_NODE


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_receiver_answers_a_refusal_as_an_outage(
    role_url: str, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its node is a member all the while."""
    address = f"http://127.0.0.1:{free_port()}"
    bus = Bus("shop", asking(role_url, refusal), **QUICK)
    bus.listen(address)
    seen: list[int] = []

    @bus.handles(Paid)
    async def handle(paid: Paid, session: AsyncSession) -> None:
        seen.append(paid.number)

    async with bus, httpx.AsyncClient(timeout=20) as client:
        with refusing(role_url, refusal, spared="% node%"):
            for _ in range(3):
                answer = await client.post(
                    f"{address}/messages/refusals.paid", json={"number": 1}, headers={"Idempotency-Key": "1"}
                )
                assert answer.status_code == 503, answer.text
        await client.post(f"{address}/messages/refusals.paid", json={"number": 1}, headers={"Idempotency-Key": "1"})
        await eventually(lambda: seen == [1])
    assert not faults(caplog.records)
