"""An audit of more suspicious ids than one process should hold: Spark brings the rows of each together.

lakes ──> suspects ──> their rows, by id and sorted ──> tasks: matching.Judge ──> findings
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from durable.pipeline.session import needs_spark

with needs_spark():
    from pyspark.sql import Column, DataFrame, Window
    from pyspark.sql import functions as F

from durable.messages.routing import LOCAL
from durable.pipeline import ledger, lost_lives
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import LakeTable
from durable.pipeline.matching import BY_AGE, LETTER, LOST, RECEIVED, ROWS, SENT, Edges, Judge
from durable.pipeline.rows import records
from durable.pipeline.uses import PRECISION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FOUND: Final = (
    "finding STRING, id STRING, message_type STRING, source STRING, service STRING, address STRING, "
    "sent_at TIMESTAMP, finished_at TIMESTAMP, copies INT, detail STRING"
)

# A group of the ledger has two numbers. `weight` counts: what was sent in its lowest 20 bits, what was received in the
# next, and local messages above. `places` has a bit for the hash of each place where it was handled, and one that says:
# look closer. Two places with one bit make an id suspect, never innocent; and since something was sent no fewer times
# than to how many destinations, as many places as that are enough. Primitive sums are what Spark aggregates fastest.
_COUNT_BITS: Final = 20
_PLACE_BITS: Final = 62
_SENT, _RECEIVED, _LOCAL = 1, 1 << _COUNT_BITS, 1 << (2 * _COUNT_BITS)
_LOOK_CLOSER: Final = 1 << _PLACE_BITS


def findings(
    spark: SparkSession,
    senders: Sequence[Lake],
    receivers: Sequence[Lake],
    since: date | None,
    edges: Edges,
    may_be_late: Sequence[ledger.Wanted],
    judge: Judge,
) -> DataFrame:
    """Judge all rows of all suspects: a row for each finding, with the columns of matching.FOUND."""
    sent = _all(spark, senders, "history").where("side = 'outgoing'")
    received = _all(spark, receivers, "history").where("side = 'incoming'")
    letters = _all(spark, receivers, "dead_letters").where("side = 'incoming' AND id IS NOT NULL")
    lakes = [*senders, *receivers]
    lost = {
        role: found.where("id IS NOT NULL")
        for table, role in LOST.items()
        if (found := lost_lives.rows(spark, lakes, table)) is not None
    }
    sources = [
        *ledger.sources(senders, "outgoing", since),
        *ledger.sources(receivers, "incoming", since),
    ]
    suspects = ledger.many_suspects(spark, sources, edges)
    if suspects is None:
        suspects = unbalanced(
            inside(_all(spark, senders, "history", since).where("side = 'outgoing'"), edges.of_suspects()),
            inside(_all(spark, receivers, "history", since).where("side = 'incoming'"), edges.of_suspects()),
        )
    suspects = reduce(DataFrame.union, (rows.select("id") for rows in lost.values()), suspects).distinct()
    roles = {SENT: sent, RECEIVED: received, LETTER: letters}
    rows = [
        *(_in_role(role, of.join(suspects, "id", "left_semi")) for role, of in roles.items()),
        *(_in_role(role, of) for role, of in lost.items()),
        ledger.many_rows(spark, may_be_late),
    ]
    together = reduce(DataFrame.unionByName, rows).repartition("id").sortWithinPartitions("id")
    return together.mapInArrow(judge, _FOUND)


def _all(spark: SparkSession, lakes: Sequence[Lake], table: LakeTable, since: date | None = None) -> DataFrame:
    each = {lake.url: lake.read(spark, table, since) for lake in lakes}
    return reduce(DataFrame.unionByName, each.values())


def _in_role(role: str, rows: DataFrame) -> DataFrame:
    """The same with the columns of ROWS."""
    columns = {"role": F.lit(role)} | {name: F.col(name) for name in rows.columns}
    return rows.select(
        *(columns.get(each.name, F.lit(None)).cast(ledger.SPARK_TYPES[each.type]).alias(each.name) for each in ROWS)
    )


def inside(rows: DataFrame, edges: Edges) -> DataFrame:
    """Limit rows by the time that both sides know: when the message was sent."""
    since = F.lit(True) if edges.since is None else F.col("sent_at") >= F.lit(edges.since)
    until = F.lit(True) if edges.until is None else F.col("sent_at") < F.lit(edges.until)
    return rows.where(since & until)


def told(found: DataFrame, example_count: int) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return how many there are of each kind, and the oldest of each."""
    counts = {row["finding"]: row["count"] for row in records(found.groupBy("finding").count())}
    if not counts:
        return counts, []
    age = Window.partitionBy("finding").orderBy(*BY_AGE)
    oldest = found.withColumn("age", F.row_number().over(age)).where(F.col("age") <= example_count).drop("age")
    return counts, records(oldest)


def unbalanced(sent: DataFrame, received: DataFrame) -> DataFrame:
    """The ids (column `id`) that are not simply sent at one time to n places, seen at n places, and handled once at
    each.
    """
    sends = sent.select("id", "sent_at", *_entry(F.col("outcome") == "sent", _SENT, F.lit(0)))
    is_local = F.col("address") == LOCAL
    place = F.expr(f"shiftleft(1L, CAST(pmod(xxhash64(service, address), {_PLACE_BITS}) AS INT))")
    weight, places = F.when(is_local, _LOCAL).otherwise(_RECEIVED), F.when(is_local, 0).otherwise(place)
    receipts = received.select("id", "sent_at", *_entry(F.col("outcome") == "handled", weight, places))
    ids = (
        sends.unionByName(receipts)
        .repartition("id")  # nearly every id is a new one: what a partial aggregation before the shuffle does is lost
        .groupBy("id")
        .agg(
            F.sum("weight").alias("weight"),
            F.bit_or("places").alias("places"),
            (F.max(F.unix_micros("sent_at")) - F.min(F.unix_micros("sent_at"))).alias("took"),
        )
    )
    sent_count, received_count = _count(0), _count(_COUNT_BITS)
    is_balanced = (
        (F.col("places") < _LOOK_CLOSER)
        & (sent_count == received_count)
        & (received_count == F.bit_count("places"))
        & (F.shiftright("weight", 2 * _COUNT_BITS) <= 1)
        & (F.coalesce("took", F.lit(0)) <= PRECISION // timedelta(microseconds=1))
    )
    return ids.where(~is_balanced).select("id")


def _entry(is_expected: Column, weight: Column | int, places: Column) -> tuple[Column, Column]:
    """A row as it is added to the sum of its id."""
    marked = F.when(is_expected, places.cast("bigint")).otherwise(F.lit(_LOOK_CLOSER))
    return F.lit(weight).cast("bigint").alias("weight"), marked.alias("places")


def _count(first_bit: int) -> Column:
    return F.shiftright("weight", first_bit).bitwiseAND(F.lit((1 << _COUNT_BITS) - 1))
