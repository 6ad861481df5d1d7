"""The schema on every supported Postgres: migrations up, down, twice and as a script; versions; partitions by day."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4, uuid5

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from psycopg import sql
from sqlalchemy import Connection, MetaData, create_engine, inspect, make_url, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError

from durable.embedded import Embedded
from durable.envelope import NodeId, derived_id, new_id
from durable.errors import SchemaMismatch
from durable.storage import inbox, maintenance, migrator, purging, tables
from durable.storage.inbox import Arrival
from durable.storage.locks import Job, try_lock
from durable.storage.maintenance import HISTORY, IDS, Day
from durable.storage.sql import housekeeping
from tests.conftest import fresh_databases
from tests.failure import leftovers
from tests.failure.books import waits_for_a_lock
from tests.failure.waiting import eventually
from tests.support.partitions import drop_partitions, make_partitions, purge_undated

SCHEMA = "durable"
KEEP_IDS, KEEP_HISTORY = timedelta(days=8), timedelta(days=30)


@pytest.fixture
def database(every_server: Embedded) -> Iterator[str]:
    """A migrated database."""
    with fresh_databases(every_server) as make:
        yield make("schema")


@pytest.fixture
def empty(every_server: Embedded) -> Iterator[str]:
    """A database without any tables."""
    name = f"empty_{uuid4().hex}"
    yield every_server.url(name)
    with psycopg.connect(every_server.uri(), autocommit=True) as conn:
        conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = create_engine(psycopg_url(database))
    yield engine
    engine.dispose()


def psycopg_url(database: str) -> str:
    return make_url(database).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


# ---------------------------------------------------------------- migrations

CATALOG = """
SELECT 'column', c.relname, a.attname, concat_ws(' ', format_type(a.atttypid, a.atttypmod), a.attnotnull,
    a.attidentity, pg_get_expr(d.adbin, d.adrelid))
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = attnum
WHERE c.relnamespace = to_regnamespace(%(schema)s) AND attnum > 0
UNION ALL
SELECT 'relation', relname, relkind::text, concat_ws(' ', reloptions, pg_get_expr(relpartbound, oid)) FROM pg_class
WHERE relnamespace = to_regnamespace(%(schema)s)
UNION ALL
SELECT 'index', '', indexname, indexdef FROM pg_indexes WHERE schemaname = %(schema)s
UNION ALL
SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE connamespace = to_regnamespace(%(schema)s)
UNION ALL
SELECT 'function', '', proname, concat_ws(' ', pg_get_functiondef(oid), proacl) FROM pg_proc
WHERE pronamespace = to_regnamespace(%(schema)s)
"""


def catalog(database: str, schema: str = SCHEMA) -> set[tuple[Any, ...]]:
    """Everything in the schema, as the system catalogs describe it."""
    with psycopg.connect(database) as conn:
        return set(conn.execute(CATALOG, {"schema": schema}).fetchall())


def version_of(database: str, schema: str = SCHEMA) -> str | None:
    with leftovers.transaction(database) as conn:
        return migrator.current_version(conn, schema)


def test_a_second_migration_changes_nothing(empty: str) -> None:
    assert version_of(empty) is None
    migrator.upgrade(psycopg_url(empty), SCHEMA)
    first = catalog(empty)
    migrator.upgrade(psycopg_url(empty), SCHEMA)

    assert version_of(empty) == migrator.SCHEMA_VERSION
    assert first == catalog(empty)


def test_schema_may_have_any_name_and_other_schemas_are_left_unchanged(empty: str) -> None:
    migrator.upgrade(psycopg_url(empty), "one")
    one = catalog(empty, "one")
    migrator.upgrade(psycopg_url(empty), "_other_2")

    assert version_of(empty, "one") == version_of(empty, "_other_2") == migrator.SCHEMA_VERSION
    assert catalog(empty, "one") == one
    assert not catalog(empty, SCHEMA)


async def test_a_migrator_waits_for_another(empty: str) -> None:
    with leftovers.transaction(empty) as conn:
        assert try_lock(conn, SCHEMA, Job.MIGRATE)
        migrating = asyncio.create_task(asyncio.to_thread(migrator.upgrade, psycopg_url(empty), SCHEMA))
        await eventually(lambda: waits_for_a_lock(empty))
        assert version_of(empty) is None
    await migrating
    assert version_of(empty) == migrator.SCHEMA_VERSION


def test_downgrade_leaves_only_the_version_table(empty: str) -> None:
    migrator.upgrade(psycopg_url(empty), SCHEMA)
    command.downgrade(migrator._config(psycopg_url(empty), SCHEMA), "base")

    assert {name for kind, name, *_ in catalog(empty) if kind == "relation"} == {
        "alembic_version",
        "alembic_version_pkc",
    }
    assert not {entry for entry in catalog(empty) if entry[0] == "function"}
    migrator.upgrade(psycopg_url(empty), SCHEMA)
    assert version_of(empty) == migrator.SCHEMA_VERSION


def test_the_script_for_review_makes_the_same_schema(empty: str, database: str) -> None:
    script = migrator.upgrade_sql("postgresql+psycopg://nobody@nowhere.invalid/none", SCHEMA)
    with psycopg.connect(empty, autocommit=True) as conn:
        conn.execute(script.encode())

    assert catalog(empty) == catalog(database)
    assert version_of(empty) == migrator.SCHEMA_VERSION


def test_the_table_definitions_are_those_of_the_migrated_database(engine: Engine) -> None:
    metadata = MetaData()
    defined = tables.define(metadata, SCHEMA)

    def is_compared(thing: Any, name: str | None, kind: str, reflected: bool, other: Any) -> bool:
        if kind == "index":  # indexes are the migrations' affair
            return False
        return kind != "table" or (thing.schema == SCHEMA and (not reflected or name in defined))

    with engine.connect() as conn:
        options = {
            "include_schemas": True,
            "include_name": lambda name, kind, parents: kind != "schema" or name == SCHEMA,
            "include_object": is_compared,
            "compare_type": True,
        }
        assert compare_metadata(MigrationContext.configure(conn, opts=options), metadata) == []

        inspector = inspect(conn)
        for name, table in defined.items():
            primary_key = inspector.get_pk_constraint(name, SCHEMA)["constrained_columns"]
            assert [column.name for column in table.primary_key] == primary_key
            for column in inspector.get_columns(name, SCHEMA):
                described = table.columns[column["name"]]
                assert is_filled(described) == (column["default"] is not None), f"{name}.{column['name']}"


def is_filled(column: Any) -> bool:
    """Does the database give it a value, other than by counting?"""
    return column.server_default is not None and column.identity is None


def test_the_tables_may_be_put_into_an_applications_own_metadata() -> None:
    metadata = MetaData()
    assert {table.schema for table in tables.define(metadata, "elsewhere").values()} == {"elsewhere"}
    assert set(metadata.tables) == {f"elsewhere.{name}" for name in tables.define(MetaData())}


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("version", "advice"),
    [("0000", "run: durable-agent migrate"), ("9999", "run: pip install --upgrade durable-bus")],
    ids=["older", "newer"],
)
def test_schema_of_another_version_is_refused_with_advice(database: str, version: str, advice: str) -> None:
    with leftovers.transaction(database) as conn:
        migrator.check_version(conn, SCHEMA)
        conn.exec_driver_sql("UPDATE durable.alembic_version SET version_num = %s", (version,))
        with pytest.raises(SchemaMismatch, match=advice) as refusal:
            migrator.check_version(conn, SCHEMA)

    assert version in str(refusal.value)
    assert migrator.SCHEMA_VERSION in str(refusal.value)


def test_database_without_tables_is_refused_with_advice(empty: str) -> None:
    with leftovers.transaction(empty) as conn, pytest.raises(SchemaMismatch, match="run: durable-agent migrate"):
        migrator.check_version(conn, SCHEMA)


# ---------------------------------------------------------------- partitions


def id_of(moment: datetime) -> UUID:
    """A UUIDv7 of this moment."""
    milliseconds = int(moment.timestamp() * 1000)
    return UUID(int=(milliseconds << 80) | (7 << 76) | (2 << 62) | (uuid4().int & ((1 << 62) - 1)))


def partition_of(conn: Connection, envelope_id: UUID) -> str:
    name = conn.exec_driver_sql(
        "SELECT relname FROM durable.received_ids r JOIN pg_class c ON c.oid = r.tableoid WHERE id = %s", (envelope_id,)
    ).scalar_one()
    return str(name)


def receive(conn: Connection, *ids: UUID) -> set[UUID]:
    """Store envelopes with these ids; returns those that were new."""
    arrivals = [
        Arrival("billing", leftovers.envelope(number, envelope_id=envelope_id), NodeId(1))
        for number, envelope_id in enumerate(ids)
    ]
    return {envelope_id for envelope_id, _ in inbox.store(conn, SCHEMA, arrivals)}


def day(offset: int) -> str:
    return f"{datetime.now(UTC) + timedelta(days=offset):%Y%m%d}"


def partitions(conn: Connection, parent: str) -> set[str]:
    rows = conn.exec_driver_sql(
        "SELECT right(inhrelid::regclass::text, 8) FROM pg_inherits WHERE inhparent = CAST(%s AS regclass)",
        (f"durable.{parent}",),
    )
    return set(rows.scalars())


def test_partitions_are_made_ahead_and_only_once(engine: Engine) -> None:
    with engine.begin() as conn:
        made = make_partitions(conn, SCHEMA, 9)
        assert made == [f"{parent}_{day(n)}" for parent in ("received_ids", "envelope_history") for n in (8, 9)]
        assert make_partitions(conn, SCHEMA, 9) == []
        for parent in ("received_ids", "envelope_history"):
            assert partitions(conn, parent) == {"_default", *(day(n) for n in range(-1, 10))}


def test_id_lies_in_the_partition_of_its_day(engine: Engine) -> None:
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    moments = {
        midnight: day(0),
        midnight + timedelta(days=1, milliseconds=-1): day(0),
        midnight - timedelta(milliseconds=1): day(-1),
        midnight + timedelta(days=1): day(1),
        midnight - timedelta(days=40): "_default",
        midnight + timedelta(days=40): "_default",
    }
    with engine.begin() as conn:
        for moment, name in moments.items():
            envelope_id = id_of(moment)
            assert receive(conn, envelope_id) == {envelope_id}
            assert partition_of(conn, envelope_id).endswith(name), f"{moment}: {partition_of(conn, envelope_id)}"


def test_ids_of_a_day_without_a_partition_move_when_the_partition_is_made(engine: Engine) -> None:
    early = id_of(datetime.now(UTC) + timedelta(days=12))
    with engine.begin() as conn:
        receive(conn, early)
        assert partition_of(conn, early) == "received_ids_default"
    with engine.begin() as conn:
        make_partitions(conn, SCHEMA, 14)
        assert partition_of(conn, early) == f"received_ids_{day(12)}"
        assert receive(conn, early) == set(), "it is remembered all the same"


def test_history_of_a_day_without_a_partition_moves_when_the_partition_is_made(engine: Engine) -> None:
    with engine.begin() as conn:
        add_history(conn, datetime.now(UTC) + timedelta(days=9))
        make_partitions(conn, SCHEMA, 10)
        where = conn.exec_driver_sql("SELECT tableoid::regclass::text FROM durable.envelope_history").scalar_one()
    assert where == f"durable.envelope_history_{day(9)}"


def add_history(conn: Connection, finished_at: datetime) -> None:
    conn.exec_driver_sql(
        "INSERT INTO durable.envelope_history (id, side, outcome, address, message_type, source, correlation_id, "
        "sent_at, attempts, interruptions, node_id, finished_at) "
        "VALUES (gen_random_uuid(), 'incoming', 'handled', 'a', 'b', 'c', gen_random_uuid(), now(), 0, 0, 1, %s)",
        (finished_at,),
    )


def add_day(conn: Connection, offset: int) -> None:
    """The partitions of a day in the past, as they were made when it was in the future."""
    past = (datetime.now(UTC) + timedelta(days=offset)).date()
    for parent in (IDS, HISTORY):
        assert maintenance.make_day(conn, SCHEMA, Day(parent, past))


def test_days_past_their_retention_are_dropped_and_no_others(engine: Engine) -> None:
    offsets = (-40, -32, -31, -30, -10, -9, -8)
    with engine.begin() as conn:
        for offset in offsets:
            add_day(conn, offset)
        dropped = drop_partitions(conn, SCHEMA, keep_ids=KEEP_IDS, keep_history=KEEP_HISTORY)

        # A day is dropped when all of it is past the retention: its last moment is a day younger than its first.
        assert dropped == (
            [f"received_ids_{day(n)}" for n in offsets if n < -8]
            + [f"envelope_history_{day(n)}" for n in (-40, -32, -31)]
        )
        assert partitions(conn, "received_ids") == {"_default", *(day(n) for n in range(-1, 8)), day(-8)}


ARCHIVED_BELOW = "INSERT INTO durable.archives VALUES (%s, 'shop', 'app', 'lake', 'id', %s, %s, NULL)"


def test_archived_history_is_dropped_by_no_node(engine: Engine) -> None:
    """Whole days, and what lies in no day: `pipeline purge` drops them, which compares them with the lake."""
    with engine.begin() as conn:
        for offset in (-40, -39):
            add_day(conn, offset)
            add_history(conn, datetime.now(UTC) + timedelta(days=offset))
        add_history(conn, datetime.now(UTC) - timedelta(days=60))
        conn.exec_driver_sql(ARCHIVED_BELOW, ("envelope_history", 2**40, 2**40))
        keep: dict[str, Any] = {"keep_ids": KEEP_IDS, "keep_history": KEEP_HISTORY}

        dropped = set(drop_partitions(conn, SCHEMA, **keep))
        assert dropped == {f"received_ids_{day(-40)}", f"received_ids_{day(-39)}"}
        assert purge_undated(conn, SCHEMA, **keep) == [0, 0, 0]

        conn.exec_driver_sql("DELETE FROM durable.archives")
        dropped = set(drop_partitions(conn, SCHEMA, **keep))
        assert dropped == {f"envelope_history_{day(-40)}", f"envelope_history_{day(-39)}"}
        assert purge_undated(conn, SCHEMA, **keep) == [0, 0, 1]


async def test_day_is_kept_for_a_row_committed_during_the_drop(engine: Engine, database: str) -> None:
    past = (datetime.now(UTC) - timedelta(days=40)).date()
    with engine.begin() as conn:
        add_day(conn, -40)
        conn.exec_driver_sql(ARCHIVED_BELOW, ("envelope_history", 3, 3))
        conn.exec_driver_sql("ALTER FUNCTION durable.drop_archived_history(date) SET lock_timeout = '20s'")

    def drop() -> None:
        with pytest.raises(DBAPIError, match="not archived whole"), engine.begin() as conn:
            purging.drop_day(conn, SCHEMA, past)

    with engine.connect() as late:
        add_history(late, datetime.now(UTC) - timedelta(days=40))
        dropping = asyncio.create_task(asyncio.to_thread(drop))
        await eventually(lambda: waits_for_a_lock(database))
        late.commit()
    await dropping
    with engine.connect() as conn:
        assert conn.exec_driver_sql("SELECT count(*) FROM durable.envelope_history").scalar_one() == 1


def test_retention_below_an_hour_is_refused(engine: Engine) -> None:
    with engine.connect() as conn:
        add_day(conn, -40)
        (old,) = maintenance.past_days(conn, SCHEMA, IDS, KEEP_IDS)
        with pytest.raises(DBAPIError, match="below an hour"):
            maintenance.drop_day(conn, SCHEMA, old, timedelta(minutes=59))


def test_day_within_its_retention_is_refused_to_be_dropped(engine: Engine) -> None:
    yesterday = Day(IDS, (datetime.now(UTC) - timedelta(days=1)).date())
    with engine.connect() as conn, pytest.raises(DBAPIError, match="not past its retention"):
        maintenance.drop_day(conn, SCHEMA, yesterday, KEEP_IDS)


def test_ids_without_a_day_fill_no_partition(engine: Engine) -> None:
    """Neither business keys, nor ids that handlers derive, nor those of strangers."""
    undated = {uuid4(), uuid5(new_id(), "invoice-17"), derived_id(new_id(), "billing/1")}
    with engine.begin() as conn:
        assert receive(conn, *undated) == undated
        assert conn.exec_driver_sql("SELECT count(*) FROM durable.received_ids").scalar_one() == 0
        assert set(conn.exec_driver_sql("SELECT id FROM durable.undated_ids").scalars()) == undated
        assert receive(conn, *undated) == set(), "they are remembered all the same"


def test_rows_of_no_day_are_purged_in_bounded_batches(engine: Engine, database: str) -> None:
    leftovers.old_ids(database, 10_500)
    with engine.begin() as conn:
        receive(conn, uuid4())
        receive(conn, id_of(datetime.now(UTC) + timedelta(days=40)))
        for days in (40, 35, 29):
            add_history(conn, datetime.now(UTC) - timedelta(days=days))
    purged = []
    for _ in range(3):
        with engine.begin() as conn:
            purged.append(purge_undated(conn, SCHEMA, keep_ids=KEEP_IDS, keep_history=KEEP_HISTORY))

    assert purged == [[10_000, 0, 2], [500, 0, 0], [0, 0, 0]]
    with engine.connect() as conn:
        assert conn.exec_driver_sql("SELECT count(*) FROM durable.received_ids").scalar_one() == 1
        assert conn.exec_driver_sql("SELECT count(*) FROM durable.undated_ids").scalar_one() == 1
        assert conn.exec_driver_sql("SELECT count(*) FROM durable.envelope_history").scalar_one() == 1


def test_old_id_of_a_waiting_message_is_kept(engine: Engine) -> None:
    """Otherwise the message could be handled, and come once more after that."""
    waiting, handled = uuid4(), uuid4()
    with engine.begin() as conn:
        receive(conn, waiting)
        receive(conn, handled)
        conn.execute(text("DELETE FROM durable.incoming_envelopes WHERE id = :id"), {"id": handled})
        conn.exec_driver_sql("UPDATE durable.undated_ids SET received_at = now() - interval '40 days'")
    with engine.begin() as conn:
        purge_undated(conn, SCHEMA, keep_ids=KEEP_IDS, keep_history=KEEP_HISTORY)
    with engine.connect() as conn:
        kept = "SELECT id FROM durable.undated_ids WHERE received_at > now() - interval '1 hour'"
        assert conn.exec_driver_sql(kept).scalars().all() == [waiting]
        assert conn.exec_driver_sql("SELECT count(*) FROM durable.undated_ids").scalar_one() == 1


@pytest.mark.parametrize("table", ["undated_ids", "received_ids_default"])
def test_old_ids_are_found_by_an_index_of_their_ages(engine: Engine, table: str) -> None:
    purge = {"undated_ids": housekeeping.PURGE_UNDATED_IDS, "received_ids_default": housekeeping.PURGE_DEFAULT_IDS}
    with engine.begin() as conn:
        conn.exec_driver_sql("SET LOCAL enable_seqscan = off")
        plan = conn.execute(
            text(f"EXPLAIN {purge[table].whole.within(SCHEMA).text}"), {"keep": KEEP_IDS, "batch_size": 100}
        )
        assert f"{table}_by_age" in "\n".join(plan.scalars())


def test_purge_runs_on_one_node_at_a_time(engine: Engine, database: str) -> None:
    leftovers.old_ids(database, 1)
    with engine.begin() as first, engine.begin() as second:
        assert try_lock(first, SCHEMA, Job.PARTITIONS)
        assert purge_undated(second, SCHEMA, keep_ids=KEEP_IDS, keep_history=KEEP_HISTORY) == [0, 0, 0]


def test_making_a_day_gives_up_rather_than_block_the_traffic(engine: Engine) -> None:
    """Behind a long transaction it would wait for its lock, and every insert behind it."""
    with engine.begin() as long, engine.connect() as short:
        receive(long, new_id())
        long.exec_driver_sql("SELECT FROM durable.received_ids")
        with pytest.raises(DBAPIError, match="lock timeout"):
            make_partitions(short, SCHEMA, 9)
