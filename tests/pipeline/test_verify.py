"""Verify and purge compare contents: one bit that differs in the lake is found, named, and keeps everything here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from durable.errors import DurableError
from durable.pipeline.columns import COLUMNS
from durable.pipeline.copying import connection
from durable.pipeline.lake_tables import SOURCES, LakeTable
from durable.pipeline.purge import Purged, Retention, purge
from durable.storage.sql.archive import KEYS
from tests.support.archiving import Archiver
from tests.support.history import add_history, add_letters, add_old_day
from tests.support.partitions import drop_partitions

MONTH = Retention(timedelta(days=30), timedelta(days=30))
BOTH: Sequence[LakeTable] = ("history", "dead_letters")


def files(archiver: Archiver, table: LakeTable) -> list[Path]:
    return sorted(Path(archiver.lake.table_url(table)).glob("day=*/*.parquet"))


def tamper(file: Path, column: str, row: int, change: Callable[[Any], Any]) -> None:
    """One value of a file of the lake becomes another one."""
    rows = pq.ParquetFile(file).read()
    index, kind = rows.schema.get_field_index(column), rows.schema.field(column).type
    values = rows.column(index).cast(pa.int64()) if pa.types.is_timestamp(kind) else rows.column(index)
    changed = values.to_pylist()
    changed[row] = change(changed[row])
    plain = pa.array(changed, pa.int64() if pa.types.is_timestamp(kind) else kind)
    pq.write_table(rows.set_column(index, rows.schema.field(index), plain.cast(kind)), file)


def flipped(value: Any) -> Any:
    """The value with one bit of it turned over."""
    match value:
        case None:
            return None
        case bool():
            return not value
        case int():
            return value ^ 1
        case str():
            return flipped(value.encode()).decode()
        case bytes():
            return bytes([value[0] ^ 1, *value[1:]])
        case _:
            raise AssertionError(value)


def fill(conn: psycopg.Connection[Any]) -> None:
    """Rows of which every column has a value."""
    add_history(conn, 30)
    conn.execute(
        "UPDATE durable.envelope_history SET causation_id = id, partition_key = 'k', deliver_by = now(), error = 'no', "
        "seq = get_byte(uuid_send(id), 15), erasure_id = id, "
        """content_type = 'application/json', headers = '{"tenant": "a"}', body = convert_to('{"n": 1}', 'UTF8')"""
    )
    add_letters(conn, 30)
    conn.execute(
        "UPDATE durable.dead_letters SET causation_id = id, partition_key = 'k', deliver_by = now(), traceback = 't', "
        "resolution = 'discarded', resolved_at = now(), resolved_by = 'ada', resolution_reason = 'no', "
        "body = 'body', edited_body = 'edited', message_digest = 7, ordering_key = 'k', fair_key = 'f', "
        "erasure_id = id"
    )


def columns(table: LakeTable) -> list[str]:
    return [each.name for each in COLUMNS[SOURCES[table]]]


def test_every_column_is_compared(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    """A flipped bit of each column in turn, in both tables; of an erasure counts only whether there was one."""
    changes = {"letter_id": lambda number: number + 1_000, "erasure_id": lambda _: None}
    fill(conn)
    for table in BOTH:
        archiver.run(table)
        assert archiver.verify(table).is_whole
        (file,) = files(archiver, table)
        sound = file.read_bytes()
        for column in columns(table):
            tamper(file, column, 7, changes.get(column, flipped))
            found = archiver.verify(table)
            if column in KEYS[SOURCES[table]]:
                assert (column, found.missing, found.differing) == (column, 1, 0)
                assert [each.flaw for each in found.examples] == ["missing"]
            else:
                assert (column, found.missing, found.differing) == (column, 0, 1)
                assert [(each.flaw, each.columns) for each in found.examples] == [("differs", [column])]
            file.write_bytes(sound)
        assert archiver.verify(table).is_whole


@pytest.mark.parametrize("local_rows", [0, 1_000])
def test_differing_row_is_named_with_and_without_spark(
    archiver: Archiver, conn: psycopg.Connection[Any], local_rows: int
) -> None:
    fill(conn)
    archiver.run()
    (file,) = files(archiver, "history")
    row = pq.ParquetFile(file).read(columns=["id"])["id"].to_pylist()[3]
    tamper(file, "error", 3, flipped)
    tamper(file, "body", 3, flipped)
    found = archiver.verify(local_rows=local_rows)
    (named,) = found.examples
    assert (named.key[0], named.columns) == (row, ["error", "body"])
    assert (found.rows, found.differing, found.missing, found.twice) == (30, 1, 0, 0)


def test_null_is_another_value_than_an_empty_one(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    fill(conn)
    conn.execute("UPDATE durable.envelope_history SET error = NULL, body = ''")
    archiver.run()
    (file,) = files(archiver, "history")
    tamper(file, "error", 0, lambda _: "")
    tamper(file, "body", 1, lambda _: None)
    assert archiver.verify().differing == 2


@pytest.mark.parametrize("local_rows", [0, 1_000])
def test_unreadable_file_is_named(archiver: Archiver, conn: psycopg.Connection[Any], local_rows: int) -> None:
    add_history(conn, 10)
    add_history(conn, 5, first=101, side="outgoing", outcome="sent")
    archiver.run()
    broken, gone = files(archiver, "history")
    broken.write_bytes(broken.read_bytes()[:-20])
    gone.unlink()
    found = archiver.verify(local_rows=local_rows)
    assert {Path(name).name for name in found.unreadable} == {broken.name, gone.name}
    assert (found.missing, found.is_whole) == (15, False)


def test_damage_anywhere_in_a_file_is_found_or_harmless(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    """One bit of the file itself, at some hundred places: every seventieth byte, and each that says what a column is.

    Of an erasure only whether there was one counts.
    """
    fill(conn)
    archiver.run()
    (file,) = files(archiver, "history")
    sound = file.read_bytes()
    rows = pq.ParquetFile(file).read().drop_columns(["erasure_id"])
    named = sound.rindex(b"database", 0, sound.rindex(b"correlation_id"))
    found = 0
    for place in (*range(0, len(sound), max(1, len(sound) // 70)), *range(named - 30, named + 20)):
        file.write_bytes(sound[:place] + bytes([sound[place] ^ 0x10]) + sound[place + 1 :])
        if archiver.verify(local_rows=1_000).is_whole:
            read = pq.ParquetFile(file).read().drop_columns(["erasure_id"])
            assert read.equals(rows), f"byte {place}"
        else:
            found += 1
    assert found > 10


# ---------------------------------------------------------------- purge


def purged(archiver: Archiver) -> Purged:
    return purge(lambda: archiver.spark, archiver.lake, archiver.origin, MONTH)


def counts(conn: psycopg.Connection[Any]) -> tuple[int, int]:
    row = conn.execute(
        "SELECT (SELECT count(*) FROM durable.envelope_history), (SELECT count(*) FROM durable.dead_letters)"
    ).fetchone()
    assert row is not None
    return row[0], row[1]


def resolve(conn: psycopg.Connection[Any], letters: int, days: int) -> None:
    conn.execute(
        "UPDATE durable.dead_letters SET resolution = 'discarded', resolved_at = now() - make_interval(days => %s), "
        "xid = DEFAULT WHERE letter_id <= %s",
        (days, letters),
    )


def test_purge_drops_only_rows_past_their_retention(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    """A day, rows that lie in no day, and letters."""
    add_old_day(conn, 40, 5)
    add_history(conn, 3, first=101, age=timedelta(days=60))
    add_history(conn, 7, first=201)
    add_letters(conn, 9)
    resolve(conn, 6, 10)
    resolve(conn, 4, 40)
    for table in BOTH:
        archiver.run(table)
    done = purged(archiver)
    assert (len(done.days), done.rows, done.letters) == (1, 8, 4)
    assert counts(conn) == (7, 5)
    assert purged(archiver) == Purged(days=[])
    assert [archiver.verify(table).is_whole for table in BOTH] == [True, True]


@pytest.mark.parametrize(("table", "column"), [("history", "error"), ("history", "body"), ("dead_letters", "headers")])
def test_purge_drops_nothing_when_one_bit_differs(
    archiver: Archiver, conn: psycopg.Connection[Any], table: LakeTable, column: str
) -> None:
    add_old_day(conn, 40, 5)
    conn.execute("UPDATE durable.envelope_history SET error = 'no', body = 'body'")
    add_letters(conn, 5)
    resolve(conn, 5, 40)
    for each in BOTH:
        archiver.run(each)
    (file,) = files(archiver, table)
    tamper(file, column, 2, lambda value: value.replace("a", "b") if column == "headers" else flipped(value))
    with pytest.raises(DurableError, match=f"{table}: .* 1 with another content.* nothing was purged"):
        purged(archiver)
    assert counts(conn) == (5, 5)


def test_letter_resolved_after_its_archiving_is_kept_until_archived_again(
    archiver: Archiver, conn: psycopg.Connection[Any]
) -> None:
    add_letters(conn, 3)
    for table in BOTH:
        archiver.run(table)
    resolve(conn, 3, 40)
    assert purged(archiver).letters == 0
    archiver.run("dead_letters")
    assert purged(archiver).letters == 3


def test_node_drops_no_archived_history(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    """It cannot look into the lake, of which a file may be damaged."""
    add_old_day(conn, 40, 5)
    archiver.run()
    (file,) = files(archiver, "history")
    file.write_bytes(b"damaged")
    with connection(archiver.origin.url) as storage:
        assert not drop_partitions(storage, "durable", keep_ids=MONTH.history, keep_history=MONTH.history)
    assert counts(conn)[0] == 5
