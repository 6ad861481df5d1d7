"""What a statement of durable lacks, and what the code of the application lacks within such a statement."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product

import psycopg
import pytest
from sqlalchemy import Connection, make_url
from sqlalchemy.exc import DBAPIError

from durable import Bus, InvalidMessage, SchemaMismatch, message
from durable.settings import load_settings
from durable.storage import nodes
from durable.storage.bounded import look
from durable.storage.database import Database
from durable.storage.outages import Lack
from durable.storage.sql.statement import Statement
from tests.support.roles import runtime_role

MIGRATE = "; run: durable-agent migrate APP:BUS"
GRANT = "; as owner of the schema, run: durable-agent migrate APP:BUS --grant-to ROLE"

LACKS = {
    "a table": ("ALTER TABLE durable.{table} RENAME TO renamed", '"durable.{table}"', MIGRATE),
    "a column": ("ALTER TABLE durable.{table} RENAME {column} TO renamed", '"{column}"', MIGRATE),
    "a right": ("REVOKE INSERT ON durable.{table} FROM {role}", "{table}", GRANT),
    "the schema": ("REVOKE USAGE ON SCHEMA durable FROM {role}", "schema durable", GRANT),
}
"""Statements that take something of durable away, what the error names, and its advice."""

CODE = {
    "a table": "INSERT INTO public.audit VALUES (1)",
    "a table of a name of durable": "INSERT INTO public.nodes VALUES (1)",
    "a column": "INSERT INTO public.notes (elsewhere) VALUES (1)",
    "a right": "INSERT INTO public.notes VALUES (1)",
    "an error of its own": "RAISE EXCEPTION 'no circuits after closing time' USING ERRCODE = '42501'",
    "an error of its own about a table": "RAISE EXCEPTION 'no circuits today' USING ERRCODE = '42P01'",
}
"""What a trigger does that the database refuses."""

TIMINGS = {
    "at once": "CREATE TRIGGER code BEFORE INSERT ON durable.{table}",
    "at the commit": "CREATE CONSTRAINT TRIGGER code AFTER INSERT ON durable.{table} DEFERRABLE INITIALLY DEFERRED",
}

TOLD = {"silent": "", "with parameters": "ALTER ROLE {role} SET log_parameter_max_length_on_error = -1"}
"""What the server adds to each error, by this setting."""

DRIVERS = ["asyncpg", "psycopg"]
WRITE = Statement(
    "INSERT INTO {schema}.circuits (kind, key, reason, actor) VALUES ('destination', :key, :reason, 'me')"
)


def write(conn: Connection, schema: str, key: str) -> None:
    conn.execute(WRITE.within(schema), {"key": key, "reason": "closed"})


def make_partition(conn: Connection, schema: str) -> None:
    conn.execute(Statement("SELECT {schema}.make_partition('envelope_history', '2040-01-01')").within(schema))


@message("lacks.placed")
@dataclass
class Placed:
    pass


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        for statement in statements:
            conn.execute(statement.encode())


def adds_code(table: str, code: str, timing: str) -> list[str]:
    """Statements that let a trigger of the application run on each row of a table of durable."""
    body = f"BEGIN {CODE[code]}; RETURN NEW; END"
    trigger = f"{TIMINGS[timing].format(table=table)} FOR EACH ROW EXECUTE FUNCTION public.code()"
    return [
        "CREATE TABLE public.notes (number integer)",
        f"CREATE FUNCTION public.code() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$",
        trigger,
    ]


@asynccontextmanager
async def agents(url: str, driver: str) -> AsyncIterator[Database]:
    database = Database(load_settings(database_url=url.replace("postgresql", f"postgresql+{driver}", 1)))
    yield database
    await database.close()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(("lack", "told"), list(product(LACKS, TOLD)))
async def test_lack_is_named_with_its_advice(database_url: str, driver: str, lack: str, told: str) -> None:
    takes_away, named, advice = LACKS[lack]
    words = {"table": "circuits", "column": "reason"}
    with runtime_role(database_url) as url:
        words["role"] = make_url(url).username or ""
        run(database_url, TOLD[told].format(**words), takes_away.format(**words))
        async with agents(url, driver) as database:
            for work in (database.transaction, database.statement):
                with pytest.raises(Lack) as caught:
                    await work(write, "tcp://billing:1")
                text = str(caught.value)
                assert named.format(**words) in text
                assert text.endswith(advice)
                assert "INSERT" not in text
                assert "\n" not in text
        run(database_url, "ALTER TABLE IF EXISTS durable.renamed RENAME TO circuits")


@pytest.mark.parametrize("driver", DRIVERS)
async def test_lack_of_a_function_of_durable_is_named_with_its_advice(database_url: str, driver: str) -> None:
    run(database_url, "ALTER TABLE durable.envelope_history RENAME TO renamed")
    async with agents(database_url, driver) as database:
        with pytest.raises(Lack, match=r"durable.envelope_history.*; run: durable-agent migrate APP:BUS$"):
            await database.transaction(make_partition)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(("code", "timing", "told"), list(product(CODE, TIMINGS, TOLD)))
async def test_fault_of_a_trigger_of_the_application_is_none_of_durable(
    database_url: str, driver: str, code: str, timing: str, told: str
) -> None:
    with runtime_role(database_url) as url:
        run(database_url, TOLD[told].format(role=make_url(url).username), *adds_code("circuits", code, timing))
        async with agents(url, driver) as database:
            with pytest.raises((DBAPIError, InvalidMessage)):
                await database.transaction(write, "tcp://durable.billing:1")


@asynccontextmanager
async def sending(url: str) -> AsyncIterator[Bus]:
    bus = Bus("orders", database=url)
    bus.route(Placed, to="tcp://127.0.0.1:1")
    yield bus
    await bus.runtime.sessions.close()


@pytest.mark.parametrize("lack", LACKS)
async def test_commit_names_a_lack(database_url: str, lack: str) -> None:
    takes_away, named, _ = LACKS[lack]
    words = {"table": "outgoing_envelopes", "column": "partition_key"}
    with runtime_role(database_url) as url:
        words["role"] = make_url(url).username or ""
        run(database_url, takes_away.format(**words))
        async with sending(url) as bus:
            with pytest.raises((Lack, SchemaMismatch)) as caught:
                async with bus.unit_of_work():
                    bus.send(Placed())
        assert named.format(**words) in str(caught.value)
        assert "run: durable-agent migrate" in str(caught.value)


@pytest.mark.parametrize(("code", "timing"), list(product(CODE, TIMINGS)))
async def test_commit_raises_the_unchanged_error_of_a_trigger(database_url: str, code: str, timing: str) -> None:
    with runtime_role(database_url) as url:
        run(database_url, *adds_code("outgoing_envelopes", code, timing))
        async with sending(url) as bus:
            with pytest.raises(DBAPIError):
                async with bus.unit_of_work():
                    bus.send(Placed())


async def test_part_of_a_page_without_a_right_names_the_owner(database_url: str) -> None:
    with runtime_role(database_url) as url:
        with psycopg.connect(database_url, autocommit=True) as conn:
            conn.execute(f'REVOKE SELECT ON durable.nodes FROM "{make_url(url).username}"'.encode())
        database = Database(load_settings(database_url=url))
        try:
            told = await database.transaction(look, nodes.read)
        finally:
            await database.close()
    assert (told.found, told.refusal) == (None, f"this role may not read it{GRANT}")
