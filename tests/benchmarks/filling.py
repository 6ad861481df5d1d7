"""Rows that wait in an inbox or an outbox, made by the server itself: a million in seconds.

Their columns are those of `floor.envelopes`, and each has its row in received_ids. A keyed row has a key of its own;
the order of the keys is not that of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import psycopg

from durable.envelope import ANY_NODE, Envelope, NodeId
from durable.messages.digest import message_digest, terms_digest
from durable.storage.database import channel
from tests.benchmarks import floor

SCHEMA: Final = "durable"
AT_ONCE: Final = 100_000
"""Rows of one statement, after which there is progress to report."""

_MADE: Final = """
made AS MATERIALIZED (
    SELECT n, uuidv7() AS id, CASE WHEN %(is_keyed)s THEN 'key-' || md5(CAST(n AS text)) END AS key
    FROM generate_series(CAST(%(first)s AS bigint), CAST(%(last)s AS bigint)) AS n
)"""
_INBOX: Final = f"""
WITH {_MADE}, known AS (
    INSERT INTO durable.received_ids (id, endpoint, message_digest, terms)
    SELECT id, 'bench', %(message_digest)s, %(terms)s FROM made
)
INSERT INTO durable.incoming_envelopes (endpoint, id, message_type, source, correlation_id, partition_key, content_type,
    body, sent_at, owner_id, ordering_key)
SELECT 'bench', id, %(message_type)s, 'floor', id, key, 'application/json', %(body)s, now(), %(owner)s, key
FROM made ORDER BY n
"""
_OUTBOX: Final = f"""
WITH {_MADE}
INSERT INTO durable.outgoing_envelopes (destination, id, message_type, source, correlation_id, partition_key,
    content_type, body, sent_at, owner_id, ordering_key)
SELECT %(destination)s, id, %(message_type)s, 'floor', id, key, 'application/json', %(body)s, now(), %(owner)s, key
FROM made ORDER BY n
"""

Advance = Callable[[int], None]
"""Told how many rows more there are."""


def fill_inbox(
    url: str, count: int, *, is_keyed: bool = False, owner: NodeId = ANY_NODE, advance: Advance = lambda _: None
) -> None:
    """Let messages wait to be handled, and wake no node."""
    (envelope,) = floor.envelopes(1)
    digests = {"message_digest": _digest(envelope), "terms": terms_digest(envelope)}
    _fill(url, _INBOX, count, digests | {"is_keyed": is_keyed, "owner": owner}, advance)


def fill_outbox(url: str, count: int, destination: str, *, advance: Advance = lambda _: None) -> None:
    """Let messages wait to be sent, and wake no node."""
    params = {"destination": destination, "is_keyed": False, "owner": ANY_NODE}
    _fill(url, _OUTBOX, count, params, advance)


def wake(url: str) -> None:
    """Tell the nodes that there is work."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("SELECT pg_notify(%s, '')", (channel(SCHEMA),))


def _fill(url: str, statement: str, count: int, params: dict[str, Any], advance: Advance) -> None:
    same = {"message_type": floor.MESSAGE_TYPE, "body": floor.BODY}
    with psycopg.connect(url, autocommit=True) as conn:
        for first in range(1, count + 1, AT_ONCE):
            last = min(first + AT_ONCE - 1, count)
            conn.execute(statement.encode(), params | same | {"first": first, "last": last})
            advance(last - first + 1)
        conn.execute("ANALYZE")


def _digest(envelope: Envelope) -> int:
    return message_digest(envelope.message_type, envelope.body)
