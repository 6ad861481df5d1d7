"""The functions of storage, each in a transaction of its own, and the places where they are tried."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import msgspec
from sqlalchemy import Connection, text

from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId
from durable.storage import inbox, outbox
from durable.storage.database import Database
from durable.storage.inbox import Arrival
from durable.storage.outbox import Sent
from durable.storage.rows import Letter
from tests.failure.leftovers import MESSAGE_TYPE, envelope
from tests.support.servers import EMBEDDED, older_servers

A, B = NodeId(1), NodeId(2)
PEER = "tcp://127.0.0.1:2301"
LETTER = Letter.because("a test", "test")


# The drivers differ in what they accept, the servers in how they plan: not every pair is worth its time.
PLACES = [(EMBEDDED, "psycopg"), *((version, "asyncpg") for version in [EMBEDDED, *older_servers()])]


class Store:
    """The functions of storage, each in a transaction of its own."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self.database.transaction(function, *args, **kwargs)

    async def send(self, *envelopes: Envelope, owner: NodeId = ANY_NODE) -> None:
        await self.run(outbox.store, [Sent(each, None, owner) for each in envelopes])

    async def receive(self, *envelopes: Envelope, owner: NodeId = ANY_NODE, endpoint: str = "billing") -> set[Any]:
        fresh = await self.run(inbox.store, [Arrival(endpoint, each, owner) for each in envelopes])
        return {envelope_id for envelope_id, _ in fresh}

    async def claim_outgoing(
        self, node: NodeId = A, batch_size: int = 100, destination: str = PEER
    ) -> list[LeasedEnvelope]:
        claimed: list[LeasedEnvelope] = await self.run(outbox.claim, {destination: batch_size}, node=node)
        return claimed

    async def claim_incoming(
        self, node: NodeId = A, batch_size: int = 100, of: str = MESSAGE_TYPE
    ) -> list[LeasedEnvelope]:
        claimed: list[LeasedEnvelope] = await self.run(inbox.claim, message_type=of, batch_size=batch_size, node=node)
        return claimed

    async def rows(self, statement: str, **params: Any) -> list[Any]:
        def read(conn: Connection, schema: str) -> list[Any]:
            return [tuple(row) for row in conn.execute(text(statement), params)]

        return await self.database.transaction(read)

    async def one(self, statement: str, **params: Any) -> Any:
        (row,) = await self.rows(statement, **params)
        return row[0] if len(row) == 1 else row

    async def set(self, table: str, assignments: str) -> None:
        await self.rows(f"UPDATE durable.{table}_envelopes SET {assignments} RETURNING 1")


def outgoing(order_id: int = 1, **changes: Any) -> Envelope:
    return msgspec.structs.replace(envelope(order_id, destination=PEER), **changes)


def orders(claimed: Sequence[LeasedEnvelope]) -> list[int]:
    return [json.loads(lease.envelope.body)["order_id"] for lease in claimed]


def under_key(key: str = "invoice-17", **changes: Any) -> Envelope:
    """A message under a business key, sent now."""
    envelope_id = uuid5(NAMESPACE_URL, key)
    return msgspec.structs.replace(envelope(1, envelope_id=envelope_id), sent_at=datetime.now(UTC), **changes)
