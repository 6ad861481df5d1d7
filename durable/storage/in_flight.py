"""Waiting messages of the inbox, read without being claimed, in pages that are bounded in rows and bytes.

A page ends where its bodies would be more than `batch_bytes`, but never before its first row; an empty one is the end.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from durable.storage.sql.columns import FREE, QUEUED
from durable.storage.sql.statement import Statement

_COLUMNS: Final = "seq, id, endpoint, message_type, content_type, body, execution_time IS NOT NULL AS is_scheduled"
_NOT_EXPIRED: Final = "(deliver_by IS NULL OR deliver_by > now())"
# The ways in which a row can wait, each with its own index: due, due in its turn, for its time, and with a node.
_DUE: Final = f"message_type = %s AND {FREE}"
_QUEUED: Final = f"message_type = %s AND {QUEUED}"
_SCHEDULED: Final = "message_type = %s AND execution_time IS NOT NULL"
_OWNED: Final = "message_type = %s AND owner_id <> 0 AND execution_time IS NULL"


def _bounded(page: str, order: str) -> Statement:
    """The rows of this page as far as their bodies have room. The length of a body is known without reading it."""
    return Statement(f"""
WITH page AS MATERIALIZED ({page}), measured AS (
    SELECT *, sum(octet_length(body)) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) - octet_length(body) AS before
    FROM page
)
SELECT seq, id, endpoint, message_type, content_type, body, is_scheduled FROM measured
WHERE before < :batch_bytes ORDER BY {order}
""")


def _of_type(seq: str, direction: str) -> Statement:
    """Next in this direction, however they wait: short walks along an index each, merged."""
    walks = " UNION ALL ".join(
        f"""(SELECT {_COLUMNS} FROM {{schema}}.incoming_envelopes
        WHERE {state % ":message_type"} AND {_NOT_EXPIRED} AND {seq} ORDER BY seq {direction} LIMIT :batch_size)"""
        for state in (_DUE, _QUEUED, _SCHEDULED, _OWNED)
    )
    order = f"seq {direction}"
    return _bounded(f"SELECT * FROM ({walks}) AS walks ORDER BY {order} LIMIT :batch_size", order)


READ_OLDEST: Final = _of_type("seq > :after", "ASC")
READ_NEWEST: Final = _of_type("seq > :after AND seq < :before", "DESC")
READ_ALL: Final = _bounded(
    f"""SELECT {_COLUMNS} FROM {{schema}}.incoming_envelopes
    WHERE (id, endpoint) > (CAST(:id AS uuid), CAST(:endpoint AS text)) AND {_NOT_EXPIRED}
    ORDER BY id, endpoint LIMIT :batch_size""",
    "id, endpoint",
)
COUNT_ALL: Final = Statement("SELECT count(*) FROM {schema}.incoming_envelopes")

LAST_SEQ: Final = 2**63 - 1


class InFlight(NamedTuple):
    """A message that waits, as far as it must be known to decode it."""

    seq: int
    id: UUID
    endpoint: str
    message_type: str
    content_type: str
    body: bytes
    is_scheduled: bool


class Page(NamedTuple):
    """Bounds of a page."""

    batch_size: int
    batch_bytes: int


def oldest(conn: Connection, schema: str, message_type: str, page: Page, *, after: int = 0) -> list[InFlight]:
    """The oldest of this type after this seq, in order."""
    return _read(conn, READ_OLDEST, schema, page, message_type=message_type, after=after)


def newest(
    conn: Connection, schema: str, message_type: str, page: Page, *, after: int, before: int = LAST_SEQ
) -> list[InFlight]:
    """The newest of this type between these seqs, the newest first."""
    return _read(conn, READ_NEWEST, schema, page, message_type=message_type, after=after, before=before)


def every(conn: Connection, schema: str, page: Page, *, after: tuple[UUID, str]) -> list[InFlight]:
    """Read messages of any type, in the order of ids, after this id and endpoint."""
    return _read(conn, READ_ALL, schema, page, id=after[0], endpoint=after[1])


def count(conn: Connection, schema: str) -> int:
    return int(conn.execute(COUNT_ALL.within(schema)).scalar_one())


def _read(conn: Connection, statement: Statement, schema: str, page: Page, **params: Any) -> list[InFlight]:
    return [InFlight(*row) for row in conn.execute(statement.within(schema), page._asdict() | params)]
