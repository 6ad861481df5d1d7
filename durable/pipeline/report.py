"""The report: what a lake tells about throughput, latencies and failures, as tables that a page or JSON shows.

    lake ──> rollups of new days ──> merged over the days that are asked for ──> Report ──> page, JSON

Latencies are milliseconds. Every table is a list of plain rows, and small however long the history is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from durable.errors import InvalidSetting
from durable.grammar import several
from durable.pipeline.progress import Phases, silent
from durable.pipeline.session import needs_spark

with needs_spark():
    from pyspark.sql import Column, DataFrame
    from pyspark.sql import functions as F

from durable.pipeline import rollups, transform
from durable.pipeline.columns import COLUMNS
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES
from durable.pipeline.rows import records
from durable.pipeline.uses import DEDUPE_WINDOW

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Record = Mapping[str, Any]

_DAY: Final = 86_400
_WINDOWS: Final = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 43_200),
    *(_DAY, 7 * _DAY, 30 * _DAY, 365 * _DAY, 3_650 * _DAY, 36_500 * _DAY),
)
"""In seconds. A single row with an odd time makes a history last for thousands of years."""
_MOST_WINDOWS: Final = 180
_MINUTE: Final = 60
_MOST_VALUES: Final = 25
_MOST_CAUSES: Final = 100
_SLOWEST: Final = 20


@dataclass(frozen=True, slots=True)
class Mark:
    """Event that is drawn over time."""

    time: datetime
    label: str
    is_told: bool = True
    """By whoever asked for the report; otherwise it was seen in the history."""


@dataclass(frozen=True, slots=True)
class Report:
    """All tables of a report, the largest or slowest first where there is no other order."""

    lake: str
    first: datetime
    last: datetime
    days_computed: int
    window_seconds: int
    totals: Record
    throughput: Sequence[Record]
    series: Sequence[Record]
    """By service, side, address and message type: counts, rates and percentiles."""
    message_types: Sequence[Record]
    """The same by message type, of what was handled."""
    nodes: Sequence[Record]
    marks: Sequence[Mark]
    volumes: Mapping[str, Sequence[Record]]
    """By dimension."""
    causes: Sequence[Record]
    conversations: Sequence[Record]

    def marked(self, marks: Sequence[Mark]) -> Report:
        """Return the report with these marks beside its own, in the order of their times."""
        return replace(self, marks=sorted([*marks, *self.marks], key=lambda mark: mark.time))


def report(
    spark: SparkSession,
    lake: Lake,
    *,
    since: date | None = None,
    until: date | None = None,
    dimensions: Sequence[str] = (),
    dedupe_window: timedelta = DEDUPE_WINDOW,
    phase: Phases = silent,
) -> Report:
    """Compute it for these UTC days, `until` not included. `dedupe_window`: that of the services.

    Raises InvalidSetting when the lake has none of these days.
    """
    by = {name: dimension(name) for name in dimensions}
    if not lake.files("history", since, until):
        raise InvalidSetting(f"lake {lake.url}: no history of these days; see durable-agent pipeline archive")
    computed = rollups.bring_up_to_date(spark, lake, since, until, phase("computing days"))
    phase("adding up days")

    def of_days(rollup: str) -> DataFrame:
        return rollups.read(spark, lake, rollup, since, until)

    nodes = records(transform.lifetimes(of_days("nodes")))
    daily = of_days("daily").cache()
    try:
        series = records(transform.summed(daily, *transform.SERIES[1:]).orderBy(F.desc("total"), *transform.SERIES[1:]))
        types = transform.summed(daily.where("side = 'incoming'"), "message_type")
        message_types = records(types.orderBy(F.desc("total"), "message_type"))
        totals = records(transform.summed(daily))[0]
    finally:
        daily.unpersist()
    phase("throughput and volumes")
    history = lake.read(spark, "history", since, until)
    minutes = of_days("minutes")
    first, last = _span(minutes)
    seconds = _window_seconds(first, last)
    windows = minutes if seconds >= _MINUTE else transform.minutes(history, seconds)
    throughput = records(transform.throughput(windows, seconds))
    if seconds < _MINUTE:  # the minutes begin before the first row, and end after the last one
        first = min(row["window"] for row in throughput)
        last = max(row["window"] for row in throughput) + timedelta(seconds=seconds)
    counted = history.where(F.col("side") == ("incoming" if message_types else "outgoing"))  # each message once
    letters = lake.read(spark, "dead_letters", since, until)
    return Report(
        lake=lake.url,
        first=first,
        last=last,
        days_computed=computed,
        window_seconds=seconds,
        totals=totals,
        throughput=throughput,
        series=series,
        message_types=message_types,
        nodes=nodes,
        marks=_seen(throughput, nodes, timedelta(seconds=seconds)),
        volumes={name: records(transform.volume(counted, column, _MOST_VALUES)) for name, column in by.items()},
        causes=records(transform.causes(letters).limit(_MOST_CAUSES)),
        conversations=records(transform.slowest(of_days("conversations"), _SLOWEST, dedupe_window)),
    )


def dimension(name: str) -> Column:
    """A column of the history, or a field of its JSON bodies or headers, such as `body.carrier`."""
    check_dimension(name)
    column, _, path = name.partition(".")
    return F.get_json_object(F.col(column).cast("string"), f"$.{path}") if path else F.col(name)


def check_dimension(name: str) -> None:
    """Raise InvalidSetting for what is no dimension."""
    column, _, path = name.partition(".")
    known = {each.name for each in COLUMNS[SOURCES["history"]]} | {"service"}
    if column not in (known & {"body", "headers"} if path else known - {"id", "body"}):
        raise InvalidSetting(
            f"--by: {name!r} is no dimension; name a column of the history, such as partition_key, "
            "or a field of JSON bodies, such as body.customer, where bodies are kept (history_bodies)"
        )


def _span(minutes: DataFrame) -> tuple[datetime, datetime]:
    """Return the begin of the first window and the end of the last one."""
    row = records(minutes.agg(F.min("window").alias("first"), F.max("window").alias("last")))[0]
    return row["first"], row["last"] + timedelta(seconds=_MINUTE)


def _window_seconds(first: datetime, last: datetime) -> int:
    """Choose windows that divide the span into as many parts as a plot shows well."""
    wanted = (last - first).total_seconds() / _MOST_WINDOWS
    return next((seconds for seconds in _WINDOWS if seconds >= wanted), _WINDOWS[-1])


def _seen(throughput: Sequence[Record], nodes: Sequence[Record], window: timedelta) -> list[Mark]:
    """Find events that the history itself shows: a node that begins after the others, and envelopes whose node died."""
    begun: dict[str, datetime] = {}
    for node in nodes:
        begun.setdefault(node["service"], node["first"])
    starts = [
        Mark(node["first"], f"{node['service']}: node {node['node_id']} begins", is_told=False)
        for node in nodes
        if node["first"] > begun[node["service"]] + window
    ]
    deaths = [
        Mark(
            row["window"],
            f"{row['service']}: {several(row['interrupted'], 'envelopes')} had lost their node",
            is_told=False,
        )
        for row in throughput
        if row["interrupted"]
    ]
    return sorted(starts + deaths, key=lambda mark: mark.time)
