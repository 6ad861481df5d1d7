"""Envelopes go into the tables and come out unchanged; a bad one harms no neighbour."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

import msgspec
import psycopg
import pytest
from psycopg import sql

from durable.envelope import ANY_NODE, LeasedEnvelope, NodeId, derived_id, new_id
from durable.errors import InvalidMessage, StorageUnavailable
from durable.messages.ordering import FREE, QueueKeys
from durable.storage import inbox, outbox
from durable.storage.database import channel
from durable.storage.outbox import Sent
from tests.failure.leftovers import SCHEMA, envelope
from tests.integration.storage.functions.stores import PEER, A, B, Store, outgoing, under_key


async def test_envelope_is_unchanged_by_the_outbox(store: Store) -> None:
    sent = outgoing(
        causation_id=new_id(),
        partition_key="order-17",
        headers={"trace": 'a "quoted" \N{SNOWMAN}', "empty": ""},
        body=bytes(range(256)),
        deliver_by=datetime.now(UTC) + timedelta(days=1),
    )
    await store.send(sent)

    assert await store.claim_outgoing() == [LeasedEnvelope(sent, epoch=1, endpoint=PEER, seq=1)]


async def test_an_envelope_comes_back_from_the_inbox_with_its_endpoint(store: Store) -> None:
    received = msgspec.structs.replace(envelope(1), headers={"a": "b"})
    await store.receive(received, endpoint="desk")

    expected = msgspec.structs.replace(received, destination="desk")
    assert await store.claim_incoming() == [LeasedEnvelope(expected, epoch=1, endpoint="desk", seq=1)]


async def test_one_commit_sends_to_several_destinations_and_to_its_own_inbox(store: Store) -> None:
    event = outgoing()
    other = msgspec.structs.replace(event, destination="tcp://127.0.0.1:2302")
    local = msgspec.structs.replace(event, destination="local")
    later = outgoing(2, execution_time=datetime.now(UTC) + timedelta(days=1))
    await store.run(
        outbox.store,
        [Sent(event, None, A), Sent(other, None, ANY_NODE), Sent(local, "local", B), Sent(later, None, ANY_NODE)],
    )

    assert await store.rows(
        "SELECT id, destination, owner_id, execution_time IS NOT NULL FROM durable.outgoing_envelopes ORDER BY seq"
    ) == [(event.id, PEER, A, False), (event.id, other.destination, 0, False), (later.id, PEER, 0, True)]
    assert await store.rows("SELECT id, endpoint, owner_id FROM durable.incoming_envelopes") == [(event.id, "local", B)]
    assert await store.rows("SELECT id FROM durable.received_ids") == [], "a local row is its own token"


async def test_local_message_under_a_known_business_key_is_not_stored_again(store: Store) -> None:
    local = under_key(destination="local")
    assert await store.run(outbox.store, [Sent(local, "local", ANY_NODE)]) == set()
    await store.rows("DELETE FROM durable.incoming_envelopes RETURNING 1")

    known = await store.run(outbox.store, [Sent(under_key(destination="local"), "local", ANY_NODE)])

    assert known == {(local.id, "local")}
    assert await store.one("SELECT count(*) FROM durable.incoming_envelopes") == 0


IDS = {
    "version 7": new_id(),
    "version 8": derived_id(new_id(), "copy"),
    "version 5": uuid5(NAMESPACE_URL, "invoice-17"),
    "version 4": UUID("0b2a6a0e-6a3f-4d7c-9c11-0f5f4ae4a0d1"),
    "another variant": UUID(int=new_id().int | 3 << 62),
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole": {
        "causation_id": new_id(),
        "partition_key": "order-17",
        "headers": {"trace": 'a "quoted" \N{SNOWMAN}', "empty": ""},
        "body": bytes(range(256)),
        "deliver_by": datetime.now(UTC) + timedelta(days=1),
    },
    "for later": {"execution_time": datetime.now(UTC) + timedelta(hours=1)},
}


@pytest.mark.parametrize("endpoint", [None, "local"])
@pytest.mark.parametrize("keys", [FREE, QueueKeys("a"), QueueKeys(None, "b")], ids=["free", "ordered", "fair"])
async def test_only_message_of_a_commit_is_stored_as_one_of_several(
    store: Store, endpoint: str | None, keys: QueueKeys
) -> None:
    for envelope_id, changes in itertools.product(IDS.values(), SHAPES.values()):
        destination = endpoint or PEER
        sent = Sent(
            msgspec.structs.replace(outgoing(id=envelope_id, destination=destination), **changes), endpoint, A, keys
        )
        neighbour = Sent(outgoing(destination="tcp://127.0.0.1:2302"), None, ANY_NODE)
        alone = await _stored_twice(store, [sent])
        beside = await _stored_twice(store, [sent, neighbour])
        assert alone == beside
        assert alone[0] == [set(), {sent.key}], "the second was known"


async def _stored_twice(store: Store, sending: list[Sent]) -> tuple[list[set[Any]], list[Any]]:
    """What storing says the first time and the second, and the row and the ids that are left of the first message."""
    subject = sending[0].envelope.id
    known = [{key for key in await store.run(outbox.store, sending) if key[0] == subject} for _ in range(2)]
    left = []
    for table in ("outgoing_envelopes", "incoming_envelopes", "undated_ids", "received_ids"):
        left += await store.rows(
            f"WITH gone AS (DELETE FROM durable.{table} RETURNING *) SELECT to_jsonb(gone) - 'seq' - 'received_at'"
            " FROM gone WHERE id = :id",
            id=subject,
        )
    return known, left


async def test_thousand_rows_are_stored_and_deleted_by_one_statement_each(store: Store) -> None:
    sent = [outgoing(number) for number in range(1_000)]
    await store.send(*sent)
    assert await store.receive(*sent) == {each.id for each in sent}

    claimed = await store.claim_outgoing(batch_size=1_000)
    assert [lease.envelope for lease in claimed] == sent
    assert await store.run(outbox.delete_sent, A, claimed) == 1_000
    handled = await store.claim_incoming(batch_size=1_000)
    assert await store.run(inbox.finish_handled, A, handled) == 1_000
    assert await store.rows(
        "SELECT side, outcome, count(*) FROM durable.envelope_history GROUP BY 1, 2 ORDER BY 1"
    ) == [
        ("incoming", "handled", 1_000),
        ("outgoing", "sent", 1_000),
    ]


@pytest.mark.parametrize("owner", [ANY_NODE, A], ids=["unowned", "owned"])
async def test_storing_rows_announces_nothing(store: Store, url: str, owner: NodeId) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel(SCHEMA))))
        await store.send(outgoing(), owner=owner)
        conn.execute("SELECT 1")  # what was announced before comes with its answer
        heard = list(conn.notifies(timeout=0))

    assert heard == []


async def test_nodes_are_woken_by_a_separate_transaction(store: Store, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel(SCHEMA))))
        await store.run(outbox.wake_nodes)
        assert len(list(conn.notifies(timeout=20, stop_after=1))) == 1


async def test_a_commit_of_scheduled_rows_announces_nothing(store: Store, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel(SCHEMA))))
        await store.send(outgoing(execution_time=datetime.now(UTC) + timedelta(days=1)))
        conn.execute("SELECT 1")
        assert not list(conn.notifies(timeout=0))


BAD: dict[str, dict[str, Any]] = {
    "a NUL in a column": {"partition_key": "a\0b"},
    "a NUL in a header": {"headers": {"a": "b\0"}},
    "a NUL in the type": {"message_type": "a\0b"},
    "a lone surrogate": {"partition_key": "\ud800"},
    "a lone surrogate in a header": {"headers": {"a": "\udfff"}},
}


@pytest.mark.parametrize("flaw", BAD)
async def test_a_bad_row_is_an_invalid_message_and_stores_none_of_its_neighbours(store: Store, flaw: str) -> None:
    batch = [envelope(1), msgspec.structs.replace(envelope(2), **BAD[flaw]), envelope(3)]
    with pytest.raises(InvalidMessage):
        await store.receive(*batch)

    assert await store.receive(batch[0], batch[2]) == {batch[0].id, batch[2].id}, "nothing is left of the first try"


async def test_a_lost_connection_is_an_unavailable_storage_and_the_next_transaction_has_another(
    store: Store, url: str
) -> None:
    await store.receive(envelope(1))
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    with pytest.raises(StorageUnavailable):
        await store.receive(envelope(2))
    assert await store.receive(envelope(3))
