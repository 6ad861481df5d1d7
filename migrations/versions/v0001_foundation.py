"""The tables, their partial indexes, and the partitions of received_ids and envelope_history.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from alembic import context, op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# A queue table is emptied as fast as it is filled: vacuum by a few hundred dead rows, not by a share of the table.
QUEUE = """WITH (
    fillfactor = 90, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.0, autovacuum_analyze_threshold = 5000,
    autovacuum_vacuum_insert_threshold = 100000, autovacuum_vacuum_cost_delay = 0)"""

# A time that no reader can hold would stop every claim of its neighbours. By some hours less than the calendar of
# Python: a time is read in the zone of its reader, and the clock of the database may be ahead.
WITHIN = "BETWEEN '0001-01-02 00:00+00' AND '9999-12-31 08:00+00'"

# What no claim would ever find: a place in the queue before the first or at the end, a mark that durable does not know
# (-1: refused by the database, -2: without its encryption key), an order without a name. A tenant may be without one.
ENVELOPE = """
    seq bigint GENERATED ALWAYS AS IDENTITY CHECK (seq BETWEEN 1 AND 9223372036854775806),
    id uuid NOT NULL,
    message_type text NOT NULL,
    source text NOT NULL,
    correlation_id uuid NOT NULL,
    causation_id uuid,
    partition_key text,
    content_type text NOT NULL,
    headers jsonb NOT NULL DEFAULT '{}',
    body bytea NOT NULL,
    sent_at timestamptz NOT NULL,
    deliver_by timestamptz,
    execution_time timestamptz,
    attempts integer NOT NULL DEFAULT 0,
    interruptions integer NOT NULL DEFAULT 0,
    owner_id integer NOT NULL CHECK (owner_id >= -2),
    ordering_key text COLLATE "C" CHECK (ordering_key <> ''),
    fair_key text COLLATE "C",
    epoch integer NOT NULL DEFAULT 0,
    CHECK (sent_at {within} AND deliver_by {within} AND execution_time {within})""".replace("{within}", WITHIN)

# Rows that keep those behind them under the same ordering key from being claimed.
HELD = "ordering_key IS NOT NULL AND (owner_id <> 0 OR (execution_time IS NOT NULL AND attempts > 0))"

UPGRADE = """
CREATE TABLE "{schema}".outgoing_envelopes (
    destination text NOT NULL, {envelope},
    PRIMARY KEY (id, destination)
) {queue};
CREATE INDEX outgoing_unowned ON "{schema}".outgoing_envelopes (destination, seq)
    WHERE owner_id = 0 AND execution_time IS NULL AND ordering_key IS NULL AND fair_key IS NULL;
CREATE INDEX outgoing_fair ON "{schema}".outgoing_envelopes (destination, fair_key, seq)
    WHERE fair_key IS NOT NULL AND owner_id = 0 AND execution_time IS NULL AND ordering_key IS NULL;
CREATE INDEX outgoing_ordered ON "{schema}".outgoing_envelopes (destination, ordering_key, seq)
    WHERE ordering_key IS NOT NULL AND owner_id = 0 AND execution_time IS NULL;
CREATE INDEX outgoing_queued ON "{schema}".outgoing_envelopes (destination, seq)
    WHERE owner_id = 0 AND execution_time IS NULL AND (ordering_key IS NOT NULL OR fair_key IS NOT NULL);
CREATE INDEX outgoing_held ON "{schema}".outgoing_envelopes (destination, ordering_key, seq) WHERE {held};
CREATE INDEX outgoing_owned ON "{schema}".outgoing_envelopes (owner_id) WHERE owner_id <> 0;
CREATE INDEX outgoing_due ON "{schema}".outgoing_envelopes (execution_time) WHERE execution_time IS NOT NULL;
CREATE INDEX outgoing_expiring ON "{schema}".outgoing_envelopes (deliver_by) WHERE deliver_by IS NOT NULL;

CREATE TABLE "{schema}".incoming_envelopes (
    endpoint text NOT NULL, {envelope},
    received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (id, endpoint)
) {queue};
CREATE INDEX incoming_unowned ON "{schema}".incoming_envelopes (message_type, seq)
    WHERE owner_id = 0 AND execution_time IS NULL AND ordering_key IS NULL AND fair_key IS NULL;
CREATE INDEX incoming_fair ON "{schema}".incoming_envelopes (message_type, fair_key, seq)
    WHERE fair_key IS NOT NULL AND owner_id = 0 AND execution_time IS NULL AND ordering_key IS NULL;
CREATE INDEX incoming_ordered ON "{schema}".incoming_envelopes (ordering_key, seq)
    WHERE ordering_key IS NOT NULL AND owner_id = 0 AND execution_time IS NULL;
CREATE INDEX incoming_ordered_types ON "{schema}".incoming_envelopes (message_type, ordering_key)
    WHERE ordering_key IS NOT NULL AND owner_id = 0 AND execution_time IS NULL;
CREATE INDEX incoming_queued ON "{schema}".incoming_envelopes (message_type, seq)
    WHERE owner_id = 0 AND execution_time IS NULL AND (ordering_key IS NOT NULL OR fair_key IS NOT NULL);
CREATE INDEX incoming_scheduled ON "{schema}".incoming_envelopes (message_type, seq)
    WHERE execution_time IS NOT NULL;
CREATE INDEX incoming_held ON "{schema}".incoming_envelopes (ordering_key, seq) WHERE {held};
CREATE INDEX incoming_owned ON "{schema}".incoming_envelopes (owner_id) WHERE owner_id <> 0;
CREATE INDEX incoming_due ON "{schema}".incoming_envelopes (execution_time) WHERE execution_time IS NOT NULL;
CREATE INDEX incoming_expiring ON "{schema}".incoming_envelopes (deliver_by) WHERE deliver_by IS NOT NULL;

CREATE TABLE "{schema}".received_ids (
    id uuid NOT NULL,
    endpoint text NOT NULL,
    message_digest bigint NOT NULL,
    terms bigint NOT NULL DEFAULT 0,
    received_at timestamptz NOT NULL DEFAULT now(),
    carried bigint,
    due_at timestamptz,
    expired timestamptz,
    PRIMARY KEY (id, endpoint)
) PARTITION BY RANGE (id);
CREATE TABLE "{schema}".received_ids_default PARTITION OF "{schema}".received_ids DEFAULT;
CREATE INDEX received_ids_default_by_age ON "{schema}".received_ids_default (received_at);

CREATE TABLE "{schema}".undated_ids (
    id uuid NOT NULL,
    endpoint text NOT NULL,
    message_digest bigint NOT NULL,
    terms bigint NOT NULL DEFAULT 0,
    received_at timestamptz NOT NULL DEFAULT now(),
    sent_at timestamptz NOT NULL,
    given_up boolean NOT NULL DEFAULT false,
    carried bigint,
    due_at timestamptz,
    expired timestamptz,
    PRIMARY KEY (id, endpoint)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05);
CREATE INDEX undated_ids_by_age ON "{schema}".undated_ids (received_at);

CREATE TABLE "{schema}".envelope_history (
    id uuid NOT NULL,
    side text NOT NULL CHECK (side IN ('outgoing', 'incoming')),
    outcome text NOT NULL CHECK (outcome IN ('sent', 'handled', 'dead-lettered', 'expired', 'cancelled')),
    address text NOT NULL,
    message_type text NOT NULL,
    source text NOT NULL,
    correlation_id uuid NOT NULL,
    causation_id uuid,
    partition_key text,
    sent_at timestamptz NOT NULL,
    deliver_by timestamptz,
    received_at timestamptz,
    finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempts integer NOT NULL,
    interruptions integer NOT NULL,
    node_id integer NOT NULL,
    error text,
    content_type text,
    headers jsonb,
    body bytea,
    seq bigint,
    xid bigint NOT NULL DEFAULT (pg_current_xact_id()::text)::bigint,
    erasure_id uuid
) PARTITION BY RANGE (finished_at);
CREATE TABLE "{schema}".envelope_history_default PARTITION OF "{schema}".envelope_history DEFAULT;
-- For archives by xid, and for receipts by id: ids have a time, as rows have an order. It costs inserts no more than
-- with xid alone, where a btree of ids would add a page to write for each batch.
CREATE INDEX envelope_history_xid ON "{schema}".envelope_history USING brin (xid, id);

CREATE TABLE "{schema}".dead_letters (
    letter_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    side text NOT NULL CHECK (side IN ('outgoing', 'incoming')),
    address text NOT NULL,
    id uuid,
    message_type text,
    source text,
    correlation_id uuid,
    causation_id uuid,
    partition_key text,
    content_type text,
    headers jsonb NOT NULL DEFAULT '{{}}',
    body bytea NOT NULL,
    sent_at timestamptz,
    deliver_by timestamptz,
    attempts integer NOT NULL DEFAULT 0,
    interruptions integer NOT NULL DEFAULT 0,
    exception_type text NOT NULL,
    reason text NOT NULL,
    traceback text,
    fingerprint text NOT NULL,
    failed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    replay_count integer NOT NULL DEFAULT 0,
    node_id integer NOT NULL,
    epoch integer NOT NULL DEFAULT 0,
    message_digest bigint,
    replayable boolean NOT NULL DEFAULT false,
    resolution text CHECK (resolution IN ('replayed', 'handled', 'discarded')),
    resolved_at timestamptz,
    resolved_by text,
    resolution_reason text,
    edited_body bytea,
    xid bigint NOT NULL DEFAULT (pg_current_xact_id()::text)::bigint,
    ordering_key text COLLATE "C",
    fair_key text COLLATE "C",
    erasure_id uuid,
    CHECK ((resolution IS NULL) = (resolved_at IS NULL))
);
CREATE INDEX dead_letters_unresolved ON "{schema}".dead_letters (fingerprint, letter_id) WHERE resolved_at IS NULL;
CREATE INDEX dead_letters_resolved ON "{schema}".dead_letters (resolved_at) WHERE resolved_at IS NOT NULL;
CREATE INDEX dead_letters_by_id ON "{schema}".dead_letters (id) WHERE id IS NOT NULL;
CREATE INDEX dead_letters_by_conversation ON "{schema}".dead_letters (correlation_id)
    WHERE correlation_id IS NOT NULL;
CREATE INDEX dead_letters_xid ON "{schema}".dead_letters (xid);

CREATE FUNCTION "{schema}".cluster_identity() RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT system_identifier || ':' || CASE WHEN pg_is_in_recovery()
            THEN (SELECT timeline_id FROM pg_control_checkpoint())
            ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer END
        || ':' || (SELECT oid FROM pg_database WHERE datname = current_database())
    FROM pg_control_system()
$$;

CREATE TABLE "{schema}".generations (
    generation integer PRIMARY KEY CHECK (generation BETWEEN 0 AND 32766),
    database text NOT NULL,
    began_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE "{schema}".archives (
    table_name text PRIMARY KEY CHECK (table_name IN ('envelope_history', 'dead_letters')),
    service text NOT NULL,
    app_id text NOT NULL,
    lake text NOT NULL,
    lake_id text NOT NULL,
    claimed_below bigint NOT NULL DEFAULT 0,
    archived_below bigint NOT NULL DEFAULT 0,
    archived_at timestamptz,
    identity text NOT NULL DEFAULT "{schema}".cluster_identity(),
    ended_at timestamptz,
    left_lakes jsonb NOT NULL DEFAULT jsonb_build_object(),
    lost_above bigint,
    lost_below bigint,
    looked_at timestamptz,
    looked_number bigint,
    CHECK ((lost_above IS NULL) = (lost_below IS NULL)),
    CHECK ((looked_at IS NULL) = (looked_number IS NULL))
);

CREATE TABLE "{schema}".archive_commits (
    table_name text NOT NULL,
    high bigint NOT NULL,
    low bigint NOT NULL,
    day date NOT NULL,
    row_count bigint NOT NULL,
    archived_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    is_lost boolean NOT NULL DEFAULT false,
    PRIMARY KEY (table_name, high, day, is_lost)
);

CREATE TABLE "{schema}".answers (
    request_id uuid NOT NULL,
    endpoint text NOT NULL,
    kept_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    id uuid,
    message_type text,
    source text,
    content_type text,
    headers jsonb,
    body bytea,
    sent_at timestamptz,
    PRIMARY KEY (request_id, endpoint)
);
CREATE INDEX answers_by_age ON "{schema}".answers (kept_at);

CREATE TABLE "{schema}".archive_claims (
    table_name text NOT NULL,
    commit_id bigint NOT NULL,
    high bigint NOT NULL,
    claimed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    lost_at timestamptz,
    PRIMARY KEY (table_name, commit_id)
);

CREATE TABLE "{schema}".absent_rows (
    table_name text NOT NULL,
    day date NOT NULL,
    kind text NOT NULL CHECK (kind IN ('gap', 'lost', 'dropped', 'foreign', 'early')),
    lake_id text NOT NULL DEFAULT '',
    first_at timestamptz,
    last_at timestamptz,
    row_count bigint NOT NULL,
    below bigint NOT NULL,
    noted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (table_name, day, kind, lake_id)
);

CREATE TABLE "{schema}".drops (
    table_name text NOT NULL,
    number bigint NOT NULL,
    below bigint NOT NULL,
    PRIMARY KEY (table_name, number)
);

CREATE TABLE "{schema}".erasures (
    erasure_id uuid PRIMARY KEY,
    service text NOT NULL,
    actor text NOT NULL,
    reason text NOT NULL,
    chosen_by text NOT NULL CHECK (chosen_by IN ('id', 'key')),
    chosen_count integer NOT NULL,
    choice_digest bytea NOT NULL,
    began_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz,
    history_rows bigint NOT NULL DEFAULT 0,
    letter_rows bigint NOT NULL DEFAULT 0,
    lake text,
    lake_id text,
    lake_history_rows bigint NOT NULL DEFAULT 0,
    lake_letter_rows bigint NOT NULL DEFAULT 0
);

CREATE TABLE "{schema}".failed_attempts (
    attempt_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id uuid NOT NULL,
    endpoint text NOT NULL,
    number integer NOT NULL,
    failed_at timestamptz NOT NULL,
    node_id integer NOT NULL,
    exception_type text NOT NULL,
    reason text NOT NULL,
    traceback text NOT NULL,
    letter_id bigint REFERENCES "{schema}".dead_letters ON DELETE CASCADE
);
CREATE INDEX failed_attempts_by_message ON "{schema}".failed_attempts (id, endpoint) WHERE letter_id IS NULL;
CREATE INDEX failed_attempts_by_time ON "{schema}".failed_attempts (failed_at) WHERE letter_id IS NULL;
CREATE INDEX failed_attempts_by_letter ON "{schema}".failed_attempts (letter_id) WHERE letter_id IS NOT NULL;

CREATE SEQUENCE "{schema}".node_ids AS integer;
CREATE TABLE "{schema}".nodes (
    node_id integer PRIMARY KEY DEFAULT nextval('"{schema}".node_ids'),
    service text NOT NULL,
    description text NOT NULL,
    version text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    heartbeat_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    capabilities jsonb NOT NULL DEFAULT '{{}}'
);
ALTER SEQUENCE "{schema}".node_ids OWNED BY "{schema}".nodes.node_id;

-- Providers of services that can be called, each for as long as its lease: of own nodes, and of announced peers.
CREATE TABLE "{schema}".offers (
    service text NOT NULL,
    source text NOT NULL,
    node_id integer,
    application text NOT NULL,
    node bigint NOT NULL,
    machine text NOT NULL,
    version text NOT NULL,
    digest bytea NOT NULL,
    signatures jsonb NOT NULL,
    addresses text[] NOT NULL,
    since timestamptz NOT NULL,
    load bigint NOT NULL DEFAULT 0,
    is_singleton boolean NOT NULL DEFAULT false,
    epoch bigint NOT NULL DEFAULT 0,
    leased_until timestamptz NOT NULL,
    PRIMARY KEY (service, source)
);
CREATE INDEX offers_by_source ON "{schema}".offers (source);
CREATE INDEX offers_by_node ON "{schema}".offers (node_id) WHERE node_id IS NOT NULL;
CREATE INDEX offers_by_lease ON "{schema}".offers (leased_until);

-- Singletons: the number of each is the key of its lock. `holder` is empty when its last holder has given it up.
-- `lease` is the longest time for which a holder since then may be sure of its lock after losing it.
CREATE TABLE "{schema}".services (
    name text PRIMARY KEY,
    number integer NOT NULL GENERATED ALWAYS AS IDENTITY UNIQUE,
    version text NOT NULL,
    epoch bigint NOT NULL DEFAULT 0,
    holder integer,
    held_since timestamptz,
    lease interval
);

CREATE TABLE "{schema}".circuits (
    kind text NOT NULL CHECK (kind IN ('destination', 'handler', 'listener', 'schedule', 'key')),
    key text COLLATE "C" NOT NULL,
    reason text NOT NULL,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    until timestamptz,
    actor text NOT NULL,
    probing boolean NOT NULL DEFAULT false,
    parked boolean NOT NULL DEFAULT false,
    ordering_key text COLLATE "C" NOT NULL DEFAULT '',
    PRIMARY KEY (kind, key, parked, ordering_key),
    CHECK (parked OR ordering_key = ''),
    CHECK (NOT parked OR (kind IN ('handler', 'key') AND until IS NULL AND NOT probing))
);

CREATE TABLE "{schema}".actions (
    number bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    id uuid NOT NULL UNIQUE,
    began_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor text NOT NULL,
    verb text NOT NULL,
    target text NOT NULL,
    reason text,
    changed bigint NOT NULL,
    before jsonb,
    after jsonb
);

CREATE TABLE "{schema}".handler_counts (
    handler text NOT NULL,
    node_id integer NOT NULL,
    messages integer NOT NULL,
    failures integer NOT NULL,
    counted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (handler, node_id)
);

CREATE TABLE "{schema}".schedules (
    name text PRIMARY KEY,
    cron text NOT NULL,
    tz text NOT NULL,
    misfire text NOT NULL,
    message_type text,
    destination text,
    declaration text NOT NULL,
    declared_by integer NOT NULL,
    declared_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    occurrence_at timestamptz,
    due_at timestamptz NOT NULL,
    failing_since timestamptz,
    asked_at timestamptz,
    last_at timestamptz,
    ran_at timestamptz,
    changed_by text,
    changed_at timestamptz,
    error text
);

CREATE TABLE "{schema}".published_batches (
    batch text PRIMARY KEY,
    job uuid NOT NULL,
    number bigint,
    row_count bigint NOT NULL DEFAULT 0,
    added_count bigint NOT NULL DEFAULT 0,
    contents jsonb,
    published_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE "{schema}".replays (
    name text PRIMARY KEY,
    plan jsonb NOT NULL,
    begun_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE "{schema}".placements (
    side text NOT NULL CHECK (side IN ('outgoing', 'incoming')),
    name text NOT NULL,
    ordering_key text,
    fair_by text,
    PRIMARY KEY (side, name)
);
"""

# The runtime role may call these without any right to create or drop tables. Each call makes or drops one day, so that
# a lock is held for no longer than that takes. `lock_timeout` keeps a call from queueing behind a long reader and
# blocking every insert meanwhile: it gives up after some milliseconds, and its caller tries again. (Postgres detaches
# nothing CONCURRENTLY from a table that has a default partition.)
# (No format(): Alembic's --sql doubles every per cent sign.)
FUNCTIONS = """
-- The first id of a day: a UUIDv7 begins with the milliseconds since 1970.
CREATE FUNCTION "{schema}".first_id(day date) RETURNS uuid LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
    SELECT rpad(lpad(to_hex((extract(epoch FROM day::timestamptz) * 1000)::bigint), 12, '0'), 32, '0')::uuid
$$;

-- False when the day is there, or another session is at it.
CREATE FUNCTION "{schema}".make_partition(parent text, day date) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms'
SET timezone = 'UTC' AS $$
DECLARE
    whole text := '"{schema}".' || quote_ident(parent);
    part text := '"{schema}".' || quote_ident(parent || to_char(day, '"_"YYYYMMDD'));
    rest text := '"{schema}".' || quote_ident(parent || '_default');
    key text;
    low text;
    high text;
    granted record;
BEGIN
    CASE parent
    WHEN 'received_ids' THEN
        key := 'id';
        low := quote_literal("{schema}".first_id(day)) || '::uuid';
        high := quote_literal("{schema}".first_id(day + 1)) || '::uuid';
    WHEN 'envelope_history' THEN
        key := 'finished_at';
        low := quote_literal(day::timestamptz) || '::timestamptz';
        high := quote_literal((day + 1)::timestamptz) || '::timestamptz';
    END CASE;
    IF NOT pg_try_advisory_xact_lock({class_id}, 2) OR to_regclass(part) IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE 'CREATE TABLE ' || part || ' (LIKE ' || whole || ' INCLUDING ALL)';
    -- LIKE copies no rights, and who reads a table in parts names each of them.
    FOR granted IN
        SELECT privilege_type AS may, quote_ident(pg_get_userbyid(grantee)) AS role
        FROM pg_class CROSS JOIN aclexplode(relacl)
        WHERE oid = CAST(whole AS regclass) AND grantee <> relowner AND grantee <> 0 -- nothing is for PUBLIC
    LOOP
        EXECUTE 'GRANT ' || granted.may || ' ON ' || part || ' TO ' || granted.role;
    END LOOP;
    EXECUTE 'WITH early AS (DELETE FROM ' || rest || ' WHERE ' || key || ' >= ' || low || ' AND ' || key || ' < '
        || high || ' RETURNING *) INSERT INTO ' || part || ' SELECT * FROM early';
    EXECUTE 'ALTER TABLE ' || whole || ' ATTACH PARTITION ' || part
        || ' FOR VALUES FROM (' || low || ') TO (' || high || ')';
    RETURN true;
END $$;

-- Transactions of a restored, upgraded or failed-over database are numbered anew. Each such generation counts from
-- another multiple of 2^48, so that `xid` rises over all of them.
CREATE FUNCTION "{schema}".generation_base() RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT COALESCE(max(generation), 0)::bigint << 48 FROM "{schema}".generations
$$;

-- Up to which xid a table is archived: NULL where it is not, or no more, and 0 where it was by another generation, so
-- that nothing is dropped whose number says nothing.
CREATE FUNCTION "{schema}".archived_below(archived_table text) RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN identity = "{schema}".cluster_identity() THEN archived_below ELSE 0 END
    FROM "{schema}".archives WHERE table_name = archived_table AND ended_at IS NULL
$$;

-- Up to which xid a table was archived, also where that has ended: NULL where it never was. What is dropped from there
-- on is a gap, which the next archive notes in the lake.
CREATE FUNCTION "{schema}".gap_begins(archived_table text) RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN identity = "{schema}".cluster_identity() THEN archived_below ELSE 0 END
    FROM "{schema}".archives WHERE table_name = archived_table
$$;

-- The locks wait for every transaction that has written under the last generation: after them no row of it appears.
CREATE FUNCTION "{schema}".begin_generation() RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' AS $$
DECLARE
    base bigint;
BEGIN
    PERFORM pg_advisory_xact_lock({class_id}, 2);
    LOCK TABLE "{schema}".envelope_history, "{schema}".dead_letters IN ACCESS EXCLUSIVE MODE;
    INSERT INTO "{schema}".generations (generation, database)
        SELECT max(generation) + 1, (array_agg(database ORDER BY generation DESC))[1] FROM "{schema}".generations;
    base := "{schema}".generation_base();
    EXECUTE 'ALTER TABLE "{schema}".envelope_history ALTER COLUMN xid SET DEFAULT '
        '(pg_current_xact_id()::text)::bigint + ' || base;
    EXECUTE 'ALTER TABLE "{schema}".dead_letters ALTER COLUMN xid SET DEFAULT '
        '(pg_current_xact_id()::text)::bigint + ' || base;
    -- Below the base: a lake that stands at it was brought there by another database, restored from the same one.
    UPDATE "{schema}".archives SET identity = "{schema}".cluster_identity(), claimed_below = base - 1;
    RETURN base;
END $$;

-- Numbers a drop of rows, the newest of which is of the transaction before `drop_below`, and returns that: a stream
-- remembers the last number, and judges later drops by their rows. One that reached no further than a later drop tells
-- nothing more than it. Numbers are in the order of the commits, so that none appears below one that was seen.
CREATE FUNCTION "{schema}".number_drop(dropped_from text, drop_below bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    last bigint;
BEGIN
    LOCK TABLE "{schema}".drops IN SHARE ROW EXCLUSIVE MODE;
    SELECT COALESCE(max(number), 0) INTO last FROM "{schema}".drops WHERE table_name = dropped_from;
    DELETE FROM "{schema}".drops WHERE table_name = dropped_from AND below <= drop_below;
    INSERT INTO "{schema}".drops (table_name, number, below) VALUES (dropped_from, last + 1, drop_below);
    RETURN drop_below;
END $$;

-- Notes the rows of a day of history that is about to be dropped: those that were archived, and those that were not. Of
-- before the first archive one number is enough, the newest xid, by which streams know what they have not read. It is
-- found without reading a day of millions of rows under its lock: an xid of the last blocks, then all above it.
CREATE FUNCTION "{schema}".note_drop(child text, day date, gap_begins bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    part text := '"{schema}".' || quote_ident(child);
    blocks bigint := pg_relation_size(part) / current_setting('block_size')::int;
    last_blocks tid := '(' || GREATEST(0, blocks - 8) || ',0)';
    newest bigint;
BEGIN
    IF gap_begins IS NULL THEN
        EXECUTE 'SELECT max(xid) FROM ' || part || ' WHERE ctid >= $1' INTO newest USING last_blocks;
        EXECUTE 'SELECT max(xid) FROM ' || part || ' WHERE xid >= $1' INTO newest USING COALESCE(newest, 0);
        INSERT INTO "{schema}".absent_rows AS known (table_name, day, kind, row_count, below)
            SELECT 'envelope_history', note_drop.day, 'early', 1,
                "{schema}".number_drop('envelope_history', newest + 1) WHERE newest IS NOT NULL
            ON CONFLICT ON CONSTRAINT absent_rows_pkey DO UPDATE SET
            row_count = known.row_count + 1, below = GREATEST(known.below, excluded.below);
        RETURN;
    END IF;
    EXECUTE 'INSERT INTO "{schema}".absent_rows AS known (table_name, day, kind, first_at, last_at, row_count, below) '
        'SELECT ''envelope_history'', $1, CASE WHEN xid < $2 THEN ''dropped'' ELSE ''gap'' END, min(finished_at), '
        'max(finished_at), count(*), "{schema}".number_drop(''envelope_history'', max(xid) + 1) FROM ' || part ||
        ' GROUP BY 3 '
        'ON CONFLICT ON CONSTRAINT absent_rows_pkey DO UPDATE SET '
        'first_at = LEAST(known.first_at, excluded.first_at), last_at = GREATEST(known.last_at, excluded.last_at), '
        'row_count = known.row_count + excluded.row_count, below = GREATEST(known.below, excluded.below)'
        USING day, gap_begins;
END $$;

-- False when the day is of a history that is archived, which only `pipeline purge` drops, or another session is at it.
CREATE FUNCTION "{schema}".drop_partition(parent text, day date, keep interval) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms'
SET timezone = 'UTC' AS $$
DECLARE
    child text := parent || to_char(day, '"_"YYYYMMDD');
    part text := '"{schema}".' || quote_ident(child);
BEGIN
    IF keep < interval '1 hour' THEN
        RAISE EXCEPTION 'a retention below an hour would forget messages that are still under way';
    END IF;
    IF day + 1 >= now() - keep THEN
        RAISE EXCEPTION 'this day is not past its retention';
    END IF;
    IF NOT pg_try_advisory_xact_lock({class_id}, 2) THEN
        RETURN false;
    END IF;
    IF parent = 'envelope_history' THEN
        IF "{schema}".archived_below(parent) IS NOT NULL THEN
            RETURN false;
        END IF;
    ELSIF parent <> 'received_ids' THEN
        RAISE EXCEPTION USING MESSAGE = parent || ' is not kept in days';
    END IF;
    IF parent = 'envelope_history' AND to_regclass(part) IS NOT NULL THEN
        EXECUTE 'LOCK TABLE ' || part || ' IN ACCESS EXCLUSIVE MODE';
        PERFORM "{schema}".note_drop(child, day, "{schema}".gap_begins(parent));
    END IF;
    EXECUTE 'DROP TABLE IF EXISTS ' || part;
    RETURN true;
END $$;

-- For `pipeline purge`, which has compared the day with the lake before. The day is looked at under the lock of the
-- DROP, for what a long transaction has committed to it meanwhile.
CREATE FUNCTION "{schema}".drop_archived_history(day date) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $$
DECLARE
    child text := 'envelope_history_' || to_char(day, 'YYYYMMDD');
    part text := '"{schema}".' || quote_ident(child);
    archived bigint;
    is_late boolean;
BEGIN
    PERFORM pg_advisory_xact_lock({class_id}, 2);
    archived := "{schema}".archived_below('envelope_history');
    EXECUTE 'LOCK TABLE ' || part || ' IN ACCESS EXCLUSIVE MODE';
    EXECUTE 'SELECT EXISTS (SELECT FROM ' || part || ' WHERE xid >= $1)' INTO is_late USING archived;
    IF archived IS NULL OR is_late THEN
        RAISE EXCEPTION 'the history of this day is not archived whole';
    END IF;
    PERFORM "{schema}".note_drop(child, day, archived);
    EXECUTE 'ALTER TABLE "{schema}".envelope_history DETACH PARTITION ' || part;
    EXECUTE 'DROP TABLE ' || part;
    RETURN child;
END $$;

REVOKE EXECUTE ON FUNCTION "{schema}".make_partition(text, date) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION "{schema}".note_drop(text, date, bigint) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION "{schema}".drop_partition(text, date, interval) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION "{schema}".drop_archived_history(date) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION "{schema}".begin_generation() FROM PUBLIC;
SELECT "{schema}".make_partition(parent, CAST(now() AT TIME ZONE 'UTC' AS date) + days)
FROM unnest(ARRAY['received_ids', 'envelope_history']) AS parent CROSS JOIN generate_series(-1, 7) AS days;
"""

# Tables in which bulk publishing gathers rows, each named after its job, with the time at which that began, and the
# attempt of a task that fills it. They are made at run time, so the names are checked here.
STAGING = """
CREATE FUNCTION "{schema}".make_staging(staging text, for_role text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF staging !~ '^staged_[0-9a-f]{{32}}_[0-9]{{1,18}}$' THEN
        RAISE EXCEPTION USING MESSAGE = staging || ' is no name of a staging table';
    END IF;
    -- It fails for PUBLIC, too, which is no role.
    IF NOT pg_has_role(session_user, for_role::name, 'MEMBER') THEN
        RAISE EXCEPTION USING MESSAGE = for_role || ' is not a role of ' || session_user;
    END IF;
    EXECUTE 'CREATE UNLOGGED TABLE "{schema}".' || staging || ' (destination text NOT NULL, endpoint text, '
        'id uuid NOT NULL, message_type text NOT NULL, source text NOT NULL, correlation_id uuid NOT NULL, '
        'causation_id uuid, partition_key text, content_type text NOT NULL, headers text NOT NULL, '
        'body bytea NOT NULL, sent_at timestamptz NOT NULL, deliver_by timestamptz, execution_time timestamptz, '
        'message_digest bigint NOT NULL, digests text, carried bigint NOT NULL, dated boolean NOT NULL, '
        'ordering_key text, fair_key text, position bytea)';
    EXECUTE 'GRANT SELECT, INSERT ON "{schema}".' || staging || ' TO ' || quote_ident(for_role);
END $$;

CREATE FUNCTION "{schema}".drop_staging(chosen text, keep interval) RETURNS SETOF text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' AS $$
DECLARE
    staging text;
BEGIN
    FOR staging IN
        SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = '{schema}' AND c.relkind = 'r' AND c.relname ~ '^staged_[0-9a-f]{{32}}_[0-9]+$'
            AND (c.relname = chosen OR (right(chosen, 1) = '_' AND starts_with(c.relname, chosen)))
            AND to_timestamp(('x' || lpad(substr(c.relname, 8, 12), 16, '0'))::bit(64)::bigint / 1000.0) <= now() - keep
        ORDER BY c.relname
    LOOP
        BEGIN
            EXECUTE 'DROP TABLE IF EXISTS "{schema}".' || quote_ident(staging);
            RETURN NEXT staging;
        EXCEPTION WHEN lock_not_available THEN
            NULL;  -- an attempt that nobody waits for is at it; it goes with those of jobs that died
        END;
    END LOOP;
END $$;

REVOKE EXECUTE ON FUNCTION "{schema}".make_staging(text, text) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION "{schema}".drop_staging(text, interval) FROM PUBLIC;
"""

DOWNGRADE = """
SELECT "{schema}".drop_staging('staged_', interval '-1 day');
DROP FUNCTION "{schema}".drop_staging(text, interval);
DROP FUNCTION "{schema}".make_staging(text, text);
DROP FUNCTION "{schema}".drop_archived_history(date);
DROP FUNCTION "{schema}".begin_generation();
DROP FUNCTION "{schema}".drop_partition(text, date, interval);
DROP FUNCTION "{schema}".note_drop(text, date, bigint);
DROP FUNCTION "{schema}".number_drop(text, bigint);
DROP FUNCTION "{schema}".make_partition(text, date);
DROP FUNCTION "{schema}".first_id(date);
DROP FUNCTION "{schema}".gap_begins(text);
DROP FUNCTION "{schema}".archived_below(text);
DROP FUNCTION "{schema}".generation_base();
DROP TABLE "{schema}".published_batches, "{schema}".replays, "{schema}".placements, "{schema}".schedules,
    "{schema}".handler_counts, "{schema}".actions, "{schema}".circuits, "{schema}".nodes,
    "{schema}".offers, "{schema}".services,
    "{schema}".failed_attempts, "{schema}".erasures, "{schema}".archive_commits, "{schema}".archive_claims,
    "{schema}".absent_rows, "{schema}".drops, "{schema}".answers,
    "{schema}".archives, "{schema}".generations,
    "{schema}".dead_letters, "{schema}".envelope_history, "{schema}".received_ids, "{schema}".undated_ids,
    "{schema}".incoming_envelopes, "{schema}".outgoing_envelopes CASCADE;
DROP FUNCTION "{schema}".cluster_identity();
"""


def upgrade() -> None:
    schema, class_id = context.config.attributes["schema"], context.config.attributes["jobs_class_id"]
    op.execute(UPGRADE.format(schema=schema, envelope=ENVELOPE, queue=QUEUE, held=HELD))
    op.execute(FUNCTIONS.format(schema=schema, class_id=class_id))
    op.execute(STAGING.format(schema=schema))


def downgrade() -> None:
    op.execute(DOWNGRADE.format(schema=context.config.attributes["schema"]))
