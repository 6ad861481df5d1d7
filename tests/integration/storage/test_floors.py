"""Looks for work while an open snapshot keeps the rows that were handled since: each is passed by a full look."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus
from durable.embedded import Embedded
from durable.envelope import NodeId
from durable.recovery import floors
from durable.storage import agenda, outbox
from durable.storage.sql.agenda import READ_AGENDA
from durable.storage.sql.inbox import CLAIM_INCOMING
from durable.storage.sql.outbox import CLAIM_OUTGOING
from durable.storage.sql.statement import Statement
from durable.telemetry import Event
from tests.benchmarks import filling, floor
from tests.benchmarks.floor import Note
from tests.failure.waiting import eventually
from tests.support.tables import Tables, shared_tables

HANDLED = 10_000


@pytest.fixture
def tables(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables, psycopg.connect(tables.url) as snapshot:
        snapshot.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT")
        yield tables


def fill(tables: Tables, side: str, count: int) -> None:
    if side == "incoming":
        filling.fill_inbox(tables.url, count)
    else:
        filling.fill_outbox(tables.url, count, floor.DESTINATION)


def pages(conn: Connection, statement: Statement, **params: Any) -> int:
    """Return how many pages a statement reads."""
    sql = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement.within('durable').text}"
    ((plan,),) = (conn.execute(text(sql), params).scalar_one(),)
    return int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])


@pytest.mark.parametrize("side", ["outgoing", "incoming"])
def test_short_looks_pass_no_handled_rows(tables: Tables, side: str) -> None:
    fill(tables, side, HANDLED)
    tables.execute(f"UPDATE durable.{side}_envelopes SET owner_id = 1, epoch = 1")
    tables.execute(f"DELETE FROM durable.{side}_envelopes")
    fill(tables, side, 10)
    destinations = [floor.DESTINATION] if side == "outgoing" else []
    types = [floor.MESSAGE_TYPE] if side == "incoming" else []
    engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
    read: dict[str, int] = {}
    with engine.connect() as conn:
        for look, place in (("short", HANDLED + 1), ("full", 0)):
            places = [place]
            lanes = {"known_destinations": destinations, "destination_floors": places[: len(destinations)]}
            lanes |= {"known_types": types, "type_floors": places[: len(types)]}
            read[look] = pages(conn, READ_AGENDA, after="", count=100, is_short=look == "short", **lanes)
            if side == "incoming":
                name = floor.MESSAGE_TYPE
                claim = {"message_type": name, "handler": name, "batch_size": 5, "node": 1, "is_trial": False}
                read[look] += pages(conn, CLAIM_INCOMING.whole, **claim, floor=place)
            else:
                claim = {"destinations": destinations, "sizes": [5], "batch_size": 5, "node": 1, "floors": places}
                read[look] += pages(conn, CLAIM_OUTGOING.whole, **claim)
            conn.rollback()
    engine.dispose()
    assert 5 * read["short"] < read["full"], read


def test_primary_key_is_not_looked_through_for_destinations(tables: Tables) -> None:
    """Statistics of a table that handled rows crowd know few rows, and no way through an index seems long."""
    fill(tables, "outgoing", HANDLED)
    tables.execute("UPDATE durable.outgoing_envelopes SET owner_id = 1, epoch = 1")
    tables.execute("DELETE FROM durable.outgoing_envelopes")
    tables.execute("ANALYZE durable.outgoing_envelopes")
    places = {f"tcp://shop:{number}": HANDLED + 1 for number in range(50)}
    prepared = {"prepare_threshold": 0, "options": "-c plan_cache_mode=force_generic_plan"}  # as after some looks
    engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"), connect_args=prepared)

    def scans() -> int:
        found = tables.one("SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'outgoing_envelopes_pkey'")
        assert isinstance(found, int)
        return found

    before = scans()
    with engine.begin() as conn:
        agenda.read(conn, "durable", after="", count=100, known=agenda.Lanes(places, {}))
    with engine.begin() as conn:
        assert not outbox.claim(conn, "durable", dict.fromkeys(places, 1), node=NodeId(1), floors=places)
        conn.execute(text("SELECT pg_stat_force_next_flush()"))
    engine.dispose()
    assert scans() - before < len(places)


def test_looks_of_a_connection_share_one_plan(tables: Tables) -> None:
    url = tables.url.replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(url, connect_args={"prepare_threshold": 0}, pool_size=1)
    for _ in range(3):
        with engine.begin() as conn:
            agenda.read(conn, "durable", after="", count=100)
    with engine.connect() as conn:
        plans = conn.execute(
            text(
                "SELECT generic_plans, custom_plans FROM pg_prepared_statements "
                "WHERE statement LIKE '%AS shared_destinations%' AND statement NOT LIKE '%pg_prepared%'"
            )
        ).all()
    engine.dispose()
    assert [tuple(each) for each in plans] == [(3, 0)]


@pytest.mark.parametrize("side", ["outgoing", "incoming"])
def test_claim_finds_its_rows_by_their_places(tables: Tables, side: str) -> None:
    """By key it would read an index once more for each, or the whole table, if its statistics say so."""
    fill(tables, side, HANDLED)
    name = floor.MESSAGE_TYPE
    statement, claim = {
        "incoming": (CLAIM_INCOMING, {"message_type": name, "handler": name, "is_trial": False, "floor": 0}),
        "outgoing": (CLAIM_OUTGOING, {"destinations": [floor.DESTINATION], "sizes": [50], "floors": [0]}),
    }[side]
    engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as conn:
        sql = f"EXPLAIN (COSTS OFF) {statement.whole.within('durable').text}"
        plan = conn.execute(text(sql), {**claim, "batch_size": 50, "node": 1}).scalars().all()
    engine.dispose()
    assert f"Tid Scan on {side}_envelopes" in "\n".join(plan)


@pytest.fixture
def short_looks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nearly all looks are short, and begin at the last claim."""
    monkeypatch.setattr(floors, "SLOW", 0.0)
    monkeypatch.setattr(floors, "_TIMES", 100_000)
    monkeypatch.setattr(floors, "_LATE", 0.0)
    return monkeypatch


@contextmanager
def late_row(tables: Tables) -> Iterator[None]:
    """A row that has its place in the queue before all that are stored in this block, and is committed at its end."""
    with psycopg.connect(tables.url) as late:
        late.execute("SELECT nextval(pg_get_serial_sequence('durable.incoming_envelopes', 'seq'))")
        filling.fill_inbox(tables.url, 1)
        late.execute("CREATE TEMP TABLE kept ON COMMIT DROP AS SELECT * FROM durable.incoming_envelopes")
        late.execute("UPDATE kept SET id = uuidv7()")
        late.execute("INSERT INTO durable.incoming_envelopes OVERRIDING SYSTEM VALUE SELECT * FROM kept")
        yield


@pytest.mark.usefixtures("short_looks")
async def test_rows_of_late_commits_and_other_types_are_handled_behind_a_snapshot(tables: Tables) -> None:
    """Nothing wakes the node when they are committed, and its next poll is far away."""
    handled: list[int] = []
    bus = Bus("shop", tables.url, poll_interval=60)

    @bus.handles(Note, max_batch=100)
    async def take(notes: list[Note], session: AsyncSession) -> None:
        handled.append(len(notes))

    async with bus:
        with late_row(tables):
            for count in range(1, 6):
                filling.fill_inbox(tables.url, 100)
                filling.wake(tables.url)
                await eventually(lambda count=count: sum(handled) >= 100 * count)  # type: ignore[misc]
        began = time.monotonic()
        await eventually(lambda: bus.runtime.counters[Event.HANDLED] == 502)
        assert time.monotonic() - began < 10


async def test_rows_below_the_floor_wait_for_room_alone(tables: Tables, short_looks: pytest.MonkeyPatch) -> None:
    """On a busy node each full look falls into a moment in which its handler has no room."""
    short_looks.setattr(floors, "_LONGEST", 0.3)
    is_open = asyncio.Event()
    handled: list[Note] = []
    bus = Bus("shop", tables.url, poll_interval=60, buffer_size=10, batch_size=10)

    @bus.handles(Note, concurrency=1)
    async def take(note: Note) -> None:
        await is_open.wait()
        handled.append(note)

    full_looks: list[int] = []
    read = agenda.read

    def noted(conn: Connection, schema: str, *, known: agenda.Lanes | None, **how: Any) -> agenda.Agenda:
        found = read(conn, schema, known=known, **how)
        if known is None:
            full_looks.append(len(found.message_types))
        return found

    short_looks.setattr(agenda, "read", noted)
    async with bus:
        with late_row(tables):
            filling.fill_inbox(tables.url, 40)
            filling.wake(tables.url)
            await eventually(lambda: bus.runtime.counters[Event.CLAIMED] == 10)
        short_looks.setattr(floors, "_LONGEST", 600.0)
        looks = len(full_looks)
        await eventually(lambda: len(full_looks) == looks + 1)
        is_open.set()
        await eventually(lambda: len(handled) == 42)
        assert len(full_looks) == looks + 1
