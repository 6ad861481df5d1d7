"""Waiting messages of the inbox, read without being claimed, in pages that are bounded in rows and bytes.

A page ends where its bodies would be more than `batch_bytes`, but never before its first row; an empty one is the end.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from durable.envelope import TENANT, Envelope, LeasedEnvelope
from durable.storage.sql import in_flight as statements
from durable.storage.sql.statement import Statement

LAST_SEQ: Final = 2**63 - 1
_ANY_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)


class InFlight(NamedTuple):
    """A message that waits, as far as it must be known to decode it."""

    seq: int
    id: UUID
    endpoint: str
    message_type: str
    content_type: str
    body: bytes
    is_scheduled: bool
    tenant: str | None = None

    def lease(self) -> LeasedEnvelope:
        """Return as much of its envelope as decoding needs."""
        envelope = Envelope(
            id=self.id,
            message_type=self.message_type,
            destination=self.endpoint,
            source="",
            correlation_id=self.id,
            body=self.body,
            sent_at=_ANY_TIME,
            content_type=self.content_type,
            headers={} if self.tenant is None else {TENANT: self.tenant},
        )
        return LeasedEnvelope(envelope, endpoint=self.endpoint)


class Page(NamedTuple):
    """Bounds of a page."""

    batch_size: int
    batch_bytes: int


def oldest(conn: Connection, schema: str, message_type: str, page: Page, *, after: int = 0) -> list[InFlight]:
    """The oldest of this type after this seq, in order."""
    return _read(conn, statements.READ_OLDEST, schema, page, message_type=message_type, after=after)


def newest(
    conn: Connection, schema: str, message_type: str, page: Page, *, after: int, before: int = LAST_SEQ
) -> list[InFlight]:
    """The newest of this type between these seqs, the newest first."""
    return _read(conn, statements.READ_NEWEST, schema, page, message_type=message_type, after=after, before=before)


def every(conn: Connection, schema: str, page: Page, *, after: tuple[UUID, str]) -> list[InFlight]:
    """Read messages of any type, in the order of ids, after this id and endpoint."""
    return _read(conn, statements.READ_ALL, schema, page, id=after[0], endpoint=after[1])


def count(conn: Connection, schema: str) -> int:
    return int(conn.execute(statements.COUNT_ALL.within(schema)).scalar_one())


def _read(conn: Connection, statement: Statement, schema: str, page: Page, **params: Any) -> list[InFlight]:
    return [InFlight(*row) for row in conn.execute(statement.within(schema), page._asdict() | params)]
