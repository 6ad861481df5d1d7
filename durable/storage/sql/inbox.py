"""The statements of the inbox: storing what arrives, claiming, and finishing in the handler's transaction."""

from __future__ import annotations

from typing import Final

from durable.storage.sql.columns import (
    DATED,
    ENVELOPE,
    FREE,
    LETTER,
    QUEUEING,
    REMEMBERED,
    SELECT_ENVELOPE,
    UNNEST_ENVELOPE,
    UNNEST_QUEUEING,
    known_digest,
    remember_expired,
    remember_undated,
)
from durable.storage.sql.statement import Statement
from durable.storage.sql.work import INBOX

_THIS: Final = "id = :id AND endpoint = :endpoint AND owner_id + 0 = :node AND epoch = :epoch"
_COUNTED: Final = " + CAST(:counted AS integer)"
_FAILURES: Final = """unnest(
        CAST(:failed_number AS integer[]), CAST(:failed_at AS timestamptz[]), CAST(:failed_type AS text[]),
        CAST(:failed_reason AS text[]), CAST(:failed_traceback AS text[]))
    AS failure (number, failed_at, exception_type, reason, traceback)"""

# A row comes back for each envelope that was not there before; the others are duplicates, also where the id is
# forgotten and its row still waits.
STORE_RECEIVED = Statement(f"""
WITH received AS MATERIALIZED (
    SELECT * FROM unnest({UNNEST_ENVELOPE}, CAST(:execution_time AS timestamptz[]), CAST(:endpoint AS text[]),
        CAST(:message_digest AS bigint[]), CAST(:terms AS bigint[]), {UNNEST_QUEUEING}) WITH ORDINALITY
    AS t ({ENVELOPE}, execution_time, endpoint, message_digest, terms, {QUEUEING}, position)
), dated AS (
    INSERT INTO {{schema}}.received_ids (id, endpoint, message_digest, terms, due_at)
    SELECT id, endpoint, message_digest, terms, execution_time FROM received WHERE {DATED}
    ON CONFLICT DO NOTHING RETURNING id, endpoint
), undated AS (
    {remember_undated(f"SELECT {REMEMBERED}, terms, execution_time FROM received WHERE NOT {DATED}")}
), fresh AS (
    SELECT id, endpoint FROM dated UNION ALL SELECT id, endpoint FROM undated
), stored AS (
    INSERT INTO {{schema}}.incoming_envelopes (endpoint, {ENVELOPE}, execution_time, {QUEUEING})
    SELECT endpoint, {SELECT_ENVELOPE}, execution_time, {QUEUEING} FROM received JOIN fresh USING (id, endpoint)
    ORDER BY position
    ON CONFLICT (id, endpoint) DO NOTHING RETURNING id, endpoint
)
SELECT id, endpoint FROM stored
""")

# What is known under these ids, to tell two messages under one id from a duplicate.
_KNOWN: Final = """
SELECT known.id, known.endpoint, known.message_digest, known.terms, known.due_at, known.expired, waiting.deliver_by,
    clock_timestamp() AS now
FROM unnest(CAST(:id AS uuid[]), CAST(:endpoint AS text[])) AS t (id, endpoint)
JOIN {schema}.%s AS known USING (id, endpoint)
LEFT JOIN {schema}.incoming_envelopes AS waiting USING (id, endpoint)
"""
FIND_KNOWN = Statement(f"{_KNOWN % 'received_ids'} UNION ALL {_KNOWN % 'undated_ids'}")

# Of what expired into a dead letter.
NOTE_EXPIRED = Statement(f"""
WITH expired AS (
    SELECT * FROM unnest(CAST(:id AS uuid[]), CAST(:endpoint AS text[]), CAST(:deliver_by AS timestamptz[]))
        AS t (id, endpoint, deliver_by)
), {remember_expired("expired")}
SELECT count(*) FROM expired
""")

# It waits for a row that is locked: its transaction may be rolled back, and leave it as it was.
LIVE_LONGER = Statement("""
WITH later AS MATERIALIZED (
    SELECT row.id, row.endpoint,
        CASE WHEN t.deliver_by IS NOT NULL THEN GREATEST(row.deliver_by, t.deliver_by) END AS deliver_by
    FROM unnest(CAST(:id AS uuid[]), CAST(:endpoint AS text[]), CAST(:deliver_by AS timestamptz[]))
        AS t (id, endpoint, deliver_by)
    JOIN {schema}.incoming_envelopes AS row USING (id, endpoint)
    WHERE row.deliver_by IS NOT NULL ORDER BY row.id, row.endpoint FOR UPDATE OF row
)
UPDATE {schema}.incoming_envelopes AS row SET deliver_by = later.deliver_by
FROM later WHERE row.id = later.id AND row.endpoint = later.endpoint
""")

# A sender that had no answer sends it again: the same message under the same id is one letter, of one fault. Once that
# is resolved only what was sent at that time is a repeat: under a business key the message may be sent anew.
QUARANTINE = Statement(f"""
INSERT INTO {{schema}}.dead_letters ({LETTER})
SELECT 'incoming', CAST(:address AS text), CAST(:id AS uuid), CAST(:message_type AS text), CAST(:source AS text),
    CAST(:correlation_id AS uuid), CAST(:causation_id AS uuid), CAST(:partition_key AS text),
    CAST(:content_type AS text), CAST(:headers AS jsonb), CAST(:body AS bytea), CAST(:sent_at AS timestamptz),
    CAST(:deliver_by AS timestamptz), 0, 0, CAST(:exception_type AS text), CAST(:reason AS text),
    CAST(:traceback AS text), CAST(:fingerprint AS text), CAST(:node AS integer), CAST(:message_digest AS bigint),
    CAST(:replayable AS boolean), 0, 0, CAST(:ordering_key AS text), CAST(:fair_key AS text)
WHERE NOT EXISTS (
    SELECT FROM {{schema}}.dead_letters AS letter
    WHERE letter.id = CAST(:id AS uuid) AND letter.address = :address AND letter.body = :body
        AND letter.reason = CAST(:reason AS text) AND letter.message_type = CAST(:message_type AS text)
        AND letter.partition_key IS NOT DISTINCT FROM CAST(:partition_key AS text)
        AND (letter.resolved_at IS NULL OR letter.sent_at = CAST(:sent_at AS timestamptz))
)
""")

CLAIM_INCOMING = INBOX.next(
    f"""message_type = :message_type AND seq >= CAST(:floor AS bigint) AND {FREE}
        AND (deliver_by IS NULL OR deliver_by > now())
        AND NOT EXISTS (
            SELECT FROM {{schema}}.circuits
            WHERE kind = 'handler' AND key IN (:message_type, :handler) AND NOT parked
                AND (probing OR until IS NULL OR until > now())
                AND NOT (probing AND CAST(:is_trial AS boolean))
        ){{only}}
    ORDER BY seq LIMIT :batch_size""",
    f", {INBOX.claimed()}",
)

# ---------------------------------------------------------------- handling

# In the handler's own transaction. The caller compares the count: fewer rows than leases means that a lease was lost.
FINISH_HANDLED = Statement(f"""
WITH handled AS (
    DELETE FROM {INBOX.rows} AS row USING {INBOX.mine} RETURNING row.*
), {INBOX.history("handled", "handled", counted=_COUNTED)}
SELECT count(*) FROM handled
""")

FINISH_MADE_UP = Statement("""
INSERT INTO {schema}.envelope_history
    (id, side, outcome, address, message_type, source, correlation_id, sent_at, attempts, interruptions, node_id)
SELECT id, 'incoming', 'handled', 'local', 'durable.made-up', 'durable', id, now(), 0, 0, 0 FROM gen_random_uuid() AS id
""")

# Only for a message whose nodes died while they owned it: counted before it runs, so that one that kills its process
# comes to its end.
BEGIN_SUSPECT_ATTEMPT = Statement(f"""
UPDATE {{schema}}.incoming_envelopes SET attempts = attempts + 1
WHERE {_THIS}
RETURNING attempts
""")

# Without an execution_time: with no attempt in its row it would not hold its key while it waits for that.
TAKE_BACK_ATTEMPT = Statement(f"""
UPDATE {{schema}}.incoming_envelopes SET owner_id = 0, epoch = epoch + 1, attempts = attempts - 1
WHERE {_THIS}
RETURNING id
""")

# Of its failed attempts the last ones are kept: a handler may ask for another attempt for ever.
_KEEP_FAILURES: Final = f"""kept AS (
    INSERT INTO {{schema}}.failed_attempts
        (id, endpoint, number, failed_at, exception_type, reason, traceback, node_id)
    SELECT put_off.id, put_off.endpoint, failure.*, :node FROM put_off, {_FAILURES} ORDER BY number
), forgotten AS (
    DELETE FROM {{schema}}.failed_attempts WHERE attempt_id = ANY (ARRAY(
        SELECT attempt_id FROM {{schema}}.failed_attempts JOIN put_off USING (id, endpoint)
        WHERE letter_id IS NULL ORDER BY attempt_id DESC OFFSET :earlier))
)"""
RETRY_LATER = Statement(f"""
WITH put_off AS (
    UPDATE {{schema}}.incoming_envelopes SET owner_id = 0, epoch = epoch + 1, attempts = attempts + :counted,
        execution_time = now() + CAST(:delay AS interval)
    WHERE {_THIS}
    RETURNING id, endpoint
), {_KEEP_FAILURES}
SELECT id FROM put_off
""")

# Behind all that has arrived: its place in the queue is `seq`.
PUT_BACK = Statement(f"""
WITH put_off AS (
    UPDATE {{schema}}.incoming_envelopes SET owner_id = 0, epoch = epoch + 1, attempts = attempts + :counted,
        seq = DEFAULT, headers = CAST(:headers AS jsonb), fair_key = CAST(:fair_key AS text),
        body = CAST(:body AS bytea)
    WHERE {_THIS}
    RETURNING id, endpoint
), {_KEEP_FAILURES}
SELECT id FROM put_off
""")

_DIGEST: Final = f"COALESCE({known_digest('moved')}, CAST(:message_digest AS bigint))"
DEAD_LETTER_INCOMING = Statement(f"""
WITH moved AS (
    DELETE FROM {{schema}}.incoming_envelopes
    WHERE {_THIS}
    RETURNING *
), letters AS (
    {INBOX.letters(counted=_COUNTED, digest=_DIGEST)}
    RETURNING letter_id, id, address
), last AS (
    INSERT INTO {{schema}}.failed_attempts
        (id, endpoint, number, failed_at, exception_type, reason, traceback, node_id, letter_id)
    SELECT letters.id, address, failure.*, :node, letter_id FROM letters, {_FAILURES} ORDER BY number
), earlier AS (
    UPDATE {{schema}}.failed_attempts AS attempt SET letter_id = letters.letter_id
    FROM letters WHERE attempt.id = letters.id AND attempt.endpoint = letters.address AND attempt.letter_id IS NULL
), {INBOX.history("dead-lettered", "moved", counted=_COUNTED, error=":reason")}
SELECT count(*) FROM moved
""")

# By the database's clock: a node whose clock is fast may ask too early, and then no row comes back.
# What an agent has in memory may be older than the row: a duplicate has made that live longer.
LATE_INCOMING = Statement(f"""
SELECT deliver_by FROM {{schema}}.incoming_envelopes
WHERE {_THIS} AND deliver_by < clock_timestamp() + CAST(:within AS interval)
FOR UPDATE
""")

EXPIRE_OWNED_INCOMING = Statement(f"""
WITH expired AS (
    DELETE FROM {{schema}}.incoming_envelopes
    WHERE {_THIS} AND deliver_by < clock_timestamp() + CAST(:within AS interval)
    RETURNING *
), {remember_expired("expired")}, {INBOX.history("expired", "expired", counted=_COUNTED, error="CAST(:reason AS text)")}
SELECT count(*) FROM expired
""")
