"""SQL text is read as Postgres reads it: what ends the transaction there, and which savepoints are open after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from psycopg.pq import ExecStatus, TransactionStatus

from durable.embedded import Embedded
from durable.outbox.sql_text import control_of
from tests.conftest import fresh_databases

NAMES = ["a", "A", '"A"', '"a""b"', '"a;b"', "a$1", "a$2", "Ä", "ä", 'U&"\0061"', "savepoint", '"a b"']
NAMES += ["x" * 64, "x" * 63]
SPACES = [" ", "\n", "\r", "\t", " /* ; COMMIT */ ", "/* a /* b */ ; END */", "-- ; COMMIT\n", "-- x\r", "/**/"]
HARMLESS = [
    "SELECT 1",
    "SELECT ';COMMIT'",
    "SELECT E'\\';COMMIT'",
    'SELECT 1 AS ";ROLLBACK"',
    "SELECT $$;COMMIT$$",
    "SELECT $a$;$$END$a$",
    "SELECT 1 AS x$a$",
    "SELECT ''';COMMIT'",
    "DO $$ BEGIN PERFORM 1; END $$",
    "CREATE OR REPLACE FUNCTION pg_temp.f() RETURNS int BEGIN ATOMIC SELECT CASE WHEN true THEN 1 END; END",
    'PREPARE "COMMIT" AS SELECT 1; DEALLOCATE "COMMIT"',
    "SET LOCAL application_name = 'end'",
    "BEGIN",
]
ENDS = ["COMMIT", "end", "ABORT", "ROLLBACK", "Rollback Work", "COMMIT AND CHAIN", "ROLLBACK TRANSACTION AND CHAIN"]
ABOUT = ["SAVEPOINT {}", "ROLLBACK TO {}", "rollback work to savepoint {}", "RELEASE {}", "RELEASE SAVEPOINT {}"]


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Statements, each word apart from the next by something that is no word."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2))
    about = st.builds(str.format, st.sampled_from(ABOUT), st.sampled_from(names))
    begun = [f"SAVEPOINT {name}" for name in names]
    kinds = st.one_of(about, st.sampled_from(HARMLESS), st.sampled_from(ENDS))
    parts = begun + draw(st.lists(kinds, min_size=1, max_size=4))
    spaced = [draw(st.sampled_from(SPACES)) + _apart(part, draw(st.sampled_from(SPACES))) for part in parts]
    return ";".join(spaced) + draw(st.sampled_from(["", ";", ";;", " -- COMMIT", "; /* x */"]))


def _apart(statement: str, space: str) -> str:
    """Put this space behind the first word."""
    first, _, rest = statement.partition(" ")
    return f"{first}{space}{rest}" if rest else first


@pytest.fixture(scope="module")
def conn(servers: Callable[[int], Embedded]) -> Iterator[psycopg.Connection[Any]]:
    with fresh_databases(servers(18)) as make, psycopg.connect(make("text"), autocommit=True) as conn:
        yield conn


def run(conn: psycopg.Connection[Any], sql: str) -> bool:
    """Run it as one message of the simple protocol. Returns whether it was carried out."""
    return conn.pgconn.exec_(sql.encode()).status in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)


def transaction(conn: psycopg.Connection[Any]) -> bytes | None:
    """The number of the transaction that is open."""
    if conn.pgconn.transaction_status == TransactionStatus.IDLE:
        return None
    return conn.pgconn.exec_(b"SELECT pg_current_xact_id()").get_value(0, 0)


def open_savepoints(sql: str) -> list[str]:
    names = list[str]()
    for verb, name in control_of(sql).savepoints:
        if verb == "savepoint":
            names.append(name)
        elif name in names:
            at = len(names) - 1 - names[::-1].index(name)
            del names[at + (verb == "rollback") :]
    return names


@settings(max_examples=400, deadline=None)
@example("/* a /* b */ c */ COMMIT")
@example("-- x\rCOMMIT")
@example("SELECT 1 AS x$a$; ROLLBACK; SELECT 2 AS y$a$")
@example('SAVEPOINT "a""b"; SAVEPOINT "a"; ROLLBACK TO "a""b"')
@given(texts())
def test_text_is_read_as_by_postgres(conn: psycopg.Connection[Any], sql: str) -> None:
    conn.pgconn.exec_(b"ROLLBACK")
    conn.pgconn.exec_(b"BEGIN")
    before = transaction(conn)
    if not run(conn, sql):
        return
    assert control_of(sql).ends == (transaction(conn) != before)
    if control_of(sql).ends:
        return
    for name in reversed(open_savepoints(sql)):
        quoted = name.replace('"', '""')
        assert run(conn, f'RELEASE "{quoted}"'), f"{name} is not open"
    assert run(conn, "SAVEPOINT probe")
    for name in NAMES:
        assert not run(conn, f"RELEASE {name}"), f"{name} is open"
        assert run(conn, "ROLLBACK TO probe")


def test_most_generated_texts_are_carried_out(conn: psycopg.Connection[Any]) -> None:
    done = list[bool]()

    @settings(max_examples=100, deadline=None, database=None)
    @given(texts())
    def count(sql: str) -> None:
        conn.pgconn.exec_(b"ROLLBACK")
        conn.pgconn.exec_(b"BEGIN")
        done.append(run(conn, sql))

    count()
    assert sum(done) > len(done) / 3
