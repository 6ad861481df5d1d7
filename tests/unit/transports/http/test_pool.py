"""The pool of connections to one address: which connection a request has, and which are closed."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from durable.testing import eventually
from durable.transports.http.pool import Pool

LONG = 1_000.0  # seconds; no measure


class Connection:
    def __init__(self, **_: Any) -> None:
        made.append(self)
        self.is_closed = False

    async def aclose(self) -> None:
        self.is_closed = True


made: list[Connection] = []


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(httpx, "AsyncHTTPTransport", Connection)


def pool_of(most: int = 3, idle_seconds: float = LONG) -> Pool:
    return Pool(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), most, idle_seconds)


async def use(pool: Pool, count: int) -> list[Any]:
    """Use so many connections at one time, and give them back in the order in which they were taken."""
    async with AsyncExitStack() as first, AsyncExitStack() as others:
        used = [await first.enter_async_context(pool.connection())]
        used += [await others.enter_async_context(pool.connection()) for _ in range(count - 1)]
        await first.aclose()
    return used


async def test_requests_in_a_row_share_one_connection() -> None:
    pool = pool_of()
    assert [await use(pool, 1) for _ in range(10)] == [[made[0]]] * 10
    assert len(made) == 1


async def test_connection_used_last_is_used_first() -> None:
    pool = pool_of()
    _, last = await use(pool, 2)
    assert await use(pool, 1) == [last]


async def test_request_waits_when_most_connections_are_in_use() -> None:
    pool = pool_of(most=2)
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(pool.connection())
        waiting = asyncio.create_task(use(pool, 1))
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting
    assert len(made) == 2


async def test_connection_of_a_failed_request_is_closed() -> None:
    pool = pool_of(most=1)
    with pytest.raises(LookupError):
        async with pool.connection():
            raise LookupError
    await use(pool, 1)
    await eventually(lambda: [each.is_closed for each in made] == [True, False])


async def test_connection_is_closed_when_unused_for_a_while() -> None:
    pool = pool_of(idle_seconds=-1.0)
    await use(pool, 2)
    await eventually(lambda: [each.is_closed for each in made] == [True, True], within=5)
    pool = pool_of(idle_seconds=LONG)
    made.clear()
    await use(pool, 2)
    assert not any(each.is_closed for each in made)


async def test_closed_pool_has_closed_its_connections() -> None:
    pool = pool_of()
    await use(pool, 3)
    await pool.aclose()
    assert [each.is_closed for each in made] == [True, True, True]


@pytest.mark.parametrize(
    ("server_seconds", "passed", "is_kept"),
    [(10, 4.9, True), (10, 5.1, False), (0, 0.0, False), (10 * LONG, 0.9 * LONG, True), (10 * LONG, 1.1 * LONG, False)],
)
async def test_connection_is_kept_for_half_of_the_time_of_the_server(
    monkeypatch: pytest.MonkeyPatch, server_seconds: float, passed: float, is_kept: bool
) -> None:
    loop, pool = asyncio.get_running_loop(), pool_of()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    async with pool.connection():
        pool.heed(server_seconds)
    now += passed
    async with pool.connection() as connection:
        used: object = connection
        assert (used is made[0]) == is_kept
    monkeypatch.undo()
    await eventually(lambda: made[0].is_closed != is_kept)
