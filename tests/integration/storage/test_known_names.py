"""Names that commands accept: a name is known by its presence, however many others there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, create_engine, text

from durable.storage import known_names
from durable.storage.circuits import CircuitKind
from durable.storage.sql import known_names as statements
from tests.support.tables import Tables

MANY = 12_000
ASKED = [f"{n:05}" for n in (0, 1, 4_999, 9_999, 10_000, 11_000, MANY - 1)]
NAMES = """
CREATE TEMP TABLE names ON COMMIT DROP AS
SELECT lpad(CAST(n AS text), 5, '0') AS name FROM generate_series(0, CAST(:last AS integer)) AS n
"""
LETTERS = """
INSERT INTO durable.dead_letters
    (side, address, body, message_type, exception_type, reason, fingerprint, source, node_id)
SELECT 'incoming', name, '', name, name, 'no', name, name, 1 FROM names
"""
SCHEDULES = """
INSERT INTO durable.schedules (name, cron, tz, misfire, message_type, destination, declaration, declared_by, due_at)
SELECT name, '0 3 * * *', 'UTC', 'once', name, name, 'x', 7, now() FROM names
"""
CIRCUITS = "INSERT INTO durable.circuits (kind, key, reason, actor) SELECT :kind, name, 'moving', 'ada' FROM names"


@pytest.fixture
def conn(tables: Tables) -> Iterator[Connection]:
    engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as conn:  # rolled back
        conn.execute(text(NAMES), {"last": MANY - 1})
        yield conn
    engine.dispose()


@pytest.mark.parametrize("kind", CircuitKind)
def test_name_of_a_kind_is_known_among_very_many(conn: Connection, kind: CircuitKind) -> None:
    conn.execute(text(CIRCUITS), {"kind": kind})
    for name in ASKED:
        assert name in known_names.read(conn, "durable", kind, ["unknown", name])
    assert "unknown" not in known_names.read(conn, "durable", kind, ["unknown"])


@pytest.mark.parametrize("column", statements.OF_LETTERS)
def test_name_in_letters_is_known_among_very_many(conn: Connection, column: str) -> None:
    conn.execute(text(LETTERS))
    for name in ASKED:
        assert name in known_names.of_letters(conn, "durable", column, name, resolved=False)
    assert "unknown" not in known_names.of_letters(conn, "durable", column, "unknown", resolved=False)


@pytest.mark.parametrize("column", statements.OF_DELAYED)
def test_name_in_delayed_messages_is_known_among_very_many(conn: Connection, column: str) -> None:
    conn.execute(text(SCHEDULES))
    for name in ASKED:
        assert name in known_names.of_delayed(conn, "durable", column, name)
    assert "unknown" not in known_names.of_delayed(conn, "durable", column, "unknown")
