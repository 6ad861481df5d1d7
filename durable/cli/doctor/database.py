"""Checks of the database."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, pool

from durable.cli.doctor.checks import Check, attempted, fail, ok, warn
from durable.cli.target import connection
from durable.cli.ways_in import way_in
from durable.errors import SchemaMismatch, StorageUnavailable
from durable.grammar import lasting, several
from durable.settings import Settings
from durable.storage import maintenance, migrator, nodes, status
from durable.storage.connection_names import OF_COMMANDS
from durable.storage.database import async_url, configured_url, lock_engine_url
from durable.storage.engines import Limits, is_pooled, make_engine
from durable.storage.outages import GRANT, PRIMARY
from durable.storage.readiness import veil_of

OLDEST_POSTGRES: Final = 14
NEWEST_POSTGRES: Final = 18
MAX_SKEW: Final = timedelta(seconds=5)
_OVERFLOW_AND_LOCK: Final = 3
"""Connections of a node outside its pools: two more for its agents, and the one that holds its lock."""

_MIGRATE: Final = "run: durable-agent migrate APP:BUS"
_NARROW: Final = (
    "let nodes run as a role of their own: durable-agent migrate APP:BUS --grant-to ROLE, as owner of the schema; "
    "and revoke what PUBLIC has"
)
_UNVEIL: Final = "let the role see every row: ALTER ROLE ... BYPASSRLS, or disable row-level security"


def database_checks(settings: Settings, *, has_sync_handlers: bool = False) -> list[Check]:
    """Run each check on its own; checks that this database cannot answer are left out.

    Raises InvalidSetting for a URL that a node cannot use.
    """
    async_url(settings)
    try:
        with connection(settings, isolation="AUTOCOMMIT") as conn:
            return list(_connected(conn, settings, has_sync_handlers))
    except StorageUnavailable as error:
        return [fail("database", str(error), way_in(error))]


def _connected(conn: Connection, settings: Settings, has_sync_handlers: bool) -> Iterator[Check]:
    schema = settings.db_schema
    yield server_version(conn, schema)
    if status.is_read_only(conn, schema):
        yield fail("transactions", "read-only: no node can work", PRIMARY)
    yield clock_skew(conn, schema)
    yield encryption(settings, status.is_encrypted(conn, schema))
    yield pooler(conn, settings)
    yield transaction_limit(conn, schema, settings)
    yield attempted(
        "lock connection",
        lambda: lock_connection(settings),
        "correct lock_database_url: a direct connection to Postgres",
    )
    version = attempted("schema", lambda: schema_version(conn, schema), _MIGRATE)
    yield version
    allowed = rights(conn, schema)
    if allowed.advice or not version.advice:  # without tables no right is missing
        yield allowed
    if not version.advice:
        yield attempted("row security", lambda: row_security(conn, schema), _UNVEIL)
        yield attempted("partitions", lambda: partitions(conn, settings), _MIGRATE)
        yield attempted("connections", lambda: connections(conn, settings, has_sync_handlers), _MIGRATE)
        yield attempted("services", lambda: services(conn, schema), _MIGRATE)


def server_version(conn: Connection, schema: str) -> Check:
    server = status.server(conn, schema)
    detail = f"Postgres {server.version}, database {server.database}, role {server.role}"
    if server.number // 10_000 < OLDEST_POSTGRES:
        return fail("database", detail, f"use Postgres {OLDEST_POSTGRES} or newer")
    if server.number // 10_000 > NEWEST_POSTGRES:
        return warn("database", detail, f"durable is tested up to Postgres {NEWEST_POSTGRES}; upgrade durable")
    return ok("database", detail)


def clock_skew(conn: Connection, schema: str) -> Check:
    """Compare the clocks, at the middle of the round trip."""
    asked = datetime.now(UTC)
    there = status.clock(conn, schema)
    skew = there - (asked + (datetime.now(UTC) - asked) / 2)
    side = "ahead of" if skew > timedelta(0) else "behind"
    detail = f"the database is {abs(skew.total_seconds()):.2f} s {side} this machine"
    if abs(skew) > MAX_SKEW:
        return warn(
            "clock",
            detail,
            "synchronise the clocks by NTP: one writes deliver_by and at=, the other reads them",
        )
    return ok("clock", detail)


def pooler(conn: Connection, settings: Settings) -> Check:
    """Check for a pooler; each process detects it by itself, unless the setting names it."""
    dbapi_connection = conn.connection.dbapi_connection
    assert dbapi_connection is not None
    if not is_pooled(dbapi_connection):
        return ok("pooler", "none, the connection is direct")
    detail = f"database_url goes through one (setting: {settings.pooler}), so prepared statements are not used"
    if settings.lock_database_url is None:
        return fail("pooler", detail, "set DURABLE_LOCK_DATABASE_URL to a direct connection, for the node's lock")
    return ok("pooler", detail)


def transaction_limit(conn: Connection, schema: str, settings: Settings) -> Check:
    """Check that the role lets transactions last as long as durable does, which sets every other limit of a session."""
    longest = max(4 * settings.statement_timeout, settings.handler_timeout, settings.unit_of_work_timeout)
    limit = status.transaction_limit(conn, schema)
    if not limit or limit >= longest:
        return ok("transaction limit", lasting(limit) if limit else "none")
    return warn(
        "transaction limit",
        f"transaction_timeout is {lasting(limit)} for this role: Postgres ends longer transactions, with their session",
        f"ALTER ROLE ... SET transaction_timeout = 0, or let it be {lasting(longest)} at least",
    )


def encryption(settings: Settings, is_encrypted: bool) -> Check:
    """Check that nobody on the way can read, or answer in the place of the database."""
    url = configured_url(settings)
    mode = url.query.get("sslmode", "prefer")
    detail = f"{'encrypted' if is_encrypted else 'not encrypted'} (sslmode={mode})"
    if url.is_local or (is_encrypted and mode == "verify-full"):
        return ok("encryption", f"{detail}, on this machine" if url.is_local else detail)
    return warn(
        "encryption",
        f"{detail}: whoever is on the way can answer in the place of the database",
        "add sslmode=verify-full&sslrootcert=/path/to/authority.pem to database_url",
    )


def lock_connection(settings: Settings) -> Check:
    """Check for a direct connection: a pooler reports another process id than the session that runs a statement."""
    limits = Limits.of(settings.connect_timeout)
    engine = make_engine(lock_engine_url(settings), settings, limits, name=OF_COMMANDS, poolclass=pool.NullPool)
    with engine.connect() as conn:
        dbapi_connection = conn.connection.dbapi_connection
        assert dbapi_connection is not None
        is_direct = not is_pooled(dbapi_connection)
    if is_direct:
        return ok("lock connection", "direct")
    return fail(
        "lock connection",
        "goes through a pooler, which cannot keep a session's lock",
        "set DURABLE_LOCK_DATABASE_URL to a direct connection",
    )


def rights(conn: Connection, schema: str) -> Check:
    missing = status.missing_rights(conn, schema)
    if missing:
        return fail("rights", f"this role lacks {', '.join(missing)}", GRANT)
    wide = status.wide_rights(conn, schema)
    if wide:
        return warn("rights", f"wider than a node needs: {'; '.join(wide)}", _NARROW)
    return ok("rights", "this role has all that a node needs")


def schema_version(conn: Connection, schema: str) -> Check:
    try:
        migrator.check_version(conn, schema)
    except SchemaMismatch as error:  # an older database is migrated, and a newer one needs newer code
        detail, _, advice = str(error).partition("; ")
        return fail("schema", detail, advice)
    return ok("schema", f"{schema} is at version {migrator.SCHEMA_VERSION}")


def row_security(conn: Connection, schema: str) -> Check:
    """Check that no policy hides rows: what a node does not see is not handled."""
    if veil := veil_of(conn, schema):
        detail, _, advice = veil.partition("; ")
        return fail("row security", detail, advice)
    return ok("row security", "every row is in sight")


def partitions(conn: Connection, settings: Settings) -> Check:
    days = maintenance.partitioned_days(conn, settings.db_schema)
    detail = f"{days - 1} days ahead" if days else "none for today"
    if days < 2:
        return fail("partitions", detail, "start a node: its maintenance creates them")
    if days - 1 < min(settings.partitions_ahead, 2):
        return warn("partitions", detail, "start a node, whose maintenance creates them, or see the log of one")
    return ok("partitions", detail)


def services(conn: Connection, schema: str) -> Check:
    found = nodes.services(conn, schema)
    if len(found) > 1:
        return warn(
            "services",
            f"nodes of {', '.join(found)} work on the tables of {schema}, and each handles messages of the others",
            "give every service a schema of its own: the setting db_schema, and durable-agent migrate --schema",
        )
    return ok("services", f"nodes of {found[0]}" if found else "no node runs")


def connections(conn: Connection, settings: Settings, has_sync_handlers: bool) -> Check:
    limits = status.connection_limits(conn, settings.db_schema)
    allowed = min(limit for limit in limits if limit is not None)
    pools = settings.pool_size * (2 if has_sync_handlers else 1) + settings.agent_pool_size + _OVERFLOW_AND_LOCK
    alive = len(nodes.locked(conn, settings.db_schema))
    detail = f"up to {pools} for each process, {several(alive, 'nodes')} alive, {allowed} allowed"
    if pools * max(1, alive) > allowed:
        return warn(
            "connections", detail, "lower pool_size, or raise max_connections (or the limit of the role or database)"
        )
    return ok("connections", detail)
