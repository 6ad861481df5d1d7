"""One migrated database for all tests of a module, emptied before each: a new one takes longer than most tests."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql

from durable.embedded import Embedded
from tests.conftest import fresh_databases

_TABLES = (
    "outgoing_envelopes",
    "incoming_envelopes",
    "received_ids",
    "undated_ids",
    "envelope_history",
    "failed_attempts",
    "dead_letters",
    "nodes",
    "offers",
    "services",
    "circuits",
    "actions",
    "handler_counts",
    "schedules",
    "published_batches",
    "replays",
    "placements",
    "archive_commits",
    "answers",
    "archive_claims",
    "absent_rows",
    "drops",
    "archives",
    "generations",
)
_CLEAR = sql.SQL("; ").join(sql.SQL("DELETE FROM durable.{}").format(sql.Identifier(table)) for table in _TABLES)


class Tables:
    """durable's tables as a test sees them: from outside, over a connection of its own."""

    def __init__(self, url: str, conn: psycopg.Connection[Any]) -> None:
        self.url = url
        self.connection = conn

    def rows(self, query: str, *params: object) -> list[Any]:
        """What this query returns; a column alone comes as its values."""
        cursor = self.connection.execute(query.encode(), params)
        rows = cursor.fetchall() if cursor.description else []
        return [row[0] if len(row) == 1 else row for row in rows]

    def one(self, query: str, *params: object) -> Any:
        (row,) = self.rows(query, *params)
        return row

    def count(self, table: str) -> int:
        return int(self.one(f"SELECT count(*) FROM durable.{table}"))

    def dead_letters(self) -> list[Any]:
        """message_type, exception_type, reason, body; in the order of their ends."""
        return self.rows(
            "SELECT message_type, exception_type, reason, body FROM durable.dead_letters ORDER BY letter_id"
        )

    async def pass_time(self, by: timedelta) -> None:
        """Let everything that waits become due, or expire, earlier by so much, and pauses end."""
        await self.change("UPDATE durable.circuits SET since = since - %s, until = until - %s", by, by)
        for table in ("outgoing_envelopes", "incoming_envelopes"):
            await self.change(
                f"UPDATE durable.{table} SET execution_time = execution_time - %s, deliver_by = deliver_by - %s",
                by,
                by,
            )
            await self.change(
                f"UPDATE durable.{table} SET sent_at = sent_at - %s, headers = jsonb_set(headers, '{{durable-due}}', "
                "to_jsonb(CAST(headers ->> 'durable-due' AS timestamptz) - %s)) "
                "WHERE jsonb_exists(headers, 'durable-due')",
                by,
                by,
            )

    def execute(self, query: str, *params: object) -> None:
        self.connection.execute(query.encode(), params)

    async def change(self, query: str, *params: object) -> None:
        """The same in a thread: what it waits for may be held by a transaction of a node in this loop."""
        await asyncio.to_thread(self.execute, query, *params)

    def clear(self) -> None:
        self.connection.execute(_CLEAR)  # all in one question to the server


async def change(url: str, query: str) -> None:
    """One statement in the database of nodes that run in this loop: in a thread, as `Tables.change`."""

    def execute() -> None:
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute(query.encode())

    await asyncio.to_thread(execute)


@contextmanager
def shared_tables(server: Embedded) -> Iterator[Tables]:
    """A fresh database on this server; its owner calls clear() between tests."""
    with fresh_databases(server) as make:
        url = make("app")
        with psycopg.connect(url, autocommit=True) as conn:
            yield Tables(url, conn)


@contextmanager
def refusing_statements(tables: Tables, where: str, refused: Collection[int], code: str) -> Iterator[None]:
    """Refuse the statements of these numbers, from 1, with this code, as if a right were away. `where`: such as `INSERT
    ON durable.incoming_envelopes`. A sequence counts them, because no rollback takes it back.
    """
    tables.execute("CREATE SEQUENCE public.refused")
    numbers = ", ".join(map(str, refused))
    tables.execute(f"""CREATE FUNCTION public.refuse_statement() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF nextval('public.refused') IN ({numbers}) THEN RAISE EXCEPTION 'no right' USING ERRCODE = '{code}'; END IF;
        RETURN NULL;
    END $$""")
    tables.execute(
        f"CREATE TRIGGER refuse_statement BEFORE {where} FOR EACH STATEMENT EXECUTE FUNCTION public.refuse_statement()"
    )
    try:
        yield
    finally:
        tables.execute("DROP FUNCTION public.refuse_statement CASCADE")
        tables.execute("DROP SEQUENCE public.refused")
