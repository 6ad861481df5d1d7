"""Rows of dead and stopping nodes are released, due ones promoted, late ones expired."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import text

from durable.envelope import ANY_NODE, NodeId
from durable.storage import leases
from durable.storage.sql.recovery import INCOMING, OUTGOING, Recovery
from tests.failure.leftovers import envelope
from tests.integration.storage.functions.stores import PEER, A, B, Store, outgoing

SIDES = pytest.mark.parametrize("table", [OUTGOING, INCOMING], ids=["outgoing", "incoming"])


async def fill(store: Store, table: Recovery, *numbers: int, owner: NodeId = ANY_NODE, **changes: Any) -> None:
    """Rows in one of the two tables."""
    for number in numbers:
        if table is OUTGOING:
            await store.send(outgoing(number, **changes), owner=owner)
        else:
            await store.receive(msgspec.structs.replace(envelope(number), **changes), owner=owner)


def side_of(table: Recovery) -> str:
    return "outgoing" if table is OUTGOING else "incoming"


@SIDES
async def test_a_dead_nodes_rows_are_released_in_bounded_batches_and_marked(store: Store, table: Recovery) -> None:
    await fill(store, table, *range(5), owner=A)
    await fill(store, table, 5, owner=B)

    assert [await store.run(leases.release_dormant, table, A, 2) for _ in range(4)] == [2, 2, 1, 0]
    rows = await store.rows(
        f"SELECT owner_id, epoch, interruptions, count(*) FROM durable.{side_of(table)}_envelopes "
        "GROUP BY 1, 2, 3 ORDER BY 1"
    )
    assert rows == [(ANY_NODE, 1, 1, 5), (B, 0, 0, 1)]


@SIDES
async def test_locked_rows_are_left_for_the_next_sweep(store: Store, table: Recovery) -> None:
    await fill(store, table, *range(3), owner=A)
    async with store.database.engine.begin() as conn:
        await conn.execute(text(f"SELECT FROM durable.{side_of(table)}_envelopes LIMIT 1 FOR UPDATE"))
        async with asyncio.timeout(30):
            assert await store.run(leases.release_dormant, table, A, 10) == 2
    assert await store.run(leases.release_dormant, table, A, 10) == 1


@SIDES
async def test_stopping_node_releases_its_rows_unmarked(store: Store, table: Recovery) -> None:
    await fill(store, table, *range(3), owner=A)
    await fill(store, table, 3, owner=B)

    assert await store.run(leases.release_all, table, A) == 3
    assert await store.run(leases.owners, table) == {B}
    assert await store.one(f"SELECT sum(interruptions) FROM durable.{side_of(table)}_envelopes") == 0


@SIDES
async def test_owners_and_their_rows_are_listed(store: Store, table: Recovery) -> None:
    await fill(store, table, *range(2), owner=A)
    await fill(store, table, 2, owner=NodeId(7))
    await fill(store, table, 3)

    assert await store.run(leases.owners, table) == {A, 7}
    owned = await store.run(leases.owned_by, table, A)
    assert {(address, epoch) for _, address, epoch in owned} == {(PEER if table is OUTGOING else "billing", 0)}
    assert len(owned) == 2


@SIDES
async def test_empty_tables_have_no_owners(store: Store, table: Recovery) -> None:
    assert await store.run(leases.owners, table) == set()
    assert await store.run(leases.backlog, table) == []


@SIDES
async def test_due_rows_are_promoted_the_earliest_first_and_bounded(store: Store, table: Recovery) -> None:
    await fill(store, table, *range(3))
    side = side_of(table)
    await store.set(side, "execution_time = now() - seq * interval '1 second'")
    await fill(store, table, 3)
    await store.rows(f"UPDATE durable.{side}_envelopes SET execution_time = now() + interval '1 hour' "
                     f"WHERE execution_time IS NULL RETURNING 1")  # fmt: skip

    assert await store.run(leases.promote_due, table, 1) == 1
    assert await store.one(f"SELECT max(seq) = 3 FROM durable.{side}_envelopes WHERE execution_time IS NULL")
    assert [await store.run(leases.promote_due, table, 10) for _ in range(2)] == [2, 0]


@SIDES
async def test_unowned_rows_expire_bounded_and_owned_ones_do_not(store: Store, table: Recovery) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    await fill(store, table, *range(3), deliver_by=past)
    await fill(store, table, 3, deliver_by=past, owner=A)
    await fill(store, table, 4)
    await fill(store, table, 5, deliver_by=datetime.now(UTC) + timedelta(hours=1))

    assert [await store.run(leases.expire, table, B, 2) for _ in range(3)] == [2, 1, 0]
    assert await store.one(f"SELECT count(*) FROM durable.{side_of(table)}_envelopes") == 3
    assert await store.rows(
        "SELECT side, outcome, node_id, count(*) FROM durable.envelope_history GROUP BY 1, 2, 3"
    ) == [(side_of(table), "expired", B, 3)]


async def test_backlog_is_counted_by_destination_and_delayed_rows_do_not_age_the_group(store: Store) -> None:
    now = datetime.now(UTC)
    day, tomorrow = timedelta(days=1), now + timedelta(days=1)
    await store.send(outgoing(1, sent_at=now - day), outgoing(2))
    await store.send(outgoing(3, sent_at=now - 2 * day), owner=A)
    await store.send(outgoing(4, sent_at=now - 3 * day, execution_time=tomorrow))

    [group] = await store.run(leases.backlog, OUTGOING)

    assert group[:4] == (PEER, 4, 3, 1)
    assert [age is not None and age // day for age in group[4:]] == [2, 1]
