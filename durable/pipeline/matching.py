"""Matching of sent and received messages: all rows of an id in, what is found of it out. Plain Python, no Spark.

                               outgoing rows of the senders          incoming rows of the receivers
    every row                         └────────────> ledger <────────────┘       summed up by id
    the few ids that do not balance                    │
    their rows once more, sorted by id                 └─> Judge ─> lost · undone · open · unarchived · alien · ...

A delivery is an id and a destination; a receipt is an id, a service and an endpoint. Which destination leads to which
endpoint is known to nobody but the network, so an id balances when it has as many receipts as deliveries: an event
that went to two destinations must be seen at two places. What it came to there is no loss: handled, dead-lettered and
expired are all ends, and so is a quarantined dead letter, which has no row of history.

    no row of history       a duplicate that the receiver recognised; what still waits in an outbox or an inbox
    only an incoming row    a local message, which is its sender's own
    several rows            a dead letter that was replayed: `dead-lettered`, then `handled`

The id of a business key is of several messages, one for each use of the key (durable.pipeline.uses): each is judged
alone, by the rows that were sent in it.

A row of a life that its database has lost is no delivery and no receipt: what it tells of is undone there. It says only
why a counterpart is missing, `undone` at the receiver, or `forgotten` by the sender.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple
from uuid import UUID

import numpy as np
import pyarrow as pa

from durable.envelope import unix_ms
from durable.messages.routing import LOCAL
from durable.pipeline.lake_tables import LakeTable
from durable.pipeline.spans import NO_SPAN, Span, common, of_any
from durable.pipeline.uses import DEDUPE_WINDOW, PRECISION, beginnings, use_of

FINDINGS: Final = ("lost", "undone", "twice", "overdue", "forgotten", "alien", "late", "open", "unarchived")

SENT, RECEIVED, LETTER = "sent", "received", "letter"
"""Roles of rows: outgoing of a sender, incoming of a receiver, incoming dead letter of a receiver."""
MAY_BE_LATE: Final = "may be late"
"""Role of a row of a receiver of which nothing else is asked."""
LOST: Final[Mapping[LakeTable, str]] = {"history": "lost row", "dead_letters": "lost letter"}
"""Roles of keys, of the rows of each table that are of a life that their database has lost."""

_MOMENT: Final = pa.timestamp("us", "UTC")
ROWS: Final = pa.schema(
    [
        ("role", pa.string()),
        ("id", pa.binary()),
        *((name, pa.string()) for name in ("side", "database")),
        ("xid", pa.int64()),
        *((name, pa.string()) for name in ("message_type", "source", "service", "outcome", "address")),
        *((name, _MOMENT) for name in ("sent_at", "finished_at", "deliver_by")),
        ("letter_id", pa.int64()),
        ("failed_at", _MOMENT),
    ]
)
"""What a Judge is shown: the columns of the lake's tables that it needs, and the role of each row."""

FOUND: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("finding", "id", "message_type", "source", "service", "address")),
        *((name, _MOMENT) for name in ("sent_at", "finished_at")),
        ("copies", pa.int32()),
        ("detail", pa.string()),
    ]
)
BY_AGE: Final = ("sent_at", "id", "service", "address")
"""Columns by which findings of one kind are sorted, so that no two are level."""
_AT_ONCE: Final = 10_000  # findings of a batch that leaves a worker
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


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
    replays: Mapping[tuple[str, str | None, str], Collection[datetime]] = field(default_factory=dict)
    """When replays under the same ids to a destination began, by the service and the database that sent them."""

    def of_address(self, address: str) -> dict[str, Span]:
        """The spans of the services that receive what is sent to an address."""
        names = self.routes.get(address) or self.receivers
        return {name: self.receivers.get(name, NO_SPAN) for name in sorted(names)}

    def widened(self) -> Edges:
        """Let in the counterparts of rows just inside the limits."""
        since, until = self.since and self.since - PRECISION, self.until and self.until + PRECISION
        return replace(self, since=since, until=until)

    def of_suspects(self) -> Edges:
        """Return the limits within which the rows of an id balance, unless there is a finding that is asked for.

        Of such a finding no row lies before `since`; but what makes it one may lie after `until`.
        """
        return replace(self.widened(), until=None)


class Row(NamedTuple):
    """Row, letter or key, with the columns of ROWS. Times are microseconds since 1970."""

    role: str
    id: bytes
    side: str
    database: str | None
    xid: int | None
    message_type: str | None
    source: str | None
    service: str
    outcome: str | None
    address: str | None
    sent_at: int
    finished_at: int
    deliver_by: int | None
    letter_id: int | None
    failed_at: int | None

    @property
    def key(self) -> tuple[object, ...]:
        """Return what the lists of lost lives know this row by, among those of its id."""
        if self.role in (LETTER, LOST["dead_letters"]):
            return self.service, self.letter_id, self.failed_at
        return self.service, self.side, self.address, self.outcome, self.finished_at

    @property
    def identity(self) -> tuple[object, ...]:
        """Return what the copies of this row in several lakes have in common."""
        return self.role, self.database, self.xid, self.key

    @property
    def place(self) -> str:
        return " ".join(filter(None, (self.service, self.address)))


class Finding(NamedTuple):
    """Finding, with the columns of FOUND. Times are microseconds since 1970."""

    finding: str
    id: str
    message_type: str | None
    source: str | None
    service: str
    address: str | None
    sent_at: int
    finished_at: int
    copies: int
    detail: str


@dataclass(frozen=True, slots=True)
class _Gap:
    service: str
    begin: int
    end: int

    def may_hold(self, sent_at: int, finished_at: int) -> bool:
        """Tell whether a message came to its end there: it did between the times that both sides know."""
        return finished_at >= self.begin and sent_at < self.end


@dataclass(frozen=True, slots=True)
class _Way:
    """Services that an address, or a source, leads to, and the times that they can tell of."""

    services: frozenset[str]
    begin: int | None
    end: int | None
    gaps: tuple[_Gap, ...] = ()
    begins_with: str | None = None
    """The database with which the first of their histories begins."""

    @classmethod
    def to(cls, spans: Mapping[str, Span], first_databases: Mapping[str, str]) -> _Way:
        begin = of_any(spans.values()).begin
        first = next((service for service, span in spans.items() if span.begin == begin), None)
        return cls(
            frozenset(spans),
            _microseconds(begin),
            _microseconds(common(spans.values()).until),
            tuple(
                _Gap(service, _number(gap.begin), _number(gap.end))
                for service, span in spans.items()
                for gap in span.gaps
            ),
            first and first_databases.get(first, first),
        )


class Judge:
    """Findings of each id among all of its rows: an id whose rows are not all there is judged by what is.

    `late_after`: so long after it was sent a message is late, whatever its deadline. `dedupe_window`: that of the
    services. Travels to tasks.
    """

    def __init__(
        self, edges: Edges, late_after: timedelta | None = None, dedupe_window: timedelta = DEDUPE_WINDOW
    ) -> None:
        self._edges = edges
        self._dedupe_window = dedupe_window // timedelta(microseconds=1)
        self._late_after = None if late_after is None else late_after // timedelta(microseconds=1)
        self._since, self._until = _microseconds(edges.since), _microseconds(edges.until)
        self._due = _microseconds(edges.due)
        self._replays = {key: [*map(_number, moments)] for key, moments in edges.replays.items()}
        self._ways: dict[str, _Way] = {}
        self._sources = {name: _Way.to({name: span}, {}) for name, span in edges.senders.items()}

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Turn batches of ROWS, sorted by id, into batches of FOUND."""
        found: list[Finding] = []
        for _, rows in groupby(_rows(batches), key=attrgetter("id")):
            found += self.findings(rows)
            if len(found) >= _AT_ONCE:
                yield _batch(found)
                found.clear()
        yield _batch(found)

    def findings(self, rows: Iterable[Row]) -> list[Finding]:
        """Judge all rows of one id. A finding is of the time when the first of its rows was sent, and asked for if that
        lies inside; so that of several periods it belongs to one.
        """
        return [found for found in self._findings([*rows]) if self._is_asked_for(found.sent_at)]

    def _is_asked_for(self, sent_at: int) -> bool:
        return (self._since is None or sent_at >= self._since) and (self._until is None or sent_at < self._until)

    def _findings(self, rows: Sequence[Row]) -> Iterator[Finding]:
        lost_keys = {row.key for row in rows if row.role in LOST.values()}
        there = [row for row in {row.identity: row for row in rows}.values() if row.role not in LOST.values()]
        for of_use in self._uses(sorted(there, key=_age)):
            yield from self._findings_of_use(of_use, lost_keys)

    def _uses(self, rows: Sequence[Row]) -> Sequence[Sequence[Row]]:
        """Part the rows of one id by the uses of its key: those of an id that carries its time are of one message."""
        if not rows or unix_ms(UUID(bytes=rows[0].id)) is not None:
            return [rows]
        begins = beginnings((row.sent_at for row in rows if row.sent_at), self._dedupe_window)
        uses: list[list[Row]] = [[] for _ in begins or [0]]
        for row in rows:
            uses[use_of(begins, row.sent_at or row.failed_at or 0)].append(row)
        return uses

    def _findings_of_use(self, rows: Sequence[Row], lost_keys: Collection[object]) -> Iterator[Finding]:
        living: defaultdict[str, list[Row]] = defaultdict(list)
        undone: defaultdict[str, list[Row]] = defaultdict(list)
        for row in rows:
            (undone if row.key in lost_keys else living)[row.role].append(row)
        ends, undone_ends = ([*_remote(of[RECEIVED]), *_remote(of[LETTER])] for of in (living, undone))
        yield from self._missing(living[SENT], ends, undone_ends)
        if not living[SENT]:
            yield from self._alien(_remote(living[RECEIVED]), is_forgotten=bool(undone[SENT]))
        yield from _twice(living[RECEIVED])
        yield from self._late(living[MAY_BE_LATE])

    def _missing(self, sent: Sequence[Row], ends: Sequence[Row], undone_ends: Sequence[Row]) -> Iterator[Finding]:
        """Sent to more places than it was seen at, but for those of replays under its id, which ask for no other copy;
        open while the last copy may still be on its way to an end, overdue when a receiver's history has stood still
        since, unarchived where its end may lie in a gap of one or before it begins, undone where all others had an end
        in a lost life.
        """
        deliveries = [row for row in sent if row.outcome == "sent"]
        destinations = _addresses(deliveries)
        first_destinations = _addresses(row for row in deliveries if not self._is_replayed(row)) or destinations[:1]
        seen = sorted({row.place for row in ends})
        copies = len(first_destinations) - len(seen)
        if copies <= 0:
            return
        sent_at, acknowledged = min(row.sent_at for row in deliveries), max(row.finished_at for row in deliveries)
        undone = sorted({row.place for row in undone_ends} - {*seen})
        ways, first_ways = ([*map(self._way, each)] for each in (destinations, first_destinations))
        detail = f"seen only at {' '.join(seen)}" if seen else "seen nowhere"
        if undone:
            detail += f"; an end at {' '.join(undone)} is of a life that its database has lost"
        finding = "undone" if len(undone) >= copies else "lost"
        places = Counter({(row.service, row.address): row.service for row in ends}.values())
        too_early = [
            way
            for way in first_ways
            if way.begin is not None and sent_at < way.begin and _lacks_one(way.services, places, first_ways)
        ]
        if any(way.end is not None and acknowledged >= way.end for way in ways):
            finding = "open"
            if self._due is not None and acknowledged < self._due:
                finding, detail = "overdue", f"{detail}; a receiver's history stands still since before"
        elif too_early:
            begins = {f"{way.begins_with} begins at {_text(way.begin or 0)[:19]}" for way in too_early}
            finding, detail = "unarchived", f"{detail}; the history of {', of '.join(sorted(begins))}"
        elif any(
            gap.may_hold(sent_at, acknowledged) and _lacks_one({gap.service}, places, ways, len(first_ways))
            for way in ways
            for gap in way.gaps
        ):
            finding, detail = "unarchived", f"{detail}; a receiver's history has a gap there"
        first = deliveries[0]
        yield Finding(
            finding,
            _uuid(first.id),
            first.message_type,
            first.source,
            first.service,
            " ".join(destinations),
            sent_at,
            acknowledged,
            copies,
            detail,
        )

    def _is_replayed(self, row: Row) -> bool:
        """Tell whether a replay under its id sent a message there: it keeps the time of the first sending."""
        began = self._replays.get((row.service, row.database, row.address or ""), ())
        return any(row.sent_at < each <= row.finished_at for each in began)

    def _alien(self, remote: Sequence[Row], *, is_forgotten: bool) -> Iterator[Finding]:
        """Received, and no sender has a row of it, whatever its outcome; open while that row may still be archived,
        unarchived where it may lie in a gap of the sender's history, forgotten where a lost life of its sender has it.
        """
        for rows in _by_place(remote):
            first = min(rows, key=attrgetter("finished_at"))
            sent_at, finished_at = min(row.sent_at for row in rows), first.finished_at
            way = self._sources.get(first.source or "", _Way(frozenset(), None, None))
            if way.begin is not None and sent_at < way.begin:
                continue  # what its sender sent before its history begins is out of the question
            finding, detail = "alien", "its source is none of the senders"
            if is_forgotten:
                finding, detail = "forgotten", "its sender's database has lost the life that sent it"
            elif first.source in self._sources:
                detail = "its source has no record of it"
            if way.end is not None and finished_at >= way.end:
                finding = "open"
            elif any(gap.may_hold(sent_at, finished_at) for gap in way.gaps):
                finding, detail = "unarchived", f"{detail}; its source's history has a gap there"
            yield _received(finding, first, sent_at, finished_at, 1, detail)

    def _late(self, rows: Sequence[Row]) -> Iterator[Finding]:
        """Handled after the deadline that its sender gave it, or so long after it was sent."""
        for row in rows:
            took = row.finished_at - row.sent_at
            is_late = row.deliver_by is not None and row.finished_at > row.deliver_by
            is_slow = self._late_after is not None and took > self._late_after
            if row.outcome == "handled" and (is_late or is_slow):
                detail = f"handled {took / 1e6:.3f} s after it was sent"
                yield _received("late", row, row.sent_at, row.finished_at, 1, detail)

    def _way(self, address: str) -> _Way:
        if address not in self._ways:
            self._ways[address] = _Way.to(self._edges.of_address(address), self._edges.first_databases)
        return self._ways[address]


def _lacks_one(
    services: Collection[str], places: Mapping[str, int], ways: Sequence[_Way], most: int | None = None
) -> bool:
    """Tell whether fewer places of these services have seen a message than destinations, or `most` of them, may lead
    there.
    """
    leading = [way for way in ways if not way.services.isdisjoint(services)][:most]
    return sum(places.get(service, 0) for service in services) < len(leading)


def _twice(received: Sequence[Row]) -> Iterator[Finding]:
    """Handled more than once by one endpoint of one service."""
    for rows in _by_place([row for row in received if row.outcome == "handled"]):
        if len(rows) > 1:
            times, sent_at = sorted(row.finished_at for row in rows), min(row.sent_at for row in rows)
            detail = f"handled at {' and '.join(map(_text, times))}"
            yield _received("twice", rows[0], sent_at, times[-1], len(rows), detail)


def _received(finding: str, row: Row, sent_at: int, finished_at: int, copies: int, detail: str) -> Finding:
    of = row.message_type, row.source, row.service, row.address
    return Finding(finding, _uuid(row.id), *of, sent_at, finished_at, copies, detail)


def _addresses(rows: Iterable[Row]) -> list[str]:
    return sorted({row.address for row in rows if row.address is not None})


def _age(row: Row) -> tuple[int, int, str]:
    return row.sent_at or 0, row.finished_at or 0, str(row)


def _remote(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.address != LOCAL]


def _by_place(rows: Iterable[Row]) -> Iterable[list[Row]]:
    found: defaultdict[object, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.service, row.address].append(row)
    return found.values()


# ---------------------------------------------------------------- values


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    for batch in batches:
        yield from map(Row._make, zip(*map(_values, batch.columns), strict=True))


def _values(column: pa.Array) -> list[object]:
    values: list[object] = (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_pylist()
    return values


def _batch(found: Sequence[Finding]) -> pa.RecordBatch:
    columns = zip(*found, strict=True) if found else [()] * len(FOUND)
    arrays = [pa.array(values, each.type) for values, each in zip(columns, FOUND, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=FOUND)


def _microseconds(moment: datetime | None) -> int | None:
    return None if moment is None else _number(moment)


def _number(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _text(microseconds: int) -> str:
    """Write a time as it is read by people. Not every time of Postgres is a datetime."""
    return str(np.datetime64(microseconds, "us")).replace("T", " ")


def _uuid(id_: bytes) -> str:
    return str(UUID(bytes=id_))
