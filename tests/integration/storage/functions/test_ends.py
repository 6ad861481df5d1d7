"""Ends of a message: handled, dead, rejected, quarantined, expired, or tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from sqlalchemy import text

from durable.envelope import ANY_NODE
from durable.storage import expiry, inbox, leases, outbox
from durable.storage.inbox import Arrival, Lateness
from durable.storage.rows import Letter, Tried
from durable.storage.sql.recovery import INCOMING
from durable.testing import eventually
from tests.failure.leftovers import MESSAGE_TYPE, envelope
from tests.integration.storage.functions.stores import LETTER, PEER, A, B, Store, outgoing

WAITS_FOR_A_LOCK = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
)
HISTORY = "SELECT side, outcome, address, attempts, interruptions, node_id, error FROM durable.envelope_history"


async def test_finished_message_is_in_the_history(store: Store) -> None:
    await store.send(outgoing())
    (lease,) = await store.claim_outgoing()
    await store.run(outbox.count_failed_attempt, A, [lease])
    await store.run(outbox.delete_sent, A, [lease])

    assert await store.one(HISTORY) == ("outgoing", "sent", PEER, 1, 0, A, None)
    assert await store.one(
        "SELECT id = :id AND xid > 0 AND finished_at >= sent_at FROM durable.envelope_history", id=lease.envelope.id
    )


async def test_the_history_of_both_sides_keeps_the_deadline(store: Store) -> None:
    deadline = datetime.now(UTC) + timedelta(days=1)
    await store.send(outgoing(1, deliver_by=deadline))
    await store.receive(msgspec.structs.replace(envelope(2), deliver_by=deadline))
    await store.run(outbox.delete_sent, A, await store.claim_outgoing())
    await store.run(inbox.finish_handled, A, await store.claim_incoming())
    kept = "SELECT count(*) FROM durable.envelope_history WHERE deliver_by = :deadline"
    assert await store.one(kept, deadline=deadline) == 2


async def test_dead_letter_keeps_the_whole_envelope_and_the_reason(store: Store) -> None:
    await store.receive(msgspec.structs.replace(envelope(1), headers={"a": "b"}, partition_key="k", body=b"\0raw"))
    (lease,) = await store.claim_incoming()
    letter = Letter.from_error(ValueError("no such order \0"))
    assert await store.run(inbox.dead_letter, A, lease, letter, Tried(3))

    row = await store.one(
        "SELECT side, address, id, message_type, source, CAST(headers AS text), partition_key, body, attempts, "
        "exception_type, reason, traceback, fingerprint, replay_count, node_id FROM durable.dead_letters"
    )
    assert row == (
        "incoming", "billing", lease.envelope.id, MESSAGE_TYPE, "orders", '{"a": "b"}', "k", b"\0raw", 3,
        "ValueError", "no such order \N{REPLACEMENT CHARACTER}", letter.traceback, letter.fingerprint, 0, A,
    )  # fmt: skip
    assert await store.one(HISTORY) == ("incoming", "dead-lettered", "billing", 3, 0, A, letter.reason)
    assert await store.one("SELECT count(*) FROM durable.incoming_envelopes") == 0


async def test_message_rejected_by_the_peer_is_a_dead_letter_of_the_outgoing_side(store: Store) -> None:
    await store.send(outgoing(1), outgoing(2))
    first, second = await store.claim_outgoing()
    await store.run(outbox.dead_letter, A, [(first, LETTER)])

    assert await store.rows("SELECT side, address, id FROM durable.dead_letters") == [
        ("outgoing", PEER, first.envelope.id)
    ]
    assert await store.rows("SELECT id FROM durable.outgoing_envelopes") == [(second.envelope.id,)]


@pytest.mark.parametrize("known", [True, False], ids=["envelope", "bytes alone"])
async def test_unstorable_envelope_is_quarantined_with_its_bytes(store: Store, known: bool) -> None:
    strange = envelope(1) if known else None
    await store.run(
        inbox.quarantine, A, inbox.Unfit("billing", b"\xff\0", "a test", strange, {"routing-key": "a\0b\ud800"})
    )

    row = await store.one("SELECT id, message_type, body, reason, headers FROM durable.dead_letters")
    known_columns = (strange.id if strange else None, MESSAGE_TYPE if strange else None)
    assert row == (*known_columns, b"\xff\0", "a test", {"routing-key": "a\N{REPLACEMENT CHARACTER}b?"})


async def test_retry_is_due_after_its_delay_by_the_clock_of_the_database(store: Store) -> None:
    await store.receive(envelope(1))
    (lease,) = await store.claim_incoming()
    assert await store.run(inbox.retry_later, A, lease, Tried(2), delay=timedelta(hours=1))

    owner, epoch, attempts, due = await store.one(
        "SELECT owner_id, epoch, attempts, execution_time - now() FROM durable.incoming_envelopes"
    )
    assert (owner, epoch, attempts) == (ANY_NODE, 2, 2)
    assert timedelta(minutes=59) < due <= timedelta(hours=1)
    assert await store.run(leases.promote_due, INCOMING, 100) == 0
    assert await store.claim_incoming() == []

    await store.set("incoming", "execution_time = now()")
    assert await store.run(leases.promote_due, INCOMING, 100) == 1
    (again,) = await store.claim_incoming(B)
    assert (again.attempts, again.epoch, again.interruptions) == (2, 3, 0)


async def test_owned_message_expires_by_the_clock_of_the_database(store: Store) -> None:
    await store.receive(msgspec.structs.replace(envelope(1), deliver_by=datetime.now(UTC) + timedelta(hours=1)))
    (lease,) = await store.claim_incoming()
    assert not await store.run(inbox.expire, A, lease)
    await store.set("incoming", "deliver_by = now() - interval '1 second'")
    assert await store.run(inbox.expire, A, lease)

    assert (await store.one(HISTORY))[:2] == ("incoming", "expired")


@pytest.mark.parametrize("end", [inbox.expire, expiry.bury_incoming], ids=["forgotten", "dead letter"])
@pytest.mark.parametrize("within", [timedelta(0), timedelta(minutes=1)], ids=["now", "soon"])
async def test_owned_message_expires_by_the_deadline_of_its_row(
    store: Store, end: Callable[..., bool], within: timedelta
) -> None:
    await store.receive(msgspec.structs.replace(envelope(1), deliver_by=datetime.now(UTC) - timedelta(seconds=1)))
    await store.set("incoming", "deliver_by = now() + interval '1 hour'")
    (lease,) = await store.claim_incoming()
    old = msgspec.structs.replace(lease.envelope, deliver_by=datetime.now(UTC) - timedelta(seconds=1))
    held = msgspec.structs.replace(lease, envelope=old)

    assert not await store.run(end, A, held, Lateness(within))
    await store.set("incoming", "deliver_by = '2024-02-29Z'")
    assert await store.run(end, A, held, Lateness(within))
    known = "SELECT expired = '2024-02-29Z' FROM durable.%s"
    noted = f"{known % 'received_ids'} UNION ALL {known % 'undated_ids'}"
    assert await store.one(noted) is True


async def test_message_to_be_sent_expires_by_the_deadline_of_its_row(store: Store) -> None:
    await store.send(outgoing(1, deliver_by=datetime.now(UTC) + timedelta(hours=1)))
    (lease,) = await store.claim_outgoing()
    held = msgspec.structs.replace(
        lease, envelope=msgspec.structs.replace(lease.envelope, deliver_by=datetime.now(UTC) - timedelta(seconds=1))
    )

    for end in (outbox.expire, expiry.bury_outgoing):
        assert await store.run(end, A, [held]) == (set(), {lease.envelope.id})


async def test_waiting_message_lives_longer_after_its_lock_is_rolled_back(store: Store) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    await store.receive(msgspec.structs.replace(envelope(1), deliver_by=datetime.now(UTC) + timedelta(minutes=1)))
    (lease,) = await store.claim_incoming()
    duplicate = Arrival(lease.endpoint, msgspec.structs.replace(lease.envelope, deliver_by=later), ANY_NODE)
    async with store.database.engine.connect() as other:
        await other.execute(text("SELECT FROM durable.incoming_envelopes FOR UPDATE"))
        lengthening = asyncio.create_task(store.run(inbox.live_longer, [duplicate]))
        await eventually(lambda: store.one(WAITS_FOR_A_LOCK))
        await other.rollback()

    assert await lengthening
    assert await store.one("SELECT deliver_by = :later FROM durable.incoming_envelopes", later=later) is True


async def test_message_lives_no_longer_after_its_end(store: Store) -> None:
    await store.receive(msgspec.structs.replace(envelope(1), deliver_by=datetime.now(UTC) + timedelta(minutes=1)))
    (lease,) = await store.claim_incoming()
    duplicate = Arrival(lease.endpoint, lease.envelope, ANY_NODE)

    assert await store.run(inbox.live_longer, [duplicate])
    await store.run(inbox.finish_handled, A, [lease])
    assert not await store.run(inbox.live_longer, [duplicate])


async def test_suspect_attempt_is_counted_before_its_run(store: Store) -> None:
    await store.receive(envelope(1))
    (lease,) = await store.claim_incoming()
    assert [await store.run(inbox.begin_suspect_attempt, A, lease) for _ in range(2)] == [1, 2]
