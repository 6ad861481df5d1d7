"""Every SQL statement that touches an envelope, named, with why it is written so.

Those of recovery are in durable.storage.sql.recovery, those about nodes, locks, partitions and versions in
durable.storage.sql.housekeeping, those about circuits in durable.storage.sql.circuits, and those that read and
resolve dead letters in durable.storage.sql.dead_letters.

Rules that hold throughout:
- Batches travel as arrays through unnest: one statement for any number of envelopes.
- A claim is a CTE with FOR UPDATE SKIP LOCKED. `WHERE id IN (SELECT ... LIMIT)` may be planned so that it runs the
  sub-select again for each row, and then updates everything.
- A change to an owned row names owner and epoch: that is the fence. It returns how many rows it met.
- What finishes an envelope also writes its history: `WITH done AS (DELETE ... RETURNING *) INSERT ...`.
- The insert into received_ids, or undated_ids, is the check for duplicates. A check before an insert has a race.
- A statement that chooses its rows by itself is Batched, so that the row which the database refuses can be found
  (durable.storage.isolation).

`{schema}` is quoted here and was checked against Settings.db_schema's pattern.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from sqlalchemy import TextClause, text


class Statement:
    """One SQL statement, to be completed by the schema that holds the tables."""

    def __init__(self, sql: str) -> None:
        self._sql = sql

    @lru_cache(maxsize=64)  # noqa: B019  statements are module constants and live as long as the process
    def within(self, schema: str) -> TextClause:
        return text(self._sql.replace("{schema}", f'"{schema}"'))


class Batched:
    """A statement over the next rows of a table, and the same over those of them that are named.

    `picked` chooses rows, with `{only}` behind its conditions and `{lock}` where it locks; `then` works on `picked`.
    `key` are the columns that name a row, and `only` narrows the choice to the keys in the parameters :only_0, :only_1.
    """

    def __init__(self, picked: str, then: str, *, key: str, only: str) -> None:
        def statement(narrowed: str, lock: str) -> str:
            return picked.replace("{only}", narrowed).replace("{lock}", lock)

        self.whole = Statement(f"WITH picked AS MATERIALIZED ({statement('', _LOCK)}){then}")
        self.named = Statement(f"WITH picked AS MATERIALIZED ({statement(f' AND {only}', _LOCK)}){then}")
        self.keys = Statement(f"SELECT {key} FROM ({statement('', '')}) AS picked")


_LOCK: Final = "FOR UPDATE SKIP LOCKED"


def by_key(address: str) -> str:
    """Narrows to rows of a table of work."""
    named = "unnest(CAST(:only_0 AS uuid[]), CAST(:only_1 AS text[])) AS named (id, address)"
    return f"(id, {address}) IN (SELECT named.id, named.address FROM {named})"


_ENVELOPE: Final = (
    "id, message_type, source, correlation_id, causation_id, partition_key, content_type, headers, body, sent_at, "
    "deliver_by"
)
# What a claim returns, in the order of durable.storage.rows.leased.
CLAIMED: Final = (
    f"{_ENVELOPE.replace('headers', 'CAST(headers AS text) AS headers')}, %s, epoch, attempts, interruptions, "
    "ordering_key"
)
_UNNEST_ENVELOPE: Final = """
    CAST(:id AS uuid[]), CAST(:message_type AS text[]), CAST(:source AS text[]), CAST(:correlation_id AS uuid[]),
    CAST(:causation_id AS uuid[]), CAST(:partition_key AS text[]), CAST(:content_type AS text[]),
    CAST(:headers AS text[]), CAST(:body AS bytea[]), CAST(:sent_at AS timestamptz[]),
    CAST(:deliver_by AS timestamptz[])"""
_SELECT_ENVELOPE: Final = (
    "id, message_type, source, correlation_id, causation_id, partition_key, content_type, "
    "CAST(headers AS jsonb), body, sent_at, deliver_by"
)
_QUEUEING: Final = "owner_id, ordering_key, fair_key"
_UNNEST_QUEUEING: Final = "CAST(:owner_id AS integer[]), CAST(:ordering_key AS text[]), CAST(:fair_key AS text[])"
MINE: Final = (
    "unnest(CAST(:ids AS uuid[]), CAST(:addresses AS text[]), CAST(:epochs AS integer[])) AS mine (id, address, epoch)"
)
# `+ 0` hides the owner from the planner: without statistics it takes the index of owned rows, which are all of a
# node's, for the shorter way, and compares each of them with each id.
FENCE: Final = "row.id = mine.id AND row.epoch = mine.epoch AND row.owner_id + 0 = :node"
_FENCE_OUTGOING: Final = f"{FENCE} AND row.destination = mine.address"
_FENCE_INCOMING: Final = f"{FENCE} AND row.endpoint = mine.address"
_THIS: Final = "id = :id AND endpoint = :endpoint AND owner_id + 0 = :node AND epoch = :epoch"

HISTORY: Final = (
    "id, side, outcome, address, message_type, source, correlation_id, causation_id, partition_key, sent_at, "
    "deliver_by, received_at, attempts, interruptions, seq, content_type, headers, body, node_id, error"
)
# Without the setting history_bodies these three stay NULL, and cost nothing.
_KEPT: Final = ", ".join(
    f"CASE WHEN CAST(:keep_body AS boolean) THEN {column} END" for column in ("content_type", "headers", "body")
)
FROM_OUTGOING: Final = (
    "destination, message_type, source, correlation_id, causation_id, partition_key, sent_at, deliver_by, "
    f"CAST(NULL AS timestamptz), attempts, interruptions, seq, {_KEPT}"
)
FROM_INCOMING: Final = (
    "endpoint, message_type, source, correlation_id, causation_id, partition_key, sent_at, deliver_by, received_at, "
    f"attempts, interruptions, seq, {_KEPT}"
)
# The unowned rows that are due, by whether their place among others matters; word for word as in the partial indexes.
FREE_OUTGOING: Final = "owner_id = 0 AND execution_time IS NULL AND ordering_key IS NULL AND fair_key IS NULL"
QUEUED_OUTGOING: Final = (
    "owner_id = 0 AND execution_time IS NULL AND (ordering_key IS NOT NULL OR fair_key IS NOT NULL)"
)
FREE_INCOMING: Final = FREE_OUTGOING
QUEUED_INCOMING: Final = QUEUED_OUTGOING
_LETTER: Final = (
    "side, address, id, message_type, source, correlation_id, causation_id, partition_key, content_type, headers, "
    "body, sent_at, deliver_by, attempts, interruptions, exception_type, reason, traceback, fingerprint, node_id, "
    "message_digest, replayable, epoch, replay_count, ordering_key, fair_key"
)
_LETTER_FROM_ROW: Final = (
    "id, message_type, source, correlation_id, causation_id, partition_key, content_type, headers, body, sent_at, "
    "deliver_by"
)

# A message that was replayed and failed again is another letter, and the count goes on.
_REPLAYS: Final = """(
        SELECT COALESCE(max(replay_count), 0) FROM {schema}.dead_letters AS earlier
        WHERE earlier.id = moved.id AND earlier.address = moved.%s)"""
# The dead letter of a row that the database refuses to change, whoever owned it.
LETTER_FROM_MOVED: Final = f"""INSERT INTO {{schema}}.dead_letters ({_LETTER})
SELECT '%(side)s', %(address)s, {_LETTER_FROM_ROW}, attempts, interruptions, :exception_type, :reason, :traceback,
    :fingerprint, :node, %(digest)s, true, epoch, {_REPLAYS.replace("%s", "%(address)s")}, ordering_key, fair_key
FROM moved"""
_FAILURES: Final = """unnest(
        CAST(:failed_number AS integer[]), CAST(:failed_at AS timestamptz[]), CAST(:failed_type AS text[]),
        CAST(:failed_reason AS text[]), CAST(:failed_traceback AS text[]))
    AS failure (number, failed_at, exception_type, reason, traceback)"""

_VERSION: Final = "(get_byte(uuid_send(id), 6) >> 4)"
DATED: Final = f"{_VERSION} = 7"
"""An id that carries its day lies in received_ids, any other in undated_ids: so none fills the default partition."""
_GENERATED: Final = f"{_VERSION} IN (7, 8)"


_REMEMBERED: Final = "id, endpoint, message_digest, sent_at"


def remember_undated(rows: str) -> str:
    """The insert of these ids without a day, which returns those that are new.

    New is also what was cancelled, or discarded as a dead letter, and is sent again; not what a peer without an answer
    repeats of it, which has the time at which it was sent then.
    """
    return f"""INSERT INTO {{schema}}.undated_ids AS known (id, endpoint, message_digest, sent_at)
    {rows}
    ON CONFLICT (id, endpoint) DO UPDATE SET message_digest = excluded.message_digest, sent_at = excluded.sent_at,
        received_at = now(), given_up = false
    WHERE known.given_up AND known.sent_at <> excluded.sent_at
    RETURNING id, endpoint"""


def give_up(finished: str, address: str) -> str:
    """The update that frees the ids of what was cancelled or discarded, for other messages under the same key.

    `finished` has to hold its id: a message that only came under it must not free the id of the one that was handled.
    """
    return f"""UPDATE {{schema}}.undated_ids AS known SET given_up = true, received_at = now()
    FROM {finished} WHERE known.id = {finished}.id AND known.endpoint = {finished}.{address}"""


def known_digest(moved: str) -> str:
    """The digest of the message that holds the id of this row: of an edited body it is that of the first one."""
    return f"""COALESCE(
        (SELECT known.message_digest FROM {{schema}}.received_ids AS known
            WHERE known.id = {moved}.id AND known.endpoint = {moved}.endpoint),
        (SELECT known.message_digest FROM {{schema}}.undated_ids AS known
            WHERE known.id = {moved}.id AND known.endpoint = {moved}.endpoint))"""


# ---------------------------------------------------------------- sending: rows in the application's transaction

# Everything that one commit sends, in one statement: local messages go straight into the inbox. `seq` follows the order
# in which they were sent, which a join alone might turn around. Returns what was there already, under an id that is a
# business key, or that of an earlier attempt of the same handler. A local id that was generated is its own token: it
# is committed with its cause, or not at all, and nobody sends it again.
STORE_SENT = Statement(f"""
WITH sent AS MATERIALIZED (
    SELECT * FROM unnest({_UNNEST_ENVELOPE}, CAST(:execution_time AS timestamptz[]), CAST(:destination AS text[]),
        CAST(:endpoint AS text[]), CAST(:message_digest AS bigint[]), {_UNNEST_QUEUEING}) WITH ORDINALITY
    AS t ({_ENVELOPE}, execution_time, destination, endpoint, message_digest, {_QUEUEING}, position)
), undated AS (
    {remember_undated(f"SELECT {_REMEMBERED} FROM sent WHERE endpoint IS NOT NULL AND NOT {_GENERATED}")}
), local AS (
    INSERT INTO {{schema}}.incoming_envelopes (endpoint, {_ENVELOPE}, execution_time, {_QUEUEING})
    SELECT endpoint, {_SELECT_ENVELOPE}, execution_time, {_QUEUEING} FROM sent
    WHERE endpoint IS NOT NULL AND ({_GENERATED} OR (id, endpoint) IN (SELECT id, endpoint FROM undated))
    ORDER BY position
    ON CONFLICT DO NOTHING RETURNING id, endpoint
), remote AS (
    INSERT INTO {{schema}}.outgoing_envelopes (destination, {_ENVELOPE}, execution_time, {_QUEUEING})
    SELECT destination, {_SELECT_ENVELOPE}, execution_time, {_QUEUEING} FROM sent WHERE endpoint IS NULL
    ORDER BY position
    ON CONFLICT DO NOTHING RETURNING id, destination
)
SELECT id, endpoint AS address FROM sent
WHERE endpoint IS NOT NULL AND (id, endpoint) NOT IN (SELECT id, endpoint FROM local)
UNION ALL
SELECT id, destination FROM sent
WHERE endpoint IS NULL AND (id, destination) NOT IN (SELECT id, destination FROM remote)
""")
WAKE_NODES = Statement("SELECT pg_notify(CAST(:channel AS text), '')")

# The latch is looked at here too: a node that latches releases its rows, and no other must take them in the moment
# before it has read `circuits` again.
CLAIM_OUTGOING = Batched(
    """
    SELECT id, destination, epoch FROM {schema}.outgoing_envelopes
    WHERE destination = :destination AND owner_id = 0 AND execution_time IS NULL AND ordering_key IS NULL
        AND fair_key IS NULL AND (deliver_by IS NULL OR deliver_by > now())
        AND NOT EXISTS (
            SELECT FROM {schema}.circuits
            WHERE kind = 'destination' AND key = :destination AND (probing OR until IS NULL OR until > now())
        ){only}
    ORDER BY seq LIMIT :batch_size {lock}""",
    f""", claimed AS (
    UPDATE {{schema}}.outgoing_envelopes AS row SET owner_id = :node, epoch = row.epoch + 1
    FROM picked WHERE row.id = picked.id AND row.destination = picked.destination
    RETURNING row.*
)
SELECT {CLAIMED % "destination"}
FROM claimed ORDER BY seq
""",
    key="id, destination, epoch",
    only=by_key("destination"),
)

WAITED_FOR_OUTGOING = Statement("""
SELECT DISTINCT destination FROM {schema}.outgoing_envelopes
WHERE destination = ANY (CAST(:destinations AS text[]))
""")

DELETE_SENT = Statement(f"""
WITH sent AS (
    DELETE FROM {{schema}}.outgoing_envelopes AS row USING {MINE}
    WHERE {_FENCE_OUTGOING}
    RETURNING row.*
), history AS (
    INSERT INTO {{schema}}.envelope_history ({HISTORY})
    SELECT id, 'outgoing', 'sent', {FROM_OUTGOING}, :node, NULL FROM sent
)
SELECT count(*) FROM sent
""")

COUNT_FAILED_SEND = Statement(f"""
UPDATE {{schema}}.outgoing_envelopes AS row SET attempts = row.attempts + 1
FROM {MINE} WHERE {_FENCE_OUTGOING}
""")

DEAD_LETTER_OUTGOING = Statement(f"""
WITH moved AS (
    DELETE FROM {{schema}}.outgoing_envelopes AS row USING {MINE}
    WHERE {_FENCE_OUTGOING}
    RETURNING row.*
), letters AS (
    INSERT INTO {{schema}}.dead_letters ({_LETTER})
    SELECT 'outgoing', destination, {_LETTER_FROM_ROW}, attempts, interruptions,
        :exception_type, :reason, :traceback, :fingerprint, :node, NULL, true, epoch, {_REPLAYS % "destination"},
        ordering_key, fair_key
    FROM moved
), history AS (
    INSERT INTO {{schema}}.envelope_history ({HISTORY})
    SELECT id, 'outgoing', 'dead-lettered', {FROM_OUTGOING}, :node, :reason FROM moved
)
SELECT count(*) FROM moved
""")

# Late is what the database's clock says. What comes back neither expired nor not is this node's no more: perhaps it
# expired by an earlier run of this statement, whose reply was lost, and it must not be sent then.
EXPIRE_OWNED_OUTGOING = Statement(f"""
WITH expired AS (
    DELETE FROM {{schema}}.outgoing_envelopes AS row USING {MINE}
    WHERE {_FENCE_OUTGOING} AND row.deliver_by < clock_timestamp()
    RETURNING row.*
), history AS (
    INSERT INTO {{schema}}.envelope_history ({HISTORY})
    SELECT id, 'outgoing', 'expired', {FROM_OUTGOING}, :node, 'expired before it was sent' FROM expired
)
SELECT id, true AS expired FROM expired
UNION ALL
SELECT row.id, false FROM {{schema}}.outgoing_envelopes AS row, {MINE}
WHERE {_FENCE_OUTGOING} AND row.id NOT IN (SELECT id FROM expired)
""")

# ---------------------------------------------------------------- receiving

# A row comes back for each envelope that was not there before; the others are duplicates, also where the id is
# forgotten and its row still waits.
STORE_RECEIVED = Statement(f"""
WITH received AS MATERIALIZED (
    SELECT * FROM unnest({_UNNEST_ENVELOPE}, CAST(:execution_time AS timestamptz[]), CAST(:endpoint AS text[]),
        CAST(:message_digest AS bigint[]), {_UNNEST_QUEUEING}) WITH ORDINALITY
    AS t ({_ENVELOPE}, execution_time, endpoint, message_digest, {_QUEUEING}, position)
), dated AS (
    INSERT INTO {{schema}}.received_ids (id, endpoint, message_digest)
    SELECT id, endpoint, message_digest FROM received WHERE {DATED}
    ON CONFLICT DO NOTHING RETURNING id, endpoint
), undated AS (
    {remember_undated(f"SELECT {_REMEMBERED} FROM received WHERE NOT {DATED}")}
), fresh AS (
    SELECT id, endpoint FROM dated UNION ALL SELECT id, endpoint FROM undated
), stored AS (
    INSERT INTO {{schema}}.incoming_envelopes (endpoint, {_ENVELOPE}, execution_time, {_QUEUEING})
    SELECT endpoint, {_SELECT_ENVELOPE}, execution_time, {_QUEUEING} FROM received JOIN fresh USING (id, endpoint)
    ORDER BY position
    ON CONFLICT (id, endpoint) DO NOTHING RETURNING id, endpoint
)
SELECT id, endpoint FROM stored
""")

# Two messages under one id: a fault of the sender that must not pass as a duplicate.
_CHANGED: Final = """
SELECT known.id, known.endpoint
FROM unnest(CAST(:id AS uuid[]), CAST(:endpoint AS text[]), CAST(:message_digest AS bigint[]))
    AS t (id, endpoint, message_digest)
JOIN {schema}.%s AS known USING (id, endpoint)
WHERE known.message_digest <> t.message_digest
"""
FIND_CHANGED_BODIES = Statement(f"{_CHANGED % 'received_ids'} UNION ALL {_CHANGED % 'undated_ids'}")

# A sender that had no answer sends it again: the same bytes under the same id are one letter.
QUARANTINE = Statement(f"""
INSERT INTO {{schema}}.dead_letters ({_LETTER})
SELECT 'incoming', CAST(:address AS text), CAST(:id AS uuid), CAST(:message_type AS text), CAST(:source AS text),
    CAST(:correlation_id AS uuid), CAST(:causation_id AS uuid), CAST(:partition_key AS text),
    CAST(:content_type AS text), CAST(:headers AS jsonb), CAST(:body AS bytea), CAST(:sent_at AS timestamptz),
    CAST(:deliver_by AS timestamptz), 0, 0, CAST(:exception_type AS text), CAST(:reason AS text),
    CAST(:traceback AS text), CAST(:fingerprint AS text), CAST(:node AS integer), CAST(:message_digest AS bigint),
    CAST(:replayable AS boolean), 0, 0, CAST(:ordering_key AS text), CAST(:fair_key AS text)
WHERE NOT EXISTS (
    SELECT FROM {{schema}}.dead_letters AS letter
    WHERE letter.id = CAST(:id AS uuid) AND letter.address = :address AND letter.body = :body
)
""")

CLAIM_INCOMING = Batched(
    """
    SELECT id, endpoint, epoch FROM {schema}.incoming_envelopes
    WHERE message_type = :message_type AND owner_id = 0 AND execution_time IS NULL AND ordering_key IS NULL
        AND fair_key IS NULL AND (deliver_by IS NULL OR deliver_by > now())
        AND (CAST(:is_trial AS boolean) OR NOT EXISTS (
            SELECT FROM {schema}.circuits
            WHERE kind = 'handler' AND key IN (:message_type, :handler) AND (probing OR until IS NULL OR until > now())
        )){only}
    ORDER BY seq LIMIT :batch_size {lock}""",
    f""", claimed AS (
    UPDATE {{schema}}.incoming_envelopes AS row SET owner_id = :node, epoch = row.epoch + 1
    FROM picked WHERE row.id = picked.id AND row.endpoint = picked.endpoint
    RETURNING row.*
)
SELECT {CLAIMED % "endpoint"}
FROM claimed ORDER BY seq
""",
    key="id, endpoint, epoch",
    only=by_key("endpoint"),
)

# ---------------------------------------------------------------- handling

# In the handler's own transaction. The caller compares the count: fewer rows than leases means that a lease was lost.
FINISH_HANDLED = Statement(f"""
WITH handled AS (
    DELETE FROM {{schema}}.incoming_envelopes AS row
    USING {MINE}
    WHERE {_FENCE_INCOMING}
    RETURNING row.*
), history AS (
    INSERT INTO {{schema}}.envelope_history ({HISTORY})
    SELECT id, 'incoming', 'handled', {FROM_INCOMING}, :node, NULL FROM handled
)
SELECT count(*) FROM handled
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
        seq = DEFAULT, headers = CAST(:headers AS jsonb), fair_key = CAST(:fair_key AS text)
    WHERE {_THIS}
    RETURNING id, endpoint
), {_KEEP_FAILURES}
SELECT id FROM put_off
""")

DEAD_LETTER_INCOMING = Statement(f"""
WITH moved AS (
    DELETE FROM {{schema}}.incoming_envelopes
    WHERE {_THIS}
    RETURNING *
), letters AS (
    INSERT INTO {{schema}}.dead_letters ({_LETTER})
    SELECT 'incoming', endpoint, {_LETTER_FROM_ROW}, attempts + :counted, interruptions,
        :exception_type, :reason, :traceback, :fingerprint, :node,
        COALESCE({known_digest("moved")}, CAST(:message_digest AS bigint)), true, epoch,
        {_REPLAYS % "endpoint"}, ordering_key, fair_key
    FROM moved
    RETURNING letter_id, id, address
), last AS (
    INSERT INTO {{schema}}.failed_attempts
        (id, endpoint, number, failed_at, exception_type, reason, traceback, node_id, letter_id)
    SELECT letters.id, address, failure.*, :node, letter_id FROM letters, {_FAILURES} ORDER BY number
), earlier AS (
    UPDATE {{schema}}.failed_attempts AS attempt SET letter_id = letters.letter_id
    FROM letters WHERE attempt.id = letters.id AND attempt.endpoint = letters.address AND attempt.letter_id IS NULL
), history AS (
    INSERT INTO {{schema}}.envelope_history ({HISTORY})
    SELECT id, 'incoming', 'dead-lettered', {FROM_INCOMING}, :node, :reason FROM moved
)
SELECT count(*) FROM moved
""")

# By the database's clock: a node whose clock is fast may ask too early, and then no row comes back.
EXPIRE_OWNED_INCOMING = Statement(f"""
WITH expired AS (
    DELETE FROM {{schema}}.incoming_envelopes
    WHERE {_THIS} AND deliver_by < clock_timestamp() + CAST(:within AS interval)
    RETURNING *
), history AS (
    INSERT INTO {{schema}}.envelope_history ({HISTORY})
    SELECT id, 'incoming', 'expired', {FROM_INCOMING}, :node, CAST(:reason AS text) FROM expired
)
SELECT count(*) FROM expired
""")
