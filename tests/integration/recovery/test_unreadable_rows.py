"""Rows that a node claims and cannot read: put aside, or named again and again, while their neighbours proceed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import msgspec
import pytest

from durable import Bus, message
from durable.embedded import Embedded
from durable.settings import load_settings
from durable.testing import eventually
from durable.transports.memory import MemoryTransport
from tests.support.tables import Tables, shared_tables

PEER = "memory://shop"
COUNT = 6

REFUSALS = {
    "none": (),
    "letters by a trigger": (
        "CREATE FUNCTION public.deny() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'no letters' USING ERRCODE = 'P0001'; END $$",
        "CREATE TRIGGER deny BEFORE INSERT ON durable.dead_letters FOR EACH ROW EXECUTE FUNCTION public.deny()",
    ),
    "letters by a missing right": (
        "CREATE FUNCTION public.deny() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'no right' USING ERRCODE = '42501'; END $$",
        "CREATE TRIGGER deny BEFORE INSERT ON durable.dead_letters FOR EACH STATEMENT EXECUTE FUNCTION public.deny()",
    ),
    "letters without their table": ("ALTER TABLE durable.dead_letters RENAME TO moved",),
}
"""What the database refuses when a row is to be put aside."""


@message("unreadable.placed")
class Placed(msgspec.Struct):
    number: int


@pytest.fixture
def tables(server: Embedded) -> Iterator[Tables]:
    with shared_tables(server) as tables:
        yield tables


@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("side", ["incoming", "outgoing"])
async def test_unreadable_row_does_not_hold_its_neighbours_up(
    tables: Tables, caplog: pytest.LogCaptureFixture, side: str, driver: str, refusal: str, position: int
) -> None:
    url = tables.url.replace("postgresql:", f"postgresql+{driver}:")
    memory = MemoryTransport(load_settings())
    bus = Bus("shop", url, transports=[memory], poll_interval=timedelta(milliseconds=200))
    bus.listen(PEER)
    seen: list[int] = []

    @bus.handles(Placed)
    async def handle(placed: Placed) -> None:
        seen.append(placed.number)

    if side == "outgoing":
        bus.route(Placed, to=PEER)
    async with bus.unit_of_work():
        for number in range(COUNT):
            bus.send(Placed(number))
    damaged = tables.rows(f"SELECT id FROM durable.{side}_envelopes ORDER BY seq")[position]
    tables.execute(f"UPDATE durable.{side}_envelopes SET headers = '[1]' WHERE id = %s", damaged)
    for statement in REFUSALS[refusal]:
        tables.execute(statement)

    async with bus:
        await eventually(lambda: len(seen) == COUNT - 1)
        await eventually(lambda: str(damaged) in caplog.text, what="the row is named")

    if refusal == "none":
        assert tables.rows("SELECT id FROM durable.dead_letters") == [damaged]
    else:
        assert tables.rows(f"SELECT id FROM durable.{side}_envelopes") == [damaged]
    assert sorted(seen) == [number for number in range(COUNT) if number != position]
