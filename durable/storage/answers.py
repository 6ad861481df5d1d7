"""Answers to requests, kept until somebody has waited for them, or until their retention is over."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Row

from durable.envelope import Envelope, LeasedEnvelope
from durable.storage import maintenance
from durable.storage.rows import decoded_headers
from durable.storage.sql import answers as statements


class Arrived(NamedTuple):
    """An answer in the inbox, and the request that it answers."""

    request_id: UUID
    lease: LeasedEnvelope


class Kept(NamedTuple):
    """An answer that is kept; without its envelope when it was forgotten."""

    request_id: UUID
    endpoint: str
    envelope: Envelope | None


def keep(conn: Connection, schema: str, arrived: Sequence[Arrived]) -> set[UUID]:
    """Keep the answers in the transaction that finishes them. Returns the ids of those that are kept.

    The others are second answers, or answers to requests that were forgotten.
    """
    params = {
        "request_ids": [each.request_id for each in arrived],
        "ids": [each.lease.envelope.id for each in arrived],
        "endpoints": [each.lease.endpoint for each in arrived],
    }
    return set(conn.execute(statements.KEEP.within(schema), params).scalars())


def read(conn: Connection, schema: str, request_ids: Collection[UUID]) -> list[Kept]:
    """Return the answers to these requests, the oldest first."""
    rows = conn.execute(statements.READ.within(schema), {"request_ids": list(request_ids)})
    return [Kept(row.request_id, row.endpoint, None if row.body is None else _envelope(row)) for row in rows]


def _envelope(row: Row[Any]) -> Envelope:
    return Envelope(
        id=row.id,
        message_type=row.message_type,
        destination=row.endpoint,
        source=row.source,
        correlation_id=row.request_id,
        causation_id=row.request_id,
        content_type=row.content_type,
        headers=decoded_headers(row.headers),
        body=row.body,
        sent_at=row.sent_at,
    )


def forget(conn: Connection, schema: str, request_id: UUID, *, endpoint: str) -> None:
    """Forget the answer to this request that came to this endpoint, also one that is to come."""
    conn.execute(statements.FORGET.within(schema), {"request_id": request_id, "endpoint": endpoint})


def forget_former(conn: Connection, schema: str, request_id: UUID, *, endpoint: str, came_to: str) -> None:
    """Forget what is kept for a former request, unless this id is still known where its request comes in."""
    params = {"request_id": request_id, "endpoint": endpoint, "came_to": came_to}
    conn.execute(statements.FORGET_FORMER.within(schema), params)


def purge(conn: Connection, schema: str, *, keep: timedelta, batch_size: int) -> int:
    """Delete a bounded number of answers that are older than this. Returns how many."""
    return maintenance.purge(conn, schema, statements.PURGE, keep=keep, batch_size=batch_size)
