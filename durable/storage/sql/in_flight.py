"""The SQL statements that read waiting messages of the inbox in pages, which are bounded in rows and bytes."""

from __future__ import annotations

from typing import Final

from durable.envelope import TENANT
from durable.storage.sql.columns import FREE, QUEUED
from durable.storage.sql.statement import Statement

_COLUMNS: Final = (
    "seq, id, endpoint, message_type, content_type, body, execution_time IS NOT NULL AS is_scheduled, "
    f"headers->>'{TENANT}' AS tenant"
)
_NOT_EXPIRED: Final = "(deliver_by IS NULL OR deliver_by > now())"
# The ways in which a row can wait, each with its own index: due, due in its turn, for its time, and with a node or
# marked for none.
_DUE: Final = f"message_type = %s AND {FREE}"
_QUEUED: Final = f"message_type = %s AND {QUEUED}"
_SCHEDULED: Final = "message_type = %s AND execution_time IS NOT NULL"
_MARKED: Final = "message_type = %s AND owner_id <> 0 AND execution_time IS NULL"


def _bounded(page: str, order: str) -> Statement:
    """The rows of this page as far as their bodies have room. The length of a body is known without reading it."""
    return Statement(f"""
WITH page AS MATERIALIZED ({page}), measured AS (
    SELECT *, sum(octet_length(body)) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) - octet_length(body) AS before
    FROM page
)
SELECT seq, id, endpoint, message_type, content_type, body, is_scheduled, tenant FROM measured
WHERE before < :batch_bytes ORDER BY {order}
""")


def _of_type(seq: str, direction: str) -> Statement:
    """Next in this direction, however they wait: short walks along an index each, merged."""
    walks = " UNION ALL ".join(
        f"""(SELECT {_COLUMNS} FROM {{schema}}.incoming_envelopes
        WHERE {state % ":message_type"} AND {_NOT_EXPIRED} AND {seq} ORDER BY seq {direction} LIMIT :batch_size)"""
        for state in (_DUE, _QUEUED, _SCHEDULED, _MARKED)
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
