"""Tables that are written into other files while they are read by blocks: their rows are elsewhere then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any, Final

import psycopg
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from durable.errors import StorageUnavailable
from durable.pipeline.lake_tables import SOURCES, LakeTable
from durable.pipeline.read_options import ReadOptions
from durable.pipeline.reader import EnvelopeReader, SharePartition
from durable.pipeline.source import consistent
from durable.storage import slices
from durable.storage.slices import Share
from tests.support.archiving import Archiver
from tests.support.history import add_history, add_letters

REWRITES: Final = {
    "VACUUM FULL": "VACUUM (FULL) durable.{leaf}",
    "CLUSTER": "CLUSTER durable.{leaf} USING rewritten",
    "nothing": "VACUUM durable.{leaf}",
}
Rewrite = Callable[[LakeTable, str], None]


@pytest.fixture
def rewrite(conn: psycopg.Connection[Any]) -> Rewrite:
    """Rewrite the only leaf of a table that has rows, in another order than before."""

    def work(table: LakeTable, how: str) -> None:
        leaf = conn.execute(
            f"SELECT tableoid::regclass::text FROM durable.{SOURCES[table]} LIMIT 1".encode()
        ).fetchone()
        assert leaf is not None
        name = leaf[0].rpartition(".")[2]
        conn.execute(f"CREATE INDEX rewritten ON durable.{name} (id)".encode())
        conn.execute(REWRITES[how].format(leaf=name).encode())
        conn.execute("DROP INDEX durable.rewritten")

    return work


def add_rows(conn: psycopg.Connection[Any], table: LakeTable, count: int) -> None:
    if table == "history":
        add_history(conn, count, finished_at=datetime.now(UTC))
    else:
        add_letters(conn, count)


def delete_rows(conn: psycopg.Connection[Any], table: LakeTable) -> None:
    """Leave gaps, which a rewrite closes."""
    conn.execute(f"DELETE FROM durable.{SOURCES[table]} WHERE get_byte(uuid_send(id), 15) % 2 = 0".encode())


def read(url: str, snapshot: str, table: LakeTable, between: Callable[[], None]) -> int:
    """Plan eight tasks, read with the first half of them, then with the others; return the number of rows."""
    where = {"url": url, "snapshot": snapshot, "table": SOURCES[table]}
    options = ReadOptions.parse({**where, "partitions": "8", "columns": "id"})
    reader = EnvelopeReader(options, StructType([StructField("id", BinaryType())]))
    tasks: list[SharePartition] = [each for each in reader.partitions() if isinstance(each, SharePartition)]
    assert len(tasks) > 1
    found = 0
    for number, task in enumerate(tasks):
        if number == len(tasks) // 2:
            between()
        found += sum(batch.num_rows for batch in reader.read(task))
    return found


@pytest.mark.parametrize("how", REWRITES)
@pytest.mark.parametrize("table", SOURCES)
def test_read_by_blocks_is_whole_or_refused_when_its_table_is_rewritten(
    conn: psycopg.Connection[Any], database_url: str, rewrite: Rewrite, table: LakeTable, how: str
) -> None:
    add_rows(conn, table, 400)
    with consistent(database_url) as options:
        delete_rows(conn, table)

        refused = pytest.raises(StorageUnavailable, match=r"was written into another file .*: run the same")
        for between in (lambda: rewrite(table, how), lambda: None):
            with nullcontext() if how == "nothing" else refused:
                assert read(database_url, options["snapshot"], table, between) == 400
    with consistent(database_url) as options:
        assert read(database_url, options["snapshot"], table, lambda: None) == 200


CHANGES: Final = {
    "DROP": ("DROP TABLE durable.{leaf}", "was dropped meanwhile.*within a new snapshot"),
    "TRUNCATE": ("TRUNCATE durable.{leaf}", "was written into another file .*within a new snapshot"),
    "VACUUM FULL": ("VACUUM (FULL) durable.{leaf}", "was written into another file .*within a new snapshot"),
    "DETACH": ("ALTER TABLE durable.envelope_history DETACH PARTITION durable.{leaf}", None),
    "DELETE": ("DELETE FROM durable.{leaf}", None),
    "VACUUM": ("VACUUM durable.{leaf}", None),
    "INSERT": ("INSERT INTO durable.{leaf} SELECT (jsonb_populate_record(l, extra)).* FROM durable.{leaf} l, "
        "jsonb_build_object('id', gen_random_uuid()) extra", None),
}  # fmt: skip


@pytest.mark.parametrize("how", CHANGES)
def test_reads_within_one_snapshot_are_alike_or_refused_when_a_day_changes_between_them(
    conn: psycopg.Connection[Any], database_url: str, how: str
) -> None:
    add_history(conn, 400, finished_at=datetime.now(UTC))
    leaf = conn.execute("SELECT tableoid::regclass::text FROM durable.envelope_history LIMIT 1").fetchone()
    assert leaf is not None
    change, said = CHANGES[how]
    with consistent(database_url) as options:
        assert read(database_url, options["snapshot"], "history", lambda: None) == 400
        conn.execute(change.format(leaf=leaf[0].rpartition(".")[2]).encode())
        with nullcontext() if said is None else pytest.raises(StorageUnavailable, match=said):
            assert read(database_url, options["snapshot"], "history", lambda: None) == 400


@pytest.mark.parametrize("how", ["VACUUM FULL", "CLUSTER"])
@pytest.mark.parametrize("table", SOURCES)
def test_rows_are_archived_once_when_their_table_is_rewritten_after_the_survey(
    conn: psycopg.Connection[Any],
    archiver: Archiver,
    rewrite: Rewrite,
    monkeypatch: pytest.MonkeyPatch,
    table: LakeTable,
    how: str,
) -> None:
    add_rows(conn, table, 400)
    of_survey = slices.of_survey

    def rewritten(*args: Any) -> Sequence[Share]:
        delete_rows(conn, table)
        rewrite(table, how)
        return of_survey(*args)

    with monkeypatch.context() as patch:
        patch.setattr(slices, "of_survey", rewritten)
        with pytest.raises(StorageUnavailable, match=r"was written into another file .*within a new snapshot"):
            archiver.run(table)
    done = archiver.run(table)
    left = conn.execute(f"SELECT count(*) FROM durable.{SOURCES[table]}".encode()).fetchone()
    assert left is not None
    assert done.rows == left[0] > 0
    assert archiver.verify(table).is_whole
