"""The reading of statements, where it must not take long: it is done before and after each of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.outbox import sql_text
from durable.outbox.sql_text import control_of

_LONG = "INSERT INTO t (end_at, released) VALUES " + ", ".join(["($1::INTEGER, 'x')"] * 1_000)


@pytest.mark.parametrize("sql", [_LONG, f"WITH commit AS ({_LONG}) SELECT 1"])
def test_long_statement_is_not_read_to_its_end(sql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, met = sql_text._tokens, count()

    def counted(text: str) -> Iterator[object]:
        for token in tokens(text):
            next(met)
            yield token

    monkeypatch.setattr(sql_text, "_tokens", counted)
    assert control_of(sql) == (False, (), False, True)
    assert next(met) <= 8


@pytest.mark.parametrize("sql", [f"{_LONG}; COMMIT", f"{_LONG} ;/* ; */ SAVEPOINT a; ROLLBACK"])
def test_end_behind_a_long_statement_is_seen(sql: str) -> None:
    assert control_of(sql).ends


@pytest.mark.parametrize(
    "name",
    ['"a%b"', '"a%%b"', "U&\"d!0061t\" UESCAPE E'!'", 'U&"d!0061t" UESCAPE $$!$$', 'U&"\\D83D"', 'U&"\\+110000"'],
)
def test_name_known_to_the_database_alone_is_none(name: str) -> None:
    assert control_of(f"ROLLBACK TO {name}").savepoints == (("rollback", None),)


LASTING = r"""
    SET LOCAL app.tenant = '7'
    set role accounting
    /* first */ SET CONSTRAINTS ALL DEFERRED
    SET TRANSACTION ISOLATION LEVEL SERIALIZABLE
    RESET ROLE
    SELECT 1; SET app.tenant = '7'
    SELECT set_config($1, $2, true)
    WITH one AS (SELECT pg_catalog.SET_CONFIG('a', 'b', TRUE)) SELECT 1
    DO $$ BEGIN SET LOCAL a = 1; END $$
    CREATE TEMP TABLE t (a int)
    create local temporary table t (a int)
    CREATE TEMPORARY VIEW v AS SELECT 1
    CREATE TABLE pg_temp.t (a int)
    SELECT 1 INTO TEMP t
    SELECT 1 AS a INTO TEMPORARY TABLE t
    LOCK orders
    LOCK TABLE orders IN SHARE MODE
    DECLARE c CURSOR FOR SELECT 1
    SELECT pg_advisory_xact_lock(1)
    SELECT pg_try_advisory_xact_lock_shared(1, 2)
    SELECT pg_advisory_lock(1)
    NOTIFY orders
    DO $$ BEGIN CREATE TEMP TABLE IF NOT EXISTS scratch (n int) ON COMMIT DROP; INSERT INTO scratch VALUES (1); END $$
    DO LANGUAGE plpgsql 'BEGIN EXECUTE ''SE'' || ''T a.b = 1''; END'
    SELECT 1; do $$ BEGIN LOCK orders; END $$
    CALL book(7)
    PREPARE one AS SELECT 1
    EXECUTE one
    EXPLAIN ANALYZE EXECUTE one
    CREATE OR REPLACE TEMP VIEW v AS SELECT 1
    CREATE OR REPLACE LOCAL TEMPORARY RECURSIVE VIEW v (a) AS SELECT 1
    CREATE TEMP SEQUENCE s
    CREATE FUNCTION "pg_temp".f() RETURNS int LANGUAGE sql AS 'SELECT 1'
    CREATE TABLE orders (a int)
    UPDATE pg_settings SET setting = '7' WHERE name = 'app.tenant'
    update "pg_catalog"."pg_settings" set setting = '7'
    SELECT 1 AS a INTO "pg_temp".t
    SELECT 1 AS a INTO U&"pg\005ftemp".t
    SELECT U&"set\005fconfig"('a', 'b', true)
    SELECT lo_open(1, 2)
    ((SELECT 1)); LISTEN orders
    SELECT pg_notify('orders', '7')
"""
PASSING = """
    SELECT 1
    SELECT 'SET a = 1'
    SELECT offset_of FROM settings
    SELECT a FROM t FOR UPDATE
    UPDATE readings SET temp = 3
    UPDATE t SET "local" = 1
    INSERT INTO readings (temp, locked) VALUES (1, true)
    INSERT INTO t (a) VALUES (1) ON CONFLICT DO UPDATE SET a = 2
    MERGE INTO t USING s ON true WHEN MATCHED THEN UPDATE SET a = 1
    DELETE FROM t
    INSERT INTO temperatures VALUES (1)
    INSERT INTO locals (temp) SELECT 1
    ((SELECT 1) UNION SELECT 2)
    /* first */ WITH one AS (INSERT INTO t VALUES (1) RETURNING a) SELECT a FROM one;
    VALUES (1)
    TABLE t
    COPY t FROM STDIN
    SAVEPOINT a
    ROLLBACK TO a; RELEASE a; -- and no more
"""


@pytest.mark.parametrize("sql", LASTING.strip().splitlines())
def test_control_tells_of_statements_with_effects_until_the_end(sql: str) -> None:
    assert control_of(sql.replace("SET LOCAL", "SET\n LOCAL")).lasts
    assert not control_of(sql).ends


@pytest.mark.parametrize("sql", PASSING.strip().splitlines())
def test_control_tells_nothing_of_statements_about_rows(sql: str) -> None:
    assert not control_of(sql).lasts


def any_case(word: str) -> st.SearchStrategy[str]:
    return st.lists(st.booleans(), min_size=len(word), max_size=len(word)).map(
        lambda upper: "".join(sign.upper() if up else sign for sign, up in zip(word, upper, strict=True))
    )


GAPS = st.lists(st.sampled_from([" ", "\n", "\t", "/* a /* b */ c */", "-- x\n", "/**/"]), min_size=1).map("".join)
SCOPES = st.sampled_from(["temp", "temporary", "local temp", "local temporary", "global temp", "global temporary"])


@given(st.data())
def test_temporary_table_of_a_query_is_seen_in_any_spelling(data: st.DataObject) -> None:
    words = ["select", "1", "as", "a", "into", *data.draw(SCOPES).split(), *data.draw(st.sampled_from([["table"], []]))]
    sql = "".join(data.draw(any_case(word)) + data.draw(GAPS) for word in words) + "t"
    assert control_of(sql).lasts


@given(st.sampled_from(["do", "call f()", "set a = 1", "execute a", "create or replace temp view v"]), st.data())
def test_statement_of_another_kind_is_seen_behind_any_one(sql: str, data: st.DataObject) -> None:
    before = data.draw(st.sampled_from(["", "SELECT 1;", "SELECT ';' ;;", "SAVEPOINT a;"]))
    first, *rest = sql.split(" ", 1)
    assert control_of(before + data.draw(GAPS) + data.draw(any_case(first)) + data.draw(GAPS) + "".join(rest)).lasts
