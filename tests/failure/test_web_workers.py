"""A web service with two workers, while many clients post: one of them is killed, or all are told to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from durable.embedded.ports import free_port
from tests.failure.books import Books, open_books, read_books
from tests.failure.waiting import eventually
from tests.support.web import ROOT, WebService, serving

REQUESTS, CLIENTS = 400, 16


class Answers:
    """What the clients were told of their orders."""

    def __init__(self) -> None:
        self.taken: set[int] = set()
        self.refused: set[int] = set()
        self.unknown: set[int] = set()

    @property
    def count(self) -> int:
        return len(self.taken) + len(self.refused) + len(self.unknown)


async def post_orders(url: str, orders: Iterable[int], answers: Answers) -> None:
    """Each order once, whatever comes of it, from many clients."""
    waiting = iter(orders)

    async def client_posts(client: httpx.AsyncClient) -> None:
        for order_id in waiting:
            try:
                status = (await client.post(f"/orders/{order_id}")).status_code
            except httpx.TransportError:
                answers.unknown.add(order_id)
                continue
            {201: answers.taken, 409: answers.refused}.get(status, answers.unknown).add(order_id)

    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as client, asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(client_posts(client), name=f"client {number}")


async def settled(shop: WebService, answers: Answers) -> Books:
    """Wait until everything that was taken is handled, and only the workers that live are nodes; then compare."""

    def is_settled() -> bool:
        books = read_books(shop.database)
        missing = answers.taken - handled(books).keys()
        assert not missing, f"{len(missing)} orders were taken and not handled\n{shop.output()[-3000:]}"
        assert not books.violations(), "\n".join(books.violations())
        workers = sorted(worker.pid for worker in shop.workers())
        assert sorted(books.nodes) == workers, f"nodes of {books.nodes}, but the workers are {workers}"
        return True

    await eventually(is_settled, within=60)
    books = read_books(shop.database)
    effects = handled(books)
    assert {order_id: effects.get(order_id) for order_id in answers.taken} == dict.fromkeys(answers.taken, 1)
    assert not answers.refused & set(books.sent.values())
    assert effects.keys() <= answers.taken | answers.unknown
    return books


def handled(books: Books) -> dict[int, int]:
    """How many effects each order has."""
    return {order_id: books.effects[key] for key, order_id in books.sent.items() if key in books.effects}


@pytest.fixture
def start(make_database: Callable[[str], str], tmp_path: Path) -> Iterator[Callable[[], WebService]]:
    """Starts the service, on the same database and port each time."""
    database, port = make_database("shop"), free_port()
    open_books(database)
    environment = {"DURABLE_DATABASE_URL": database, "SHOP_URL": f"http://127.0.0.1:{port}"}
    with contextlib.ExitStack() as stack:

        def start() -> WebService:
            log = tmp_path / f"shop-{port}.log"
            return stack.enter_context(serving("tests.failure.web:app", ROOT, port, log, environment))

        yield start


async def test_every_2xx_is_handled_once_when_a_worker_is_killed(start: Callable[[], WebService]) -> None:
    shop, answers = start(), Answers()
    await shop.ready()
    traffic = asyncio.create_task(post_orders(shop.url, range(1, REQUESTS + 1), answers))
    await eventually(lambda: answers.count > REQUESTS // 4, within=30)
    killed = shop.kill_a_worker()
    await traffic
    assert len(answers.taken) > REQUESTS // 2
    books = await settled(shop, answers)
    assert killed not in books.nodes
    shop.stop()
    assert read_books(shop.database).violations_after_shutdown() == []


async def test_every_2xx_is_handled_once_when_the_service_is_stopped_under_load(
    start: Callable[[], WebService],
) -> None:
    """What was not done when it stopped belongs to nobody, and is done when it runs again."""
    shop, answers = start(), Answers()
    await shop.ready()
    traffic = asyncio.create_task(post_orders(shop.url, range(1, REQUESTS + 1), answers))
    await eventually(lambda: answers.count > REQUESTS // 4, within=30)
    await asyncio.to_thread(shop.stop)
    await traffic
    books = read_books(shop.database)
    assert not [row for row in books.pending if row.owner_id]
    assert books.nodes == []

    shop = start()
    await shop.ready()
    await settled(shop, answers)
    shop.stop()
    assert read_books(shop.database).violations_after_shutdown() == []
