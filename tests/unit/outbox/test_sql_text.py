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
    assert control_of(sql) == (False, (), True)
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
