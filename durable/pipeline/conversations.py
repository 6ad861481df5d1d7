"""Conversations over the lakes of any number of services: how long each took, how deep it went, and along which path.

    rows of all lakes ── by correlation id, sorted ──> Python workers: durable.pipeline.trees ──> a row for each

One pass of one sorted stream for each worker. A group for each conversation (applyInArrow) took eleven times as long,
and joining level by level seven times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial, reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from durable.errors import InvalidSetting
from durable.pipeline import trees
from durable.pipeline.session import needs_spark

with needs_spark():
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

from durable.pipeline.lake import Lake
from durable.pipeline.rows import records
from durable.pipeline.uses import DEDUPE_WINDOW

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS: Final[Mapping[str, str]] = {"slowest": "seconds", "deepest": "depth", "largest": "messages"}

_STEP: Final = pa.struct([("id", pa.string()), ("message_type", pa.string()), ("milliseconds", pa.float64())])
SCHEMA: Final = pa.schema(
    [
        ("correlation_id", pa.string()),
        ("messages", pa.int32()),
        ("depth", pa.int32()),
        ("began", pa.timestamp("us", "UTC")),
        ("ended", pa.timestamp("us", "UTC")),
        ("seconds", pa.float64()),
        ("path", pa.list_(_STEP)),
    ]
)
_DDL: Final = (
    "correlation_id STRING, messages INT, depth INT, began TIMESTAMP, ended TIMESTAMP, seconds DOUBLE, "
    "path ARRAY<STRUCT<id: STRING, message_type: STRING, milliseconds: DOUBLE>>"
)
_AT_ONCE: Final = 10_000  # rows of a batch that leaves a worker
MOST_ROWS: Final = 100_000  # of one conversation that is shown


@dataclass(frozen=True, slots=True)
class Overview:
    """All conversations of some days."""

    conversations: int
    messages: int
    deepest: int
    p50_seconds: float | None
    p95_seconds: float | None
    chosen: Sequence[Mapping[str, Any]]
    """Those that come first in the order that was asked for."""


NONE: Final = Overview(conversations=0, messages=0, deepest=0, p50_seconds=None, p95_seconds=None, chosen=())


def overview(
    spark: SparkSession,
    lakes: Sequence[Lake],
    *,
    since: date | None = None,
    until: date | None = None,
    order: str = "slowest",
    count: int = 20,
    dedupe_window: timedelta = DEDUPE_WINDOW,
) -> Overview:
    """Summarize the conversations of these days. `dedupe_window`: that of the services, which tells the conversations
    of one business key apart. Raises InvalidSetting for lakes without history.
    """
    found = summaries(_history(spark, lakes, since, until), dedupe_window).cache()
    try:
        facts = records(
            found.agg(
                F.count("*").alias("conversations"),
                F.coalesce(F.sum("messages"), F.lit(0)).alias("messages"),
                F.coalesce(F.max("depth"), F.lit(0)).alias("deepest"),
                F.percentile_approx("seconds", 0.5).alias("p50_seconds"),
                F.percentile_approx("seconds", 0.95).alias("p95_seconds"),
            )
        )[0]
        chosen = records(found.orderBy(F.desc(ORDERS[order]), "correlation_id").limit(count))
        return Overview(**facts, chosen=chosen)
    finally:
        found.unpersist()


def summaries(history: DataFrame, dedupe_window: timedelta = DEDUPE_WINDOW) -> DataFrame:
    """Summarize each conversation. Columns: `correlation_id`, `messages`, `depth`, `began`, `ended`, `seconds` and the
    critical `path`.
    """
    return (
        _rows(history)
        .repartition("correlation_id")
        .sortWithinPartitions("correlation_id", "sent_at", "id")
        .mapInArrow(partial(summarise, dedupe_window=dedupe_window), _DDL)
    )


def find(
    spark: SparkSession, lakes: Sequence[Lake], wanted: UUID, dedupe_window: timedelta = DEDUPE_WINDOW
) -> list[trees.Conversation]:
    """The conversation of this id, or the one that the message of this id belongs to; of a business key those of each
    use, the latest one last. Raises InvalidSetting.
    """
    history = _rows(_history(spark, lakes, None, None))
    id_ = F.lit(bytearray(wanted.bytes))
    of_message = history.where(F.col("id") == id_).select("correlation_id")
    of_conversation = history.where(F.col("correlation_id") == id_).select("correlation_id")
    known = records(of_message.union(of_conversation).distinct().limit(2))
    if not known:
        raise unknown(wanted)
    its = F.lit(bytearray(known[0]["correlation_id"]))
    rows = records(history.where(F.col("correlation_id") == its).orderBy("sent_at", "id").limit(MOST_ROWS))
    return of_id(wanted, trees.conversations((trees.Row(**row) for row in rows), dedupe_window))


def of_id(wanted: UUID, found: Iterable[trees.Conversation]) -> list[trees.Conversation]:
    """Leave out those that only have the same key: they have no message of this id."""
    every = [*found]
    return [each for each in every if wanted.bytes in each.messages] or every


def steps(path: Sequence[trees.Message]) -> list[dict[str, Any]]:
    """The critical path, and what each message on it adds: until it sent the next one, or came to its end."""
    ends = [*(following.sent_at for _, following in pairwise(path)), path[-1].ended_at]
    return [
        {
            "id": str(UUID(bytes=message.id)),
            "message_type": message.message_type,
            "milliseconds": (end - message.sent_at) / 1_000,
        }
        for message, end in zip(path, ends, strict=True)
    ]


def no_history(lakes: Sequence[Lake]) -> InvalidSetting:
    """The error for lakes that hold nothing of the days that were asked for."""
    return InvalidSetting(f"lake {', '.join({lake.url: None for lake in lakes})}: there is no history of these days")


def unknown(wanted: UUID) -> InvalidSetting:
    """The error for an id that is none of a message and none of a conversation."""
    return InvalidSetting(f"--id: no message and no conversation {wanted} is in these lakes")


def moment(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds / 1_000_000, UTC)


# ---------------------------------------------------------------- rows


def _history(spark: SparkSession, lakes: Sequence[Lake], since: date | None, until: date | None) -> DataFrame:
    each = {lake.url: lake for lake in lakes}
    if not any(lake.files("history", since, until) for lake in each.values()):
        raise no_history(lakes)
    return reduce(DataFrame.unionByName, (lake.read(spark, "history", since, until) for lake in each.values()))


def _rows(history: DataFrame) -> DataFrame:
    times = ("sent_at", "finished_at")
    return history.select(
        *(F.unix_micros(name).alias(name) if name in times else F.col(name) for name in trees.COLUMNS)
    )


def summarise(batches: Iterable[pa.RecordBatch], dedupe_window: timedelta = DEDUPE_WINDOW) -> Iterator[pa.RecordBatch]:
    """Turn rows sorted by conversation into one row of SCHEMA for each conversation. Runs in a worker of Spark, too."""
    make: Callable[..., trees.Row] = trees.Row._make
    rows = (make(row) for batch in batches for row in zip(*(c.to_pylist() for c in batch.columns), strict=True))
    gathered: list[dict[str, Any]] = []
    for found in trees.conversations(rows, dedupe_window):
        gathered.append(_summary(found))
        if len(gathered) >= _AT_ONCE:
            yield pa.RecordBatch.from_pylist(gathered, schema=SCHEMA)
            gathered = []
    yield pa.RecordBatch.from_pylist(gathered, schema=SCHEMA)


def _summary(found: trees.Conversation) -> dict[str, Any]:
    return {
        "correlation_id": str(UUID(bytes=found.correlation_id)),
        "messages": len(found.messages),
        "depth": found.depth,
        "began": found.began_at,
        "ended": found.ended_at,
        "seconds": (found.ended_at - found.began_at) / 1_000_000,
        "path": steps(found.path),
    }
