"""The SQL statements of publishing in bulk: rows gather in staging tables, and move into the outbox or the inbox.

A staging table belongs to one attempt of one task and is unlogged: a crash of the server empties it, so what moves is
counted. Functions of the schema's owner make and drop it; the runtime role needs no DDL rights.

`{staging}` is a name that make_staging() has accepted.
"""

from __future__ import annotations

from typing import Final

from durable.routing import LOCAL
from durable.storage.statements import Statement

_ENVELOPE: Final = (
    "id, message_type, source, correlation_id, causation_id, partition_key, content_type, headers, body, sent_at, "
    "deliver_by, execution_time"
)
_SELECT_ENVELOPE: Final = _ENVELOPE.replace("headers", "CAST(headers AS jsonb)")

MAKE_STAGING = Statement("SELECT {schema}.make_staging(CAST(:staging AS text), CAST(current_user AS text))")
DROP_STAGING = Statement("SELECT {schema}.drop_staging(CAST(:prefix AS text), CAST(:keep AS interval))")
COUNT_STAGED = Statement("SELECT count(*) FROM {schema}.{staging}")

# Sorted, so that the primary key grows from left to right.
MOVE_REMOTE = Statement(f"""
INSERT INTO {{schema}}.outgoing_envelopes (destination, {_ENVELOPE}, owner_id)
SELECT destination, {_SELECT_ENVELOPE}, 0 FROM {{schema}}.{{staging}} WHERE destination <> '{LOCAL}'
ORDER BY id, destination
ON CONFLICT DO NOTHING
""")
# As for all that arrives, the insert into received_ids is the check for duplicates.
MOVE_LOCAL = Statement(f"""
WITH fresh AS (
    INSERT INTO {{schema}}.received_ids (id, endpoint, message_digest)
    SELECT id, destination, message_digest FROM {{schema}}.{{staging}} WHERE destination = '{LOCAL}'
    ORDER BY id
    ON CONFLICT DO NOTHING RETURNING id
)
INSERT INTO {{schema}}.incoming_envelopes (endpoint, {_ENVELOPE}, owner_id)
SELECT DISTINCT ON (id) destination, {_SELECT_ENVELOPE}, 0
FROM {{schema}}.{{staging}} JOIN fresh USING (id) WHERE destination = '{LOCAL}'
ORDER BY id
""")
# Two rows under one id that are two messages: one of them would be lost without a word.
FIND_AMBIGUOUS = Statement("""
SELECT id, destination FROM {schema}.{staging} GROUP BY id, destination
HAVING count(*) > 1 AND count(DISTINCT (message_type, body)) > 1 LIMIT 1
""")

# A row comes back unless this batch, or this or a later micro-batch of a stream, was published before. A second
# publisher of the same batch waits here for the first.
BEGIN_BATCH = Statement("""
INSERT INTO {schema}.published_batches AS known (batch, number) VALUES (:batch, CAST(:number AS bigint))
ON CONFLICT (batch) DO UPDATE SET number = excluded.number, published_at = clock_timestamp()
WHERE known.number < excluded.number
RETURNING batch
""")
COUNT_BATCH = Statement("""
UPDATE {schema}.published_batches SET row_count = :row_count, added_count = :added_count WHERE batch = :batch
""")
READ_BATCH = Statement("SELECT row_count, added_count, published_at FROM {schema}.published_batches WHERE batch = :batch")
NOTIFY = Statement("SELECT pg_notify(CAST(:channel AS text), '')")
# What streams have come to is kept: a query may be started again on its checkpoint after any time.
PURGE_BATCHES = Statement("""
DELETE FROM {schema}.published_batches WHERE number IS NULL AND published_at < now() - CAST(:keep AS interval)
""")
