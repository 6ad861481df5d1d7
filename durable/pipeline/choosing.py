"""Which messages of the past are to be replayed: rows of the lake, or of any other DataFrame, and what they are."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from durable.errors import InvalidSetting
from durable.pipeline.session import spark_errors

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from durable.pipeline.lake import Lake, LakeTable

DONE: Final = ("sent", "handled")
MOMENT: Final[Mapping[LakeTable, str]] = {"history": "finished_at", "dead_letters": "failed_at"}
"""The column by which a table of the lake is in order."""
LETTER: Final = ("service", "database", "letter_id")
"""What a letter of the lake is known by, in all of its states. The database of rows of older versions is NULL."""
_OPTIONAL: Final = {
    "service": "string",
    "correlation_id": "binary",
    "causation_id": "binary",
    "partition_key": "string",
    "content_type": "string",
    "headers": "string",
    "sent_at": "timestamp",
    "seq": "bigint",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which messages; what is None or empty does not matter."""

    table: LakeTable = "history"
    service: str | None = None
    side: str | None = None
    outcomes: Sequence[str] = DONE
    types: Sequence[str] = ()
    addresses: Sequence[str] = ()
    ids: Sequence[UUID] = ()
    since: datetime | None = None
    until: datetime | None = None
    where: str | None = None

    @property
    def is_narrowed(self) -> bool:
        return any((self.types, self.addresses, self.ids, self.since, self.until, self.where))


class Group(NamedTuple):
    """How many messages of one kind were chosen; those without a body cannot be replayed."""

    service: str | None
    side: str
    message_type: str
    address: str
    messages: int
    without_body: int
    first: datetime | None
    last: datetime | None


def choose(spark: SparkSession, lake: Lake, choice: Choice) -> DataFrame:
    """The rows of the lake, with a column `moment`. Raises InvalidSetting when `where` is no condition."""
    from pyspark.sql import functions as F

    last = choice.until.date() if choice.until is not None else date.max
    until = None if last == date.max else last + timedelta(days=1)
    rows = lake.read(spark, choice.table, choice.since and choice.since.date(), until)
    rows = rows.withColumn("moment", F.col(MOMENT[choice.table]))
    if choice.table == "dead_letters":
        rows = _unresolved(rows).withColumn("seq", F.col("letter_id"))
    else:
        rows = rows.where(F.col("outcome").isin(*choice.outcomes))
    return matching(rows, choice)


def complete(rows: DataFrame) -> DataFrame:
    """Rows of any origin with the columns that a replay needs; raises InvalidSetting when one of them is missing."""
    from pyspark.sql import functions as F

    if "side" not in rows.columns and "destination" in rows.columns:
        rows = rows.withColumns({"side": F.lit("outgoing"), "address": F.col("destination")})
    for name in ("id", "side", "address", "message_type", "source", "body"):
        if name not in rows.columns:
            raise InvalidSetting(
                f"column {name}: missing; a replay needs id, message_type, source, body, and destination, "
                "or side and address as in the history"
            )
    missing = {name: F.lit(None).cast(kind) for name, kind in _OPTIONAL.items() if name not in rows.columns}
    rows = rows.withColumns(missing) if missing else rows
    moment = next(name for name in ("finished_at", "failed_at", "sent_at") if name in rows.columns)
    return rows.withColumn("moment", F.col(moment))


def matching(rows: DataFrame, choice: Choice) -> DataFrame:
    """Those that the filters let through."""
    from pyspark.sql import functions as F

    ids = [F.lit(bytearray(each.bytes)) for each in choice.ids]
    conditions: list[Column] = [
        *([F.col("service") == choice.service] if choice.service else []),
        *([F.col("side") == choice.side] if choice.side else []),
        *([F.col("message_type").isin(*choice.types)] if choice.types else []),
        *([F.col("address").isin(*choice.addresses)] if choice.addresses else []),
        *([F.col("id").isin(*ids)] if ids else []),
        *([F.col("moment") >= F.lit(choice.since)] if choice.since else []),
        *([F.col("moment") < F.lit(choice.until)] if choice.until else []),
    ]
    for condition in conditions:
        rows = rows.where(condition)
    return _narrowed(rows, choice.where) if choice.where else rows


def survey(rows: DataFrame) -> list[Group]:
    """What was chosen, by kind."""
    from pyspark.sql import functions as F

    keys = ["service", "side", "message_type", "address"]
    counted = rows.groupBy(*keys).agg(
        F.count(F.lit(1)).alias("messages"),
        F.count_if(F.col("body").isNull()).alias("without_body"),
        F.min("moment").alias("first"),
        F.max("moment").alias("last"),
    )
    with spark_errors():
        return [Group(*row) for row in counted.orderBy(*keys).collect()]


def _unresolved(letters: DataFrame) -> DataFrame:
    """The lake holds each state of each letter: one that was resolved later is none of them."""
    from pyspark.sql import functions as F

    resolved = letters.where(F.col("resolved_at").isNotNull()).select(*LETTER)
    open_letters = letters.where(F.col("resolved_at").isNull() & F.col("replayable"))
    one, other = open_letters.alias("one"), resolved.alias("other")
    same = [F.col(f"one.{name}").eqNullSafe(F.col(f"other.{name}")) for name in LETTER]
    return one.join(other, same, "left_anti").dropDuplicates(list(LETTER))


def _narrowed(rows: DataFrame, where: str) -> DataFrame:
    from pyspark.errors import AnalysisException, ParseException

    try:
        with _unlogged():
            narrowed = rows.where(where)
            narrowed.schema  # noqa: B018  over Spark Connect nothing is looked at before
    except (AnalysisException, ParseException) as error:
        said = " ".join(str(error).partition("SQLSTATE")[0].split())
        raise InvalidSetting(f"where: {where!r} is no condition over these columns: {said}") from error
    return narrowed


@contextmanager
def _unlogged() -> Iterator[None]:
    """Without the page of JSON that pyspark writes beside the error that it raises."""
    logger = logging.getLogger("SQLQueryContextLogger")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
