"""An id is stored once, for as long as it is remembered."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec
import pytest
from sqlalchemy import Connection

from durable.encryption.repeats import is_another
from durable.encryption.ring import KeyRing
from durable.envelope import ANY_NODE
from durable.storage import dead_letters, delayed, inbox, maintenance, outbox
from durable.storage.dead_letters import LetterRange
from durable.storage.inbox import Arrival
from durable.storage.outbox import Sent
from tests.failure.books import waits_for_a_lock
from tests.failure.leftovers import SCHEMA, envelope
from tests.failure.waiting import eventually
from tests.integration.storage.functions.stores import LETTER, A, Store, under_key


async def test_received_envelope_is_a_duplicate_after_its_handling(store: Store) -> None:
    first, second = envelope(1), envelope(2)
    assert await store.receive(first) == {first.id}
    assert await store.receive(first, second) == {second.id}
    await store.run(inbox.finish_handled, A, await store.claim_incoming())
    assert await store.receive(first, second) == set()
    assert await store.claim_incoming() == []


async def test_another_endpoint_receives_the_same_envelope_for_itself(store: Store) -> None:
    event = envelope(1)
    assert await store.receive(event, endpoint="billing") == {event.id}
    assert await store.receive(event, endpoint="shipping") == {event.id}
    assert await store.one("SELECT count(*) FROM durable.incoming_envelopes") == 2


async def test_second_of_two_concurrent_receptions_waits_and_finds_a_duplicate(store: Store, url: str) -> None:
    received = envelope(1)

    def receive(conn: Connection, schema: str) -> set[inbox.Key]:
        return inbox.store(conn, SCHEMA, [Arrival("billing", received, A)])

    async with store.database.engine.begin() as first:
        assert await first.run_sync(receive, SCHEMA) == {(received.id, "billing")}
        second = asyncio.create_task(store.database.transaction(receive))
        await eventually(lambda: waits_for_a_lock(url))
    assert await second == set()


async def test_an_id_twice_in_one_call_is_stored_once(store: Store) -> None:
    received = envelope(1)
    assert await store.receive(received, received) == {received.id}

    assert await store.one("SELECT count(*) FROM durable.incoming_envelopes") == 1


async def test_known_id_with_another_body_is_found(store: Store) -> None:
    first, second = envelope(1), envelope(2)
    await store.receive(first, second)
    changed = msgspec.structs.replace(first, body=b"another")
    arrivals = [Arrival("billing", changed, ANY_NODE), Arrival("billing", second, ANY_NODE)]

    found = await store.run(inbox.find_known, arrivals)
    others = {
        each.key for each in arrivals if is_another(KeyRing(), found[each.key][0], each.envelope, found[each.key][1])
    }
    assert others == {(first.id, "billing")}


OLD = timedelta(days=30)
KEEP = timedelta(days=8)
EVERYTHING = LetterRange(0, 2**62, 100)


async def forget_old(store: Store) -> None:
    """As a month later: what is remembered has become old, and is purged."""
    for table in ("undated_ids", "received_ids"):
        await store.rows(f"UPDATE durable.{table} SET received_at = now() - interval '30 days' RETURNING 1")
    for statement in maintenance.PURGES:
        await store.run(maintenance.purge, statement, keep=KEEP)


async def test_id_is_remembered_while_its_row_waits_and_forgotten_after(store: Store) -> None:
    waiting = under_key()
    await store.receive(waiting)
    await forget_old(store)
    assert await store.receive(waiting, envelope(2)) != {waiting.id}
    await store.run(inbox.finish_handled, A, await store.claim_incoming())
    assert await store.receive(waiting) == set(), "remembered for as long again, since it waited"

    await forget_old(store)
    assert await store.receive(waiting) == {waiting.id}


@pytest.mark.parametrize("remembered", ["undated_ids", "received_ids"])
async def test_forgotten_id_with_a_waiting_row_is_a_duplicate_and_harms_no_neighbour(
    store: Store, remembered: str
) -> None:
    waiting = under_key() if remembered == "undated_ids" else envelope(1)
    await store.receive(waiting)
    await store.rows(f"DELETE FROM durable.{remembered} RETURNING 1")
    neighbour = envelope(2)

    assert await store.receive(waiting, neighbour) == {neighbour.id}
    assert len(await store.claim_incoming()) == 2


async def test_forgotten_business_key_with_a_waiting_row_fails_no_commit(store: Store) -> None:
    local = under_key(destination="local")
    await store.run(outbox.store, [Sent(local, "local", ANY_NODE)])
    await store.rows("DELETE FROM durable.undated_ids RETURNING 1")

    assert await store.run(outbox.store, [Sent(local, "local", ANY_NODE)]) == {(local.id, "local")}


async def give_up_by_cancel(store: Store) -> None:
    await store.set("incoming", "owner_id = 0, execution_time = now() + interval '1 hour'")
    cancelled = await store.run(
        delayed.cancel, delayed.Selection(), EVERYTHING, side="incoming", actor="ada", reason=None
    )
    assert len(cancelled.done) == 1


async def give_up_by_discard(store: Store) -> None:
    (lease,) = await store.claim_incoming()
    await store.run(inbox.dead_letter, A, lease, LETTER)
    discarded = await store.run(
        dead_letters.discard, dead_letters.Selection(), EVERYTHING, actor="ada", reason="a test"
    )
    assert len(discarded.done) == 1


GIVING_UP = {"cancelled": give_up_by_cancel, "discarded": give_up_by_discard}


@pytest.mark.parametrize("give_up", GIVING_UP)
async def test_message_under_an_abandoned_key_is_new(store: Store, give_up: str) -> None:
    given_up = under_key()
    await store.receive(given_up)
    await GIVING_UP[give_up](store)

    assert await store.receive(given_up) == set(), "what a sender without an answer repeats stays given up"
    again = under_key()
    assert await store.receive(again) == {given_up.id}
    assert await store.receive(again) == set()


@pytest.mark.parametrize("give_up", GIVING_UP)
async def test_local_message_under_an_abandoned_key_is_new(store: Store, give_up: str) -> None:
    await store.run(outbox.store, [Sent(under_key(destination="local"), "local", ANY_NODE)])
    await GIVING_UP[give_up](store)

    assert await store.run(outbox.store, [Sent(under_key(destination="local"), "local", ANY_NODE)]) == set()
    assert len(await store.claim_incoming()) == 1


async def test_replayed_letter_holds_its_key_again(store: Store) -> None:
    await store.receive(under_key())
    await give_up_by_discard(store)
    await store.rows("UPDATE durable.dead_letters SET resolution = NULL, resolved_at = NULL RETURNING 1")
    await store.run(dead_letters.replay, dead_letters.Selection(), EVERYTHING, actor="ada")

    assert await store.receive(under_key()) == set()


async def test_replayed_letter_of_a_dropped_day_fills_no_partition(store: Store) -> None:
    await store.receive(envelope(1))
    (lease,) = await store.claim_incoming()
    await store.run(inbox.dead_letter, A, lease, LETTER)
    await store.rows("DELETE FROM durable.received_ids RETURNING 1")
    await store.rows(
        "UPDATE durable.dead_letters SET id = CAST('00' || substr(CAST(id AS text), 3) AS uuid) RETURNING 1"
    )

    replayed = await store.run(dead_letters.replay, dead_letters.Selection(), EVERYTHING, actor="ada")

    assert len(replayed.done) == 1
    assert await store.one("SELECT count(*) FROM durable.received_ids") == 0
