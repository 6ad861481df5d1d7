"""Statements of the registry: the services that can be called, their providers, and which of them holds a singleton."""

from __future__ import annotations

from durable.storage.sql.statement import Statement

# ---------------------------------------------------------------- offers

# A node that was struck off writes nothing. The epoch of an own node is that of `services`, if it is the holder.
WRITE_OFFERS = Statement("""
WITH gone AS (
    DELETE FROM {schema}.offers WHERE source = :source AND service <> ALL (CAST(:services AS text[]))
)
INSERT INTO {schema}.offers AS row (service, source, node_id, application, node, machine, version, digest, signatures,
    addresses, since, load, is_singleton, epoch, leased_until)
SELECT given.service, :source, CAST(:node_id AS integer), given.application, given.node, given.machine, given.version,
    given.digest, CAST(given.signatures AS jsonb),
    ARRAY(SELECT jsonb_array_elements_text(CAST(given.addresses AS jsonb))), given.since, given.load,
    given.is_singleton, COALESCE(held.epoch, given.epoch), clock_timestamp() + CAST(:lease AS interval)
FROM unnest(CAST(:services AS text[]), CAST(:applications AS text[]), CAST(:nodes AS bigint[]),
    CAST(:machines AS text[]), CAST(:versions AS text[]), CAST(:digests AS bytea[]), CAST(:signatures AS text[]),
    CAST(:addresses AS text[]), CAST(:sinces AS timestamptz[]), CAST(:loads AS bigint[]),
    CAST(:singletons AS boolean[]), CAST(:epochs AS bigint[]))
    AS given (service, application, node, machine, version, digest, signatures, addresses, since, load, is_singleton,
        epoch)
LEFT JOIN {schema}.services AS held
    ON given.is_singleton AND held.name = given.service AND held.holder = CAST(:node_id AS integer)
WHERE CAST(:node_id AS integer) IS NULL
    OR EXISTS (SELECT FROM {schema}.nodes WHERE node_id = CAST(:node_id AS integer))
ORDER BY given.service
ON CONFLICT (service, source) DO UPDATE SET node_id = excluded.node_id, application = excluded.application,
    node = excluded.node, machine = excluded.machine, version = excluded.version, digest = excluded.digest,
    signatures = excluded.signatures, addresses = excluded.addresses, since = excluded.since, load = excluded.load,
    is_singleton = excluded.is_singleton, epoch = excluded.epoch, leased_until = excluded.leased_until
""")
RENEW_OFFERS = Statement("""
UPDATE {schema}.offers AS row SET leased_until = clock_timestamp() + CAST(:lease AS interval), load = renewed.load,
    epoch = COALESCE((
        SELECT held.epoch FROM {schema}.services AS held
        WHERE row.is_singleton AND held.name = row.service AND held.holder = row.node_id
    ), CASE WHEN row.node_id IS NULL THEN row.epoch ELSE 0 END)
FROM unnest(CAST(:services AS text[]), CAST(:loads AS bigint[])) AS renewed (service, load)
WHERE row.source = :source AND row.service = renewed.service
""")
REMOVE_OFFERS = Statement("DELETE FROM {schema}.offers WHERE source = :source")
# A time that no driver can decode would stop the reading of all.
READ_OFFERS = Statement("""
SELECT service, source, node_id, application, node, machine, version, digest, addresses, since, load, is_singleton,
    epoch, leased_until - clock_timestamp() AS lease
FROM {schema}.offers
WHERE leased_until > clock_timestamp() AND since BETWEEN '0001-01-02 00:00+00' AND '9999-12-30 00:00+00'
ORDER BY service, source LIMIT :most
""")
READ_OWN_ADDRESSES = Statement(
    "SELECT DISTINCT unnest(addresses) FROM {schema}.offers WHERE node_id IS NOT NULL LIMIT :most"
)
READ_SIGNATURES = Statement("""
SELECT DISTINCT ON (digest) digest, CAST(signatures AS text) AS signatures FROM {schema}.offers
WHERE digest = ANY (CAST(:digests AS bytea[])) ORDER BY digest
""")
# Of paused peers, and of nodes that wrote while they were struck off: the rows of a node go with the node.
SWEEP_OFFERS = Statement("""
WITH elapsed AS (
    SELECT service, source FROM {schema}.offers WHERE leased_until < clock_timestamp()
    ORDER BY leased_until LIMIT :most FOR UPDATE SKIP LOCKED
)
DELETE FROM {schema}.offers AS row USING elapsed
WHERE row.service = elapsed.service AND row.source = elapsed.source RETURNING row.source
""")
NOTIFY = Statement("SELECT pg_notify(CAST(:channel AS text), CAST(:payload AS text))")

# ---------------------------------------------------------------- singletons

DECLARE_SINGLETON = Statement("""
INSERT INTO {schema}.services AS row (name, version) VALUES (:name, :version)
ON CONFLICT (name) DO UPDATE SET version = excluded.version RETURNING number
""")
LOCK_SINGLETON = Statement("SELECT pg_try_advisory_lock(:class_id, :number)")
UNLOCK_SINGLETON = Statement("SELECT pg_advisory_unlock(:class_id, :number)")
# By the session that holds the lock: nobody else raises the epoch. A holder that vanishes before its own time begins
# leaves the longest lease of those before it.
TAKE_SINGLETON = Statement("""
WITH former AS (SELECT number, lease FROM {schema}.services WHERE number = :number FOR UPDATE)
UPDATE {schema}.services AS row SET epoch = row.epoch + 1, holder = :node, held_since = clock_timestamp(),
    lease = GREATEST(CAST(:lease AS interval), former.lease)
FROM former WHERE row.number = former.number RETURNING row.epoch, former.lease AS former_lease
""")
GIVE_UP_SINGLETON = Statement("""
UPDATE {schema}.services SET holder = NULL, held_since = NULL, lease = NULL WHERE number = :number AND epoch = :epoch
""")
# The numbers of those that this session holds, in the epoch that it knows.
READ_HELD = Statement("""
SELECT number FROM {schema}.services JOIN unnest(CAST(:numbers AS integer[]), CAST(:epochs AS bigint[]))
    AS known (number, epoch) USING (number, epoch)
WHERE holder = :node AND EXISTS (
    SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid()
        AND CAST(CAST(classid AS bigint) AS bit(32)) = CAST(CAST(:class_id AS bigint) AS bit(32))
        AND CAST(objid AS bigint) = number AND objsubid = 2
)
""")
# A node that was struck off because it stands still keeps its session, and with it its locks. Ends that session, which
# is known by the lock of the node itself: that of a newer holder has another.
END_STRUCK_OFF_HOLDER = Statement("""
SELECT pg_terminate_backend(mine.pid)
FROM {schema}.services AS service
JOIN pg_locks AS mine ON mine.locktype = 'advisory' AND mine.granted AND mine.objsubid = 2
    AND CAST(CAST(mine.classid AS bigint) AS bit(32)) = CAST(CAST(:class_id AS bigint) AS bit(32))
    AND CAST(mine.objid AS bigint) = service.number
JOIN pg_locks AS of_node ON of_node.locktype = 'advisory' AND of_node.granted AND of_node.objsubid = 2
    AND CAST(CAST(of_node.classid AS bigint) AS bit(32)) = CAST(CAST(:nodes_class_id AS bigint) AS bit(32))
    AND CAST(of_node.objid AS bigint) = service.holder AND of_node.pid = mine.pid
    AND of_node.database = mine.database
WHERE service.number = :number AND mine.pid <> pg_backend_pid()
    AND mine.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND NOT EXISTS (SELECT FROM {schema}.nodes WHERE node_id = service.holder)
""")
