"""The SQL statements by which tables leave the database whole: up to where, in which parts, and what was archived.

Every row carries the transaction that wrote it (`xid`). Below the oldest transaction that still runs nothing can be
added any more: that is the horizon, and what lies below it is what may be archived. A row's number says nothing of
that kind, because a transaction which took the lower number may commit later.

A database that was restored, upgraded or failed over may give the numbers of its former transactions once more. Each
such generation counts from another multiple of 2^48 (`generation_base()`), so that `xid` and horizon rise over all of
them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

from sqlalchemy import DateTime, MetaData, Text
from sqlalchemy.dialects.postgresql import JSONB

from durable.storage import tables
from durable.storage.sql.absent import DROPPED, noting
from durable.storage.sql.statement import Statement
from durable.storage.sql.times import in_range

# ---------------------------------------------------------------- snapshots and parts of tables

EXPORT_SNAPSHOT = Statement("SELECT pg_export_snapshot()")
# Where a snapshot is joined, this is its horizon: what is below is whole in it.
READ_HORIZON = Statement("""
SELECT {schema}.generation_base() + CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint)
""")
# No transaction with this number, or a later one, has ended.
READ_NEXT = Statement("""
SELECT {schema}.generation_base() + CAST(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS text) AS bigint)
""")
# A snapshot lasts for as long as the work of many tasks; it must not be ended for idling.
HOLD_SNAPSHOT = Statement("SET LOCAL idle_in_transaction_session_timeout = 0")
JOIN_SNAPSHOT = Statement("SET TRANSACTION SNAPSHOT '{snapshot}'")

# What a task says before it reads blocks, so that they stay where they are, and then asks.
HOLD_FILE: Final = "LOCK TABLE {relation} IN ACCESS SHARE MODE"
READ_FILE: Final = "SELECT CAST(pg_relation_filenode(CAST('{relation}' AS regclass)) AS bigint)"

# Leaves and files as the snapshot of the transaction has them, as functions on the catalog would not; then, in this
# order, the size and the file as they are now, NULL for what is gone. A table without partitions is its own leaf.
READ_LEAVES = Statement("""
WITH RECURSIVE tree AS (
    SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = CAST(:schema AS name) AND c.relname = CAST(:table AS name)
    UNION ALL SELECT i.inhrelid FROM pg_inherits i JOIN tree ON i.inhparent = tree.oid
)
SELECT c.relname AS leaf, CAST(c.relfilenode AS bigint) AS file,
    pg_relation_size(c.oid) / CAST(current_setting('block_size') AS integer) AS blocks,
    CAST(pg_relation_filenode(c.oid) AS bigint) AS file_now
FROM pg_class c JOIN tree USING (oid)
WHERE c.relkind = 'r'
ORDER BY c.relname
""")


# By which time a row belongs to a day of the lake.
DAYS = {"envelope_history": "finished_at", "dead_letters": "failed_at"}

# The rows of a day and side are parted into so many blocks by their ids, so that few are looked at where some differ.
BLOCKS: Final = 64
_BLOCK: Final = {
    "envelope_history": f"get_byte(uuid_send(id), 15) & {BLOCKS - 1}",
    "dead_letters": f"CAST(letter_id & {BLOCKS - 1} AS integer)",
}


# By what a row is known. Numbers of letters, and of transactions, come again where a database was restored.
KEYS: Final = {
    "envelope_history": ("id", "side", "address", "outcome", "xid"),
    "dead_letters": ("letter_id", "id", "failed_at", "side", "xid"),
}


ERASURE: Final = "erasure_id"
"""The column that tells that a row was erased, and by which erasure."""


def _day(table: str) -> str:
    return f"CAST({in_range(DAYS[table])} AT TIME ZONE 'UTC' AS date)"


def _keys(table: str) -> str:
    """Select the key of a row."""
    return ", ".join(f"{in_range(name)} AS {name}" if name == DAYS[table] else name for name in KEYS[table])


def _record(table: str) -> str:
    """A row as bytes, the same on every server and for every client: what durable.pipeline.digests makes of a lake's.

    record_send() writes each column with its type and length. Texts are UTF-8, whatever the client's encoding. Of an
    erasure counts that there was one: after a restore another one may have come to the row first, here or in the lake.
    """
    columns = tables.define(MetaData())[table].columns
    return f"record_send(ROW({', '.join(_sent(each.name, each.type) for each in columns)}))"


def _sent(name: str, kind: object) -> str:
    if name == ERASURE:
        return f"({name} IS NOT NULL)"
    match kind:
        case DateTime():
            return in_range(name)
        case JSONB():
            return f"convert_to(CAST({name} AS text), 'UTF8')"
        case Text():
            return f"convert_to({name}, 'UTF8')"
        case _:
            return name


_KEY: Final = {"envelope_history": "CAST(id AS text)", "dead_letters": "CAST(letter_id AS text)"}
# A row that was read once, and is not here, without the note of a drop that took it; a letter whose number another one
# has, or an earlier state of it, or none yet. Each drop is noted with the rows, whatever becomes of their day.
_IS_NOTED_AS_DROPPED: Final = """EXISTS (SELECT FROM {{schema}}.absent_rows
        WHERE table_name = '{table}' AND day = CAST(CAST(CAST(:moment AS text) AS timestamp) AS date)
            AND kind IN ('gap', 'dropped', 'early') AND row_count > 0 AND below > :xid)"""
_IS_OF_ANOTHER_LIFE: Final = {
    "envelope_history": f"""
SELECT NOT EXISTS (SELECT FROM {{schema}}.envelope_history WHERE xid = :xid AND id = CAST(:key AS uuid))
    AND NOT {_IS_NOTED_AS_DROPPED.format(table="envelope_history")}
""",
    "dead_letters": f"""
SELECT COALESCE(
    (SELECT xid < :xid OR failed_at AT TIME ZONE 'UTC' <> CAST(CAST(:moment AS text) AS timestamp)
        FROM {{schema}}.dead_letters WHERE letter_id = CAST(CAST(:key AS text) AS bigint)),
    CAST(CAST(:key AS text) AS bigint)
        > COALESCE(pg_sequence_last_value(CAST(pg_get_serial_sequence(:table, 'letter_id') AS regclass)), 0)
    OR NOT {_IS_NOTED_AS_DROPPED.format(table="dead_letters")})
""",
}


class ByTransaction:
    """The statements over a range of transactions of one of the tables that note them; `time` tells a row's age."""

    def __init__(self, table: str, time: str) -> None:
        self.table = table
        # By leaf: how many rows there are, and in which blocks they lie.
        self.survey = Statement(f"""
SELECT c.relname AS leaf, CAST(pg_relation_filenode(c.oid) AS bigint) AS file, survey.rows,
    (CAST(CAST(survey.first AS text) AS point))[0] AS first_block,
    (CAST(CAST(survey.last AS text) AS point))[0] AS last_block
FROM (
    SELECT tableoid, count(*) AS rows, min(ctid) AS first, max(ctid) AS last
    FROM {{schema}}.{table} WHERE xid >= :low AND xid < :high GROUP BY tableoid
) AS survey JOIN pg_class c ON c.oid = survey.tableoid ORDER BY c.relname
""")
        # The last row of a batch.
        self.read_last = Statement(f"""
SELECT xid, {_KEY[table]} AS key, CAST({in_range(DAYS[table])} AT TIME ZONE 'UTC' AS text) AS moment
FROM {{schema}}.{table} WHERE xid >= :low AND xid < :high ORDER BY xid DESC, {_KEY[table]} LIMIT 1
""")
        self.is_of_another_life = Statement(_IS_OF_ANOTHER_LIFE[table])
        # Where a batch of about this many rows ends: whole transactions, and one at least.
        self.find_end = Statement(f"""
SELECT max(xid) + 1 FROM (
    SELECT xid FROM {{schema}}.{table} WHERE xid >= :low AND xid < :high ORDER BY xid LIMIT :rows
) AS first
""")
        # Where the rows begin that are here, and those that running transactions may still write.
        self.find_start = Statement(f"""
SELECT LEAST(min(xid), CAST(:high AS bigint)) FROM {{schema}}.{table}
""")
        # Of every day: any of them may have been dropped before the first archive.
        self.oldest = Statement(f"""
SELECT uuid_send(id) AS id, side, moment, xid FROM (
    SELECT id, side, {in_range(DAYS[table])} AS moment, xid,
        row_number() OVER (PARTITION BY {_day(table)} ORDER BY xid) AS place
    FROM {{schema}}.{table} WHERE id IS NOT NULL) AS numbered
WHERE place <= :rows
""")
        self.exists = Statement(f"""
SELECT EXISTS (SELECT FROM {{schema}}.{table} WHERE xid >= :low AND xid < :high)
""")
        # No transaction of this generation can have such a number yet.
        self.is_from_elsewhere = Statement(f"""
SELECT EXISTS (SELECT FROM {{schema}}.{table} WHERE xid >=
    {{schema}}.generation_base() + CAST(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS text) AS bigint))
""")
        # By UTC day, the rows of these transactions that are still here.
        self.count_days = Statement(f"""
SELECT {_day(table)} AS day, count(*) AS rows
FROM {{schema}}.{table} WHERE xid >= :low AND xid < :high GROUP BY 1
""")
        self.lag = Statement(f"""
SELECT count(*) AS rows, clock_timestamp() - min({in_range(time)}) AS age FROM {{schema}}.{table} WHERE xid >= :low
""")
        # The first of them, as they lie in the table: about the oldest.
        self.lag_up_to = Statement(f"""
SELECT count(*) AS rows, clock_timestamp() - min(behind.moment) AS age
FROM (SELECT {in_range(time)} AS moment FROM {{schema}}.{table} WHERE xid >= :low LIMIT :most) AS behind
""")

    # Few processes compare contents; to define the tables takes each of them longer than all other statements.
    @cached_property
    def digest_blocks(self) -> Statement:
        """Count and digest the archived rows of some days, by block. A block's digest is the sum of its rows'."""
        return Statement(f"""
SELECT day, side, block, count(*) AS rows, CAST(sum(digest) AS text) AS digest
FROM ({self._digested}) AS digested GROUP BY day, side, block
""")

    @cached_property
    def digest_rows(self) -> Statement:
        """Digest the archived rows of some blocks."""
        narrowed = f"{self._digested}    AND {_BLOCK[self.table]} = ANY (CAST(:blocks AS integer[]))"
        return Statement(f"""
SELECT {", ".join(KEYS[self.table])}, digest FROM ({narrowed}) AS digested
""")

    @cached_property
    def _digested(self) -> str:
        """The archived rows of some days, each with its digest: 64 bits of its SHA-256."""
        table = self.table
        return f"""
SELECT {_day(table)} AS day, {_keys(table)}, {_BLOCK[table]} AS block,
    CAST(CAST('x' || encode(substr(sha256({_record(table)}), 1, 8), 'hex') AS bit(64)) AS bigint) AS digest
FROM {{schema}}.{table} WHERE xid < :high
    AND (CAST(:since AS timestamptz) IS NULL OR {DAYS[table]} >= CAST(:since AS timestamptz))
    AND (CAST(:until AS timestamptz) IS NULL OR {DAYS[table]} < CAST(:until AS timestamptz))
"""


HISTORY = ByTransaction("envelope_history", "finished_at")
DEAD_LETTERS = ByTransaction("dead_letters", "COALESCE(resolved_at, failed_at)")
BY_TRANSACTION = {each.table: each for each in (HISTORY, DEAD_LETTERS)}

# ---------------------------------------------------------------- what was archived, and where

LOCK_ARCHIVE = Statement("SELECT pg_try_advisory_lock(:class_id, :key)")
UNLOCK_ARCHIVE = Statement("SELECT pg_advisory_unlock(:class_id, :key)")
# pg_locks shows a key of two ints as unsigned halves (objsubid 2).
IS_ARCHIVE_LOCKED = Statement("""
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2
    AND CAST(CAST(classid AS bigint) AS bit(32)) = CAST(CAST(:class_id AS bigint) AS bit(32))
    AND CAST(objid AS bigint) = :key
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
""")
# What makes this database another one than before, with other transactions under the same numbers: its cluster, its
# timeline, and itself within the cluster.
READ_IDENTITY = Statement("SELECT {schema}.cluster_identity()")
NAME_DATABASE = Statement("""
INSERT INTO {schema}.generations (generation, database) VALUES (0, COALESCE(CAST(:name AS text),
    current_database() || '-' || left(replace(CAST(gen_random_uuid() AS text), '-', ''), 8)))
ON CONFLICT (generation) DO NOTHING
""")
READ_DATABASE = Statement("SELECT database FROM {schema}.generations ORDER BY generation DESC LIMIT 1")
BEGIN_GENERATION = Statement("SELECT {schema}.begin_generation()")
READ_GENERATION_BASE = Statement("SELECT {schema}.generation_base()")
# What was archived before tells it for good; else the nodes that are there now.
READ_SERVICES = Statement("""
SELECT DISTINCT service FROM {schema}.archives
UNION
SELECT service FROM {schema}.nodes WHERE NOT EXISTS (SELECT FROM {schema}.archives)
ORDER BY service
""")
READ_ARCHIVE = Statement("""
SELECT service, app_id, lake, lake_id, claimed_below, archived_below, archived_at, identity, ended_at, left_lakes,
    lost_above, lost_below, looked_at, looked_number
FROM {schema}.archives WHERE table_name = :table
""")
# From here on nothing of the table is dropped that is not archived.
BEGIN_ARCHIVE = Statement("""
INSERT INTO {schema}.archives (table_name, service, app_id, lake, lake_id)
VALUES (:table, :service, :app_id, :lake, :lake_id)
ON CONFLICT (table_name) DO NOTHING
""")
# A lake is known by its id, wherever its files are.
PLACE_ARCHIVE = Statement("""
UPDATE {schema}.archives SET lake = :lake WHERE table_name = :table AND lake_id = :lake_id AND lake <> :lake
""")
# What was archived into the other lake says nothing of this one.
MOVE_ARCHIVE = Statement("""
WITH forgotten AS (DELETE FROM {schema}.archive_commits WHERE table_name = :table)
UPDATE {schema}.archives SET service = :service, app_id = :app_id, lake = :lake, lake_id = :lake_id,
    claimed_below = 0, archived_below = 0, lost_above = NULL, lost_below = NULL,
    left_lakes = left_lakes || jsonb_build_object(lake_id, claimed_below)
WHERE table_name = :table
""")
# A copy has used none of the lakes of its original.
FORGET_LEFT_LAKES = Statement("UPDATE {schema}.archives SET left_lakes = jsonb_build_object()")
# The row stays: whoever archives again goes on from where the lake is. What is dropped meanwhile is known to be.
END_ARCHIVES = Statement("""
UPDATE {schema}.archives SET ended_at = clock_timestamp() WHERE ended_at IS NULL
""")
RESUME_ARCHIVE = Statement("UPDATE {schema}.archives SET ended_at = NULL WHERE table_name = :table")
# Before a commit of the lake: so an offset of the lake beyond it is known to come from another life of the database.
CLAIM_ARCHIVE = Statement("""
UPDATE {schema}.archives SET claimed_below = GREATEST(claimed_below, :high) WHERE table_name = :table
""")
# Each commit of a lake has a number at random, noted here before it is made: a lake that stands at another one was
# brought there by somebody else. The newest stays, however old it is.
CLAIM_COMMITS = Statement("""
WITH older AS (
    DELETE FROM {schema}.archive_claims AS known
    WHERE table_name = :table AND claimed_at < clock_timestamp() - CAST(:keep AS interval)
        AND EXISTS (SELECT FROM {schema}.archive_claims AS newer
            WHERE newer.table_name = :table AND newer.claimed_at > known.claimed_at)
)
INSERT INTO {schema}.archive_claims (table_name, commit_id, high)
SELECT :table, commit_id, high
FROM unnest(CAST(:commit_ids AS bigint[]), CAST(:highs AS bigint[])) AS claimed (commit_id, high)
ON CONFLICT (table_name, commit_id) DO NOTHING
""")
READ_CLAIMED = Statement("""
SELECT max(high) FROM {schema}.archive_claims
WHERE table_name = :table AND commit_id = ANY (CAST(:commit_ids AS bigint[]))
""")
CONFIRM_ARCHIVE = Statement("""
UPDATE {schema}.archives SET archived_below = GREATEST(archived_below, :high), archived_at = clock_timestamp()
WHERE table_name = :table AND archived_below < :high
""")
# Noted before the commit of the lake, so that whatever the lake ever held is known here; without the commit the range
# is noted again, with the rows that it has then.
NOTE_COMMIT = Statement("""
WITH older AS (
    DELETE FROM {schema}.archive_commits
    WHERE table_name = :table AND archived_at < clock_timestamp() - CAST(:keep AS interval)
), uncommitted AS (
    DELETE FROM {schema}.archive_commits
    WHERE table_name = :table AND low >= :low AND NOT is_lost
        AND NOT (high = :high AND day = ANY (CAST(:days AS date[])))
)
INSERT INTO {schema}.archive_commits (table_name, low, high, day, row_count)
SELECT :table, :low, :high, day, row_count
FROM unnest(CAST(:days AS date[]), CAST(:counts AS bigint[])) AS noted (day, row_count)
ON CONFLICT (table_name, high, day, is_lost) DO UPDATE SET row_count = EXCLUDED.row_count, low = EXCLUDED.low,
    archived_at = clock_timestamp()
""")
# The newest commits, of which each has a row for each day. The last may be noted and not made, or not confirmed.
READ_COMMITS = Statement("""
WITH ends AS (
    SELECT DISTINCT high FROM {schema}.archive_commits WHERE table_name = :table AND NOT is_lost
    ORDER BY high DESC LIMIT :limit
)
SELECT table_name, min(low) AS low, high, min(day) AS first_day, max(day) AS last_day,
    CAST(sum(row_count) AS bigint) AS rows, max(archived_at) AS archived_at
FROM {schema}.archive_commits JOIN ends USING (high)
WHERE table_name = :table AND NOT is_lost GROUP BY table_name, high ORDER BY high DESC
""")
# The lake is behind what was archived: nothing beyond its offset may be dropped until it is archived again. Until then
# the commits that it lost are kept. Those that bring their rows once more lie in [lost_above, lost_below); if the lake
# loses these as well, they are noted again.
REWIND_ARCHIVE = Statement("""
WITH archive AS (
    SELECT archived_below, COALESCE(lost_above, :low) AS lost_above, COALESCE(lost_below, :low) AS lost_below
    FROM {schema}.archives WHERE table_name = :table AND archived_below > :low FOR UPDATE
), lost AS (
    UPDATE {schema}.archive_commits AS known SET is_lost = true FROM archive
    WHERE table_name = :table AND NOT is_lost AND high > :low AND high <= archive.archived_below
        AND NOT (known.low >= archive.lost_above AND known.high <= archive.lost_below)
), left_behind AS (
    UPDATE {schema}.archive_claims AS known SET lost_at = COALESCE(lost_at, clock_timestamp()) FROM archive
    WHERE table_name = :table AND high > :low
)
UPDATE {schema}.archives SET archived_below = :low, lost_above = LEAST(archive.lost_above, :low),
    lost_below = GREATEST(archive.lost_below, archive.archived_below)
FROM archive WHERE table_name = :table
""")
# All that the lake lost is in it again, or named.
SETTLE_ARCHIVE = Statement("""
WITH settled AS (DELETE FROM {schema}.archive_commits WHERE table_name = :table AND is_lost)
UPDATE {schema}.archives SET lost_above = NULL, lost_below = NULL WHERE table_name = :table
""")
# By day, the rows that a lake which ends at `low` has lost, less those that it got again. `first` to `end`: the
# transactions of which rows that are still here are yet to be archived again. Before a generation such a row may have
# any number.
READ_LOST = Statement("""
WITH archive AS (
    SELECT archived_below, COALESCE(lost_above, :low) AS lost_above, GREATEST(lost_below, archived_below) AS lost_below
    FROM {schema}.archives WHERE table_name = :table
)
SELECT day, CAST(sum(CASE
        WHEN is_lost OR (high > :low AND high <= archived_below) THEN row_count
        WHEN known.low >= lost_above AND high <= LEAST(lost_below, :low) THEN -row_count
        ELSE 0 END) AS bigint) AS rows,
    CASE WHEN :low < {schema}.generation_base() THEN 0 ELSE :low END AS first, lost_below AS end
FROM {schema}.archive_commits AS known, archive WHERE table_name = :table GROUP BY day, lost_below
""")

# By day, where the commits end that the lake has lost, of those that are not all archived again or named.
READ_LOST_ENDS = Statement("""
SELECT day, max(high) AS high FROM {schema}.archive_commits WHERE table_name = :table AND is_lost GROUP BY day
""")

# ---------------------------------------------------------------- what holds the horizon back

# The next number, which it uses up.
TAKE_NUMBER = Statement("SELECT {schema}.generation_base() + CAST(CAST(pg_current_xact_id() AS text) AS bigint)")
# What has a number, in any database of the cluster. Prepared transactions hide when they began, and so do sessions of
# other roles from one without pg_read_all_stats, which sees only that they write.
READ_RUNNING = Statement("""
SELECT min(xact_start) FILTER (WHERE backend_xid IS NOT NULL) AS oldest,
    bool_or(backend_xid IS NOT NULL AND xact_start IS NULL) OR EXISTS (SELECT FROM pg_prepared_xacts) AS is_hidden
FROM pg_stat_activity
""")
# A look stays until all that had a number at it have ended: a later one might never come to that.
NOTE_LOOK = Statement("""
UPDATE {schema}.archives SET looked_at = :moment, looked_number = :number
WHERE table_name = :table AND (looked_number IS NULL OR looked_number < :horizon)
""")
# From here on no row of the history was dropped, whether there was one or not.
READ_OLDEST_DAY = Statement("""
SELECT CAST(min(to_date(right(c.relname, 8), 'YYYYMMDD')) AS timestamp) AT TIME ZONE 'UTC'
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = CAST(:table AS regclass) AND c.relname ~ '_[0-9]{8}$'
""")
# The oldest number that is not ended. Locks tell it to every role, and of prepared transactions too.
READ_HOLDER = Statement("""
SELECT p.gid, l.pid, a.application_name, a.usename AS role, a.state, a.query,
    clock_timestamp() - COALESCE(a.xact_start, p.prepared) AS age
FROM pg_locks l
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_prepared_xacts p ON p.transaction = l.transactionid
WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted
ORDER BY age(l.transactionid) DESC LIMIT 1
""")
# Who uses one of these tables or their partitions, the longest first; a prepared transaction has no process.
READ_USER = Statement("""
SELECT p.gid, l.pid, a.application_name, a.usename AS role, a.state, a.query,
    clock_timestamp() - COALESCE(a.xact_start, p.prepared) AS age
FROM pg_locks l
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_locks own
    ON l.pid IS NULL AND own.locktype = 'transactionid' AND own.virtualtransaction = l.virtualtransaction
LEFT JOIN pg_prepared_xacts p ON p.transaction = own.transactionid
WHERE l.locktype = 'relation' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND (l.relation = ANY (CAST(CAST(:tables AS text[]) AS regclass[])) OR l.relation IN (
        SELECT inhrelid FROM pg_inherits WHERE inhparent = ANY (CAST(CAST(:tables AS text[]) AS regclass[]))))
ORDER BY COALESCE(a.xact_start, p.prepared) LIMIT 1
""")

# ---------------------------------------------------------------- comparing with the lake, and letting go

# How old the days are, by the database's clock.
READ_OLD_DAYS = Statement("""
SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day
FROM pg_inherits i
JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = CAST(:table AS regclass) AND c.relname ~ '_[0-9]{8}$'
    AND to_date(right(c.relname, 8), 'YYYYMMDD') + 1 < (now() AT TIME ZONE 'UTC') - CAST(:keep AS interval)
ORDER BY 1
""")
# Of the days all of which are past this retention, and rows that lie in none of the daily partitions.
READ_FIRST_DAY_KEPT = Statement("SELECT CAST((now() AT TIME ZONE 'UTC') - CAST(:keep AS interval) AS date)")
COUNT_STRAY_HISTORY = Statement("""
SELECT count(*) FROM {schema}.envelope_history_default
WHERE xid < :high AND finished_at < CAST(:until AS timestamptz)
""")
PURGE_STRAY_HISTORY = Statement(f"""
WITH picked AS (
    SELECT ctid AS place FROM {{schema}}.envelope_history_default
    WHERE xid < :high AND finished_at < CAST(:until AS timestamptz) LIMIT :batch_size FOR UPDATE SKIP LOCKED
), purged AS (
    DELETE FROM {{schema}}.envelope_history_default WHERE ctid = ANY (ARRAY(SELECT place FROM picked))
    RETURNING {DROPPED["envelope_history"]}
), noted AS ({noting("envelope_history", "purged")}
)
SELECT count(*) FROM purged
""")
PURGE_OLD_ATTEMPTS = Statement("""
WITH picked AS MATERIALIZED (
    SELECT attempt_id FROM {schema}.failed_attempts
    WHERE letter_id IS NULL AND failed_at < CAST(:until AS timestamptz) LIMIT :batch_size FOR UPDATE SKIP LOCKED
), purged AS (
    DELETE FROM {schema}.failed_attempts AS row USING picked WHERE row.attempt_id = picked.attempt_id
    RETURNING 1
)
SELECT count(*) FROM purged
""")
COUNT_RESOLVED_LETTERS = Statement("""
SELECT count(*) FROM {schema}.dead_letters WHERE xid < :high AND resolved_at < now() - CAST(:keep AS interval)
""")
PURGE_RESOLVED_LETTERS = Statement(f"""
WITH picked AS (
    SELECT letter_id FROM {{schema}}.dead_letters
    WHERE xid < :high AND resolved_at < now() - CAST(:keep AS interval)
    ORDER BY resolved_at LIMIT :batch_size FOR UPDATE SKIP LOCKED
), purged AS (
    DELETE FROM {{schema}}.dead_letters WHERE letter_id IN (SELECT letter_id FROM picked)
    RETURNING {DROPPED["dead_letters"]}
), noted AS ({noting("dead_letters", "purged")}
)
SELECT count(*) FROM purged
""")
# The state of each letter of an earlier generation, to be compared with the newest one that the lake has.
READ_EARLIER_LETTERS = Statement(f"""
SELECT letter_id, uuid_send(id) AS id, {in_range("failed_at")} AS failed_at, replay_count,
    {in_range("resolved_at")} AS resolved_at, xid
FROM {{schema}}.dead_letters WHERE xid < {{schema}}.generation_base() ORDER BY letter_id
""")
# The newest state of a letter is the one of the highest transaction.
RENEW_LETTERS = Statement("""
UPDATE {schema}.dead_letters SET xid = DEFAULT
WHERE letter_id = ANY (CAST(:letters AS bigint[])) AND xid < {schema}.generation_base()
""")
COUNT_UNARCHIVED = Statement(f"""
SELECT {_day("envelope_history")} AS day, count(*) AS rows FROM {{schema}}.envelope_history
WHERE xid >= :low AND finished_at < CAST(:until AS timestamptz) GROUP BY 1 ORDER BY 1
""")
# A gap without rows is of what a restored database has lost: who lost it may handle it again. Before the first archive
# nothing is noted, and nodes drop what is past its retention.
READ_DROPPED_UNTIL = Statement("""
SELECT GREATEST(
    (SELECT max(last_at) FROM {schema}.absent_rows
        WHERE table_name = 'envelope_history' AND kind IN ('gap', 'dropped') AND row_count > 0),
    CASE WHEN {schema}.archived_below('envelope_history') IS NULL THEN now() - CAST(:keep AS interval) END)
""")
DROP_ARCHIVED_HISTORY = Statement("SELECT {schema}.drop_archived_history(CAST(:day AS date))")
