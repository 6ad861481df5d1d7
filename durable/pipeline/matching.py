"""Matching of sent and received messages: rows of history in, findings out. DataFrames only, no lake and no files.

                               outgoing rows of the senders          incoming rows of the receivers
    every row                         └────────────> ledger <────────────┘       one pass, grouped by id
    the few ids that do not balance                    │
    their rows once more                               └─> findings: lost · undone · open · unarchived · alien · ...

A delivery is an id and a destination; a receipt is an id, a service and an endpoint. Which destination leads to which
endpoint is known to nobody but the network, so an id balances when it has as many receipts as deliveries: an event
that went to two destinations must be seen at two places. What it came to there is no loss: handled, dead-lettered and
expired are all ends, and so is a quarantined dead letter, which has no row of history.

    no row of history       a duplicate that the receiver recognised; what still waits in an outbox or an inbox
    only an incoming row    a local message, which is its sender's own
    several rows            a dead letter that was replayed: `dead-lettered`, then `handled`

A row of a life that its database has lost is no delivery and no receipt: what it tells of is undone there. It says only
why a counterpart is missing, `undone` at the receiver, or `forgotten` by the sender.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import reduce
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from durable.messages.routing import LOCAL
from durable.pipeline.rows import records
from durable.pipeline.spans import NO_SPAN, Span, common, of_any
from durable.pipeline.transform import uuid_text

FINDINGS: Final = ("lost", "undone", "twice", "overdue", "forgotten", "alien", "late", "open", "unarchived")
_COLUMNS: Final = (
    "finding",
    "id",
    "message_type",
    "source",
    "service",
    "address",
    "sent_at",
    "finished_at",
    "copies",
    "detail",
)

_PLACE: Final = "concat_ws(' ', service, address)"

# A group of the ledger has two numbers. `weight` counts: what was sent in its lowest 20 bits, what was received in the
# next, and local messages above. `places` has a bit for the hash of each place where it was handled, and one that says:
# look closer. Two places with one bit make an id suspect, never innocent; and since something was sent no fewer times
# than to how many destinations, as many places as that are enough. Primitive sums are what Spark aggregates fastest.
_COUNT_BITS: Final = 20
_PLACE_BITS: Final = 62
_SENT, _RECEIVED, _LOCAL = 1, 1 << _COUNT_BITS, 1 << (2 * _COUNT_BITS)
_LOOK_CLOSER: Final = 1 << _PLACE_BITS


@dataclass(frozen=True, slots=True)
class History:
    """The rows that are compared. All have the columns of the lake's tables."""

    sent: DataFrame
    """Outgoing rows of all senders."""
    received: DataFrame
    """Incoming rows of all receivers."""
    quarantined: DataFrame
    """Incoming dead letters of all receivers."""
    senders: Collection[str]
    """The services that are archived in the senders' lakes."""
    forgotten: DataFrame | None = None
    undone: DataFrame | None = None
    """Rows of each side of lives that their databases have lost, where they are told from the others: `id` and, of
    receivers, `place`."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Keys of the rows of lives that their databases have lost; None where there are none."""

    rows: DataFrame | None = None
    letters: DataFrame | None = None

    @property
    def ids(self) -> DataFrame | None:
        """All ids of such rows (column `id`): each needs a closer look."""
        found = [rows.select("id") for rows in (self.rows, self.letters) if rows is not None]
        return reduce(DataFrame.unionByName, found).where("id IS NOT NULL").distinct() if found else None


@dataclass(frozen=True, slots=True)
class Edges:
    """Limits of the judgement: some rows look like findings only because a history ends there.

    Each service has a span of its own: one that began to archive yesterday, or whose archiver is held back, leaves what
    others exchange to be judged.
    """

    since: datetime | None = None
    """What was sent before, and from `until` on, is not asked for."""
    until: datetime | None = None
    senders: Mapping[str, Span] = field(default_factory=dict)
    """What a service has sent within its span is in the lakes, if it was sent."""
    receivers: Mapping[str, Span] = field(default_factory=dict)
    """What a service was sent within its span is in the lakes, if it came to an end."""
    due: datetime | None = None
    """What the senders had done before should have come to its end in the receivers' histories by now."""
    routes: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Which services have received what was sent to an address. What an unknown one leads to may be any receiver."""
    first_databases: Mapping[str, str] = field(default_factory=dict)
    """The database with which the history of a receiver begins."""

    def of_address(self, address: str) -> dict[str, Span]:
        """The spans of the services that receive what is sent to an address."""
        names = self.routes.get(address) or self.receivers
        return {name: self.receivers.get(name, NO_SPAN) for name in sorted(names)}


def findings(
    of_suspects: History | None, received: DataFrame, edges: Edges, late_after: timedelta | None = None
) -> DataFrame:
    """A row for each: late among all received, and the others among all rows of suspicious ids."""
    found = late(received, late_after)
    if of_suspects is not None:
        found = found.unionByName(compared(of_suspects, edges))
    return found.where(_within("sent_at", edges)).withColumn("id", uuid_text("id"))


def of(history: History, ids: DataFrame) -> History:
    """The rows of these ids."""
    sent, received, quarantined = (
        rows.join(ids, "id", "left_semi") for rows in (history.sent, history.received, history.quarantined)
    )
    return History(sent, received, quarantined, history.senders)


def once(history: History) -> History:
    """Drop the copies that a second lake holds of the same rows of a database."""
    return replace(history, sent=_once(history.sent), received=_once(history.received))


def counting(rows: DataFrame, lost: Lost) -> DataFrame:
    """Each of these rows once, less those of lost lives."""
    return _living(_once(rows), lost.rows)


def _once(rows: DataFrame) -> DataFrame:
    return rows.dropDuplicates(["database", "xid", "id", "side", "service", "address", "outcome", "finished_at"])


def _living(rows: DataFrame, lost: DataFrame | None) -> DataFrame:
    return rows if lost is None else rows.join(lost, lost.columns, "left_anti")


def apart(history: History, lost: Lost) -> History:
    """Put the rows of lost lives apart from those that count."""
    undone = []
    if lost.rows is not None:
        keys = lost.rows.columns
        of_lost = history.received.join(lost.rows, keys, "left_semi").where(F.col("address") != LOCAL)
        undone.append(of_lost.select("id", F.expr(_PLACE).alias("place")))
        history = replace(
            history,
            sent=_living(history.sent, lost.rows),
            received=_living(history.received, lost.rows),
            forgotten=history.sent.join(lost.rows, keys, "left_semi").select("id"),
        )
    if lost.letters is not None:
        keys = lost.letters.columns
        of_lost = history.quarantined.join(lost.letters, keys, "left_semi")
        undone.append(of_lost.select("id", F.expr(_PLACE).alias("place")))
        history = replace(history, quarantined=_living(history.quarantined, lost.letters))
    return replace(history, undone=reduce(DataFrame.unionByName, undone)) if undone else history


# ---------------------------------------------------------------- every row: which ids need a closer look


def unbalanced(history: History) -> DataFrame:
    """The ids (column `id`) that are not simply sent to n places, seen at n places, and handled once at each."""
    sent = history.sent.select("id", *_entry(F.col("outcome") == "sent", _SENT, F.lit(0)))
    is_local = F.col("address") == LOCAL
    place = F.expr(f"shiftleft(1L, CAST(pmod(xxhash64(service, address), {_PLACE_BITS}) AS INT))")
    weight, places = F.when(is_local, _LOCAL).otherwise(_RECEIVED), F.when(is_local, 0).otherwise(place)
    received = history.received.select("id", *_entry(F.col("outcome") == "handled", weight, places))
    ledger = (
        sent.unionByName(received)
        .repartition("id")  # nearly every id is a new one: what a partial aggregation before the shuffle does is lost
        .groupBy("id")
        .agg(F.sum("weight").alias("weight"), F.bit_or("places").alias("places"))
    )
    sent_count, received_count = _count(0), _count(_COUNT_BITS)
    is_balanced = (
        (F.col("places") < _LOOK_CLOSER)
        & (sent_count == received_count)
        & (received_count == F.bit_count("places"))
        & (F.shiftright("weight", 2 * _COUNT_BITS) <= 1)
    )
    return ledger.where(~is_balanced).select("id")


def _entry(is_expected: Column, weight: Column | int, places: Column) -> tuple[Column, Column]:
    """A row as it is added to the ledger."""
    marked = F.when(is_expected, places.cast("bigint")).otherwise(F.lit(_LOOK_CLOSER))
    return F.lit(weight).cast("bigint").alias("weight"), marked.alias("places")


def _count(first_bit: int) -> Column:
    return F.shiftright("weight", first_bit).bitwiseAND(F.lit((1 << _COUNT_BITS) - 1))


# ---------------------------------------------------------------- the rows of suspicious ids


def compared(history: History, edges: Edges) -> DataFrame:
    """Lost, undone, open, unarchived, forgotten, alien and twice, exactly, among all rows of these ids."""
    remote = history.received.where(F.col("address") != LOCAL)
    return (
        _missing(history, remote, edges)
        .unionByName(_alien(history, remote, edges))
        .unionByName(_twice(history.received))
    )


def _missing(history: History, remote: DataFrame, edges: Edges) -> DataFrame:
    """Sent to more places than it was seen at; open while the last copy may still be on its way to an end, overdue when
    a receiver's history has stood still since, unarchived where its end may lie in a gap of one or before it begins,
    undone where all others had an end in a lost life.
    """
    sent = history.sent
    addresses = [row["address"] for row in records(sent.select("address").distinct())]
    ways = {name: edges.of_address(name) for name in addresses}
    spans = _spans(sent.sparkSession, "address", ways).join(_ways(sent.sparkSession, ways, edges), "address")
    deliveries = (
        sent.where("outcome = 'sent'")
        .join(F.broadcast(spans), "address", "left")
        .groupBy("id")
        .agg(
            *(F.first(name).alias(name) for name in ("message_type", "source", "service")),
            F.array_sort(F.collect_set("address")).alias("destinations"),
            F.min("sent_at").alias("sent_at"),
            F.max("finished_at").alias("finished_at"),
            F.min("end").alias("end"),
            F.flatten(F.collect_list("gaps")).alias("gaps"),
            F.collect_set("way").alias("ways"),
        )
    )
    places = ("id", "service", "address")
    receipts = (
        remote.select(*places)
        .unionByName(history.quarantined.select(*places))
        .groupBy("id")
        .agg(
            F.array_sort(F.collect_set(F.expr(_PLACE))).alias("seen"),
            F.collect_set(F.struct("service", "address")).alias("places"),
        )
    )
    nowhere = F.array().cast("array<string>")
    seen = F.coalesce("seen", nowhere)
    copies = F.size("destinations") - F.size(seen)
    found = deliveries.join(receipts, "id", "left")
    if history.undone is None:
        found = found.withColumn("undone", nowhere)
    else:
        of_lost = history.undone.groupBy("id").agg(F.array_sort(F.collect_set("place")).alias("undone"))
        of_lost = found.join(of_lost, "id", "left")
        found = of_lost.withColumn("undone", F.array_except(F.coalesce("undone", nowhere), seen))
    missing = F.when(F.size("undone") >= F.col("copies"), "undone").otherwise("lost")
    return (
        found.withColumn("copies", copies)
        .where("copies > 0")
        .withColumn("too_early", F.expr(_BEFORE_A_HISTORY))
        .withColumn("finding", _finding(missing, F.expr(_IN_GAP_OF_RECEIVER) | (F.size("too_early") > 0), edges.due))
        .withColumn("address", F.concat_ws(" ", "destinations"))
        .withColumn("detail", _listed("seen only at ", seen, "seen nowhere"))
        .withColumn("detail", F.when(F.size("undone") == 0, F.col("detail")).otherwise(_in_lost_life("undone")))
        .withColumn("detail", _explained("a receiver's history", F.expr(_BEGINNINGS)))
        .select(*_COLUMNS)
    )


def _alien(history: History, remote: DataFrame, edges: Edges) -> DataFrame:
    """Received, and no sender has a row of it, whatever its outcome; open while that row may still be archived,
    unarchived where it may lie in a gap of the sender's history, forgotten where a lost life of its sender has it.
    """
    sent = history.sent
    spans = _spans(sent.sparkSession, "source", {name: {name: span} for name, span in edges.senders.items()})
    why = F.when(F.col("source").isin(list(history.senders)), "its source has no record of it")
    why = why.otherwise("its source is none of the senders")
    is_forgotten = F.coalesce("is_forgotten", F.lit(False))
    return (
        remote.join(sent.select("id"), "id", "left_anti")
        .join(_of_forgotten(history), "id", "left")
        .groupBy("id", "service", "address")
        .agg(
            *(F.first(name).alias(name) for name in ("message_type", "source")),
            F.min("sent_at").alias("sent_at"),
            F.min("finished_at").alias("finished_at"),
            F.first(F.when(is_forgotten, "its sender's database has lost the life that sent it").otherwise(why)).alias(
                "detail"
            ),
            F.first(F.when(is_forgotten, "forgotten").otherwise("alien")).alias("missing"),
        )
        .join(F.broadcast(spans), "source", "left")
        .where(_was_recorded())
        .withColumn("finding", _finding(F.col("missing"), F.expr(_IN_GAP)))
        .withColumn("detail", _explained("its source's history"))
        .withColumn("copies", F.lit(1))
        .select(*_COLUMNS)
    )


def _of_forgotten(history: History) -> DataFrame:
    """The ids that were sent in a lost life."""
    ids = history.sent.select("id").limit(0) if history.forgotten is None else history.forgotten.distinct()
    return ids.withColumn("is_forgotten", F.lit(True))


def _twice(received: DataFrame) -> DataFrame:
    """Handled more than once by one endpoint of one service."""
    return (
        received.where("outcome = 'handled'")
        .groupBy("id", "service", "address")
        .agg(
            *(F.first(name).alias(name) for name in ("message_type", "source")),
            F.min("sent_at").alias("sent_at"),
            F.max("finished_at").alias("finished_at"),
            F.count("*").cast("int").alias("copies"),
            F.array_sort(F.collect_list(F.date_format("finished_at", "yyyy-MM-dd HH:mm:ss.SSSSSS"))).alias("times"),
        )
        .where("copies > 1")
        .withColumn("finding", F.lit("twice"))
        .withColumn("detail", F.concat(F.lit("handled at "), F.concat_ws(" and ", "times")))
        .select(*_COLUMNS)
    )


# ---------------------------------------------------------------- what needs no counterpart


def late(received: DataFrame, late_after: timedelta | None = None) -> DataFrame:
    """Handled after the deadline that its sender gave it, or so long after it was sent."""
    took = F.unix_micros("finished_at") - F.unix_micros("sent_at")
    is_slow = F.lit(False) if late_after is None else took > F.lit(int(late_after.total_seconds() * 1e6))
    return (
        received.where("outcome = 'handled'")
        .where(is_slow | F.coalesce(F.col("finished_at") > F.col("deliver_by"), F.lit(False)))
        .withColumn("finding", F.lit("late"))
        .withColumn("copies", F.lit(1))
        .withColumn("detail", F.format_string("handled %.3f s after it was sent", took / 1e6))
        .select(*_COLUMNS)
    )


# ---------------------------------------------------------------- edges

# Transports may carry times with less precision than the database keeps: the counterpart of a row just inside the
# edge must not be cut off.
_PRECISION: Final = timedelta(seconds=1)


def inside(rows: DataFrame, edges: Edges) -> DataFrame:
    """Limit rows by the time that both sides know: when the message was sent."""
    return rows.where(_within("sent_at", widened(edges)))


def widened(edges: Edges) -> Edges:
    since, until = edges.since and edges.since - _PRECISION, edges.until and edges.until + _PRECISION
    return replace(edges, since=since, until=until)


def _within(column: str, edges: Edges) -> Column:
    low = F.lit(True) if edges.since is None else F.col(column) >= F.lit(edges.since)
    high = F.lit(True) if edges.until is None else F.col(column) < F.lit(edges.until)
    return low & high


# A message came to its end between the times that both sides know. Of a service that was seen at as many places as it
# has addresses nothing is missing.
_IN_GAP: Final = "COALESCE(exists(gaps, gap -> finished_at >= gap.begin AND sent_at < gap.end), false)"
_IN_GAP_OF_RECEIVER: Final = """
COALESCE(exists(gaps, gap -> finished_at >= gap.begin AND sent_at < gap.end
    AND size(filter(COALESCE(places, array()), place -> place.service = gap.service))
        < size(array_distinct(transform(filter(gaps, each -> each.service = gap.service), each -> each.address)))
), false)
"""


# Messages sent before the history of an address begins. Where as many places have seen one as destinations may lead to
# the services of that address, nothing of it is missing there.
_BEFORE_A_HISTORY: Final = """
filter(ways, way -> sent_at < way.begin
    AND size(filter(COALESCE(places, array()), place -> array_contains(way.services, place.service)))
        < size(filter(ways, other -> arrays_overlap(other.services, way.services)))
)
"""
_BEGINNINGS: Final = """
array_join(array_sort(array_distinct(transform(too_early, way ->
    concat(way.database, ' begins at ', date_format(way.begin, 'yyyy-MM-dd HH:mm:ss'))))), ', of ')
"""


_MOMENT: Final = pa.timestamp("us", "UTC")
_GAP: Final = pa.struct({"service": pa.string(), "address": pa.string(), "begin": _MOMENT, "end": _MOMENT})
_SPAN_DDL: Final = (
    "{key} STRING, begin TIMESTAMP, end TIMESTAMP, "
    "gaps ARRAY<STRUCT<service: STRING, address: STRING, begin: TIMESTAMP, end: TIMESTAMP>>"
)


def _spans(spark: SparkSession, key: str, spans: Mapping[str, Mapping[str, Span]]) -> DataFrame:
    """Make a table of the overlap of the services' spans for each key, and all of their gaps."""
    rows = []
    for name, of_services in spans.items():
        whole = common(of_services.values())
        gaps = [
            {"service": service, "address": name, "begin": gap.begin, "end": gap.end}
            for service, span in of_services.items()
            for gap in span.gaps
        ]
        rows.append({key: name, "begin": whole.begin, "end": whole.until, "gaps": gaps})
    schema = pa.schema({key: pa.string(), "begin": _MOMENT, "end": _MOMENT, "gaps": pa.list_(_GAP)})
    # Out of tuples it would take a job of its own. Over Spark Connect an empty table has no schema that it is not told.
    return spark.createDataFrame(pa.Table.from_pylist(rows, schema), _SPAN_DDL.format(key=key))


_WAY: Final = pa.struct(
    {"address": pa.string(), "services": pa.list_(pa.string()), "begin": _MOMENT, "database": pa.string()}
)
_WAY_DDL: Final = (
    "address STRING, way STRUCT<address: STRING, services: ARRAY<STRING>, begin: TIMESTAMP, database: STRING>"
)


def _ways(spark: SparkSession, ways: Mapping[str, Mapping[str, Span]], edges: Edges) -> DataFrame:
    """Make a table of where each address leads to: its services, and the first of whose histories begins when."""
    rows = []
    for address, spans in ways.items():
        begin = of_any(spans.values()).begin
        first = next((service for service, span in spans.items() if span.begin == begin), None)
        way = {"services": list(spans), "begin": begin, "database": first and edges.first_databases.get(first, first)}
        rows.append({"address": address, "way": {"address": address, **way}})
    schema = pa.schema({"address": pa.string(), "way": _WAY})
    return spark.createDataFrame(pa.Table.from_pylist(rows, schema), _WAY_DDL)


def _was_recorded() -> Column:
    """Tell whether a sender's history reaches back to a message: what it sent before is out of the question."""
    return F.col("begin").isNull() | (F.col("sent_at") >= F.col("begin"))


def _finding(otherwise: Column, is_in_gap: Column, due: datetime | None = None) -> Column:
    is_overdue = F.lit(False) if due is None else F.col("finished_at") < F.lit(due)
    may_come = F.when(is_overdue, "overdue").otherwise("open")
    return F.when(_may_come(), may_come).when(is_in_gap, "unarchived").otherwise(otherwise)


def _explained(whose: str, beginnings: Column | None = None) -> Column:
    why = F.lit(f"; {whose} has a gap there")
    if beginnings is not None:
        why = F.when(beginnings == "", why).otherwise(F.concat(F.lit("; the history of "), beginnings))
    gap = F.concat("detail", why)
    end = F.concat("detail", F.lit(f"; {whose} stands still since before"))
    found = F.when(F.col("finding") == "unarchived", gap).when(F.col("finding") == "overdue", end)
    return found.otherwise(F.col("detail"))


def _may_come() -> Column:
    return F.coalesce(F.col("finished_at") >= F.col("end"), F.lit(False))


def _in_lost_life(places: str) -> Column:
    names = F.array_join(places, " ")
    return F.concat("detail", F.lit("; an end at "), names, F.lit(" is of a life that its database has lost"))


def _listed(intro: str, names: Column, otherwise: str) -> Column:
    return F.when(F.size(names) == 0, otherwise).otherwise(F.concat(F.lit(intro), F.array_join(names, " ")))
