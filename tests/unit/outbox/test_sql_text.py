"""The reading of statements, where it must not take long: it is done before and after each of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

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


LASTING = """
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
    CREATE TABLE temperatures (a int)
    SAVEPOINT a
"""


@pytest.mark.parametrize("sql", LASTING.strip().splitlines())
def test_control_tells_of_statements_with_effects_until_the_end(sql: str) -> None:
    assert control_of(sql.replace("SET LOCAL", "SET\n LOCAL")).lasts
    assert not control_of(sql).ends


@pytest.mark.parametrize("sql", PASSING.strip().splitlines())
def test_control_tells_nothing_of_statements_about_rows(sql: str) -> None:
    assert not control_of(sql).lasts
