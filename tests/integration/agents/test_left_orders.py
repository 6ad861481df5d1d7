"""Orders that a release gives up while messages or parks are left in them: a bus warns of them when it starts."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from durable import Bus, message, upcaster
from durable.messages import upcasting
from tests.failure.workbench import QUICK
from tests.support.tables import Tables

WARNING = "have another order"
LEFT = {
    "nothing": "SELECT 1",
    "messages that wait": """
        INSERT INTO durable.incoming_envelopes (endpoint, id, message_type, source, correlation_id, content_type, body,
            sent_at, owner_id, execution_time, attempts, ordering_key)
        SELECT 'shop', gen_random_uuid(), 'gone.placed', 'shop', gen_random_uuid(), 'application/json', '{"number":1}',
            now(), 0, NULL, 0, ordering_key
        FROM durable.placements WHERE name = 'gone.placed'""",
    "a message that waits for its retry": """
        INSERT INTO durable.incoming_envelopes (endpoint, id, message_type, source, correlation_id, content_type, body,
            sent_at, owner_id, execution_time, attempts, ordering_key)
        SELECT 'shop', gen_random_uuid(), 'gone.placed', 'shop', gen_random_uuid(), 'application/json', '{"number":1}',
            now(), 0, now() + interval '1 hour', 1, ordering_key
        FROM durable.placements WHERE name = 'gone.placed'""",
    "a park": """
        INSERT INTO durable.circuits (kind, key, reason, actor, parked, ordering_key)
        SELECT 'handler', 'gone.placed', 'refused', 'node 1', true, ordering_key
        FROM durable.placements WHERE name = 'gone.placed'""",
}


@message("gone.placed")
class Placed(msgspec.Struct):
    number: int


@message("gone.legacy")
class Legacy(msgspec.Struct):
    number: int


def up(old: Legacy) -> Placed:
    return Placed(old.number)


@pytest.fixture(autouse=True)
def no_upcaster() -> Iterator[None]:
    yield
    upcasting._steps.pop("gone.legacy", None)


async def warnings(tables: Tables, caplog: pytest.LogCaptureFixture, *, ordered: bool = True) -> list[str]:
    """Start a release once, and return what it has said of orders."""
    caplog.clear()
    shop = Bus("shop", tables.url, **QUICK)

    @shop.handles(Placed, ordered=ordered)
    async def place(order: Placed) -> None: ...

    async with shop:
        pass
    return [each for each in caplog.messages if WARNING in each]


@pytest.mark.parametrize("left", LEFT)
async def test_release_warns_of_a_left_order(tables: Tables, caplog: pytest.LogCaptureFixture, left: str) -> None:
    assert await warnings(tables, caplog) == []
    tables.rows(LEFT[left])
    upcaster(Legacy, to=Placed)(up)

    found = await warnings(tables, caplog)

    assert len(found) == (left != "nothing")
    assert all("messages of gone.placed have" in each and "left in the order gone.placed:" in each for each in found)
    assert await warnings(tables, caplog) == []


async def test_release_with_the_same_order_warns_of_nothing(tables: Tables, caplog: pytest.LogCaptureFixture) -> None:
    assert await warnings(tables, caplog) == []
    tables.rows(LEFT["a park"])
    assert await warnings(tables, caplog) == []
