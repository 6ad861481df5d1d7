"""The fence: a row is changed only by its owner, in its epoch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy import Connection, text

from durable.envelope import ANY_NODE, LeasedEnvelope, NodeId
from durable.storage import inbox, leases, outbox
from durable.storage.rows import ONCE
from durable.storage.sql import inbox as inbox_statements
from durable.storage.sql import outbox as outbox_statements
from durable.storage.sql.recovery import INCOMING, OUTGOING
from durable.storage.sql.statement import Statement
from tests.failure.leftovers import envelope
from tests.integration.storage.functions.stores import LETTER, A, B, Store, outgoing

Change = Callable[[Store, NodeId, LeasedEnvelope], Any]


async def _begin(store: Store, node: NodeId, lease: LeasedEnvelope) -> bool:
    return await store.run(inbox.begin_suspect_attempt, node, lease) is not None


async def _count(store: Store, node: NodeId, lease: LeasedEnvelope) -> bool:
    before = await store.one("SELECT sum(attempts) FROM durable.outgoing_envelopes")
    await store.run(outbox.count_failed_attempt, node, [lease])
    return bool(await store.one("SELECT sum(attempts) FROM durable.outgoing_envelopes") > before)


async def _dead_letter_outgoing(store: Store, node: NodeId, lease: LeasedEnvelope) -> bool:
    await store.run(outbox.dead_letter, node, [(lease, LETTER)])
    return bool(await store.one("SELECT count(*) FROM durable.dead_letters"))


CHANGES: dict[str, tuple[str, Change]] = {
    "delete sent": ("outgoing", lambda store, node, lease: store.run(outbox.delete_sent, node, [lease])),
    "count a failed attempt": ("outgoing", _count),
    "dead-letter outgoing": ("outgoing", _dead_letter_outgoing),
    "release outgoing": ("outgoing", lambda store, node, lease: store.run(leases.release, OUTGOING, node, [lease.key])),
    "finish handled": ("incoming", lambda store, node, lease: store.run(inbox.finish_handled, node, [lease])),
    "begin a suspect attempt": ("incoming", _begin),
    "retry later": (
        "incoming",
        lambda store, node, lease: store.run(inbox.retry_later, node, lease, delay=timedelta(seconds=1)),
    ),
    "dead-letter incoming": ("incoming", lambda store, node, lease: store.run(inbox.dead_letter, node, lease, LETTER)),
    "expire": ("incoming", lambda store, node, lease: store.run(inbox.expire, node, lease)),
    "release incoming": ("incoming", lambda store, node, lease: store.run(leases.release, INCOMING, node, [lease.key])),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_row_is_changed_only_by_its_owner_in_its_epoch(store: Store, change: str) -> None:
    side, apply = CHANGES[change]
    await store.send(outgoing())
    await store.receive(envelope(1))
    (lease,) = await (store.claim_outgoing() if side == "outgoing" else store.claim_incoming())
    if change == "expire":
        await store.set("incoming", "deliver_by = now() - interval '1 second'")
    before = await store.rows(f"SELECT * FROM durable.{side}_envelopes")

    for stranger, claimed in (
        (B, lease),
        (ANY_NODE, lease),
        (A, msgspec.structs.replace(lease, epoch=lease.epoch + 1)),
        (A, msgspec.structs.replace(lease, epoch=lease.epoch - 1)),
        (A, msgspec.structs.replace(lease, endpoint="elsewhere")),
        (A, msgspec.structs.replace(lease, envelope=envelope(2))),
    ):
        assert not await apply(store, stranger, claimed)
        assert await store.rows(f"SELECT * FROM durable.{side}_envelopes") == before
    assert await apply(store, A, lease)
    assert await store.rows(f"SELECT * FROM durable.{side}_envelopes") != before


async def test_finish_deletes_only_the_rows_still_owned(store: Store) -> None:
    await store.receive(*(envelope(number) for number in range(3)))
    claimed = await store.claim_incoming()
    await store.run(leases.release, INCOMING, A, [claimed[1].key])

    assert await store.run(inbox.finish_handled, A, claimed) == 2


FENCED = {
    outbox_statements.DELETE_SENT: "outgoing",
    outbox_statements.COUNT_FAILED_SEND: "outgoing",
    outbox_statements.DEAD_LETTER_OUTGOING: "outgoing",
    outbox_statements.EXPIRE_OWNED_OUTGOING: "outgoing",
    OUTGOING.release: "outgoing",
    inbox_statements.FINISH_HANDLED: "incoming",
    INCOMING.release: "incoming",
    inbox_statements.BEGIN_SUSPECT_ATTEMPT: "incoming",
    inbox_statements.RETRY_LATER: "incoming",
    inbox_statements.DEAD_LETTER_INCOMING: "incoming",
    inbox_statements.EXPIRE_OWNED_INCOMING: "incoming",
}


async def test_a_fence_uses_the_primary_key_and_never_the_owner_index(store: Store, url: str) -> None:
    """With statistics from when the tables were empty, and 20,000 rows that one node owns."""
    with psycopg.connect(url, autocommit=True) as conn:
        for side in ("outgoing", "incoming"):
            conn.execute(f"ALTER TABLE durable.{side}_envelopes SET (autovacuum_enabled = false)")
            conn.execute(f"ANALYZE durable.{side}_envelopes")
    for first in range(0, 20_000, 2_000):
        await store.send(*(outgoing(number) for number in range(first, first + 2_000)), owner=A)
        await store.receive(*(envelope(number) for number in range(first, first + 2_000)), owner=A)

    for statement, side in FENCED.items():
        address = "destination" if side == "outgoing" else "endpoint"
        keys = await store.rows(f"SELECT id, {address}, 0 FROM durable.{side}_envelopes LIMIT 100")
        plan = await store.run(explain, statement, keys)
        indexes = {index for index in _find(plan, "Index Name") if index.startswith(side)}
        assert indexes == {f"{side}_envelopes_pkey"}, f"{statement.within('')} uses {indexes or 'no index'}: {plan}"


def explain(conn: Connection, schema: str, statement: Statement, keys: Sequence[tuple[Any, str, int]]) -> Any:
    """The plan of a fenced statement for these rows of node A."""
    params = leases.fence(A, keys) | dict(zip(("id", "endpoint", "epoch"), keys[0], strict=True))
    params |= LETTER.parameters() | ONCE.columns() | {"message_digest": 0}
    params |= {"delay": timedelta(seconds=1), "counted": 1, "within": timedelta(0), "keep_body": False}
    params |= {"is_interrupted": False}
    explained = text(f"EXPLAIN (FORMAT JSON) {statement.within(schema).text}")
    plan = conn.execute(explained, {key: params[key] for key in explained.compile().params}).scalar_one()
    return json.loads(plan) if isinstance(plan, str) else plan


def _find(plan: Any, key: str) -> Iterator[str]:
    if isinstance(plan, dict):
        if key in plan:
            yield plan[key]
        plan = list(plan.values())
    if isinstance(plan, list):
        for part in plan:
            yield from _find(part, key)
