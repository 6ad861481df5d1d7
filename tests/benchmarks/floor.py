"""The floor: the same rows written, moved and finished with plain asyncpg, and nothing else.

The statements are durable's own, so that the difference is what sessions, agents and the network cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg

from durable.digest import body_digest
from durable.envelope import Envelope, new_id
from durable.storage import statements
from durable.storage.rows import envelope_columns
from durable.storage.statements import Statement

Pool = Any  # asyncpg ships no types

CONNECTIONS = 8
BATCH = 100
DESTINATION = "tcp://127.0.0.1:1"
BODY = b'{"number":1,"text":"' + b"x" * 256 + b'"}'

PLAIN_INSERT = """
INSERT INTO durable.outgoing_envelopes (id, destination, message_type, source, correlation_id, content_type, headers,
    body, sent_at, owner_id) VALUES ($1, $2, 'bench.note', 'floor', $1, 'application/json', '{}', $3, now(), 1)
"""
BUSINESS = "INSERT INTO business (number) VALUES ($1)"
BUSINESS_LIST = "INSERT INTO business (number) SELECT unnest(CAST($1 AS integer[]))"


def envelopes(count: int) -> list[Envelope]:
    now = datetime.now(UTC)
    ids = [new_id() for _ in range(count)]
    return [
        Envelope(
            id=id_, message_type="bench.note", destination=DESTINATION, source="floor", correlation_id=id_, body=BODY,
            sent_at=now,
        )
        for id_ in ids
    ]  # fmt: skip


def batches(items: Sequence[Envelope]) -> Iterator[Sequence[Envelope]]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))


async def store(pool: Pool, count: int) -> None:
    """One business row and one outgoing row in a transaction of their own, `CONNECTIONS` at a time."""
    numbers = iter(range(count))

    async def work() -> None:
        async with pool.acquire() as conn:
            for number in numbers:
                async with conn.transaction():
                    await conn.execute(BUSINESS, number)
                    await conn.execute(PLAIN_INSERT, new_id(), DESTINATION, BODY)

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))


async def ship(sender: Pool, receiver: Pool, count: int) -> None:
    """Claim a batch, store it at the receiver, delete it: until nothing is left."""
    moved = 0
    while moved < count:
        rows = await _fetch(sender, statements.CLAIM_OUTGOING, destination=DESTINATION, batch_size=BATCH, node=1)
        taken = [Envelope(**_fields(row)) for row in rows]
        await _receive(receiver, taken)
        await _fetch(
            sender,
            statements.DELETE_SENT,
            ids=[row["id"] for row in rows],
            addresses=[DESTINATION] * len(rows),
            epochs=[row["epoch"] for row in rows],
            node=1,
        )
        moved += len(rows)


async def fill_inbox(pool: Pool, items: Sequence[Envelope]) -> None:
    for batch in batches(items):
        await _receive(pool, batch)


async def handle_singly(pool: Pool, items: Sequence[Envelope]) -> None:
    """One effect and one completion in a transaction of their own, `CONNECTIONS` at a time."""
    remaining = iter(items)

    async def work() -> None:
        async with pool.acquire() as conn:
            for item in remaining:
                async with conn.transaction():
                    await conn.execute(BUSINESS, 1)
                    await _fetch(conn, statements.FINISH_HANDLED, **_finished([item]))

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))


async def handle_in_groups(pool: Pool, items: Sequence[Envelope]) -> None:
    """A hundred effects and one completion in a transaction, `CONNECTIONS` at a time."""
    remaining = batches(items)

    async def work() -> None:
        async with pool.acquire() as conn:
            for batch in remaining:
                async with conn.transaction():
                    for _ in batch:
                        await conn.execute(BUSINESS, 1)
                    await _fetch(conn, statements.FINISH_HANDLED, **_finished(batch))

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))


async def handle_lists(pool: Pool, items: Sequence[Envelope]) -> None:
    """One statement for the effects of a hundred and one completion in a transaction, `CONNECTIONS` at a time."""
    remaining = batches(items)

    async def work() -> None:
        async with pool.acquire() as conn:
            for batch in remaining:
                async with conn.transaction():
                    await conn.execute(BUSINESS_LIST, [1] * len(batch))
                    await _fetch(conn, statements.FINISH_HANDLED, **_finished(batch))

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))


async def _receive(pool: Pool, batch: Sequence[Envelope]) -> None:
    await _fetch(
        pool,
        statements.STORE_RECEIVED,
        **envelope_columns(batch),
        endpoint=["bench"] * len(batch),
        body_digest=[body_digest(envelope.body) for envelope in batch],
        owner_id=[1] * len(batch),
    )


def _finished(batch: Sequence[Envelope]) -> dict[str, Any]:
    ids = [envelope.id for envelope in batch]
    return {"ids": ids, "addresses": ["bench"] * len(ids), "epochs": [0] * len(ids), "node": 1}


def _fields(row: Any) -> dict[str, Any]:
    named = {name: row[name] for name in Envelope.__struct_fields__ if name in row.keys()}  # noqa: SIM118  a Record
    return named | {"headers": {}}


async def _fetch(conn: Pool, statement: Statement, **params: Any) -> list[Any]:
    """Run one of durable's statements with asyncpg's own $1, $2, ... parameters."""
    sql, order = _numbered(statement)
    rows: list[Any] = await conn.fetch(sql, *(params[name] for name in order))
    return rows


_compiled: dict[Statement, tuple[str, list[str]]] = {}


def _numbered(statement: Statement) -> tuple[str, list[str]]:
    if statement not in _compiled:
        from sqlalchemy.dialects.postgresql.asyncpg import dialect

        compiled = statement.within("durable").compile(dialect=dialect())  # type: ignore[no-untyped-call]
        _compiled[statement] = str(compiled), list(compiled.positiontup or [])
    return _compiled[statement]


async def pool(url: str) -> Pool:
    return await asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS)
