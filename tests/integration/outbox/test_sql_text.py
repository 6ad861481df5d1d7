"""SQL text is read as Postgres reads it: what ends the transaction there, and which savepoints are open after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from psycopg.pq import ExecStatus, TransactionStatus
from sqlalchemy.orm import SessionTransaction

from durable.embedded import Embedded
from durable.envelope import Envelope
from durable.outbox.pending import Pending
from durable.outbox.savepoints import Savepoints
from durable.outbox.sql_text import control_of
from tests.conftest import fresh_databases

NAMES = ["a", "A", '"A"', '"a""b"', '"a;b"', "a$1", "a$2", "Ä", "ä", 'U&"\0061"', "savepoint", '"a b"']
NAMES += ["x" * 64, "x" * 63, "\u00a0a", "\u2003", 'U&"\\D83D\\DE00"', "U&\"!0061\" UESCAPE '!'"]
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
    "SELECT 1 AS \u00a0$a$",
    "PREPARE transaction AS SELECT 1; DEALLOCATE transaction",
    "PREPARE transaction (int) AS SELECT $1; DEALLOCATE transaction",
    "CREATE TABLE pg_temp.function (begin int)",
]
BESIDE = [" ", "\n", "\r\n", " \t\n ", " -- '\n", "--\n--'\n", "\n/**/", "\u00a0\n", "", "\v\n"]
PIECES = ["", "a", "\\'", "''", "; COMMIT; SELECT 1", "\\\\", "--", "/*", "$$", "\n"]
WITHIN = ["SELECT 1", "SELECT 1 AS end", "SELECT 1 AS begin", "SELECT CASE WHEN true THEN 1 END", "SELECT 1 AS atomic"]
WITHIN += ["SELECT 1 AS case", "SELECT begin FROM (SELECT 1) AS atomic (begin)", "SELECT ';END'"]
PARAMETERS = ["", "begin int", '"end" int', "a text DEFAULT 'BEGIN ATOMIC'", "b atomic", "begin atomic"]
ENDS = ["COMMIT", "end", "ABORT", "ROLLBACK", "Rollback Work", "COMMIT AND CHAIN", "ROLLBACK TRANSACTION AND CHAIN"]
ABOUT = ["SAVEPOINT {}", "ROLLBACK TO {}", "rollback work to savepoint {}", "RELEASE {}", "RELEASE SAVEPOINT {}"]


@st.composite
def literals(draw: st.DrawFn) -> str:
    """Texts in quotes that go on, or do not, behind what stands between them."""
    prefix = draw(st.sampled_from(["", "E", "e", "U&", "N", "B"]))
    pieces = draw(st.lists(st.lists(st.sampled_from(PIECES), max_size=3).map("".join), min_size=1, max_size=3))
    return f"SELECT {prefix}'" + "".join(f"{piece}'{draw(st.sampled_from(BESIDE))}'" for piece in pieces) + "'"


@st.composite
def routines(draw: st.DrawFn) -> str:
    """Functions whose body is SQL, or a text, with words of blocks as names."""
    head = f"CREATE OR REPLACE FUNCTION pg_temp.f({draw(st.sampled_from(PARAMETERS))}) RETURNS int "
    if draw(st.booleans()):
        return f"{head}LANGUAGE sql AS 'SELECT 1'"
    return f"{head}BEGIN ATOMIC {''.join(f'{each}; ' for each in draw(st.lists(st.sampled_from(WITHIN))))}SELECT 1; END"


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Statements, each word apart from the next by something that is no word."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2))
    about = st.builds(str.format, st.sampled_from(ABOUT), st.sampled_from(names))
    begun = [f"SAVEPOINT {name}" for name in names]
    kinds = st.one_of(about, st.sampled_from(HARMLESS), literals(), routines(), st.sampled_from(ENDS))
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
        conn.execute("CREATE DOMAIN atomic AS int")
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
    savepoints = Savepoints[None]()
    for verb, name in control_of(sql).savepoints:
        savepoints.meet(verb, name, None)
    return [each.name for each in savepoints.open if each.name is not None]


@settings(max_examples=400, deadline=None)
@example("/* a /* b */ c */ COMMIT")
@example("-- x\rCOMMIT")
@example("SELECT 1 AS x$a$; ROLLBACK; SELECT 2 AS y$a$")
@example('SAVEPOINT "a""b"; SAVEPOINT "a"; ROLLBACK TO "a""b"')
@example("SELECT E''\n'\\'' ; COMMIT; SELECT '1'")
@example("SELECT E'a'\n'b\\'; COMMIT; --'")
@example("CREATE FUNCTION pg_temp.f(begin atomic) RETURNS int LANGUAGE sql AS 'SELECT 1'; COMMIT; SELECT 1")
@example("SELECT 1 AS \u00a0$a$; ROLLBACK; SELECT 2 AS \u00a0$a$")
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


FAILS = "SELECT 1 / 0"


@st.composite
def steps(draw: st.DrawFn) -> list[str]:
    """Texts of one statement about a savepoint, or of some, or of some that fail on their way."""
    one = st.builds(
        str.format, st.sampled_from(["SAVEPOINT {}", "ROLLBACK TO {}", "RELEASE {}"]), st.sampled_from("abc")
    )
    several = st.lists(st.one_of(one, st.just(FAILS)), min_size=2, max_size=4).map("; ".join)
    return draw(st.lists(st.one_of(one, one, several, st.just(FAILS)), min_size=3, max_size=14))


def rows_and_messages(conn: psycopg.Connection[Any], texts: list[str], *, late: bool) -> tuple[list[int], list[int]]:
    """Run these, with a row and a message after each. Returns what is left of both, or nothing when that is lost."""
    pending = Pending()
    session = cast(SessionTransaction, object())
    for begin in ("ROLLBACK", "BEGIN", "CREATE TEMP TABLE rows (number int) ON COMMIT DROP"):
        assert run(conn, begin)
    if late:
        run(conn, "SAVEPOINT a")
    pending.begin(session)
    pending.connect(session, [], late=late)
    for number, sql in enumerate([*texts, *(f"ROLLBACK TO {name}" for name in "abc")]):
        if number >= len(texts) and conn.pgconn.transaction_status == TransactionStatus.INTRANS:
            break  # the others bring it to life again
        control = control_of(sql)
        if run(conn, sql):
            for verb, name in control.savepoints:
                pending.meet(verb, name)
        elif not control.is_alone:
            pending.doubt(control.savepoints)
        run(conn, f"INSERT INTO rows VALUES ({number})")
        pending.remember([cast(Envelope, number)])
    if pending.is_lost or conn.pgconn.transaction_status != TransactionStatus.INTRANS:
        return [], []
    rows = [number for (number,) in conn.execute("SELECT number FROM rows ORDER BY number").fetchall()]
    return rows, [cast(int, entry.envelope) for entry in pending.unstored()]


@settings(max_examples=400, deadline=None)
@example(texts=["SAVEPOINT a", "SAVEPOINT a", f"RELEASE a; {FAILS}", "ROLLBACK TO a"], late=False)
@example(texts=["SAVEPOINT a", "SAVEPOINT b", "RELEASE a", "SAVEPOINT b", FAILS, "ROLLBACK TO b"], late=False)
@example(texts=["SAVEPOINT b", "SAVEPOINT c", f"ROLLBACK TO b; SAVEPOINT c; {FAILS}", "ROLLBACK TO c"], late=False)
@example(texts=["SAVEPOINT b", "RELEASE a", FAILS, "ROLLBACK TO a"], late=True)
@example(texts=["SAVEPOINT b", f"ROLLBACK TO b; SAVEPOINT c; {FAILS}", "ROLLBACK TO c"], late=False)
@example(texts=[FAILS, f"SAVEPOINT a; {FAILS}"], late=True)
@example(texts=["SAVEPOINT b; ROLLBACK TO a", "ROLLBACK TO b", f"SAVEPOINT a; {FAILS}"], late=False)
@given(texts=steps(), late=st.booleans())
def test_messages_are_rolled_back_with_their_rows(conn: psycopg.Connection[Any], texts: list[str], late: bool) -> None:
    rows, messages = rows_and_messages(conn, texts, late=late)
    assert messages == rows
