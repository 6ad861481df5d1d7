"""Digests: the lake's rows and Postgres's come to the same numbers, and any other content to others."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from durable.pipeline.columns import COLUMNS
from durable.pipeline.copying import copy, opened
from durable.pipeline.digests import row_blocks, row_digests
from durable.pipeline.lake_tables import SOURCES, LakeTable
from durable.storage import archived_content
from durable.storage.slices import Slice

DAY = date(2026, 11, 20)
_TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
_TIMES = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC)) | st.sampled_from(
    ["infinity", "-infinity", "4713-01-01 00:00:00Z BC", "294276-12-31 23:59:59.999999Z"]
)
_IN_DAY = st.datetimes(datetime(2026, 11, 20), datetime(2026, 11, 20, 23, 59), timezones=st.just(UTC))
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "uuid": st.uuids(),
    "text": _TEXTS,
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "boolean": st.booleans(),
    "timestamptz": _TIMES,
    "bytea": st.binary(max_size=200),
    "jsonb": st.dictionaries(_TEXTS, _TEXTS, max_size=3).map(Jsonb),
}
_BOUND: dict[str, st.SearchStrategy[Any]] = {
    "side": st.sampled_from(["incoming", "outgoing"]),
    "outcome": st.sampled_from(["sent", "handled", "expired"]),
    "finished_at": _IN_DAY,
    "failed_at": _IN_DAY,
    "xid": st.integers(0, 2**40),
    "letter_id": st.integers(1, 2**62),
    "resolution": st.none(),
    "resolved_at": st.none(),
}


def _rows(table: LakeTable) -> st.SearchStrategy[dict[str, Any]]:
    columns = COLUMNS[SOURCES[table]]
    kinds = {each.name: _BOUND.get(each.name, _VALUES[each.kind]) for each in columns}
    return st.fixed_dictionaries(
        {each.name: st.none() | kinds[each.name] if each.is_nullable else kinds[each.name] for each in columns}
    )


def _store(conn: psycopg.Connection[Any], table: LakeTable, rows: list[dict[str, Any]]) -> None:
    source, names = SOURCES[table], [each.name for each in COLUMNS[SOURCES[table]]]
    override = "OVERRIDING SYSTEM VALUE " if table == "dead_letters" else ""
    conn.execute(f"TRUNCATE durable.{source} CASCADE".encode())
    insert = (
        f"INSERT INTO durable.{source} ({', '.join(names)}) {override}VALUES ({', '.join(['%s'] * len(names))}) "
        "ON CONFLICT DO NOTHING"
    )
    for row in rows:
        conn.execute(
            insert.encode(),
            [row[name] for name in names],
        )


def _read(url: str, table: LakeTable) -> pa.Table:
    """As tasks read them for the lake."""
    columns = [each.sql for each in COLUMNS[SOURCES[table]]]
    batches = list(copy(url, (Slice(f'"durable"."{SOURCES[table]}"'),), columns))
    return pa.Table.from_batches(batches)


@pytest.mark.parametrize("table", ["history", "dead_letters"])
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_digests_of_random_rows_equal_those_of_postgres(
    database_url: str, conn: psycopg.Connection[Any], table: LakeTable, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(_rows(table), min_size=1, max_size=8))
    _store(conn, table, rows)
    (batch,) = _read(database_url, table).combine_chunks().to_batches()
    sums: dict[tuple[str, int], tuple[int, int]] = {}
    for side, block, digest in zip(
        batch.column("side").to_pylist(), row_blocks(batch, table), row_digests(batch, table), strict=True
    ):
        count, total = sums.get((side, int(block)), (0, 0))
        sums[side, int(block)] = (count + 1, (total + int(digest)) % 2**64)
    with opened(database_url) as engine, engine.connect() as storage:
        found = archived_content.digests(storage, "durable", SOURCES[table], 2**62)
        blocks = sorted({block for _, block in sums})
        by_row = dict(archived_content.row_digests(storage, "durable", SOURCES[table], 2**62, DAY, blocks))
    assert {(each.side, each.number): tuple(digest) for each, digest in found.items()} == sums
    assert {each.day for each in found} == {DAY}
    assert sorted(by_row.values()) == sorted(int(each) for each in row_digests(batch, table))
    assert all(not isinstance(key[0], UUID) for key in by_row)
