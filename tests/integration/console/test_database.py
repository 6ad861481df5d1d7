"""The console's page of the database: its figures are those of the server, for every role and version."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any

import psycopg
import pytest
from markupsafe import escape
from psycopg.sql import quote
from sqlalchemy import make_url

from durable.console.database import hint, is_bloated, is_long, size
from durable.embedded import Embedded
from durable.storage.upkeep import TableSize, VacuumHolder
from durable.testing import eventually
from tests.conftest import fresh_databases
from tests.support.console_pages import OPERATOR, VIEWER, plain, row, rows, section, shown
from tests.support.history import add_history, add_old_day
from tests.support.roles import runtime_role
from tests.support.servers import EMBEDDED, TEMPLATE, older_servers, own_postgres

MARKUP = "<script>alert(1)</script>"
HELD = "Vacuum"
RUNNING, SLOWEST = "Statements that run now", "Statements by the time that they took"
HOLDER = VacuumHolder("session", None, 17, "shop", "web", "active", timedelta(seconds=1), 5, False)


@pytest.fixture
def url(every_server: Embedded) -> Iterator[str]:
    with fresh_databases(every_server) as make:
        yield make("app")


@pytest.fixture
def conn(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, autocommit=True) as conn:
        yield conn


@contextmanager
def transaction(url: str, application: str, query: str = "SELECT 1") -> Iterator[psycopg.Connection[Any]]:
    """A transaction that has a snapshot, and does nothing."""
    with closing(psycopg.connect(url, application_name=application)) as conn:
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        conn.execute(query.encode())
        yield conn
        conn.rollback()


@contextmanager
def running(url: str, query: str) -> Iterator[None]:
    """This statement, which sleeps, as it runs."""
    with closing(psycopg.connect(url, application_name="sleeper", autocommit=True)) as conn:

        def run() -> None:
            with pytest.raises(psycopg.errors.QueryCanceled):
                conn.execute(query.encode())

        thread = Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            while thread.is_alive():
                conn.cancel_safe()
                thread.join(0.1)


def one(conn: psycopg.Connection[Any], query: str, *params: object) -> Any:
    found = conn.execute(query.encode(), params).fetchone()
    assert found is not None
    return found[0] if len(found) == 1 else found


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("table", ["envelope_history", "dead_letters", "outgoing_envelopes"])
async def test_sizes_and_rows_are_those_of_the_server(url: str, conn: psycopg.Connection[Any], table: str) -> None:
    add_history(conn, 3_000)
    conn.execute("VACUUM (ANALYZE) durable.envelope_history, durable.dead_letters")
    parts = "SELECT relid FROM pg_partition_tree(CAST(%s AS regclass)) WHERE isleaf"
    of_table = f"""
        SELECT pg_size_pretty(CAST(sum(pg_table_size(oid)) AS bigint)),
            pg_size_pretty(CAST(sum(pg_indexes_size(oid)) AS bigint)), sum(GREATEST(reltuples, 0))
        FROM pg_class WHERE oid IN ({parts} UNION SELECT CAST(%s AS regclass) WHERE NOT EXISTS ({parts}))"""
    name = f"durable.{table}"
    heap, indexes, tuples = one(conn, of_table, name, name, name)
    found = row(section(await shown(url, "/database"), "Tables"), table)
    assert found[1:4] == [heap, indexes, f"{int(tuples):,}"]
    assert int(tuples) == {"envelope_history": 3_000}.get(table, 0)
    count = one(conn, f"SELECT count(*) FROM ({parts}) AS parts", name)
    assert found[0] == (f"{table} {count} partitions" if count > 1 else table)


async def test_dead_rows_are_a_problem_until_a_vacuum(url: str, conn: psycopg.Connection[Any]) -> None:
    conn.execute("ALTER TABLE durable.handler_counts SET (autovacuum_enabled = off)")
    with transaction(url, "holder"):
        conn.execute(
            "INSERT INTO durable.handler_counts (handler, node_id, messages, failures)"
            " SELECT 'h', n, 1, 0 FROM generate_series(1, 12000) AS n"
        )
        conn.execute("DELETE FROM durable.handler_counts WHERE node_id > 100")
        conn.execute("SELECT pg_stat_force_next_flush()")
        conn.execute("VACUUM durable.handler_counts")
        page = await shown(url, "/database")
        cells = row(section(page, "Tables"), "handler_counts")
        assert cells[3:5] == ["100", "11,900"]
        assert "handler_counts has 11,900 dead rows beside 100 live ones" in plain(page)
    conn.execute("VACUUM durable.handler_counts")
    page = await shown(url, "/database")
    cells = row(section(page, "Tables"), "handler_counts")
    at = one(conn, "SELECT last_vacuum FROM pg_stat_user_tables WHERE relname = 'handler_counts'")
    assert cells[3:] == ["100", "0", f"{at:%Y-%m-%d %H:%M:%S} UTC"]
    assert "The database keeps up" in page


async def test_indexes_of_partitions_are_one_index(url: str, conn: psycopg.Connection[Any]) -> None:
    summed = """
        SELECT pg_size_pretty(CAST(sum(pg_relation_size(inhrelid)) AS bigint)) FROM pg_inherits
        WHERE inhparent = CAST('durable.received_ids_pkey' AS regclass)"""
    found = section(await shown(url, "/database"), "Indexes")
    assert row(found, "received_ids_pkey")[1:3] == ["received_ids", one(conn, summed)]
    assert not [each for each in rows(found) if re.search(r"_\d{8}", each[0])]


async def test_staging_tables_are_one_row(url: str, conn: psycopg.Connection[Any]) -> None:
    for number in range(3):
        conn.execute(f"CREATE TABLE durable.staged_{'a' * 32}_{number} (n integer)".encode())
    assert row(section(await shown(url, "/database"), "Tables"), "staged_")[0] == "staged_* 3 tables"


async def test_days_are_those_of_the_partitions(url: str, conn: psycopg.Connection[Any]) -> None:
    page = await shown(url, "/database")
    assert "The database keeps up" in page
    assert row(section(page, "Days"), "received_ids")[6] == "7 days"
    add_old_day(conn, 40, 500)
    conn.execute("SELECT durable.make_partition('received_ids', CURRENT_DATE - 20)")
    page = await shown(url, "/database")
    for table, days_ago in (("envelope_history", 40), ("received_ids", 20)):
        count, newest, within, outside = one(
            conn,
            """
            SELECT count(*) - 1, max(right(c.relname, 8)) FILTER (WHERE c.relname !~ 'default'),
                pg_size_pretty(sum(pg_total_relation_size(c.oid)) FILTER (WHERE c.relname !~ 'default')),
                pg_size_pretty(sum(pg_total_relation_size(c.oid)) FILTER (WHERE c.relname ~ 'default'))
            FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid WHERE inhparent = CAST(%s AS regclass)""",
            f"durable.{table}",
        )
        oldest = str(one(conn, "SELECT CURRENT_DATE - CAST(%s AS integer)", days_ago))
        cells = row(section(page, "Days"), table)
        assert [cells[1], cells[2], cells[3].replace("-", ""), *cells[4:6]] == [
            str(count),
            oldest,
            newest,
            within,
            outside,
        ]
        assert f"{table} goes back to {oldest}" in plain(page)


async def test_missing_day_of_tomorrow_is_a_problem(url: str, conn: psycopg.Connection[Any]) -> None:
    for (name,) in conn.execute(
        "SELECT relname FROM pg_class WHERE relname ~ '^received_ids_[0-9]{8}$' AND relkind = 'r'"
        " AND to_date(right(relname, 8), 'YYYYMMDD') > CURRENT_DATE"
    ).fetchall():
        conn.execute(f"DROP TABLE durable.{name}".encode())
    assert "received_ids has no partition for tomorrow" in await shown(url, "/database")


async def test_locked_table_leaves_the_rest_of_the_page(url: str, conn: psycopg.Connection[Any]) -> None:
    with transaction(url, "locker", "LOCK TABLE durable.circuits IN ACCESS EXCLUSIVE MODE"):
        page = await shown(url, "/database")
        assert "Not read: a table is locked" in section(page, "Tables")
        assert row(section(page, HELD), "locker")[2] == "idle in transaction"
        assert row(section(page, "Days"), "received_ids")


# ---------------------------------------------------------------- what holds vacuum up


async def test_held_snapshot_is_shown_until_its_end(url: str, conn: psycopg.Connection[Any]) -> None:
    with transaction(url, MARKUP[:60]) as holder:
        for _ in range(3):
            conn.execute("SELECT pg_current_xact_id()")
        page = await shown(url, "/database")
        assert MARKUP not in page
        cells = row(section(page, HELD), f"{MARKUP}, role ")
        assert cells[1:3] == [str(holder.info.backend_pid), "idle in transaction"]
        assert int(cells[4]) >= 3
        assert f"SELECT pg_terminate_backend({holder.info.backend_pid})" in cells[0]
    assert "script&gt;" not in section(await shown(url, "/database"), HELD)


async def test_snapshot_of_another_database_holds_nothing_up(url: str, every_server: Embedded) -> None:
    with transaction(every_server.uri(), "elsewhere"):
        assert "elsewhere" not in section(await shown(url, "/database"), HELD)


async def test_prepared_transaction_is_shown_to_every_role(url: str, conn: psycopg.Connection[Any]) -> None:
    name = f"order's {one(conn, 'SELECT current_database()')}"
    with closing(psycopg.connect(url)) as other:
        other.execute("SELECT pg_current_xact_id()")
        other.execute(f"PREPARE TRANSACTION {quote(name)}".encode())
    try:
        with runtime_role(url) as mine:
            for each in (url, mine):
                cells = row(section(await shown(each, "/database"), HELD), f"prepared transaction {name}")
                assert cells[1:3] == ["", "prepared"]
                assert f"ROLLBACK PREPARED {quote(name)}" in cells[0]
                assert cells[3] != "unknown"
    finally:
        conn.execute(f"ROLLBACK PREPARED {quote(name)}".encode())


async def test_replication_slot_is_shown() -> None:
    with own_postgres(EMBEDDED) as server:
        with psycopg.connect(server.uri(), autocommit=True) as conn:
            conn.execute("ALTER SYSTEM SET wal_level = logical")
        server.restart()
        url = server.uri(TEMPLATE)
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute("SELECT pg_create_logical_replication_slot('left_behind', 'pgoutput')")
            cells = row(section(await shown(url, "/database"), HELD), "replication slot left_behind (pgoutput)")
            assert cells[1:4] == ["", "inactive", "unknown"]
            assert "SELECT pg_drop_replication_slot('left_behind')" in cells[0]
            conn.execute("SELECT pg_drop_replication_slot('left_behind')")
            assert "left_behind" not in await shown(url, "/database")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"state": "idle in transaction (aborted)"}, "pg_terminate_backend(17)"),
        ({}, "pg_cancel_backend(17)"),
        ({"state": None, "age": None}, "GRANT pg_read_all_stats"),
        ({"application": "durable-pipeline"}, "A run of the pipeline"),
        ({"is_standby": True}, "hot_standby_feedback"),
        ({"kind": "slot", "name": "s", "state": "active"}, "Its consumer is behind"),
        ({"kind": "slot", "name": "o's", "state": "inactive"}, "pg_drop_replication_slot('o''s')"),
        ({"kind": "prepared", "name": "x", "state": "prepared"}, "COMMIT PREPARED 'x'"),
    ],
)
def test_hint_names_the_remedy(changed: dict[str, Any], said: str) -> None:
    assert said in hint(HOLDER._replace(**changed))


@pytest.mark.parametrize(
    ("age", "transactions", "expected"),
    [
        (timedelta(minutes=5), 0, True),
        (timedelta(minutes=4), 5_000_000, False),
        (None, 1_000_000, True),
        (None, 999_999, False),
    ],
)
def test_old_holder_is_marked(age: timedelta | None, transactions: int, expected: bool) -> None:
    assert is_long(HOLDER._replace(age=age, transactions=transactions)) == expected


@pytest.mark.parametrize(
    ("live", "dead", "expected"),
    [(0, 9_999, False), (0, 10_000, True), (20_000, 10_000, True), (20_001, 10_000, False)],
)
def test_many_dead_rows_are_bloat(live: int, dead: int, expected: bool) -> None:
    assert is_bloated(TableSize("t", 1, live, dead, 0, 0, None)) == expected


# ---------------------------------------------------------------- connections


async def test_connections_are_counted_by_application(url: str, conn: psycopg.Connection[Any]) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(closing(psycopg.connect(url, application_name="billing", autocommit=True)))
        stack.enter_context(transaction(url, "billing"))
        page = await shown(url, "/database")
        role, most = one(conn, "SELECT current_user, current_setting('max_connections')")
        assert row(section(page, "Connections"), "billing") == ["billing", role, "4", "4", "0", "1", "0"]
        used = one(conn, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
        found = re.search(r"Connections (\d+) of (\d+)", plain(page))
        assert found is not None
        assert abs(int(found[1]) - used) <= 3, "other tests and the console come and go"
        assert found[2] == most


# ---------------------------------------------------------------- roles


async def test_least_privileged_role_is_told_of_hidden_sessions(url: str, conn: psycopg.Connection[Any]) -> None:
    with runtime_role(url) as mine, transaction(url, "holder") as holder:
        role = make_url(mine).username
        page = await shown(mine, "/database")
        assert row(section(page, HELD), "holder")[1:4] == [str(holder.info.backend_pid), "hidden", "unknown"]
        assert row(section(page, "Connections"), "holder")[2:] == ["1", "1", "0", "0", "1"]
        for title in (HELD, "Connections", RUNNING):
            assert f"The role {role} sees no states, times and statements of other roles" in section(page, title)
        assert "Not read" not in page
        whole = await shown(url, "/database")
        assert [*rows(section(page, "Tables"))] == [*rows(section(whole, "Tables"))]
        assert "sees no states" not in whole
        conn.execute(f"GRANT pg_read_all_stats TO {role}".encode())
        page = await shown(mine, "/database")
        assert row(section(page, HELD), "holder")[2] == "idle in transaction"
        assert "sees no states" not in page


@pytest.mark.parametrize("token", [OPERATOR, VIEWER])
async def test_running_statement_is_shown_to_operators_alone(
    url: str, conn: psycopg.Connection[Any], token: str
) -> None:
    running_now = "SELECT count(*) > 0 FROM pg_stat_activity WHERE state = 'active' AND application_name = 'sleeper'"
    with running(url, "SELECT pg_sleep(100), 'the salary'"):
        await eventually(lambda: one(conn, running_now))
        page = await shown(url, "/database", token)
        (cells,) = [each for each in rows(section(page, RUNNING)) if each[2] == "sleeper"]
        assert cells[0] == ("SELECT pg_sleep(100), 'the salary'" if token == OPERATOR else "(for operators)")
        assert ("salary" in page) == (token == OPERATOR)
        assert "CREATE EXTENSION pg_stat_statements" in page
        assert "pg_cancel_backend" in row(section(page, HELD), "sleeper")[0]


async def test_long_statement_is_folded_and_whole(url: str, conn: psycopg.Connection[Any]) -> None:
    query = f"SELECT pg_sleep(100), '{'a' * 100}<b>'"
    with running(url, query):
        await eventually(
            lambda: one(
                conn,
                "SELECT count(*) > 0 FROM pg_stat_activity WHERE state = 'active' AND application_name = 'sleeper'",
            )
        )
        page = section(await shown(url, "/database"), RUNNING)
        assert f"<pre>{escape(query)}</pre></details>" in page
        assert f"<summary><code>{escape(query[:90])}…</code></summary>" in page


# ---------------------------------------------------------------- pg_stat_statements, which the wheel does not have


@pytest.fixture(scope="module", params=older_servers())
def counting(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database whose server counts statements, with the extension in a schema of its own."""
    with own_postgres(request.param) as server:
        with psycopg.connect(server.uri(), autocommit=True) as conn:
            conn.execute("ALTER SYSTEM SET shared_preload_libraries = 'pg_stat_statements'")
        server.restart()
        url = server.uri(TEMPLATE)
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute('CREATE SCHEMA "Of Others"')
            conn.execute('CREATE EXTENSION pg_stat_statements SCHEMA "Of Others"')
        yield url


async def test_slowest_statements_are_those_of_the_extension(counting: str) -> None:
    with psycopg.connect(counting, autocommit=True) as conn:
        conn.execute('SELECT "Of Others".pg_stat_statements_reset()')
        for _ in range(3):
            conn.execute('SELECT pg_sleep(0.05), count(*) FROM "durable".circuits')
        conn.execute("SELECT pg_sleep(0.3)")
        calls, mean = one(
            conn,
            'SELECT calls, round(CAST(mean_exec_time AS numeric), 2) FROM "Of Others".pg_stat_statements'
            " WHERE query LIKE '%%circuits%%' AND query NOT LIKE '%%pg_stat%%'",
        )
        page = await shown(counting, "/database")
        first, *others = rows(section(page, SLOWEST))
        assert first[:2] == ['SELECT pg_sleep($1), count(*) FROM "durable".circuits', str(calls)]
        assert (calls, abs(float(first[3]) - float(mean)) < 0.011) == (3, True)
        assert not [each for each in others if "durable" not in each[0]], "statements of others are not ours"
        assert "Statements that run now" not in page
        page = await shown(counting, "/database", VIEWER)
        assert {each[0] for each in rows(section(page, SLOWEST))} == {"(for operators)"}
        assert "pg_sleep" not in page


async def test_role_without_rights_on_the_extension_is_told_so(counting: str) -> None:
    with runtime_role(counting) as mine:
        page = section(await shown(mine, "/database"), RUNNING)
        assert "this role may not read it" in page
        assert "shared_preload_libraries" not in page
        with psycopg.connect(counting, autocommit=True) as conn:
            conn.execute(f'GRANT USAGE ON SCHEMA "Of Others" TO {make_url(mine).username}'.encode())
            conn.execute('SELECT "Of Others".pg_stat_statements_reset()')
            conn.execute('SELECT 1 FROM "durable".circuits')
        found = plain(section(await shown(mine, "/database"), SLOWEST))
        assert "sees no states, times and statements of other roles" in found
        assert '1 FROM "durable".circuits' not in found
        page = section(await shown(counting, "/database"), SLOWEST)
        assert [each for each in rows(page) if each[0] == 'SELECT $1 FROM "durable".circuits']


@pytest.mark.parametrize("version", older_servers())
async def test_extension_without_its_library_is_told(version: int) -> None:
    with own_postgres(version) as server:
        url = server.uri(TEMPLATE)
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute("CREATE EXTENSION pg_stat_statements")
        found = plain(section(await shown(url, "/database"), RUNNING))
        assert "is installed, and the server has not loaded it" in found
        assert "shared_preload_libraries" in found


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    "number",
    [0, 1, 10_239, 10_240, 10_752, 8 * 1_024 * 1_024, 10_484_000, 10_485_248, 10_485_760, 7 * 10**9, 3 * 10**13],
)
def test_size_is_written_as_by_the_server(server: Embedded, number: int) -> None:
    with psycopg.connect(server.uri()) as conn:
        assert size(number) == one(conn, "SELECT pg_size_pretty(CAST(%s AS bigint))", number)


async def test_reads_take_little_time(url: str, conn: psycopg.Connection[Any]) -> None:
    """A year of history, in days."""
    for days in range(2, 300):
        conn.execute("SELECT durable.make_partition('envelope_history', CURRENT_DATE - CAST(%s AS integer))", (days,))
    page = await asyncio.wait_for(shown(url, "/database"), 10)
    assert "Not read" not in page
    assert int(row(section(page, "Days"), "envelope_history")[1]) > 300
