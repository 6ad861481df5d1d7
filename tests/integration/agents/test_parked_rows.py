"""Keys and ordered handlers that park behind a message whose row the database refuses, or no node can read."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import psycopg
import pytest

from durable import Bus, Retry, message
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK

COUNT = 4


@message("parked-rows.step")
class Step(msgspec.Struct):
    number: int


class Burial(NamedTuple):
    """Way in which a row becomes a dead letter: the message, the refused updates of its row, and its damage."""

    number: int
    refused: str = ""
    damage: str = ""
    fails: bool = False
    max_batch: int | None = None


BURIALS = {
    "claim refused": Burial(0, refused="NEW.owner_id > 0"),
    "claim refused behind others": Burial(1, refused="NEW.owner_id > 0", max_batch=10),
    "retry refused": Burial(1, refused="NEW.execution_time IS NOT NULL", fails=True),
    "promotion refused": Burial(1, refused="OLD.execution_time IS NOT NULL AND NEW.execution_time IS NULL", fails=True),
    "unreadable": Burial(0, damage="headers = '[1]'"),
    "unreadable in the middle of a run": Burial(1, damage="headers = '[1]'", max_batch=10),
}


@pytest.mark.parametrize("ordered", [False, True], ids=["key", "handler"])
@pytest.mark.parametrize("burial", BURIALS.values(), ids=BURIALS)
async def test_row_buried_by_the_database_parks_its_order(database_url: str, burial: Burial, ordered: bool) -> None:
    bus, done = _bus(database_url, burial, park=True, ordered=ordered)
    await _send(bus, burial, database_url, key=None if ordered else "k")
    async with bus:
        await eventually(lambda: _rows(database_url, "SELECT FROM durable.dead_letters"))
        ((kind, key, parked),) = _rows(database_url, "SELECT kind, key, parked FROM durable.circuits")
        assert (kind, key, parked) == (*(("handler", "parked-rows.step") if ordered else ("key", "k")), True)
        assert done in ([], [0])
        await (bus.resume(Step) if ordered else bus.resume(key="k"))
        await eventually(lambda: done == [number for number in range(COUNT) if number != burial.number])
    assert len(_rows(database_url, "SELECT FROM durable.dead_letters")) == 1


@pytest.mark.parametrize("burial", BURIALS.values(), ids=BURIALS)
async def test_row_buried_by_the_database_lets_its_key_go_on_without_parks(database_url: str, burial: Burial) -> None:
    bus, done = _bus(database_url, burial, park=False)
    await _send(bus, burial, database_url, key="k")
    async with bus:
        await eventually(lambda: done == [number for number in range(COUNT) if number != burial.number])
    assert len(_rows(database_url, "SELECT FROM durable.dead_letters")) == 1
    assert _rows(database_url, "SELECT FROM durable.circuits") == []


def _bus(url: str, burial: Burial, *, park: bool, ordered: bool = False) -> tuple[Bus, list[int]]:
    bus = Bus("shop", url, **QUICK)
    done: list[int] = []

    @bus.handles(
        Step,
        ordered=ordered,
        max_batch=burial.max_batch,
        on_dead_letter="park" if park else "continue",
        retry=Retry(immediate=0, delays=[0.01] * 9),
    )
    async def handle(step: Step) -> None:
        if burial.fails and step.number == burial.number:
            raise ValueError("not yet")
        done.append(step.number)

    return bus, done


async def _send(bus: Bus, burial: Burial, url: str, *, key: str | None) -> None:
    """Send all, and let the database bury one of them."""
    async with bus.unit_of_work():
        for number in range(COUNT):
            bus.send(Step(number), key=key)
    one = f"body = '{{\"number\":{burial.number}}}'"
    with psycopg.connect(url, autocommit=True) as conn:
        if burial.damage:
            done = conn.execute(f"UPDATE durable.incoming_envelopes SET {burial.damage} WHERE {one}".encode())
            assert done.rowcount == 1
        else:
            conn.execute(
                f"""
CREATE FUNCTION public.deny() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF {burial.refused} AND NEW.{one} THEN RAISE EXCEPTION 'refused' USING ERRCODE = '23514'; END IF;
    RETURN NEW;
END $$""".encode()
            )
            conn.execute(
                "CREATE TRIGGER deny BEFORE UPDATE ON durable.incoming_envelopes "
                "FOR EACH ROW EXECUTE FUNCTION public.deny()"
            )


def _rows(url: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url) as conn:
        return conn.execute(query.encode()).fetchall()
