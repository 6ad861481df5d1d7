"""Errors of the application that fail when they are asked what they are: each of their attempts counts all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Retry, RetryLater
from durable.clock import SystemClock
from durable.embedded import Embedded
from tests.support.one_handler import Placed, Shop, shop_tables
from tests.support.tables import Tables

ATTEMPTS = 3


def refuse(*_: object) -> Any:
    raise RuntimeError("not to be asked")


def odd_metaclass() -> Exception:
    meta: Any = type("Meta", (type,), {"__name__": property(refuse), "__mro__": property(refuse)})
    error: Exception = meta("Odd", (Exception,), {})("odd")
    return error


def odd(attribute: str) -> Callable[[], Exception]:
    return lambda: type("Odd", (Exception,), {attribute: property(refuse)})("odd")


def odd_group() -> Exception:
    error: Exception = type("Odd", (ExceptionGroup,), {"exceptions": property(refuse)})("odd", [ValueError("inner")])
    return error


def altered_verdict() -> Exception:
    error = RetryLater("1s")
    error.after = "soon"  # type: ignore[assignment]
    return error


def deep_group() -> Exception:
    error: Exception = ValueError("leaf")
    for _ in range(3_000):
        inner: list[Any] = [error]
        error = ExceptionGroup("outer", inner)
    return error


def long_chain() -> Exception:
    error = ValueError("first")
    for _ in range(3_000):
        error, error.__context__ = ValueError("later"), error
    return error


ODD = {
    "metaclass": odd_metaclass,
    "state": odd("sqlstate"),
    "class": odd("__class__"),
    "traceback": odd("__traceback__"),
    "cause": odd("__cause__"),
    "notes": odd("__notes__"),
    "text": odd("__str__"),
    "wait": odd("retry_after"),
    "group": odd_group,
    "altered verdict": altered_verdict,
    "deep group": deep_group,
    "long chain": long_chain,
}


@pytest.fixture
def tables(server: Embedded) -> Iterator[Tables]:
    with shop_tables(server) as tables:
        yield tables


@pytest.fixture
async def shop(tables: Tables) -> AsyncIterator[Shop]:
    shop = Shop(tables, SystemClock())
    yield shop
    await shop.close()


@pytest.mark.parametrize("max_batch", ["auto", 1, 10])
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
async def test_odd_error_counts_and_its_neighbours_are_handled(
    shop: Shop, make: Callable[[], Exception], max_batch: Any
) -> None:
    runs = 0

    async def handle(order: Placed, session: AsyncSession) -> None:
        nonlocal runs
        await shop.write(session, order.number)
        if order.number == 3:
            runs += 1
            raise make()

    shop.handles(handle, retry=Retry(immediate=ATTEMPTS - 1, delays=[]), max_batch=max_batch)
    async with shop.open():
        await shop.receive(*range(6))
        await shop.settled()
    assert sorted(shop.effects()) == [0, 1, 2, 4, 5]
    assert shop.tables.count("dead_letters") == 1
    assert ATTEMPTS <= runs <= ATTEMPTS + 1, "once in a group, perhaps, which rolled back"
