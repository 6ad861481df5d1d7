"""docs/examples, as its README says to run them: two services, two workers each, on a Postgres each; and what the page
on middleware shows."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from durable import InvalidMessage
from durable.embedded.ports import free_port
from durable.testing import InMemoryBus
from tests.failure.waiting import eventually
from tests.support.web import EXAMPLES, WebService, environment_of, serving


class Shop:
    """The two services, each with its database and a port for its life."""

    def __init__(self, make_database: Callable[[str], str], folder: Path) -> None:
        self._folder = folder
        self._databases = {name: make_database(name) for name in ("orders", "billing")}
        self._ports = {name: free_port() for name in self._databases}
        for name, url in self._databases.items():
            with psycopg.connect(url) as conn:
                conn.execute((EXAMPLES / f"{name}.sql").read_bytes())

    def environment(self, name: str) -> dict[str, str]:
        urls = {f"{other.upper()}_URL": f"http://127.0.0.1:{port}/durable" for other, port in self._ports.items()}
        return {"DURABLE_DATABASE_URL": self._databases[name], **urls}

    @contextlib.contextmanager
    def serving(self, name: str, **environment: str) -> Iterator[WebService]:
        environment = {**self.environment(name), **environment}
        with serving(f"{name}:app", EXAMPLES, self._ports[name], self._folder / f"{name}.log", environment) as web:
            yield web

    @contextlib.contextmanager
    def agent(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """`durable-agent run`, killed at the end if it still runs."""
        command = [sys.executable, "-m", "durable.cli", "run", f"{name}:bus"]
        with (
            (self._folder / f"{name}-agent.log").open("wb") as log,
            subprocess.Popen[bytes](
                command, cwd=EXAMPLES, env=environment_of(self.environment(name)), stdout=log, stderr=log
            ) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    def migrate(self, name: str) -> str:
        command = [sys.executable, "-m", "durable.cli", "migrate", f"{name}:bus"]
        environment = environment_of(self.environment(name))
        return subprocess.run(command, cwd=EXAMPLES, env=environment, check=True, capture_output=True, text=True).stdout

    def rows(self, name: str, query: str) -> list[Any]:
        with psycopg.connect(self._databases[name]) as conn:
            return conn.execute(query.encode()).fetchall()

    def invoiced(self) -> Counter[str]:
        """How many invoices each order has."""
        return Counter(str(order_id) for (order_id,) in self.rows("billing", "SELECT order_id FROM invoices"))

    def unanswered(self) -> int:
        return int(self.rows("orders", "SELECT count(*) FROM orders WHERE invoice IS NULL")[0][0])

    def left_over(self) -> list[Any]:
        """What is still owned or registered, in both services."""
        query = (
            "SELECT 'outgoing', id::text, owner_id FROM durable.outgoing_envelopes UNION ALL "
            "SELECT 'incoming', id::text, owner_id FROM durable.incoming_envelopes UNION ALL "
            "SELECT 'node', description, node_id FROM durable.nodes"
        )
        return [(name, *row) for name in self._databases for row in self.rows(name, query)]


@pytest.fixture
def shop(make_database: Callable[[str], str], tmp_path: Path) -> Shop:
    return Shop(make_database, tmp_path)


async def place(client: httpx.AsyncClient, amount: int, placed: set[str]) -> None:
    """An order; noted when it is known that it was taken."""
    with contextlib.suppress(httpx.TransportError):
        response = await client.post("/orders", json={"amount": amount})
        if response.is_success:
            placed.add(response.json()["id"])


async def place_many(url: str, count: int, placed: set[str], at_once: int = 10) -> None:
    """So many orders from so many clients."""
    amounts = iter(range(1, count + 1))

    async def client_places(client: httpx.AsyncClient) -> None:
        for amount in amounts:
            await place(client, amount, placed)

    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=20) as client, asyncio.TaskGroup() as tasks:
        for number in range(at_once):
            tasks.create_task(client_places(client), name=f"client {number}")


async def everything_is_invoiced(shop: Shop, placed: set[str]) -> None:
    """Every order that was taken has one invoice, and knows its number; and there is no other invoice."""

    def settled() -> bool:
        invoiced = shop.invoiced()
        assert set(invoiced) >= placed, f"{len(placed - set(invoiced))} of {len(placed)} orders have no invoice"
        assert not shop.unanswered(), f"{shop.unanswered()} orders do not know their invoice"
        return True

    await eventually(settled, within=60)
    invoiced = shop.invoiced()
    assert max(invoiced.values()) == 1
    assert set(invoiced) == {str(order_id) for (order_id,) in shop.rows("orders", "SELECT id FROM orders")}


async def test_each_order_gets_one_invoice_when_workers_are_killed(shop: Shop) -> None:
    placed: set[str] = set()
    with shop.serving("orders") as orders, shop.serving("billing") as billing:
        await asyncio.gather(orders.ready(), billing.ready())
        traffic = asyncio.create_task(place_many(orders.url, 200, placed))
        await eventually(lambda: len(placed) > 30, within=30)
        billing.kill_a_worker()
        await eventually(lambda: len(placed) > 80, within=30)
        orders.kill_a_worker()
        await traffic
        assert len(placed) > 150
        await everything_is_invoiced(shop, placed)
        await asyncio.gather(orders.ready(), billing.ready())

        async with httpx.AsyncClient() as client:
            state = (await client.get(f"{orders.url}/orders/{next(iter(placed))}")).json()
            assert state["invoice"] is not None
            assert (await client.get(f"{orders.url}/orders/{state['id'][::-1]}")).status_code in (404, 422)
            assert (await client.post(f"{orders.url}/orders", json={"amount": 0})).status_code == 422
            assert (await client.get(f"{billing.url}/turnover")).json() > 0
        orders.stop()
        billing.stop()
    assert shop.left_over() == []


async def test_send_only_web_processes_leave_the_work_to_an_agent(shop: Shop) -> None:
    """Also what arrives by the web processes' own door."""
    placed: set[str] = set()
    assert "is up to date" in shop.migrate("orders")
    with shop.serving("orders", SEND_ONLY="1") as orders, shop.serving("billing") as billing:
        await asyncio.gather(orders.ready(), billing.ready())
        await place_many(orders.url, 20, placed)
        assert len(placed) == 20
        assert shop.rows("orders", "SELECT count(*) FROM durable.outgoing_envelopes WHERE owner_id = 0") == [(20,)]
        with shop.agent("orders") as agent:
            await everything_is_invoiced(shop, placed)
            agent.terminate()
            assert agent.wait(20) == 0
        orders.stop()
        billing.stop()
    assert shop.left_over() == []


async def test_components_of_the_middleware_page_work() -> None:
    spec = importlib.util.spec_from_file_location("example_of_middleware", EXAMPLES / "middleware.py")
    assert spec is not None
    assert spec.loader is not None
    shop: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shop)

    class LostAtFirst(list[Any]):
        """What is shipped, after a first attempt to."""

        is_lost = True

        def append(self, item: Any) -> None:
            if self.is_lost:
                self.is_lost = False
                raise ConnectionError
            super().append(item)

    shop.shipped = LostAtFirst()
    async with InMemoryBus(shop.bus) as memory:
        async with shop.bus.unit_of_work():
            shop.tenant.set("blue")
            shop.bus.send(shop.OrderPlaced(1, total=42))
            shop.bus.send(shop.Newsletter("buy more"))
            with pytest.raises(InvalidMessage, match="refused by has_a_total"):
                shop.bus.send(shop.OrderPlaced(2, total=0))
            shop.tenant.set("red")
            shop.bus.send(shop.OrderPlaced(3, total=17))
        await memory.drain()
        memory.assert_no_dead_letters()
        assert sorted(shop.shipped) == [(1, "blue"), (3, "red")]
        assert {handled.attempt for handled in memory.handled} == {1}
        assert not memory.sent(shop.Newsletter)
