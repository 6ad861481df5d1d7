"""Conversations over lakes with few rows, without Spark: the same trees, from rows that are sorted in this process.

    rows of all lakes ── read and sorted through Arrow ──> conversations.summarise() ──> facts and the first of them

What a conversation is, is said in `durable.pipeline.trees`; here and on Spark its rows only come by other ways.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset as ds

from durable.pipeline import places, trees
from durable.pipeline.conversations import MOST_ROWS, ORDERS, SCHEMA, Overview, no_history, of_id, summarise, unknown
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import file_schema
from durable.pipeline.uses import DEDUPE_WINDOW

pc: Any = pyarrow.compute  # its functions are made at run time, and no type checker knows them


def overview(
    lakes: Sequence[Lake],
    *,
    since: date | None = None,
    until: date | None = None,
    order: str = "slowest",
    count: int = 20,
    dedupe_window: timedelta = DEDUPE_WINDOW,
) -> Overview:
    """Summarize conversations as durable.pipeline.conversations.overview()."""
    if not any(lake.files("history", since, until) for lake in lakes):
        raise no_history(lakes)
    history = _rows(lakes, since=since, until=until)
    by_conversation = [(name, "ascending") for name in ("correlation_id", "sent_at", "id")]
    found = pa.Table.from_batches(summarise(history.sort_by(by_conversation).to_batches(), dedupe_window), SCHEMA)
    chosen = found.sort_by([(ORDERS[order], "descending"), ("correlation_id", "ascending")]).slice(0, count)
    return Overview(
        conversations=len(found),
        messages=pc.sum(found["messages"]).as_py() or 0,
        deepest=pc.max(found["depth"]).as_py() or 0,
        p50_seconds=_quantile(found["seconds"], 0.5),
        p95_seconds=_quantile(found["seconds"], 0.95),
        chosen=chosen.to_pylist(),
    )


def find(lakes: Sequence[Lake], wanted: UUID, dedupe_window: timedelta = DEDUPE_WINDOW) -> list[trees.Conversation]:
    """Find conversations as durable.pipeline.conversations.find()."""
    named = pa.scalar(wanted.bytes, pa.binary())
    known = _rows(lakes, (ds.field("id") == named) | (ds.field("correlation_id") == named))
    if not len(known):
        raise unknown(wanted)
    rows = _rows(lakes, ds.field("correlation_id") == known["correlation_id"][0])
    first = rows.sort_by([("sent_at", "ascending"), ("id", "ascending")]).slice(0, MOST_ROWS)
    return of_id(wanted, trees.conversations((trees.Row(**row) for row in first.to_pylist()), dedupe_window))


def _rows(
    lakes: Sequence[Lake],
    where: ds.Expression | None = None,
    *,
    since: date | None = None,
    until: date | None = None,
) -> pa.Table:
    """The columns of trees.Row, of these days."""
    schema = file_schema("history")
    read = []
    for lake in _different(lakes):
        by_day = lake.files_by_day("history")
        files = [
            file
            for day, each in by_day.items()
            if (since is None or since <= day) and (until is None or day < until)
            for file in each
        ]
        read.append(
            places.ParquetFiles(lake.table_url("history"), files, schema).to_table(list(trees.COLUMNS), filter=where)
        )
    return _in_micros(pa.concat_tables(read))


def _in_micros(rows: pa.Table) -> pa.Table:
    for name in ("sent_at", "finished_at"):
        rows = rows.set_column(rows.schema.get_field_index(name), name, rows[name].cast(pa.int64()))
    return rows


def _different(lakes: Sequence[Lake]) -> list[Lake]:
    return [*{lake.url: lake for lake in lakes}.values()]


def _quantile(values: pa.ChunkedArray, rank: float) -> float | None:
    """The smallest value that is not below so many of them, as Spark's percentile_approx has it."""
    if not len(values):
        return None
    ordered = values.take(pc.sort_indices(values))
    return float(ordered[max(math.ceil(rank * len(values)) - 1, 0)].as_py())
