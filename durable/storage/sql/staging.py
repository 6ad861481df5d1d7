"""The SQL statements of publishing in bulk: rows gather in staging tables, and move into the outbox or the inbox.

A staging table belongs to one attempt of one task. It is unlogged, and a crash of the server empties it: so what moves
is counted. Functions of the schema's owner make and drop it; the runtime role needs no DDL rights.

`{staged}` stands for one staging table or more, as `durable.storage.staging` names them.
"""

from __future__ import annotations

from typing import Final

from durable.storage.sql.columns import DATED, remember_undated
from durable.storage.sql.statement import Statement

_ENVELOPE: Final = (
    "id, message_type, source, correlation_id, causation_id, partition_key, content_type, headers, body, sent_at, "
    "deliver_by, execution_time"
)
_SELECT_ENVELOPE: Final = _ENVELOPE.replace("headers", "CAST(headers AS jsonb)")
_QUEUEING: Final = "owner_id, ordering_key, fair_key"
_SELECT_QUEUEING: Final = "0, ordering_key, fair_key"

MAKE_STAGING = Statement("SELECT {schema}.make_staging(CAST(:staging AS text), CAST(current_user AS text))")
# One table, or, when the name ends with an underscore, all that begin with it.
DROP_STAGING = Statement("SELECT {schema}.drop_staging(CAST(:chosen AS text), CAST(:keep AS interval))")
COUNT_STAGED = Statement("SELECT count(*) FROM {staged}")

# `seq` follows the positions. What comes in no order has none, and is sorted by id, so that the primary key grows from
# left to right. ON CONFLICT costs a quarter of an insert, and is only needed
# where some of the rows are there.
_MOVE_REMOTE: Final = f"""
INSERT INTO {{schema}}.outgoing_envelopes (destination, {_ENVELOPE}, {_QUEUEING})
SELECT destination, {_SELECT_ENVELOPE}, {_SELECT_QUEUEING} FROM {{staged}} WHERE endpoint IS NULL
ORDER BY position, id
"""
MOVE_REMOTE_NEW = Statement(_MOVE_REMOTE)
MOVE_REMOTE = Statement(f"{_MOVE_REMOTE} ON CONFLICT DO NOTHING")


def _fresh(address: str, digest: str, those: str) -> str:
    """The keys of staged rows that were not known; they are known from now on."""
    rows = f"SELECT DISTINCT ON (id, {address}) id, {address}, {digest}, sent_at FROM {{staged}} WHERE {those}"
    return f"""dated AS (
    INSERT INTO {{schema}}.received_ids (id, endpoint, message_digest)
    SELECT id, {address}, {digest} FROM {{staged}} WHERE {those} AND {DATED}
    ORDER BY id
    ON CONFLICT DO NOTHING RETURNING id, endpoint
), undated AS (
    {remember_undated(f"{rows} AND NOT {DATED} ORDER BY id, {address}")}
), fresh AS (
    SELECT id, endpoint AS {address} FROM dated UNION ALL SELECT id, endpoint FROM undated
)"""


# An outbox forgets what it has sent. What is to be published once, also after that, is remembered as what was received.
MOVE_REMOTE_ONCE = Statement(f"""
WITH {_fresh("destination", "0", "endpoint IS NULL")}
INSERT INTO {{schema}}.outgoing_envelopes (destination, {_ENVELOPE}, {_QUEUEING})
SELECT destination, {_SELECT_ENVELOPE}, {_SELECT_QUEUEING} FROM {{staged}} JOIN fresh USING (id, destination)
WHERE endpoint IS NULL
ORDER BY position, id
ON CONFLICT DO NOTHING
""")


def _move_local(those: str) -> Statement:
    """Move local rows; as for all arrivals, the insert of the id is the check for duplicates."""
    return Statement(f"""
WITH {_fresh("endpoint", "message_digest", those)}
INSERT INTO {{schema}}.incoming_envelopes (endpoint, {_ENVELOPE}, {_QUEUEING})
SELECT endpoint, {_SELECT_ENVELOPE}, {_SELECT_QUEUEING} FROM (
    SELECT DISTINCT ON (id, endpoint) * FROM {{staged}} JOIN fresh USING (id, endpoint)
    ORDER BY id, endpoint, position
) AS first
ORDER BY position, id
ON CONFLICT (id, endpoint) DO NOTHING
""")


MOVE_LOCAL = _move_local("endpoint IS NOT NULL")
# Local messages with generated ids are not among those ids: the history knows which of them were here.
MOVE_LOCAL_ONCE = _move_local("""endpoint IS NOT NULL AND NOT EXISTS (
        SELECT FROM {schema}.envelope_history AS past
        WHERE past.id = staged.id AND past.side = 'incoming' AND past.address = staged.endpoint)""")
# Two rows under one id that are two messages: one of them would be lost without a word.
FIND_AMBIGUOUS = Statement("""
SELECT id, message_type, CASE WHEN bodies > 1 THEN 'bodies' WHEN types > 1 THEN 'types' WHEN keys > 1 THEN 'keys'
    ELSE 'headers' END AS what
FROM (
    SELECT id, min(message_type) AS message_type, count(DISTINCT body) AS bodies, count(DISTINCT message_type) AS types,
        count(DISTINCT COALESCE(partition_key, '')) AS keys,
        count(DISTINCT (content_type, CAST(headers AS jsonb))) AS headers
    FROM {staged} GROUP BY id, destination, endpoint HAVING count(*) > 1
) AS copies
WHERE bodies > 1 OR types > 1 OR keys > 1 OR headers > 1 LIMIT 1
""")

# Staged rows under whose ids other messages are there: in the outbox, or among what was received here.
FIND_CHANGED = Statement("""
SELECT count(*) AS rows, min(CAST(id AS text)) AS id FROM (
    SELECT staged.id FROM {staged} JOIN {schema}.outgoing_envelopes AS known USING (id, destination)
    WHERE staged.endpoint IS NULL AND (known.body <> staged.body OR known.message_type <> staged.message_type)
    UNION ALL
    SELECT staged.id FROM {staged} JOIN {schema}.received_ids AS known USING (id, endpoint)
    WHERE known.message_digest <> staged.message_digest
    UNION ALL
    SELECT staged.id FROM {staged} JOIN {schema}.undated_ids AS known USING (id, endpoint)
    WHERE known.message_digest <> staged.message_digest AND NOT known.given_up
) AS changed
""")
# A row comes back unless this batch, or this or a later micro-batch of a stream, was published before. Who publishes
# the same batch at the same time waits here for the first.
BEGIN_BATCH = Statement("""
INSERT INTO {schema}.published_batches AS known (batch, job, number, contents)
VALUES (:batch, CAST(:job AS uuid), CAST(:number AS bigint), CAST(:contents AS text))
ON CONFLICT (batch) DO UPDATE SET job = excluded.job, number = excluded.number, published_at = clock_timestamp()
WHERE known.number < excluded.number
RETURNING batch
""")
READ_CONTENTS = Statement("SELECT contents FROM {schema}.published_batches WHERE batch = :batch")
COUNT_BATCH = Statement("""
UPDATE {schema}.published_batches SET row_count = :row_count, added_count = :added_count WHERE batch = :batch
""")
READ_BATCH = Statement("""
SELECT batch, row_count, added_count FROM {schema}.published_batches WHERE job = CAST(:job AS uuid)
""")
NOTIFY = Statement("SELECT pg_notify(CAST(:channel AS text), '')")
# What streams have come to is kept: a query may be started again on its checkpoint after any time.
PURGE_BATCHES = Statement("""
DELETE FROM {schema}.published_batches WHERE number IS NULL AND published_at < now() - CAST(:keep AS interval)
""")
