"""Computations over history: DataFrames in, DataFrames out. No function here reads or writes files.

    history ──> daily      a row for each day, service, side, address and message type: counts, latencies
            ──> minutes    a row for each minute, service and side: counts
            ──> nodes      a row for each day, service and node: from when to when it finished something
            ──> threads    the longest conversations of each day, those of a business key by each sending of it

These four are small and can be merged: those of many days, added up, are those of the whole time. So a report over
months reads the days that were computed before, and no history but that of new days.

    sent_at ── commit to stored ──> received_at ── stored to handled ──> finished_at          of incoming, handled rows
       └───────────────────────── commit to handled ───────────────────────┘

Latencies are KLL sketches of milliseconds: a few kilobytes each, mergeable, with a rank error of about 1.3 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from durable.messages.routing import LOCAL
from durable.pipeline.columns import LETTER
from durable.pipeline.replay import unix_ms
from durable.pipeline.uses import DEDUPE_WINDOW, MICROSECOND, PRECISION, begun

__all__ = [
    "causes",
    "daily",
    "lifetimes",
    "minutes",
    "newest_states",
    "nodes",
    "slowest",
    "summed",
    "threads",
    "throughput",
    "volume",
]

LATENCIES: Final = ("commit_to_stored", "stored_to_handled", "commit_to_handled")
COUNTS: Final = ("sent", "handled", "dead_lettered", "expired", "retried", "interrupted")
SERIES: Final = ("day", "service", "side", "address", "message_type")
QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

_LONGEST_OF_A_DAY: Final = 200
_MINUTE: Final = 60

# ---------------------------------------------------------------- of days, to be merged


def daily(history: DataFrame) -> DataFrame:
    """Aggregate by day. Columns: SERIES, `total`, COUNTS, and a sketch for each of LATENCIES."""
    is_handled = F.col("outcome") == "handled"
    sent, received, finished = (F.unix_micros(name) for name in ("sent_at", "received_at", "finished_at"))
    spans = {
        "commit_to_stored": F.when(
            F.col("address") != LOCAL, received - sent
        ),  # a local message is stored by its commit
        "stored_to_handled": finished - received,
        "commit_to_handled": finished - sent,
    }
    sketches = [F.kll_sketch_agg_double(F.when(is_handled, span / 1_000)).alias(name) for name, span in spans.items()]
    return history.groupBy(*SERIES).agg(*_counts(), *sketches)


def minutes(history: DataFrame, seconds: int = _MINUTE) -> DataFrame:
    """Aggregate by window. Columns: `day`, `window` (where it begins), `service`, `side`, `total`, COUNTS. Windows may
    have any length.
    """
    windows = history.withColumn("window", _window("finished_at", seconds))
    return windows.groupBy("day", "window", "service", "side").agg(*_counts())


def nodes(history: DataFrame) -> DataFrame:
    """Aggregate by node. Columns: `day`, `service`, `node_id`, `first`, `last`, `total`. Node 0 stands for changes by
    hand.
    """
    return (
        history.where("node_id <> 0")
        .groupBy("day", "service", "node_id")
        .agg(F.min("finished_at").alias("first"), F.max("finished_at").alias("last"), F.count("*").alias("total"))
    )


def threads(history: DataFrame) -> DataFrame:
    """The longest conversations of each day: `day`, `correlation_id`, `root_at`, `began`, `ended`, `total`.

    One that goes on over midnight is found on its last day: each row knows when its message was sent. Of a business key
    that begins conversations, `root_at` is when it was sent last that day before the others were; slowest() tells its
    uses apart.
    """
    made = unix_ms("correlation_id")
    plain = history.where(made.isNotNull()).withColumn("root_at", F.lit(None).cast("timestamp"))
    of_key = Window.partitionBy("day", "correlation_id").orderBy(F.unix_micros("sent_at"))
    sent = F.when(F.col("id") == F.col("correlation_id"), F.col("sent_at"))
    latest = F.max(sent).over(of_key.rangeBetween(Window.unboundedPreceding, PRECISION // MICROSECOND))
    keyed = history.where(made.isNull()).withColumn("root_at", latest)
    whole = (
        plain.unionByName(keyed)
        .groupBy("day", "correlation_id", "root_at")
        .agg(F.min("sent_at").alias("began"), F.max("finished_at").alias("ended"), F.count("*").alias("total"))
    )
    took = F.unix_micros("ended") - F.unix_micros("began")
    ranked = whole.withColumn("took", took).withColumn("row", F.struct(*whole.columns))
    longest = F.expr(f"max_by(row, took, {_LONGEST_OF_A_DAY})")
    return ranked.groupBy("day").agg(longest.alias("longest")).select(F.inline("longest"))


def _counts() -> list[Column]:
    is_given_up = (F.col("side") == "incoming") & (F.col("outcome") != "handled")
    tests = {
        "sent": F.col("outcome") == "sent",
        "handled": F.col("outcome") == "handled",
        "dead_lettered": F.col("outcome") == "dead-lettered",
        "expired": F.col("outcome") == "expired",
        "retried": F.col("attempts") > F.when(is_given_up, 1).otherwise(0),
        "interrupted": F.col("interruptions") > 0,
    }
    return [F.count("*").alias("total"), *(F.count(F.when(test, 1)).alias(name) for name, test in tests.items())]


# ---------------------------------------------------------------- of the whole time, from those of days


def summed(of_days: DataFrame, *by: str) -> DataFrame:
    """Sum rows of daily() by these columns: counts are added up, sketches merged and turned into percentiles.

    Columns: `by`, `total`, COUNTS, the rates `retry_rate` and `dead_letter_rate`, and for each of LATENCIES how many
    there are and their percentiles in milliseconds, such as `commit_to_handled_p95`; NULL where there are none.
    """
    counts = [F.sum(name).alias(name) for name in ("total", *COUNTS)]
    sketches = [F.kll_merge_agg_double(name).alias(name) for name in LATENCIES]
    merged = of_days.groupBy(*by).agg(*counts, *sketches)
    for name in LATENCIES:
        count = F.kll_sketch_get_n_double(name)
        merged = merged.withColumn(f"{name}_count", count)
        for label, rank in QUANTILES.items():
            quantile = F.kll_sketch_get_quantile_double(name, F.lit(rank))
            merged = merged.withColumn(f"{name}_{label}", F.when(count > 0, quantile))
    rates = {"retry_rate": "retried", "dead_letter_rate": "dead_lettered"}
    return merged.withColumns({rate: F.col(name) / F.col("total") for rate, name in rates.items()}).drop(*LATENCIES)


def throughput(of_minutes: DataFrame, seconds: int) -> DataFrame:
    """Sum rows of minutes() in windows of so many seconds. Columns: `window`, `service`, `side`, `total`, COUNTS."""
    windows = of_minutes.withColumn("window", _window("window", seconds))
    counts = [F.sum(name).alias(name) for name in ("total", *COUNTS)]
    return windows.groupBy("window", "service", "side").agg(*counts).orderBy("window", "service", "side")


def lifetimes(of_days: DataFrame) -> DataFrame:
    """Sum rows of nodes() over all days. Columns: `service`, `node_id`, `first`, `last`, `total`."""
    return (
        of_days.groupBy("service", "node_id")
        .agg(F.min("first").alias("first"), F.max("last").alias("last"), F.sum("total").alias("total"))
        .orderBy("first", "service", "node_id")
    )


def slowest(of_days: DataFrame, count: int, dedupe_window: timedelta = DEDUPE_WINDOW) -> DataFrame:
    """Select the longest of threads(). Columns: `correlation_id` as text, `began`, `ended`, `total`, `seconds`.

    `dedupe_window`: that of the services, which tells the conversations of one business key apart.
    """
    seconds = (F.unix_micros("ended") - F.unix_micros("began")) / 1_000_000
    return (
        _with_uses(of_days, dedupe_window)
        .groupBy("correlation_id", "use")
        .agg(F.min("began").alias("began"), F.max("ended").alias("ended"), F.sum("total").alias("total"))
        .withColumn("seconds", seconds)
        .orderBy(F.desc("seconds"), "correlation_id")
        .limit(count)
        .withColumn("correlation_id", uuid_text("correlation_id"))
    )


def _with_uses(of_days: DataFrame, dedupe_window: timedelta) -> DataFrame:
    """Add the `use` of its key that each row of threads() is of: when it began, or NULL."""
    roots = Window.partitionBy("correlation_id")
    begins = begun("roots", dedupe_window)
    at, exact = F.coalesce("root_at", "began"), F.make_dt_interval(secs=F.lit(PRECISION.total_seconds()))
    past = F.filter("begins", lambda begin: begin <= at + exact)
    return (
        of_days.withColumn("roots", F.sort_array(F.collect_set("root_at").over(roots)))
        .withColumn("begins", begins)
        .withColumn("use", F.coalesce(F.array_max(past), F.array_min("begins")))
    )


# ---------------------------------------------------------------- of history itself


def volume(history: DataFrame, dimension: Column, count: int) -> DataFrame:
    """Count by the values of a dimension. Columns: `value`, `total`, COUNTS; the largest first, NULL is a value too."""
    return (
        history.groupBy(dimension.cast("string").alias("value"))
        .agg(*_counts())
        .orderBy(F.desc("total"), "value")
        .limit(count)
    )


def causes(letters: DataFrame) -> DataFrame:
    """Dead letters by fingerprint: each letter once."""
    return (
        newest_states(letters)
        .groupBy("fingerprint", "service", "side", "message_type", "exception_type")
        .agg(
            F.count("*").alias("total"),
            F.count(F.when(F.col("resolved_at").isNull(), 1)).alias("unresolved"),
            F.min("failed_at").alias("first"),
            F.max("failed_at").alias("last"),
            F.max_by("reason", "failed_at").alias("example"),
        )
        .orderBy(F.desc("total"), "fingerprint", "service")
    )


def newest_states(letters: DataFrame) -> DataFrame:
    """The newest state of each letter, of which the lake has a row for each."""
    newest = F.max_by(F.struct(*letters.columns), "xid").alias("letter")
    return letters.groupBy("service", "database", *LETTER).agg(newest).select("letter.*")


def uuid_text(column: str) -> Column:
    """Sixteen bytes as people write them."""
    digits = F.lower(F.hex(F.col(column)))
    return F.regexp_replace(digits, "^(.{8})(.{4})(.{4})(.{4})(.{12})$", "$1-$2-$3-$4-$5")


def is_of(column: str, values: Sequence[date]) -> Column:
    return F.col(column).isin(list(values))


def _window(column: str, seconds: int) -> Column:
    return F.timestamp_seconds(F.floor(F.unix_seconds(column) / seconds) * seconds)
