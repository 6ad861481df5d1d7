"""The SQL statements about recurring schedules, and about what waits for its time.

A schedule is one row for all nodes. Whoever runs an occurrence locks the row, stores the message and moves the row on
in one transaction: that is what makes it once, whatever anybody believes of who is alive. SKIP LOCKED lets the others
pass by.

What waits for its time is changed by one statement for a batch, which names the row as it must be: unowned, and still
to come. A promotion that comes first makes it meet no row.
"""

from __future__ import annotations

from typing import Final

from durable.envelope import DUE
from durable.storage.sql.circuits import SINCE, UNTIL
from durable.storage.sql.columns import OWNED, give_up
from durable.storage.sql.parked import PARKED_OWNER
from durable.storage.sql.statement import Statement
from durable.storage.sql.work import INBOX, OUTBOX, WorkTable

# ---------------------------------------------------------------- recurring schedules

_LIVE: Final = "EXISTS (SELECT FROM {schema}.nodes WHERE node_id = declared_by)"
_PAUSED: Final = """EXISTS (
        SELECT FROM {schema}.circuits
        WHERE kind = 'schedule' AND key = name AND (until IS NULL OR until > now()))"""

READ_SCHEDULES = Statement(f"""
SELECT name, cron, tz, misfire, message_type, destination, declaration, declared_by, declared_at, {_LIVE} AS is_live,
    {_PAUSED} AS is_paused, occurrence_at, due_at, due_at - now() AS due_in,
    asked_at - now() AS asked_in, last_at, ran_at, changed_by,
    changed_at, error
FROM {{schema}}.schedules WHERE CAST(:names AS text[]) IS NULL OR name = ANY (CAST(:names AS text[]))
ORDER BY name
""")

READ_NAMES = Statement("SELECT name FROM {schema}.schedules ORDER BY name")

# Of those that fail, the occurrence that is waited for is tried again and again, and gives way to later ones.
READ_LATE = Statement(f"""
SELECT name, {_LIVE} AS is_live, now() - COALESCE(failing_since, due_at) AS late,
    CASE WHEN failing_since IS NOT NULL THEN error END AS error
FROM {{schema}}.schedules
WHERE COALESCE(failing_since, due_at) <= now() AND NOT {_PAUSED}
ORDER BY late DESC, name LIMIT :most
""")

_SAME_TIMES: Final = "(known.cron, known.tz) = (excluded.cron, excluded.tz)"

# The youngest node that lives has the say: nodes are numbered as they join. Occurrences count anew when the times are
# others; what is due already under the old ones is dropped with them.
DECLARE_SCHEDULES = Statement(f"""
INSERT INTO {{schema}}.schedules AS known
    (name, cron, tz, misfire, message_type, destination, declaration, declared_by, due_at)
SELECT name, cron, tz, misfire, message_type, destination, declaration, :node, now() FROM unnest(
    CAST(:name AS text[]), CAST(:cron AS text[]), CAST(:tz AS text[]), CAST(:misfire AS text[]),
    CAST(:message_type AS text[]), CAST(:destination AS text[]), CAST(:declaration AS text[]))
    AS declared (name, cron, tz, misfire, message_type, destination, declaration)
ORDER BY name
ON CONFLICT (name) DO UPDATE SET
    cron = excluded.cron, tz = excluded.tz, misfire = excluded.misfire, message_type = excluded.message_type,
    destination = excluded.destination, declaration = excluded.declaration, declared_by = excluded.declared_by,
    declared_at = clock_timestamp(),
    occurrence_at = CASE WHEN {_SAME_TIMES} THEN known.occurrence_at END,
    due_at = CASE WHEN {_SAME_TIMES} THEN known.due_at ELSE now() END,
    failing_since = CASE WHEN {_SAME_TIMES} THEN known.failing_since END,
    error = CASE WHEN {_SAME_TIMES} THEN known.error END
WHERE known.declared_by < :node OR NOT {_LIVE.replace("declared_by", "known.declared_by")}
""")

# Whoever asks for a run has it at once; a run that failed is asked for again later.
_ASKED: Final = "asked_at <= now()"

LOCK_DUE_SCHEDULE = Statement(f"""
SELECT occurrence_at, due_at, failing_since IS NOT NULL AS has_failed, due_at <= now() AS is_due,
    CASE WHEN {_ASKED} THEN asked_at END AS asked_at, {_PAUSED} AS is_paused, now() AS now,
    (SELECT {SINCE} FROM {{schema}}.circuits WHERE kind = 'schedule' AND key = name) AS paused_since,
    (SELECT {UNTIL} FROM {{schema}}.circuits WHERE kind = 'schedule' AND key = name) AS paused_until
FROM {{schema}}.schedules
WHERE name = :name AND declaration = :declaration AND (due_at <= now() OR {_ASKED})
FOR UPDATE SKIP LOCKED
""")

_RAN: Final = """
    ran_at = CASE WHEN CAST(:message_type AS text) IS NULL THEN ran_at ELSE clock_timestamp() END,
    message_type = COALESCE(CAST(:message_type AS text), message_type)"""

# A pause has been reckoned with when the occurrences before it have run.
MOVE_SCHEDULE_ON = Statement(f"""
WITH ended AS (
    DELETE FROM {{schema}}.circuits
    WHERE kind = 'schedule' AND key = :name AND until <= LEAST(now(), CAST(:occurrence_at AS timestamptz))
)
UPDATE {{schema}}.schedules SET occurrence_at = CAST(:occurrence_at AS timestamptz),
    due_at = CAST(:occurrence_at AS timestamptz), error = NULL, failing_since = NULL,
    last_at = COALESCE(CAST(:last_at AS timestamptz), last_at), {_RAN}
WHERE name = :name
""")

# What was to run, an occurrence or a run by hand, stays the same, and is tried again later. An occurrence that somebody
# has moved may be tried before its time.
SCHEDULE_FAILED = Statement("""
UPDATE {schema}.schedules SET occurrence_at = CAST(:occurrence_at AS timestamptz),
    due_at = CAST(:due_at AS timestamptz),
    failing_since = COALESCE(failing_since, LEAST(CAST(:occurrence_at AS timestamptz), now())),
    error = CAST(:error AS text)
WHERE name = :name
""")

# The error of an occurrence stays as long as that fails.
SCHEDULE_RAN_AS_ASKED = Statement(f"""
UPDATE {{schema}}.schedules SET asked_at = NULL, error = CASE WHEN failing_since IS NOT NULL THEN error END, {_RAN}
WHERE name = :name
""")
SCHEDULE_FAILED_AS_ASKED = Statement("""
UPDATE {schema}.schedules SET asked_at = now() + CAST(:delay AS interval), error = CAST(:error AS text)
WHERE name = :name
""")

_CHANGED: Final = "changed_by = CAST(:actor AS text), changed_at = clock_timestamp()"
ASK_FOR_SCHEDULE = Statement(f"""
UPDATE {{schema}}.schedules SET asked_at = LEAST(asked_at, clock_timestamp()), {_CHANGED}
WHERE name = :name AND {_LIVE}
RETURNING name, pg_notify(CAST(:channel AS text), '')
""")
RESCHEDULE = Statement(f"""
UPDATE {{schema}}.schedules SET due_at = CAST(:at AS timestamptz), failing_since = NULL, {_CHANGED}
WHERE name = :name AND occurrence_at IS NOT NULL
RETURNING name, pg_notify(CAST(:channel AS text), '')
""")
# Its pause goes with it: another schedule may have the name one day.
REMOVE_ORPHAN = Statement(f"""
WITH removed AS (DELETE FROM {{schema}}.schedules WHERE name = :name AND NOT {_LIVE} RETURNING name),
unpaused AS (DELETE FROM {{schema}}.circuits USING removed WHERE kind = 'schedule' AND key = name)
SELECT name FROM removed
""")

# ---------------------------------------------------------------- what waits for its time

# What is NULL does not matter.
_SELECTED: Final = """execution_time IS NOT NULL
    AND (CAST(:ids AS uuid[]) IS NULL OR id = ANY (CAST(:ids AS uuid[])))
    AND (CAST(:message_type AS text) IS NULL OR message_type = CAST(:message_type AS text))
    AND (CAST(:address AS text) IS NULL OR %s = CAST(:address AS text))
    AND (CAST(:due_before AS timestamptz) IS NULL OR execution_time < CAST(:due_before AS timestamptz))"""


class Waiting:
    """The statements about what waits for its time in one of the two tables of work."""

    def __init__(self, table: WorkTable, fits: str) -> None:
        rows, side, address = table.rows, table.side, table.address
        selected = _SELECTED % address
        next_ones = f"""
    SELECT id, {address}, seq FROM {rows}
    WHERE {selected} AND owner_id = 0 AND seq > :after AND seq <= :newest
    ORDER BY seq LIMIT :batch_size"""
        chosen = f"{next_ones} FOR UPDATE"
        this = table.same_as("chosen")
        told = """
UNION ALL
SELECT NULL, CAST(pg_notify(CAST(:channel AS text), '') AS text) IS NULL WHERE EXISTS (SELECT FROM changed)"""
        self.list = Statement(f"""
SELECT '{side}' AS side, id, message_type, {address} AS address, source,
    LEAST(execution_time, TIMESTAMPTZ '9999-12-30 00:00:00Z') AS execution_time,
    execution_time - now() AS due_in, attempts, sent_at, deliver_by
FROM {rows} AS row WHERE {selected} ORDER BY row.execution_time, seq LIMIT :limit
""")
        self.survey = Statement(f"""
SELECT count(*) AS total, COALESCE(max(seq), 0) AS newest FROM {rows} WHERE {selected}
""")
        self.numbers = Statement(f"SELECT seq FROM ({next_ones}) AS next")
        # Another message may be sent under the same business key then. What waits to be sent holds no id here.
        freed = (
            f""", freed AS (
    {give_up("changed", address)}
)"""
            if side == "incoming"
            else ""
        )
        self.cancel = Statement(f"""
WITH chosen AS ({chosen}
), changed AS (
    DELETE FROM {rows} AS row USING chosen WHERE {this} RETURNING row.*
), {table.history("cancelled", "changed", error="CAST(:reason AS text)", node="0")}{freed}
SELECT seq, true AS done FROM changed
""")
        self.run_now = Statement(f"""
WITH chosen AS ({chosen}
), changed AS (
    UPDATE {rows} AS row SET execution_time = NULL FROM chosen WHERE {this} RETURNING row.seq
)
SELECT seq, true AS done FROM changed{told}
""")
        self.reschedule = Statement(f"""
WITH chosen AS ({chosen}
), changed AS (
    UPDATE {rows} AS row SET execution_time = CAST(:at AS timestamptz),
        headers = CASE WHEN jsonb_exists(headers, '{DUE}')
            THEN jsonb_set(headers, '{{{DUE}}}', to_jsonb(CAST(:at AS timestamptz))) ELSE headers END
    FROM chosen WHERE {this} AND (row.deliver_by IS NULL OR row.deliver_by > CAST(:at AS timestamptz)) AND {fits}
    RETURNING row.seq
)
SELECT seq, seq IN (SELECT seq FROM changed) AS done FROM chosen{told}
""")


# An id that left later than it is remembered by the receiver could not be told from a duplicate.
WAITING: Final = {
    "incoming": Waiting(INBOX, "CAST(:dedupe_window AS interval) IS NOT NULL"),
    "outgoing": Waiting(OUTBOX, "CAST(:at AS timestamptz) < row.sent_at + CAST(:dedupe_window AS interval)"),
}

_SET_ASIDE: Final = "is refused by the database, and waits for an operator"
# Where a message is that does not wait for its time, unless it is finished: for whoever wanted to change it.
READ_WHEREABOUTS = Statement(f"""
SELECT id, CASE WHEN execution_time IS NOT NULL THEN 'waits for its time'
    WHEN owner_id = 0 THEN 'is due, and waits to be handled'
    WHEN {OWNED} THEN 'is being handled by node ' || owner_id
    WHEN owner_id = {PARKED_OWNER} THEN 'is due, and waits for its encryption key'
    ELSE '{_SET_ASIDE}' END AS state
FROM {{schema}}.incoming_envelopes WHERE id = ANY (CAST(:ids AS uuid[]))
UNION ALL
SELECT id, CASE WHEN execution_time IS NOT NULL THEN 'waits for its time'
    WHEN owner_id = 0 THEN 'is due, and waits to be sent to ' || destination
    WHEN {OWNED} THEN 'is being sent by node ' || owner_id
    ELSE '{_SET_ASIDE}' END
FROM {{schema}}.outgoing_envelopes WHERE id = ANY (CAST(:ids AS uuid[]))
""")
