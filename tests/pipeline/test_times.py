"""Times that no calendar has: every column of every table may hold them, and no command of the pipeline stumbles."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest

from durable.pipeline.columns import COLUMNS
from durable.pipeline.copying import connection, copy
from durable.pipeline.foreign import Parted
from durable.pipeline.lake_tables import SOURCES, LakeTable, Whose
from durable.storage import archives
from durable.storage.slices import Slice
from durable.storage.sql.times import FIRST, LAST
from tests.support.archiving import Archiver
from tests.support.command import Agent
from tests.support.history import add_history, add_letters
from tests.support.publishing import Outbox

TIMES: Final = {
    "infinity": LAST,
    "-infinity": FIRST,
    "4713-01-01 00:00:00Z BC": FIRST,
    "0001-01-01 00:00:00Z": FIRST,
    "1899-12-31 23:59:59.999999Z": FIRST,
    "1900-01-01 00:00:00Z": FIRST,
    "8999-12-31 23:59:59.999999Z": LAST,
    "9000-01-01 00:00:00Z": LAST,
    "9999-12-31 23:59:59.999999Z": LAST,
    "10000-01-01 00:00:00Z": LAST,
    "294276-12-31 23:59:59.999999Z": LAST,
    "1969-12-31 23:59:59.5Z": datetime(1969, 12, 31, 23, 59, 59, 500_000, UTC),
}
"""Each with the time that leaves the database."""


def times_of(table: str) -> list[str]:
    return [column.name for column in COLUMNS[table] if column.kind == "timestamptz"]


def plant(conn: psycopg.Connection[Any], table: LakeTable) -> dict[int, dict[str, datetime]]:
    """A row for each column and time, all other columns of which are sound; and each row's odd time by its number."""
    expected: dict[int, dict[str, datetime]] = {}
    source = SOURCES[table]
    for name in times_of(source):
        for written, read in TIMES.items():
            number = len(expected) + 1
            if table == "history":
                add_history(conn, 1, first=number)
            else:
                add_letters(conn, 1, first=number)
            resolved = ", resolution = 'discarded'" if name == "resolved_at" else ""
            query = f"UPDATE durable.{source} SET {name} = %s{resolved} WHERE id = %s"
            conn.execute(query.encode(), (written, UUID(int=number)))
            expected[number] = {name: read}
    return expected


@pytest.mark.parametrize("local_rows", [0, 10_000])
@pytest.mark.parametrize("table", SOURCES)
def test_every_time_is_archived_compared_and_not_archived_again(
    archiver: Archiver, conn: psycopg.Connection[Any], table: LakeTable, local_rows: int
) -> None:
    expected = plant(conn, table)
    assert archiver.run(table, local_rows=local_rows).rows == len(expected)
    assert archiver.run(table, local_rows=local_rows).rows == 0
    rows = archiver.lake.read(archiver.spark, table).toArrow().to_pylist()
    assert len(rows) == len(expected)
    for row in rows:
        odd = expected[int.from_bytes(row["id"])]
        assert {name: row[name] for name in odd} == odd
    found = archiver.verify(table, local_rows=local_rows)
    assert (found.rows, found.is_whole) == (len(expected), True)

    change = "headers = '{}'" if table == "dead_letters" else "error = 'changed'"
    conn.execute(f"UPDATE durable.{SOURCES[table]} SET {change}".encode())
    found = archiver.verify(table, local_rows=local_rows)
    assert (found.differing, found.missing, found.twice) == (len(expected), 0, 0)
    assert all(each.columns for each in found.examples)


@pytest.mark.parametrize("table", SOURCES)
def test_foreign_rows_are_found_at_every_time(
    archiver: Archiver, conn: psycopg.Connection[Any], table: LakeTable
) -> None:
    expected = plant(conn, table)
    offset = archiver.run(table).high
    with connection(archiver.origin.url) as here:
        whose = Whose(archiver.origin.service, archives.database(here, "durable"))
        parted = Parted(archiver.lake, table, whose, since=0, below=offset)
        assert parted.foreign(here, archiver.origin).noted == []
    conn.execute(f"DELETE FROM durable.{SOURCES[table]} WHERE get_byte(uuid_send(id), 15) % 2 = 0".encode())
    with connection(archiver.origin.url) as here:
        assert sum(each.rows for each in parted.foreign(here, archiver.origin).noted) == len(expected) // 2
    conn.execute(f"DELETE FROM durable.{SOURCES[table]}".encode())
    with connection(archiver.origin.url) as here:
        assert sum(each.rows for each in parted.foreign(here, archiver.origin).noted) == len(expected)


@pytest.mark.parametrize("table", COLUMNS)
def test_every_time_of_every_table_is_read_within_the_range(
    conn: psycopg.Connection[Any], database_url: str, table: str
) -> None:
    """Without a row of the table: its columns are selected from those of another row."""
    for written, read in TIMES.items():
        columns = [column.sql for column in COLUMNS[table] if column.kind == "timestamptz"]
        odd = ", ".join(f"TIMESTAMPTZ '{written}' AS \"{name}\"" for name in times_of(table))
        (batch,) = copy(database_url, (Slice(f"(SELECT {odd}) AS odd"),), columns)
        assert isinstance(batch, pa.RecordBatch)
        assert batch.to_pylist() == [dict.fromkeys(times_of(table), read)]


@pytest.fixture
def agent(archiver: Archiver, tmp_path: Any, monkeypatch: Any, capsys: Any) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


COMMANDS: Final = {
    "status": ("status", "--database", "{url}", "--lake", "{lake}"),
    "verify": ("verify", "--service", "shop", "--database", "{url}", "--lake", "{lake}"),
    "purge": ("purge", "--service", "shop", "--database", "{url}", "--lake", "{lake}"),
    "audit": ("audit", "--sender", "{lake}", "--receiver", "{lake}"),
    "conversations": ("conversations", "--lake", "{lake}"),
    "report": ("report", "--lake", "{lake}", "--out", "{folder}/report.html"),
    "replay": ("replay", "--name", "x", "--all", "--dry-run", "--lake", "{lake}", "--database", "{url}"),
    "compact": ("compact", "--lake", "{lake}"),
    "vacuum": ("vacuum", "--lake", "{lake}"),
    "export": ("export", "--lake", "{lake}"),
    "erase": ("erase", "--id", "00000000-0000-0000-0000-000000000001", "--reason", "r", "--yes", "--service", "shop",
              "--database", "{url}", "--lake", "{lake}"),
}  # fmt: skip
NO_BODIES: Final = "history_bodies"


def test_every_command_takes_every_time(
    archiver: Archiver, conn: psycopg.Connection[Any], agent: Agent, tmp_path: Any
) -> None:
    """It ends by what it finds, not by an error of the calendar."""
    for table in SOURCES:
        plant(conn, table)
        archiver.run(table)
    for name, arguments in COMMANDS.items():
        given = [each.format(url=archiver.origin.url, lake=archiver.lake.url, folder=tmp_path) for each in arguments]
        ended = agent("pipeline", *given)
        if name == "replay":
            assert NO_BODIES in ended.err
        else:
            assert (name, ended.code, ended.err) == (name, 0, "")
    assert not Outbox(archiver.origin.url).orders


@pytest.mark.parametrize("name", COMMANDS)
def test_missing_lake_is_refused_with_advice(
    archiver: Archiver, conn: psycopg.Connection[Any], agent: Agent, tmp_path: Any, name: str
) -> None:
    add_history(conn, 3)
    for table in SOURCES:
        archiver.run(table)
    missing = tmp_path / "missing"
    arguments = [each.format(url=archiver.origin.url, lake=missing, folder=tmp_path) for each in COMMANDS[name]]
    ended = agent("pipeline", *arguments)
    assert (ended.code, ended.err.count("\n")) == (2, 1), (ended.out, ended.err)
    assert str(missing) in ended.err
    assert any(said in ended.err for said in ("pipeline archive", "archived into")), ended.err
    assert not missing.exists()


def test_archive_makes_nothing_in_a_foreign_place(
    archiver: Archiver, conn: psycopg.Connection[Any], agent: Agent, tmp_path: Any
) -> None:
    archiver.run()
    ended = agent("pipeline", "archive", "--service", "shop", "--database", archiver.origin.url, "--lake",
                  str(tmp_path / "misspelt"))  # fmt: skip
    assert (ended.code, "name that lake" in ended.err) == (2, True)
    assert not (tmp_path / "misspelt").exists()
