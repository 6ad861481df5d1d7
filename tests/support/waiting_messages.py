"""Messages that wait in an inbox, as code of another version has left them there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from durable.envelope import new_id
from tests.support.tables import Tables

ENDPOINT = "shop"


def put(
    tables: Tables,
    message_type: str,
    *bodies: bytes,
    content_type: str = "application/json",
    due: datetime | None = None,
    owner: int = 0,
    deliver_by: datetime | None = None,
) -> Sequence[UUID]:
    """One for each body, in this order; returns their ids. `owner` is the node that has them."""
    ids = [new_id() for _ in bodies]
    for each, body in zip(ids, bodies, strict=True):
        tables.execute(
            """INSERT INTO durable.incoming_envelopes (endpoint, id, message_type, source, correlation_id,
                content_type, body, sent_at, execution_time, owner_id, deliver_by)
            VALUES (%s, %s, %s, 'elsewhere', %s, %s, %s, now(), %s, %s, %s)""",
            ENDPOINT,
            each,
            message_type,
            each,
            content_type,
            body,
            due,
            owner,
            deliver_by,
        )
    return ids
