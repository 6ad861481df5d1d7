"""The agenda of a round: everything that waits without an owner, and nothing else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, text

from durable.envelope import ANY_NODE
from durable.messages.ordering import QueueKeys
from durable.storage import agenda, circuits, inbox, outbox
from durable.storage.agenda import Agenda, Lanes
from durable.storage.circuits import CircuitKind
from durable.storage.inbox import Arrival
from durable.storage.outbox import Sent
from durable.storage.sql.agenda import READ_AGENDA
from tests.failure.leftovers import MESSAGE_TYPE, envelope
from tests.integration.storage.functions.stores import PEER, A, Store, outgoing

MANY = 20_000
BACKLOG = f"""
INSERT INTO durable.incoming_envelopes (endpoint, id, message_type, source, correlation_id, content_type, body, sent_at,
    owner_id, deliver_by)
SELECT 'orders', gen_random_uuid(), 'type ' || n % 3, 'shop', gen_random_uuid(), 'application/json', '{{}}', now(),
    CASE n % 3 WHEN 0 THEN 7 ELSE 0 END, now() + interval '1 day'
FROM generate_series(1, {MANY}) AS n
"""


async def look(store: Store, after: str = "", count: int = 100) -> Agenda:
    found: Agenda = await store.run(agenda.read, after=after, count=count)
    return found


def _in(delay: timedelta) -> datetime:
    return datetime.now(UTC) + delay


async def test_empty_tables_have_an_empty_agenda(store: Store) -> None:
    assert (await look(store))._replace(took=timedelta(0)) == Agenda([], [], [], [], [])


async def test_unowned_rows_are_found_by_destination_and_type_once(store: Store) -> None:
    for number, name in enumerate(["a", "b", "b", "c"]):
        await store.send(outgoing(number, destination=name))
        await store.receive(msgspec.structs.replace(envelope(number), message_type=name))
    await store.send(outgoing(5, destination="owned"), owner=A)
    await store.send(outgoing(6, destination="later", execution_time=_in(timedelta(days=1))))
    await store.receive(msgspec.structs.replace(envelope(5), message_type="owned"), owner=A)

    found = await look(store)
    assert (found.destinations, found.message_types) == (["a", "b", "c"], ["a", "b", "c"])
    assert (found.is_ordered, found.is_due, found.is_late) == (False, False, False)
    assert (await look(store, count=2)).destinations == ["a", "b"]
    assert (await look(store, after="a", count=2)).destinations == ["b", "c"]


@pytest.mark.parametrize("keys", [QueueKeys("k"), QueueKeys(None, "blue")], ids=["ordered", "shared"])
async def test_rows_in_an_order_or_in_shares_are_found_apart(store: Store, keys: QueueKeys) -> None:
    await store.run(outbox.store, [Sent(outgoing(1), None, ANY_NODE, keys)])
    sent = await look(store)
    await store.run(inbox.store, [Arrival("billing", envelope(2), ANY_NODE, keys)])
    both = await look(store)
    for found in (sent, both):
        assert (found.destinations, found.message_types) == ([], [])
        assert found.is_ordered == (keys.ordering_key is not None)
        assert found.shared_destinations == ([] if found.is_ordered else [PEER])
    assert sent.shared_types == []
    assert both.shared_types == ([] if both.is_ordered else [MESSAGE_TYPE])


@pytest.mark.parametrize("side", ["outgoing", "incoming"])
class TestTimes:
    async def put(self, store: Store, side: str, **changes: Any) -> None:
        if side == "outgoing":
            await store.send(outgoing(1, **changes))
        else:
            await store.receive(msgspec.structs.replace(envelope(1), **changes))

    async def test_row_is_due_at_its_time_and_waited_for_until_then(self, store: Store, side: str) -> None:
        await self.put(store, side, execution_time=_in(timedelta(hours=1)))
        coming = await look(store)
        assert not coming.is_due
        assert coming.next_due_in is not None
        assert timedelta(minutes=59) < coming.next_due_in < timedelta(minutes=61)
        await store.set(side, "execution_time = now()")
        due = await look(store)
        assert (due.is_due, due.next_due_in) == (True, None)
        await store.set(side, f"owner_id = {A}")
        assert not (await look(store)).is_due

    async def test_row_is_late_behind_its_deadline(self, store: Store, side: str) -> None:
        await self.put(store, side, deliver_by=_in(timedelta(hours=1)))
        assert not (await look(store)).is_late
        await store.set(side, "deliver_by = now() - interval '1 ms'")
        assert (await look(store)).is_late
        await store.set(side, f"owner_id = {A}")
        assert not (await look(store)).is_late


async def test_open_circuits_are_part_of_the_agenda(store: Store) -> None:
    await store.run(circuits.open_circuit, CircuitKind.DESTINATION, PEER, reason="down", actor="node 1")
    [circuit] = (await look(store)).circuits
    assert (circuit.kind, circuit.key, circuit.reason) == ("destination", PEER, "down")


@pytest.mark.parametrize("is_short", [False, True])
async def test_agenda_is_read_along_indexes(store: Store, is_short: bool) -> None:
    def keep_unknown(conn: Connection, schema: str) -> None:
        """Statistics, which come at any moment, let the planner sort one row."""
        for table in ("incoming_envelopes", "outgoing_envelopes"):
            conn.execute(text(f"ALTER TABLE {schema}.{table} SET (autovacuum_enabled = false)"))

    await store.run(keep_unknown)
    await store.rows(f"{BACKLOG} RETURNING 1")
    await store.rows(f"{BACKLOG.replace('incoming', 'outgoing').replace('endpoint', 'destination')} RETURNING 1")

    def explain(conn: Connection, schema: str) -> str:
        sql = READ_AGENDA.within(schema).text
        lanes = {"known_destinations": ["b"], "destination_floors": [7], "known_types": ["b"], "type_floors": [7]}
        params = {"after": "", "count": 100, "is_short": is_short, **lanes}
        return "\n".join(conn.execute(text(f"EXPLAIN {sql}"), params).scalars())

    plan = await store.run(explain)
    assert "Seq Scan" not in plan, plan
    assert "Sort" not in plan, plan


async def test_short_look_finds_known_lanes_with_rows_behind_their_floors(store: Store) -> None:
    for number, name in enumerate(["a", "b", "a", "c"]):
        await store.send(outgoing(number, destination=name))
        await store.receive(msgspec.structs.replace(envelope(number), message_type=name))
    known = Lanes({"a": 3, "b": 3, "none": 0}, {"a": 4, "b": 2, "c": 0})
    found = await store.run(agenda.read, after="", count=100, known=known)
    assert (found.destinations, found.message_types) == (["a"], ["b", "c"])


@pytest.mark.parametrize("side", ["outgoing", "incoming"])
async def test_claim_begins_at_its_floor(store: Store, side: str) -> None:
    for number in range(4):
        if side == "outgoing":
            await store.send(outgoing(number))
        else:
            await store.receive(envelope(number))
    if side == "outgoing":
        claimed = await store.run(outbox.claim, {PEER: 10}, node=A, floors={PEER: 3})
    else:
        claimed = await store.run(inbox.claim, message_type=MESSAGE_TYPE, batch_size=10, node=A, floor=3)
    assert [lease.seq for lease in claimed] == [3, 4]
