"""The floor: the same rows written, moved and finished with plain asyncpg, and nothing else.

The statements are durable's own, so that the difference is what sessions, agents and the network cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import asyncpg
import msgspec

from durable import message
from durable.envelope import Envelope, new_id
from durable.messages.digest import message_digest, terms_digest
from durable.settings import Settings
from durable.storage.rows import envelope_columns
from durable.storage.sql import inbox, outbox
from durable.storage.sql.statement import Statement

Pool = Any  # asyncpg ships no types
Send = Callable[[Sequence[Envelope]], Awaitable[None]]

CONNECTIONS = 8
BATCH = 100
IN_FLIGHT = Settings().batches_in_flight
DESTINATION = "tcp://127.0.0.1:1"
MESSAGE_TYPE = "bench.note"
BODY = b'{"number":1,"text":"' + b"x" * 256 + b'"}'

PLAIN_INSERT = """
INSERT INTO durable.outgoing_envelopes (id, destination, message_type, source, correlation_id, content_type, headers,
    body, sent_at, owner_id) VALUES ($1, $2, 'bench.note', 'floor', $1, 'application/json', '{}', $3, now(), 1)
"""
BUSINESS = "INSERT INTO business (number) VALUES ($1)"
BUSINESS_LIST = "INSERT INTO business (number) SELECT unnest(CAST($1 AS integer[]))"


@message(MESSAGE_TYPE)
class Note(msgspec.Struct):
    """What BODY says."""

    number: int
    text: str


class Claimed(NamedTuple):
    envelope: Envelope
    epoch: int


def envelopes(count: int, destination: str = DESTINATION) -> list[Envelope]:
    now = datetime.now(UTC)
    ids = [new_id() for _ in range(count)]
    return [
        Envelope(
            id=id_, message_type=MESSAGE_TYPE, destination=destination, source="floor", correlation_id=id_, body=BODY,
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
        taken = await claim(sender, DESTINATION)
        await receive(receiver, [envelope for envelope, _ in taken])
        await delete(sender, taken)
        moved += len(taken)


async def ship_by(send: Send, pool: Pool, destination: str) -> None:
    """Claim, send, delete, as many batches at once as durable has in flight: until nothing is left."""

    async def work() -> None:
        while taken := await claim(pool, destination):
            await send([envelope for envelope, _ in taken])
            await delete(pool, taken)

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))


async def claim(conn: Pool, destination: str) -> list[Claimed]:
    """Up to a batch of envelopes from the outbox."""
    place = {"destinations": [destination], "sizes": [BATCH], "floors": [0]}
    rows = await _fetch(conn, outbox.CLAIM_OUTGOING.whole, **place, batch_size=BATCH, node=1)
    return [Claimed(Envelope(**_fields(row)), row["epoch"]) for row in rows]


async def receive(conn: Pool, batch: Sequence[Envelope]) -> None:
    """Into the inbox."""
    await _fetch(
        conn,
        inbox.STORE_RECEIVED,
        **envelope_columns(batch),
        execution_time=[None] * len(batch),
        endpoint=["bench"] * len(batch),
        message_digest=[message_digest(envelope.message_type, envelope.body) for envelope in batch],
        terms=[terms_digest(envelope) for envelope in batch],
        owner_id=[1] * len(batch),
        ordering_key=[None] * len(batch),
        fair_key=[None] * len(batch),
    )


async def delete(conn: Pool, claimed: Sequence[Claimed]) -> None:
    """From the outbox, with their history."""
    await _fetch(
        conn,
        outbox.DELETE_SENT,
        ids=[envelope.id for envelope, _ in claimed],
        addresses=[envelope.destination for envelope, _ in claimed],
        epochs=[epoch for _, epoch in claimed],
        node=1,
        keep_body=False,
    )


async def fill_outbox(pool: Pool, items: Sequence[Envelope]) -> None:
    for batch in batches(items):
        await _fetch(
            pool,
            outbox.STORE_SENT,
            **envelope_columns(batch),
            execution_time=[None] * len(batch),
            destination=[envelope.destination for envelope in batch],
            endpoint=[None] * len(batch),
            message_digest=[message_digest(envelope.message_type, envelope.body) for envelope in batch],
            owner_id=[0] * len(batch),
            ordering_key=[None] * len(batch),
            fair_key=[None] * len(batch),
            channel="",
            wake=False,
        )


async def fill_inbox(pool: Pool, items: Sequence[Envelope]) -> None:
    for batch in batches(items):
        await receive(pool, batch)


async def handle_singly(pool: Pool, items: Sequence[Envelope]) -> None:
    """One effect and one completion in a transaction of their own, `CONNECTIONS` at a time."""
    remaining = iter(items)

    async def work() -> None:
        async with pool.acquire() as conn:
            for item in remaining:
                async with conn.transaction():
                    await conn.execute(BUSINESS, 1)
                    await _fetch(conn, inbox.FINISH_HANDLED, **finished([item]))

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
                    await _fetch(conn, inbox.FINISH_HANDLED, **finished(batch))

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))


async def handle_lists(pool: Pool, items: Sequence[Envelope]) -> None:
    """One statement for the effects of a hundred and one completion in a transaction, `CONNECTIONS` at a time."""
    remaining = batches(items)

    async def work() -> None:
        async with pool.acquire() as conn:
            for batch in remaining:
                async with conn.transaction():
                    await conn.execute(BUSINESS_LIST, [1] * len(batch))
                    await _fetch(conn, inbox.FINISH_HANDLED, **finished(batch))

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))


def finished(batch: Sequence[Envelope]) -> dict[str, Any]:
    ids = [envelope.id for envelope in batch]
    return {
        "ids": ids,
        "addresses": ["bench"] * len(ids),
        "epochs": [0] * len(ids),
        "node": 1,
        "counted": 0,
        "keep_body": False,
    }


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


def open_pool(url: str) -> Pool:
    """To be used as an async context manager."""
    return asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS)
