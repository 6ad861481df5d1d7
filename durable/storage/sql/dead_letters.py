"""The SQL statements about dead letters: to read them, and to resolve them.

A letter is resolved once, by one statement: it finds the letter unresolved and locks it, puts the envelope where it
belongs, and marks the letter. So whoever dies in between has done nothing, and of two operators one does it. SKIP
LOCKED lets two of them share a group instead of waiting for each other.
"""

from __future__ import annotations

from typing import Final

from durable.storage.rows import QUARANTINED
from durable.storage.sql.absent import DROPPED, noting
from durable.storage.sql.columns import DATED, give_up
from durable.storage.sql.statement import Batched, Statement

# What is NULL does not matter.
_SELECTED: Final = """
    (CAST(:letters AS bigint[]) IS NULL OR letter_id = ANY (CAST(:letters AS bigint[]))
        OR id = ANY (CAST(:ids AS uuid[])))
    AND (CAST(:up_to AS bigint) IS NULL OR letter_id <= CAST(:up_to AS bigint))
    AND (CAST(:side AS text) IS NULL OR side = CAST(:side AS text))
    AND (CAST(:message_type AS text) IS NULL OR message_type = CAST(:message_type AS text))
    AND (CAST(:exception_type AS text) IS NULL OR exception_type = CAST(:exception_type AS text)
        OR right(exception_type, length(CAST(:exception_type AS text)) + 1) = '.' || CAST(:exception_type AS text))
    AND (CAST(:fingerprint AS text) IS NULL OR fingerprint = CAST(:fingerprint AS text))
    AND (CAST(:source AS text) IS NULL OR source = CAST(:source AS text))
    AND (CAST(:address AS text) IS NULL OR address = CAST(:address AS text))
    AND (CAST(:key AS text) IS NULL OR partition_key = CAST(:key AS text))
    AND (CAST(:text AS text) IS NULL OR strpos(lower(reason), lower(CAST(:text AS text))) > 0
        OR position(convert_to(CAST(:text AS text), 'UTF8') IN body) > 0)
    AND (CAST(:since AS timestamptz) IS NULL OR failed_at >= CAST(:since AS timestamptz))
    AND (CAST(:until AS timestamptz) IS NULL OR failed_at < CAST(:until AS timestamptz))
    AND (CAST(:resolved AS boolean) IS NULL OR (resolved_at IS NOT NULL) = CAST(:resolved AS boolean))"""

_SUMMARY: Final = (
    "letter_id, side, address, id, message_type, source, attempts, interruptions, exception_type, "
    "left(reason, 1000) AS reason, fingerprint, failed_at, node_id, replay_count, replayable, resolution, "
    "resolved_at, resolved_by, resolution_reason"
)
_WHOLE: Final = (
    f"{_SUMMARY.replace('left(reason, 1000) AS reason', 'reason')}, correlation_id, causation_id, partition_key, "
    "content_type, CAST(headers AS text) AS headers, body, edited_body, sent_at, deliver_by, traceback, epoch"
)
_ENVELOPE: Final = (
    "id, message_type, source, correlation_id, causation_id, partition_key, content_type, headers, body, sent_at, "
    "deliver_by"
)

# ---------------------------------------------------------------- reading

GROUP_LETTERS = Statement(f"""
WITH groups AS (
    SELECT fingerprint, side, message_type, exception_type, count(*) AS count, min(failed_at) AS first,
        max(failed_at) AS last, max(letter_id) AS newest
    FROM {{schema}}.dead_letters WHERE {_SELECTED}
    GROUP BY fingerprint, side, message_type, exception_type
)
SELECT groups.fingerprint, groups.side, groups.message_type, groups.exception_type, groups.count, groups.first,
    groups.last, left(letter.reason, 1000) AS example
FROM groups JOIN {{schema}}.dead_letters AS letter ON letter.letter_id = groups.newest
ORDER BY groups.count DESC, groups.newest DESC
""")

LIST_LETTERS = Statement(f"""
SELECT {_SUMMARY} FROM {{schema}}.dead_letters
WHERE {_SELECTED} AND (CAST(:before AS bigint) IS NULL OR letter_id < CAST(:before AS bigint))
ORDER BY letter_id DESC LIMIT :limit
""")

# How many there are, and where a run over them ends: what fails again while it lasts is another letter, beyond it.
SURVEY_LETTERS = Statement(f"""
SELECT count(*) AS total, count(*) FILTER (WHERE replayable) AS replayable, COALESCE(max(letter_id), 0) AS newest
FROM {{schema}}.dead_letters WHERE {_SELECTED}
""")

READ_LETTERS = Statement(f"""
SELECT {_WHOLE} FROM {{schema}}.dead_letters
WHERE {_SELECTED} AND letter_id > :after AND letter_id <= :newest
ORDER BY letter_id LIMIT :batch_size
""")

READ_ATTEMPTS = Statement("""
SELECT number, failed_at, exception_type, reason, traceback, node_id FROM {schema}.failed_attempts
WHERE letter_id = :letter ORDER BY attempt_id
""")

# The letters of the same conversation, and where the message itself and its cause wait, if they do.
READ_RELATIVES = Statement("""
(SELECT letter_id, 'dead letter' AS place, id, causation_id, message_type, address, sent_at,
    COALESCE(resolution, 'unresolved') || ' (' || exception_type || ')' AS state
FROM {schema}.dead_letters
WHERE letter_id <> :letter AND (correlation_id = CAST(:correlation_id AS uuid) OR id = CAST(:id AS uuid))
ORDER BY letter_id DESC LIMIT 20)
UNION ALL
SELECT NULL, 'inbox', id, causation_id, message_type, endpoint, sent_at, 'waits' FROM {schema}.incoming_envelopes
WHERE id IN (CAST(:id AS uuid), CAST(:causation_id AS uuid))
UNION ALL
SELECT NULL, 'outbox', id, causation_id, message_type, destination, sent_at, 'waits' FROM {schema}.outgoing_envelopes
WHERE id IN (CAST(:id AS uuid), CAST(:causation_id AS uuid))
ORDER BY sent_at, letter_id
""")

# ---------------------------------------------------------------- resolving

_NEXT: Final = f"""
    SELECT * FROM {{schema}}.dead_letters
    WHERE {_SELECTED} AND resolved_at IS NULL AND letter_id > :after AND letter_id <= :newest"""
_RESOLVED: Final = (
    "resolved_at = clock_timestamp(), resolved_by = CAST(:actor AS text), resolution_reason = CAST(:reason AS text), "
    "xid = DEFAULT"  # what becomes of a letter is archived again
)


_WAS_STORED: Final = f"exception_type <> '{QUARANTINED}'"
"""Only a message that was stored to be handled holds the id under which it came."""


def _remember(letters: str) -> str:
    """The inserts of the ids of what came in, if they were forgotten, and `own`: the letters that hold theirs.

    Under any other id another message was stored, or the same one once more, and has had its effects. An id of a day
    that is dropped stays forgotten: whatever comes again under it is older than duplicates are remembered.
    """
    known = f"FROM {letters} WHERE side = 'incoming' AND message_digest IS NOT NULL"
    return f"""oldest AS (
    SELECT {{schema}}.first_id(min(to_date(right(c.relname, 8), 'YYYYMMDD'))) AS id
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent = CAST('{{schema}}.received_ids' AS regclass) AND c.relname ~ '_[0-9]{{8}}$'
), dated AS (
    INSERT INTO {{schema}}.received_ids (id, endpoint, message_digest)
    SELECT id, address, message_digest {known} AND {DATED} AND id >= (SELECT oldest.id FROM oldest)
    ON CONFLICT DO NOTHING RETURNING id, endpoint
), undated AS (
    INSERT INTO {{schema}}.undated_ids AS known (id, endpoint, message_digest, sent_at)
    SELECT id, address, message_digest, sent_at {known} AND NOT {DATED}
    ON CONFLICT (id, endpoint) DO UPDATE SET message_digest = excluded.message_digest, terms = excluded.terms,
        sent_at = excluded.sent_at, carried = CASE WHEN NOT known.given_up THEN known.carried END,
        due_at = NULL, expired = NULL, received_at = now(), given_up = false
    WHERE known.given_up OR (
        known.message_digest = excluded.message_digest AND known.sent_at = excluded.sent_at
        AND (known.id, known.endpoint) IN (SELECT id, address FROM {letters} WHERE {_WAS_STORED}))
    RETURNING id, endpoint
), own AS (
    SELECT letter_id FROM {letters} AS letter
    WHERE side = 'outgoing' OR message_digest IS NULL
        OR (id, address) IN (SELECT id, endpoint FROM dated UNION ALL SELECT id, endpoint FROM undated)
        OR {DATED} AND CASE (
            SELECT known.message_digest = letter.message_digest AND {_WAS_STORED} FROM {{schema}}.received_ids AS known
            WHERE known.id = letter.id AND known.endpoint = letter.address)
        WHEN true THEN true WHEN false THEN false
        ELSE COALESCE(id < (SELECT oldest.id FROM oldest), true) END
)"""


# The epoch goes on from where it was, so that a node which is still at work on an earlier attempt can finish nothing.
# The id is remembered anew, if it was forgotten: the message may be sent again while it waits here. A deadline that
# has passed would expire it at once, and whoever replays it wants it handled. A letter whose message waits already
# comes back with false: two letters of one message, or a sender that has sent it again. One whose id another message
# has, or that came in once more, comes back with NULL: to handle it too would be a second effect under one id.
REPLAY_LETTERS = Statement(f"""
WITH chosen AS (
    {_NEXT} AND replayable
    ORDER BY letter_id LIMIT :batch_size FOR UPDATE SKIP LOCKED
), each AS (
    SELECT DISTINCT ON (id, side, address) letter_id, side, address, epoch, message_digest, exception_type,
        id, message_type, source, correlation_id, causation_id, partition_key, content_type, headers,
        ordering_key, fair_key, COALESCE(CAST(:body AS bytea), body) AS body, sent_at,
        CASE WHEN deliver_by > now() THEN deliver_by END AS deliver_by
    FROM chosen ORDER BY id, side, address, {_WAS_STORED} DESC, letter_id
), {_remember("each")}, incoming AS (
    INSERT INTO {{schema}}.incoming_envelopes (endpoint, {_ENVELOPE}, owner_id, epoch, ordering_key, fair_key)
    SELECT address, {_ENVELOPE}, 0, epoch + 1, ordering_key, fair_key FROM each
    WHERE side = 'incoming' AND letter_id IN (SELECT letter_id FROM own)
    ORDER BY letter_id
    ON CONFLICT DO NOTHING RETURNING id, endpoint
), outgoing AS (
    INSERT INTO {{schema}}.outgoing_envelopes (destination, {_ENVELOPE}, owner_id, epoch, ordering_key, fair_key)
    SELECT address, {_ENVELOPE}, 0, epoch + 1, ordering_key, fair_key FROM each
    WHERE side = 'outgoing' AND letter_id IN (SELECT letter_id FROM own)
    ORDER BY letter_id
    ON CONFLICT DO NOTHING RETURNING id, destination
), replayed AS (
    UPDATE {{schema}}.dead_letters AS letter
    SET resolution = 'replayed', {_RESOLVED}, replay_count = replay_count + 1, edited_body = CAST(:body AS bytea)
    FROM each WHERE letter.letter_id = each.letter_id AND (
        (each.side = 'incoming' AND (each.id, each.address) IN (SELECT id, endpoint FROM incoming))
        OR (each.side = 'outgoing' AND (each.id, each.address) IN (SELECT id, destination FROM outgoing)))
    RETURNING letter.letter_id
)
SELECT letter_id, CASE WHEN letter_id IN (SELECT letter_id FROM replayed) THEN true
    WHEN EXISTS (
        SELECT FROM own JOIN each USING (letter_id)
        WHERE each.id = chosen.id AND each.side = chosen.side AND each.address = chosen.address
            AND each.message_digest IS NOT DISTINCT FROM chosen.message_digest) THEN false END AS done
FROM chosen
UNION ALL
SELECT NULL, CAST(pg_notify(CAST(:channel AS text), '') AS text) IS NULL WHERE EXISTS (SELECT FROM replayed)
""")

# Another message may be sent under the same business key then, unless it was of another message than the letter.
DISCARD_LETTERS = Statement(f"""
WITH chosen AS (
    {_NEXT}
    ORDER BY letter_id LIMIT :batch_size FOR UPDATE SKIP LOCKED
), discarded AS (
    UPDATE {{schema}}.dead_letters AS letter SET resolution = 'discarded', {_RESOLVED}
    FROM chosen WHERE letter.letter_id = chosen.letter_id
    RETURNING letter.letter_id, letter.side, letter.id, letter.address, letter.exception_type, letter.message_digest,
        letter.sent_at
), freed AS (
    {give_up("discarded", "address")}
        AND side = 'incoming' AND {_WAS_STORED}
        AND known.message_digest = discarded.message_digest AND known.sent_at = discarded.sent_at
        AND NOT EXISTS (
            SELECT FROM {{schema}}.incoming_envelopes AS row WHERE row.id = known.id AND row.endpoint = known.endpoint)
)
SELECT letter_id, true AS done FROM discarded
""")

# The letters of a stretch, for when the database refuses one of them.
NEXT_LETTERS = Statement(f"""
SELECT letter_id FROM ({_NEXT}) AS next
WHERE replayable OR NOT CAST(:replayable AS boolean) ORDER BY letter_id LIMIT :batch_size
""")

# In the transaction of a handler that was run for this letter by hand. The caller looks at the count.
HANDLE_LETTER = Statement(f"""
WITH chosen AS (
    SELECT * FROM {{schema}}.dead_letters AS letter
    WHERE letter_id = :letter AND side = 'incoming' AND resolved_at IS NULL AND replayable AND NOT EXISTS (
        SELECT FROM {{schema}}.incoming_envelopes AS row WHERE row.id = letter.id AND row.endpoint = letter.address)
    FOR UPDATE
), {_remember("chosen")}, handled AS (
    UPDATE {{schema}}.dead_letters AS letter
    SET resolution = 'handled', {_RESOLVED}, replay_count = replay_count + 1
    FROM own WHERE letter.letter_id = own.letter_id
    RETURNING letter.*
), history AS (
    INSERT INTO {{schema}}.envelope_history (id, side, outcome, address, message_type, source, correlation_id,
        causation_id, partition_key, sent_at, attempts, interruptions, node_id, content_type, headers, body)
    SELECT id, 'incoming', 'handled', address, message_type, source, correlation_id, causation_id, partition_key,
        sent_at, 0, 0, 0, CASE WHEN CAST(:keep_body AS boolean) THEN content_type END,
        CASE WHEN CAST(:keep_body AS boolean) THEN headers END,
        CASE WHEN CAST(:keep_body AS boolean) THEN COALESCE(edited_body, body) END
    FROM handled
)
SELECT count(*) FROM handled
""")

# ---------------------------------------------------------------- forgetting

# Of other letters the history tells that their messages came to an end.
# Their attempts go with them, by the foreign key. Only what was resolved goes; what is archived only `pipeline purge`
# lets go, which compares it with the lake before.
PURGE_LETTERS = Batched(
    """
    SELECT letter_id FROM {schema}.dead_letters WHERE resolved_at < now() - CAST(:keep AS interval)
        AND {schema}.archived_below('dead_letters') IS NULL{only}
    ORDER BY resolved_at LIMIT :batch_size {lock}""",
    f""", purged AS (
    DELETE FROM {{schema}}.dead_letters WHERE letter_id IN (SELECT letter_id FROM picked)
    RETURNING {DROPPED["dead_letters"]}
), noted AS ("""
    + noting("dead_letters", "purged")
    + """
)
SELECT count(*) FROM purged
""",
    key="letter_id",
    only="letter_id = ANY (CAST(:only_0 AS bigint[]))",
)
# The failures of what was handled in the end, or goes on being retried for so long.
PURGE_ATTEMPTS = Batched(
    """
    SELECT attempt_id FROM {schema}.failed_attempts
    WHERE letter_id IS NULL AND failed_at < now() - CAST(:keep AS interval){only}
    ORDER BY failed_at LIMIT :batch_size {lock}""",
    """, purged AS (
    DELETE FROM {schema}.failed_attempts AS attempt USING picked
    WHERE attempt.attempt_id = picked.attempt_id RETURNING 1
)
SELECT count(*) FROM purged
""",
    key="attempt_id",
    only="attempt_id = ANY (CAST(:only_0 AS bigint[]))",
)

# ---------------------------------------------------------------- rehearsing

# What only the COMMIT would refuse.
CHECK_CONSTRAINTS = Statement("SET CONSTRAINTS ALL IMMEDIATE")
# Somebody sits before a debugger.
ALLOW_IDLING = Statement("SET LOCAL idle_in_transaction_session_timeout = 0")
