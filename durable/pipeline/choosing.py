"""Choice of the messages of the past to be replayed: rows of the lake, or of any other DataFrame, and their kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from functools import reduce
from itertools import chain
from operator import and_
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from durable.arguments import refuse_empty_period
from durable.errors import InvalidSetting
from durable.grammar import several
from durable.pipeline.conditions import check_condition
from durable.pipeline.progress import Show
from durable.pipeline.replayable import MOMENTS, check_types, times_of, with_time_zone
from durable.pipeline.rows import records
from durable.pipeline.session import spark_errors
from durable.pipeline.statistics import meeting, unjudged
from durable.pipeline.texts import check_texts
from durable.transports.addresses import spellings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from durable.pipeline.lake import Lake
    from durable.pipeline.lake_tables import LakeTable

DONE: Final = ("sent", "handled")
MOMENT: Final[Mapping[LakeTable, str]] = {"history": "finished_at", "dead_letters": "failed_at"}
"""The column by which a table of the lake is in order."""
_KIND: Final = ("service", "side", "message_type", "address")
TIME: Final = "time of the replay"
"""The column by which messages are chosen; files may have others of any name that is one word."""
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
    """Filters for messages; None and empty filters match every message. Raises InvalidSetting for a lone surrogate,
    and for a period without any time.
    """

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

    def __post_init__(self) -> None:
        check_texts(service=self.service, side=self.side, outcomes=self.outcomes, where=self.where)
        check_texts(types=self.types, addresses=self.addresses)
        refuse_empty_period(self.since, self.until)

    @property
    def is_narrowed(self) -> bool:
        return any((self.types, self.addresses, self.ids, self.since, self.until, self.where))


class Group(NamedTuple):
    """Number of chosen messages of one kind; messages without a body cannot be replayed."""

    service: str | None
    side: str
    message_type: str
    address: str
    messages: int
    without_body: int
    first: datetime | None
    last: datetime | None


def choose(spark: SparkSession, lake: Lake, choice: Choice, show: Show = lambda done, total: None) -> DataFrame:
    """The rows of the lake, with a column `moment`. Raises InvalidSetting when `where` is no condition; DurableError,
    which names it, for a damaged file: what is chosen here is published.
    """
    from pyspark.sql import functions as F

    from durable.pipeline.transform import newest_states

    last = choice.until.date() if choice.until is not None else date.max
    until = None if last == date.max else last + timedelta(days=1)
    since = choice.since and choice.since.date()
    lake.check(choice.table, since, until, show)
    rows = lake.read(spark, choice.table, since, until)
    rows = rows.withColumn(TIME, F.col(MOMENT[choice.table]))
    if choice.table == "dead_letters":
        rows = newest_states(rows).where(F.col("resolved_at").isNull() & F.col("replayable"))
        rows = rows.withColumn("seq", F.col("letter_id"))
    return matching(rows, choice)


def complete(rows: DataFrame) -> DataFrame:
    """Select the columns that a replay needs from rows of any origin. Raises InvalidSetting when one of them is
    missing, or of another type.
    """
    from pyspark.sql import functions as F

    check_types(rows.schema)
    rows = with_time_zone(rows)
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
    return rows.withColumn(TIME, unjudged(F.coalesce(*map(F.col, times_of(rows)))))


def matching(rows: DataFrame, choice: Choice) -> DataFrame:
    """Return the rows that the filters accept."""
    from pyspark.sql import functions as F

    ids = [F.lit(bytearray(each.bytes)) for each in choice.ids]
    conditions: list[Column] = [
        *([F.col("service") == choice.service] if choice.service else []),
        *([F.col("side") == choice.side] if choice.side else []),
        *([F.col("message_type").isin(*choice.types)] if choice.types else []),
        *([F.col("address").isin(*chain.from_iterable(map(spellings, choice.addresses)))] if choice.addresses else []),
        *([F.col("id").isin(*ids)] if ids else []),
        *(_within(rows, choice) if choice.since or choice.until else []),
        *([_has_outcome(choice)] if choice.outcomes and tells_outcomes(rows, choice) else []),
    ]
    for condition in conditions:
        rows = rows.where(condition)
    if choice.where:
        check_condition(rows, choice.where)
        rows = meeting(rows, choice.where)
    return rows


def _within(rows: DataFrame, choice: Choice) -> Iterator[Column]:
    from pyspark.sql import functions as F

    if choice.since is not None:
        yield F.col(TIME) >= F.lit(choice.since)
        yield _first(rows, lambda first: first >= F.lit(choice.since))
    if choice.until is not None:
        yield F.col(TIME) < F.lit(choice.until)
        yield _first(rows, lambda first: first <= F.lit(choice.until))


def _first(rows: DataFrame, is_within: Callable[[Column], Column]) -> Column:
    """Return a condition on the first column of the time alone: that is compared with the statistics of files."""
    from pyspark.sql import functions as F

    first = F.col(times_of(rows)[0])
    return first.isNull() | is_within(first)


def tells_outcomes(rows: DataFrame, choice: Choice) -> bool:
    """True of rows with outcomes as history has them; those of another type tell nothing."""
    return choice.table == "history" and dict(rows.dtypes).get("outcome") == "string"


def _has_outcome(choice: Choice) -> Column:
    from pyspark.sql import functions as F

    return F.col("outcome").isNull() | F.col("outcome").isin(*choice.outcomes)


def count_of_other_outcomes(rows: DataFrame, choice: Choice) -> int:
    """The number of rows that only their outcome leaves out."""
    if not tells_outcomes(rows, choice):
        return 0
    with spark_errors():
        return matching(rows, replace(choice, outcomes=())).where(~_has_outcome(choice)).count()


def refuse_timeless(rows: DataFrame, choice: Choice) -> None:
    """Raise InvalidSetting when `since` or `until` is to choose among rows without a time."""
    from pyspark.sql import functions as F

    if choice.since is None and choice.until is None:
        return
    with spark_errors():
        timeless = matching(rows, replace(choice, since=None, until=None)).where(F.col(TIME).isNull()).count()
    if timeless:
        raise InvalidSetting(
            f"--since, --until: {several(timeless, 'messages', 'have')} no time in {', '.join(times_of(rows))}; write "
            "one in the files, or leave these messages out by --where"
        )


def before(rows: DataFrame, end: datetime | None) -> DataFrame:
    """Return the rows up to this end, and those without a time."""
    from pyspark.sql import functions as F

    if end is None:
        return rows
    return rows.where(F.col(TIME).isNull() | (F.col(TIME) < F.lit(end))).where(_first(rows, lambda t: t <= F.lit(end)))


def alike(rows: DataFrame, found: Mapping[str, str | None]) -> DataFrame:
    """Return the rows that have these values; NULL is one of them."""
    from pyspark.sql import functions as F

    for name, value in found.items():
        rows = rows.where(F.col(name).eqNullSafe(F.lit(value).cast("string")))
    return rows


def survey(rows: DataFrame) -> list[Group]:
    """Count the chosen messages, by kind. Raises InvalidSetting for a time that is none of the calendar, and for a text
    that is not UTF-8.
    """
    from pyspark.sql import functions as F

    counted = rows.groupBy(*_KIND).agg(
        F.count(F.lit(1)).alias("messages"),
        F.count_if(F.col("body").isNull()).alias("without_body"),
        F.min(TIME).alias("first"),
        F.max(TIME).alias("last"),
    )
    try:
        with spark_errors():
            return [Group(**row) for row in records(counted.orderBy(*_KIND))]
    except UnicodeDecodeError as error:
        raise InvalidSetting(
            f"{_misencoded(rows)}; correct it in the files, or leave its row out by --where"
        ) from error
    except OverflowError as error:
        names = ", ".join(name for name in MOMENTS if name in rows.columns)
        raise InvalidSetting(
            f"column {names}: a time lies outside the years 1 to 9999; correct it in the files, or leave its row out "
            "by --where"
        ) from error


def _misencoded(rows: DataFrame) -> str | None:
    """Name the first text of the kinds that is not UTF-8, by its column in the files, and its row."""
    from pyspark.sql import functions as F

    from durable.pipeline.screens import misencoded

    names = [name for name in ("destination", *_KIND) if dict(rows.dtypes).get(name) == "string"]
    strange = rows.where(~reduce(and_, (F.coalesce(F.is_valid_utf8(name), F.lit(True)) for name in names)))
    with spark_errors():
        (batch,) = strange.select("id", *names).limit(1).toArrow().combine_chunks().to_batches()
    return misencoded(batch, names)
