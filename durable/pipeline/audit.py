"""The audit: the senders' lakes against the receivers', and what it found.

    lakes ──> totals ──> edges: what can be judged ──> ledger: suspicious ids ──> findings ──> Verdict

It fails when anything is lost, undone or was handled twice, or is open because an archive stands still. What is
forgotten, alien or late is shown, and so is what is open otherwise, and what cannot be judged because an archive has a
gap there, or begins later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from durable.arguments import refuse_empty_period
from durable.errors import InvalidSetting
from durable.pipeline.progress import Phases, silent
from durable.pipeline.session import needs_spark

with needs_spark():
    from pyspark import StorageLevel
    from pyspark.sql import DataFrame, Window
    from pyspark.sql import functions as F

from durable.pipeline import ledger, lost_lives
from durable.pipeline.erasures import recorded
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, LakeTable, Whose
from durable.pipeline.matching import (
    FINDINGS,
    Edges,
    History,
    Lost,
    apart,
    counting,
    findings,
    inside,
    of,
    once,
    unbalanced,
)
from durable.pipeline.rows import records
from durable.pipeline.spans import Span, common, joint, of_any, settled
from durable.pipeline.spellings import absolute
from durable.storage.days import within_reach

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_Owner: TypeAlias = tuple[str, str | None]
"""A service and one of its databases: rows of the first version name none."""

_CLOCK_SKEW: Final = timedelta(days=1)  # by which a row may be filed under an earlier day than its message was sent
_FEW: Final = 50_000  # ids that each task may be sent as a whole


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of an audit. `examples` are the oldest of each kind."""

    since: datetime | None
    sent_until: datetime | None
    received_until: datetime | None
    spans: Sequence[Mapping[str, Any]]
    """From when to when each service's history can be judged, but for its gaps; which of its databases begin later;
    which one holds its end back, and how long before the newest history it ends, where that is overdue."""
    totals: Sequence[Mapping[str, Any]]
    counts: Mapping[str, int]
    examples: Sequence[Mapping[str, Any]]
    erased: Sequence[Mapping[str, Any]] = ()
    """Erasures that the lakes record: content that is gone on purpose, of rows that are there and were judged."""

    @property
    def failed(self) -> bool:
        return any(self.counts[finding] > 0 for finding in ("lost", "undone", "twice", "overdue"))


@dataclass(frozen=True, slots=True)
class Question:
    """Question of an audit: its times and limits.

    `since`, `until`: by the time when messages were sent. `archived_until`: up to when every service was archived;
    without it, up to when the lake has every row of it. `settle`: how long before that something must have happened for
    a message to have come to its end. `overdue_after`: how long a history may end before the newest one until what is
    open fails. `lost_databases`: those that exist no more, and hold no end back. Raises InvalidSetting for a period
    without any time.
    """

    since: datetime | None = None
    until: datetime | None = None
    settle: timedelta = timedelta(minutes=15)
    archived_until: datetime | None = None
    late_after: timedelta | None = None
    overdue_after: timedelta = timedelta(days=1)
    lost_databases: Collection[str] = ()
    example_count: int = 10

    def __post_init__(self) -> None:
        for name in ("since", "until", "archived_until"):
            if (moment := getattr(self, name)) is not None:
                object.__setattr__(self, name, within_reach(moment))
        refuse_empty_period(self.since, self.until)


def audit(
    spark: SparkSession,
    senders: Sequence[Lake],
    receivers: Sequence[Lake],
    question: Question,
    *,
    out: str | None = None,
    phase: Phases = silent,
) -> Verdict:
    """Compare them. With `out`, every finding is written there as Parquet. Raises InvalidSetting for an empty lake."""
    phase("counting rows")
    since = _first_day(question)
    sent, received, counted, sides = _surveyed(ledger.on(spark), senders, receivers, question)
    edges, services = sides.edges, set(sides.senders)
    history = History(
        inside(_all(spark, senders, "history", since).where("side = 'outgoing'"), edges),
        inside(_all(spark, receivers, "history", since).where("side = 'incoming'"), edges),
        _all(spark, receivers, "dead_letters").where("side = 'incoming' AND id IS NOT NULL"),
        services,
    )
    lost = Lost(*(lost_lives.rows(spark, [*senders, *receivers], table) for table in SOURCES))
    phase("matching ids")
    with ExitStack() as stack:
        kept = partial(_kept, stack)
        in_slices = ledger.suspects(spark, [*sent, *received], edges, _FEW)
        suspects = unbalanced(history) if in_slices is None else in_slices
        suspects = kept(suspects if lost.ids is None else suspects.union(lost.ids).distinct())
        ids = [row["id"] for row in records(suspects.limit(_FEW + 1))]
        phase("looking closer at those that do not match")
        of_suspects: History | None = None
        if len(ids) > _FEW:
            of_suspects = apart(once(of(history, suspects)), lost)
        elif ids:  # their rows are read once, rather than joined once for each kind of finding, and lie together
            few_sent, few_received = (kept(ledger.rows(spark, side, ids).repartition(1)) for side in (sent, received))
            letters = kept(history.quarantined.join(F.broadcast(suspects), "id", "left_semi").repartition(1))
            of_suspects = apart(once(History(few_sent, few_received, letters, services)), lost)
        late = counting(ledger.possibly_late(spark, received, edges, question.late_after), lost)
        found = kept(findings(of_suspects, late, edges, question.late_after))
        counts = {row["finding"]: row["count"] for row in records(found.groupBy("finding").count())}
        if out is not None:
            found.write.parquet(out if "://" in out else f"file://{absolute(out)}")
        examples = _examples(found, counts, question.example_count)
    return _verdict([*senders, *receivers], sides, counted, counts, examples)


def audit_here(senders: Sequence[Lake], receivers: Sequence[Lake], question: Question) -> Verdict | None:
    """The same in this process, for lakes with few rows; None when something needs the closer look that audit() takes.

    The same tasks count and weigh the rows. A finding is defined once, in durable.pipeline.matching, and judged on
    Spark: so here is only found that there is none.
    """
    if lost_lives.are_named([*senders, *receivers], _first_day(question)):
        return None
    sent, received, counted, sides = _surveyed(ledger.here, senders, receivers, question)
    if not ledger.is_balanced(ledger.here, [*sent, *received], sides.edges, question.late_after):
        return None
    return _verdict([*senders, *receivers], sides, counted, {}, [])


def _surveyed(
    tasks: ledger.Tasks, senders: Sequence[Lake], receivers: Sequence[Lake], question: Question
) -> tuple[list[ledger.Source], list[ledger.Source], list[dict[str, Any]], _Sides]:
    """Return the sources of each side, with their sizes, and the part of them that can be judged."""
    for lake in (*senders, *receivers):
        if not (lake.files("history") or lake.owners("history")):
            raise InvalidSetting(f"lake {lake.url}: no history; fill it with durable-agent pipeline archive")
    since = _first_day(question)
    sent, received = ledger.sources(senders, "outgoing", since), ledger.sources(receivers, "incoming", since)
    counted = ledger.counted(tasks, [*sent, *received])
    sides = _Sides(
        senders=_histories(senders, counted, ["history"], question),
        receivers=_histories(receivers, counted, ["history", "dead_letters"], question),
        routes=ledger.routes(tasks, sent, received),
        question=question,
    )
    sides.check_lost_databases()
    return sent, received, counted, sides


def _first_day(question: Question) -> date | None:
    return question.since and (question.since - _CLOCK_SKEW).date()


def _verdict(
    lakes: Sequence[Lake],
    sides: _Sides,
    counted: Sequence[Mapping[str, Any]],
    counts: Mapping[str, int],
    examples: Sequence[Mapping[str, Any]],
) -> Verdict:
    edges = sides.edges
    return Verdict(
        edges.since,
        common(edges.senders.values()).until,
        common(edges.receivers.values()).until,
        sides.shown(),
        counted,
        {kind: counts.get(kind, 0) for kind in FINDINGS},
        examples,
        _erased(lakes),
    )


def _erased(lakes: Sequence[Lake]) -> list[dict[str, Any]]:
    return [
        {
            "lake": lake.url,
            "service": each.service,
            "erased_at": each.erased_at,
            "actor": each.actor,
            "reason": each.reason,
            "rows": each.history_rows + each.letter_rows,
        }
        for lake in {lake.url: lake for lake in lakes}.values()
        for each in recorded(lake)
    ]


def _kept(stack: ExitStack, rows: DataFrame) -> DataFrame:
    """Computed once, and let go of when the audit ends."""
    stack.callback(rows.unpersist)
    return rows.persist(StorageLevel.MEMORY_AND_DISK)


def _all(spark: SparkSession, lakes: Sequence[Lake], table: LakeTable, since: date | None = None) -> DataFrame:
    each = {lake.url: lake.read(spark, table, since).withColumn("lake", F.lit(lake.url)) for lake in lakes}
    return reduce(DataFrame.unionByName, each.values())


Databases: TypeAlias = Mapping[str | None, Span]
"""The spans of a service's databases that can be judged, by their names; older versions named none."""


@dataclass(frozen=True, slots=True)
class _Sides:
    """Histories of the services on either side."""

    senders: Mapping[str, Databases]
    receivers: Mapping[str, Databases]
    routes: Mapping[str, Collection[str]]
    question: Question

    @property
    def edges(self) -> Edges:
        newest = self._newest
        return Edges(
            since=self.question.since,
            until=self.question.until,
            senders={service: of_any(spans.values()) for service, spans in self.senders.items()},
            receivers={service: of_any(spans.values()) for service, spans in self.receivers.items()},
            due=newest and newest - self.question.overdue_after,
            routes=self.routes,
            first_databases={service: first for service, spans in self.receivers.items() if (first := _first(spans))},
        )

    @property
    def _newest(self) -> datetime | None:
        """The latest end of all histories: up to there the others could be judged, too."""
        ends = [span.until for _, _, spans in self._each() for span in spans.values()]
        return max((end for end in ends if end is not None), default=None)

    def shown(self) -> list[dict[str, Any]]:
        return [self._shown(side, service, spans) for side, service, spans in self._each()]

    def _shown(self, side: str, service: str, spans: Databases) -> dict[str, Any]:
        whole, newest = of_any(spans.values()), self._newest
        ends_first = [
            database for database, span in spans.items() if span.until is not None and span.until == whole.until
        ]
        behind = newest - whole.until if newest and whole.until else timedelta(0)
        return {
            "service": service,
            "side": side,
            "begin": whole.begin,
            "until": whole.until,
            "held_by": ends_first[0] if ends_first else None,
            "later": [
                {"database": database, "begin": span.begin}
                for database, span in spans.items()
                if span.begin is not None and span.begin != whole.begin
            ],
            "behind_seconds": behind.total_seconds() if behind > self.question.overdue_after else None,
            "gaps": [{"begin": gap.begin, "end": gap.end} for gap in whole.gaps],
        }

    def _each(self) -> Iterator[tuple[str, str, Databases]]:
        for side, services in (("outgoing", self.senders), ("incoming", self.receivers)):
            for service, spans in sorted(services.items()):
                yield side, service, spans

    def check_lost_databases(self) -> None:
        """Raise InvalidSetting for one that no lake names."""
        known = {database for _, _, spans in self._each() for database in spans}
        for name in self.question.lost_databases:
            if name not in known:
                raise InvalidSetting(f"--lost-database: no lake has rows of {name}; name one that the audit shows")


def _first(spans: Databases) -> str | None:
    """Return the database with which the history of a service begins; None where it has no known begin."""
    begin = of_any(spans.values()).begin
    return next((database for database, span in spans.items() if begin is not None and span.begin == begin), None)


def _histories(
    lakes: Sequence[Lake], counted: Sequence[Mapping[str, Any]], tables: Sequence[LakeTable], question: Question
) -> dict[str, dict[str | None, Span]]:
    """Return the spans that these lakes have whole of each database of each service, and of both tables where both have
    one. A database counts as soon as a lake knows it, with rows of the period or without: its rows may be yet to come.
    """
    firsts: dict[str, dict[_Owner, datetime]] = defaultdict(dict)
    for row in counted:
        url, owner = _owner(row)
        firsts[url][owner] = min(row["first"], firsts[url].get(owner, row["first"]))
    found: dict[_Owner, list[tuple[Span, datetime | None]]] = defaultdict(list)
    for url, lake in {lake.url: lake for lake in lakes}.items():
        known: set[_Owner] = {(whose.service, whose.database) for table in tables for whose in lake.owners(table)}
        for owner in sorted(known | firsts[url].keys(), key=str):
            found[owner].append((_span(lake, tables, *owner), firsts[url].get(owner)))
    services: dict[str, dict[str | None, Span]] = {}
    for (service, database), in_lakes in found.items():
        begins = [begin for span, first in in_lakes if (begin := span.begin or first)]
        span = joint(span for span, _ in in_lakes)._replace(begin=min(begins, default=None))
        until = None if database in question.lost_databases else question.archived_until or span.until
        services.setdefault(service, {})[database] = settled(span._replace(until=until), question.settle)
    return services


def _span(lake: Lake, tables: Sequence[LakeTable], service: str, database: str | None) -> Span:
    if database is None:
        return Span(until=lake.archived_at("history"))
    spans = [lake.span(table, Whose(service, database)) for table in tables if lake.exists(table)]
    return common(_ended(span, lake) for span in spans)


def _ended(span: Span, lake: Lake) -> Span:
    """End a span that tells no end: of one that begins nothing is known to be whole. Older versions noted neither."""
    return span._replace(until=span.until or span.begin or lake.archived_at("history"))


def _owner(row: Mapping[str, Any]) -> tuple[str, _Owner]:
    return row["lake"], (row["service"], row["database"])


def _examples(found: DataFrame, kinds: Collection[str], count: int) -> list[dict[str, Any]]:
    """The oldest of each kind."""
    if not kinds:
        return []
    age = Window.partitionBy("finding").orderBy("sent_at", "id")
    oldest = records(found.withColumn("age", F.row_number().over(age)).where(F.col("age") <= count))
    ordered = sorted(oldest, key=lambda row: (FINDINGS.index(row["finding"]), row["age"]))
    return [{name: value for name, value in row.items() if name != "age"} for row in ordered]
