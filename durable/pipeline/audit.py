"""The audit: the senders' lakes against the receivers', and what it found.

    lakes ──> totals ──> edges: what can be judged ──> ledger: suspicious ids ──> their rows ──> Judge ──> Verdict

It fails when anything is lost, undone or was handled twice, or is open because an archive stands still. What is
forgotten, alien or late is shown, and so is what is open otherwise, and what cannot be judged because an archive has a
gap there, or begins later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias
from uuid import UUID

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from durable.arguments import refuse_empty_period
from durable.envelope import unix_ms
from durable.errors import InvalidSetting
from durable.pipeline.progress import Phases, silent
from durable.pipeline.session import needs_spark

with needs_spark():
    from pyspark import StorageLevel

from durable.pipeline import ledger, lost_lives, many_suspects, places, readdressed
from durable.pipeline.erasures import recorded
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import LakeTable, Whose
from durable.pipeline.matching import BY_AGE, FINDINGS, FOUND, LOST, Edges, Judge
from durable.pipeline.spans import Span, common, joint, of_any, settled
from durable.pipeline.spellings import absolute
from durable.pipeline.uses import DEDUPE_WINDOW, PRECISION
from durable.storage.days import within_reach

pc: Any = pyarrow.compute  # its functions are made at run time, and no type checker knows them

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_Owner: TypeAlias = tuple[str, str | None]
"""A service and one of its databases: rows of the first version name none."""

_CLOCK_SKEW: Final = timedelta(days=1)  # by which a row may be filed under an earlier day than its message was sent
_FEW: Final = 100_000  # rows that one process looks at
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


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
    open fails. `lost_databases`: those that exist no more, and hold no end back. `dedupe_window`: that of the services,
    which tells the messages of one business key apart. Raises InvalidSetting for a period without any time.
    """

    since: datetime | None = None
    until: datetime | None = None
    settle: timedelta = timedelta(minutes=15)
    archived_until: datetime | None = None
    late_after: timedelta | None = None
    overdue_after: timedelta = timedelta(days=1)
    lost_databases: Collection[str] = ()
    dedupe_window: timedelta = DEDUPE_WINDOW
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
    case = _Case.of(ledger.on(spark), senders, receivers, question)
    phase("matching ids")
    rows = case.few_rows(_FEW)
    phase("looking closer at those that do not match")
    if rows is not None:
        return case.verdict(*_told(case.judged(rows), question.example_count, out))
    found = many_suspects.findings(
        spark, senders, receivers, case.since, case.edges, case.may_be_late, case.judge
    ).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        if out is not None:
            found.write.parquet(out if "://" in out else f"file://{absolute(out)}")
        return case.verdict(*many_suspects.told(found, question.example_count))
    finally:
        found.unpersist()


def audit_here(
    senders: Sequence[Lake], receivers: Sequence[Lake], question: Question, *, out: str | None = None
) -> Verdict:
    """The same in this process, for lakes with few rows."""
    case = _Case.of(ledger.here, senders, receivers, question)
    rows = case.few_rows(None)
    assert rows is not None, "all rows are few"
    return case.verdict(*_told(case.judged(rows), question.example_count, out))


def _told(found: pa.Table, example_count: int, out: str | None) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return how many there are of each kind, and the oldest of each. With `out`, all are written there."""
    if out is not None:
        folder = out.rstrip("/") if "://" in out else absolute(out)
        if places.names(folder, ""):
            raise InvalidSetting(f"--out: {out} is there already; name a new folder")
        with places.created(folder, "findings.parquet") as stream:
            pq.write_table(found, stream, compression="zstd")
    counts = {row["values"]: row["counts"] for row in found["finding"].value_counts().to_pylist()}
    oldest = found.sort_by([(name, "ascending") for name in BY_AGE])
    of_each = (oldest.filter(pc.equal(oldest["finding"], kind)).slice(0, example_count) for kind in counts)
    return counts, [row for rows in of_each for row in rows.to_pylist()]


@dataclass(frozen=True, slots=True)
class _Case:
    """Lakes, the question that is asked of them, and the part of it that they can answer."""

    tasks: ledger.Tasks
    senders: Sequence[Lake]
    receivers: Sequence[Lake]
    question: Question
    sent: Sequence[ledger.Source]
    received: Sequence[ledger.Source]
    counted: Sequence[Mapping[str, Any]]
    sides: _Sides
    edges: Edges

    @classmethod
    def of(cls, tasks: ledger.Tasks, senders: Sequence[Lake], receivers: Sequence[Lake], question: Question) -> Self:
        """Count the rows of each side. Raises InvalidSetting for an empty lake."""
        sent, received, counted, sides = _surveyed(tasks, senders, receivers, question)
        return cls(tasks, senders, receivers, question, sent, received, counted, sides, sides.edges)

    @property
    def since(self) -> date | None:
        return _first_day(self.question)

    @property
    def judge(self) -> Judge:
        return Judge(self.edges, self.question.late_after, self.question.dedupe_window)

    @property
    def may_be_late(self) -> list[ledger.Wanted]:
        return ledger.possibly_late(self.received, self.edges, self.question.late_after)

    def few_rows(self, most: int | None) -> pa.Table | None:
        """Read all rows that need a closer look, as ROWS; None when they are more than so many, or of more ids."""
        lost = self._lost_keys(self.since)
        ids = ledger.suspects(self.tasks, [*self.sent, *self.received], self.edges, most)
        if ids is None or (most is not None and len(lost) > most):
            return None
        letters = ledger.sources(self.receivers, "incoming", table="dead_letters")
        suspects = {*ids, *lost["id"].to_pylist()}
        wanted = ledger.of_ids(self.sent, self.received, letters, [*suspects])
        rows = ledger.rows(self.tasks, [*wanted, *self.may_be_late], most)
        return None if rows is None else self._with_older(pa.concat_tables([rows, lost]), most)

    def _with_older(self, rows: pa.Table, most: int | None) -> pa.Table | None:
        """Add what lies before the days of the period to the rows of ids that are found without it: a message that is
        published again may have been sent, and have come to its end, long before. So may the first message of a
        business key, which tells where its use ends. None when this is too much.
        """
        found = {} if self.since is None else _ids_by_time(self.judged(rows)) | _keys_used_again(rows)
        if self.since is None or not found:
            return rows
        first = None if None in found.values() else min(each for each in found.values() if each is not None)
        if first is not None and first >= _milliseconds(self.since):
            return rows
        begin = None if first is None else _EPOCH.date() + timedelta(milliseconds=first)
        sent, received = (
            ledger.sources(lakes, side, begin, self.since)
            for lakes, side in ((self.senders, "outgoing"), (self.receivers, "incoming"))
        )
        older = ledger.rows(self.tasks, ledger.of_ids(sent, received, [], [*found]), most)
        lost = self._lost_keys(None)
        known = lost.filter(pc.is_in(lost["id"], pa.array([*found], pa.binary())))
        return None if older is None else pa.concat_tables([rows, older, known])

    def _lost_keys(self, since: date | None) -> pa.Table:
        """The keys of lost lives, as ROWS: each of their ids needs a closer look."""
        lakes = [*self.senders, *self.receivers]
        keys = (ledger.in_role(role, lost_lives.keys(lakes, table, since)) for table, role in LOST.items())
        return pa.concat_tables(keys).filter(pc.field("id").is_valid())

    def judged(self, rows: pa.Table) -> pa.Table:
        found = self.judge(rows.sort_by("id").to_batches())
        return pa.Table.from_batches(found, FOUND)

    def verdict(self, counts: Mapping[str, int], examples: Sequence[Mapping[str, Any]]) -> Verdict:
        edges = self.edges
        return Verdict(
            edges.since,
            common(edges.senders.values()).until,
            common(edges.receivers.values()).until,
            self.sides.shown(),
            self.counted,
            {kind: counts.get(kind, 0) for kind in FINDINGS},
            sorted(examples, key=_by_kind_and_age),
            _erased([*self.senders, *self.receivers]),
        )


def _surveyed(
    tasks: ledger.Tasks, senders: Sequence[Lake], receivers: Sequence[Lake], question: Question
) -> tuple[list[ledger.Source], list[ledger.Source], list[dict[str, Any]], _Sides]:
    """Return the sources of each side, with their sizes, and the part of them that can be judged."""
    for lake in (*senders, *receivers):
        lake.refuse_gone("history")
        if not (lake.files("history") or lake.owners("history")):
            raise InvalidSetting(f"lake {lake.url}: no history; fill it with durable-agent pipeline archive")
    for lake in receivers:
        lake.refuse_gone("dead_letters")  # they are ends
    since = _first_day(question)
    sent, received = ledger.sources(senders, "outgoing", since), ledger.sources(receivers, "incoming", since)
    counted = ledger.counted(tasks, [*sent, *received])
    sides = _Sides(
        senders=_histories(senders, counted, ["history"], question),
        receivers=_histories(receivers, counted, ["history", "dead_letters"], question),
        routes=ledger.routes(tasks, sent, received),
        question=question,
        replays=_replays(senders),
    )
    sides.check_lost_databases()
    return sent, received, counted, sides


def _replays(senders: Sequence[Lake]) -> dict[tuple[str, str | None, str], list[datetime]]:
    found: defaultdict[tuple[str, str | None, str], list[datetime]] = defaultdict(list)
    for each in readdressed.noted(senders):
        found[each.service, each.database, each.destination].append(each.began_at)
    return dict(found)


def _first_day(question: Question) -> date | None:
    return question.since and (question.since - _CLOCK_SKEW).date()


def _by_kind_and_age(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return FINDINGS.index(row["finding"]), row["sent_at"], *(str(row[name]) for name in BY_AGE[1:])


def _ids_by_time(found: pa.Table) -> dict[bytes, int | None]:
    """Return the ids that older rows may clear, and before which time, in milliseconds since 1970, none of them can
    lie: an id has it inside, unless it is a business key.
    """
    ids = (UUID(text) for text in found.filter(pc.not_equal(found["finding"], "late"))["id"].to_pylist())
    skew = _CLOCK_SKEW // _MILLISECOND
    return {each.bytes: None if (made := unix_ms(each)) is None else max(made - skew, 0) for each in ids}


def _keys_used_again(rows: pa.Table) -> dict[bytes, int | None]:
    """Return the business keys under which something was sent at several times."""
    each = rows.group_by("id").aggregate([("sent_at", "min"), ("sent_at", "max")])
    took = pc.subtract(each["sent_at_max"], each["sent_at_min"])
    ids = each.filter(pc.greater(took, pa.scalar(PRECISION, pa.duration("us"))))["id"].to_pylist()
    return {id_: None for id_ in ids if unix_ms(UUID(bytes=id_)) is None}


def _milliseconds(day: date) -> int:
    return (day - _EPOCH.date()) // _MILLISECOND


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


Databases: TypeAlias = Mapping[str | None, Span]
"""The spans of a service's databases that can be judged, by their names; older versions named none."""


@dataclass(frozen=True, slots=True)
class _Sides:
    """Histories of the services on either side."""

    senders: Mapping[str, Databases]
    receivers: Mapping[str, Databases]
    routes: Mapping[str, Collection[str]]
    question: Question
    replays: Mapping[tuple[str, str | None, str], Sequence[datetime]]

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
            replays=self.replays,
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
