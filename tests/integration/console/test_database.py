"""The pages of the database and of the pipeline, on real servers and for a role with few rights."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import psycopg
import pytest
import pytest_asyncio
from psycopg import sql
from sqlalchemy import create_engine
from starlette.applications import Starlette
from starlette.routing import Mount

from durable import Bus
from durable.console import console_app
from durable.embedded import Embedded
from durable.storage import grants, sizes
from tests.conftest import fresh_databases
from tests.integration.console.visiting import OPERATOR, TOKENS, VIEWER, bearer
from tests.support.tables import Tables

ARCHIVE = """
INSERT INTO durable.archives (table_name, service, app_id, lake, lake_id, claimed_below, archived_below, archived_at)
VALUES ('envelope_history', 'shop', 'x', 's3://lake/shop', 'y', 5, 5, now() - interval '3 h')
"""
HISTORY = """
INSERT INTO durable.envelope_history (id, side, outcome, address, message_type, source, correlation_id, sent_at,
    finished_at, attempts, interruptions, node_id)
SELECT gen_random_uuid(), 'incoming', 'handled', 'shop', 'x', 'shop', gen_random_uuid(), now(), now(), 1, 0, 7
FROM generate_series(1, 700)
"""


@pytest_asyncio.fixture
async def bus(tables: Tables) -> AsyncIterator[Bus]:
    bus = Bus("shop", tables.url)
    yield bus
    await bus.runtime.stop()


def mounted(bus: Bus) -> Starlette:
    return Starlette(routes=[Mount("/console", console_app(bus, tokens=TOKENS))])


class TestDatabase:
    def test_sizes_are_those_of_postgres(self, every_server: Embedded) -> None:
        with fresh_databases(every_server) as make:
            url = make("sizes")
            with psycopg.connect(url, autocommit=True) as conn:
                conn.execute(HISTORY)
                conn.execute("ANALYZE durable.envelope_history")
                (expected,) = conn.execute(
                    "SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits "
                    "WHERE inhparent = 'durable.envelope_history'::regclass"
                ).fetchone() or (0,)
            engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
            with engine.begin() as sqlalchemy:
                found = sizes.read(sqlalchemy, "durable")
            engine.dispose()
            history = next(each for each in found.tables if each.name == "envelope_history")
            assert history.table_bytes + history.index_bytes == int(expected)
            assert history.live_rows in (
                700,
                1400,
            )  # Postgres may count what it learns of twice, until the next ANALYZE
            assert (history.parts > 2, found.connections > 0) == (True, True)
            assert history.first_day is not None
            assert history.last_day is not None
            assert history.first_day < history.last_day

    async def test_long_transaction_is_named_and_its_query_is_for_operators(self, bus: Bus, tables: Tables) -> None:
        app = mounted(bus)
        with psycopg.connect(tables.url, application_name="a-report") as holding:
            holding.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            holding.execute("SELECT 'a salary' FROM durable.nodes")
            pid = holding.info.backend_pid
            async with bearer(app, OPERATOR) as client:
                page = (await client.get("/database")).text
                assert f"pg_terminate_backend({pid})" in page
                assert ("a-report" in page, "a salary" in page) == (True, True)
            async with bearer(app, VIEWER) as client:
                page = (await client.get("/database")).text
                assert (f"pg_terminate_backend({pid})" in page, "salary" in page) == (True, False)

    async def test_role_with_few_rights_sees_the_page(self, tables: Tables) -> None:
        role = sql.Identifier("console_reader")
        with psycopg.connect(tables.url, autocommit=True) as conn:
            conn.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'few rights'").format(role))
        engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
        with engine.begin() as owner:
            grants.grant_runtime(owner, "durable", "console_reader")
        engine.dispose()
        url = re.sub(r"//[^/@]*@", "//console_reader:few%20rights@", tables.url)
        few = Bus("shop", url)
        try:
            async with bearer(mounted(few), OPERATOR) as client:
                response = await client.get("/database")
                assert (response.status_code, "pg_read_all_stats" in response.text) == (200, True)
                assert (await client.get("/pipeline")).status_code == 200
        finally:
            await few.runtime.stop()
            with psycopg.connect(tables.url, autocommit=True) as conn:
                conn.execute(sql.SQL("DROP OWNED BY {}").format(role))
                conn.execute(sql.SQL("DROP ROLE {}").format(role))


class TestPipeline:
    async def test_archive_shows_its_lag(self, bus: Bus, tables: Tables) -> None:
        async with bearer(mounted(bus), OPERATOR) as client:
            assert "Nothing is archived" in (await client.get("/pipeline")).text
            tables.execute(ARCHIVE)
            tables.execute(HISTORY)
            page = (await client.get("/pipeline")).text
            assert ("s3://lake/shop" in page, ">700</td>" in page, "goes on" in page) == (True, True, True)

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ("identity = 'another'", "waits for a decision"),
            ("lost_above = 1, lost_below = 5", "the lake lacks rows"),
            ("ended_at = now()", ">ended</span>"),
        ],
    )
    async def test_archive_in_need_is_told(self, bus: Bus, tables: Tables, change: str, told: str) -> None:
        tables.execute(ARCHIVE)
        tables.execute(f"UPDATE durable.archives SET {change}")
        async with bearer(mounted(bus), OPERATOR) as client:
            assert told in (await client.get("/pipeline")).text

    async def test_gaps_and_erasures_are_listed(self, bus: Bus, tables: Tables) -> None:
        tables.execute(ARCHIVE)
        tables.execute(
            "INSERT INTO durable.erasures (erasure_id, service, actor, reason, chosen_by, chosen_count, choice_digest) "
            "VALUES (gen_random_uuid(), 'shop', 'ada', '<i>asked</i>', 'key', 3, '')"
        )
        try:
            async with bearer(mounted(bus), OPERATOR) as client:
                page = (await client.get("/pipeline")).text
                assert ("3 by key" in page, "not finished" in page, "&lt;i&gt;asked" in page) == (True, True, True)
        finally:
            tables.execute("DELETE FROM durable.erasures")
