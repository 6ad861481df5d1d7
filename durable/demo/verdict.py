"""The verdict: what the punctuality service has added up, against the data set itself, and how it came to that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime
from typing import Any, TypedDict, Unpack

from durable.demo.events import Event
from durable.demo.flights import data_folder
from durable.demo.latches import Latch
from durable.demo.observer import Observer
from durable.grammar import several

SUMS = """
SELECT carrier, sum(flights), sum(cancelled), sum(departure_minutes), sum(arrival_minutes)
FROM delays GROUP BY carrier
"""
ADDED = "SELECT flight_id, count(*) FROM added_flights GROUP BY flight_id"
OUTCOMES = """
SELECT count(*) FILTER (WHERE outcome IN ('sent', 'handled')), coalesce(sum(interruptions), 0),
    coalesce(sum(attempts), 0)
FROM durable.envelope_history WHERE side = %s
"""
FIRST = "SELECT min(recorded_at) FROM recorded_flights"
LAST = "SELECT max(finished_at) FROM durable.envelope_history WHERE side = 'incoming'"
LATENCY = """
SELECT coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds), 0),
    coalesce(percentile_cont(0.99) WITHIN GROUP (ORDER BY seconds), 0)
FROM (SELECT CAST(extract(epoch FROM finished_at - sent_at) AS double precision) AS seconds
    FROM durable.envelope_history WHERE side = 'incoming' AND outcome = 'handled') AS handled
"""


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of a carrier. Minutes are summed over flights with such a delay; early flights count below zero."""

    flights: int
    cancelled: int
    departure_minutes: int
    arrival_minutes: int


Sums = Mapping[str, Totals]
"""Totals by carrier."""


def expected_totals(flights: int, day: date | None = None) -> dict[str, Totals]:
    """Return the totals of the data set, of one day or all, by pandas and without any code of the services."""
    import pandas

    columns = ["carrier", "dep_delay", "arr_delay", "year", "month", "day"]
    table = pandas.read_csv(data_folder() / "flights.csv.zip", usecols=columns.__contains__, nrows=flights)
    if day is not None:
        table = table[(table.year == day.year) & (table.month == day.month) & (table.day == day.day)]
    by_carrier: Any = table.groupby("carrier")
    return {
        carrier: Totals(
            flights=len(group),
            cancelled=int(group.dep_delay.isna().sum()),
            departure_minutes=int(group.dep_delay.sum()),
            arrival_minutes=int(group.arr_delay.sum()),
        )
        for carrier, group in by_carrier
    }


def added_totals(observer: Observer) -> dict[str, Totals]:
    """Return the totals in the tables of the punctuality service."""
    return {carrier: Totals(*map(int, sums)) for carrier, *sums in observer.rows("punctuality", SUMS)}


def differences(ours: Sums, expected: Sums) -> list[str]:
    """A line for each number that is not what it should be."""
    nothing = Totals(0, 0, 0, 0)
    found = []
    for carrier in sorted({*ours, *expected}):
        have, want = asdict(ours.get(carrier, nothing)), asdict(expected.get(carrier, nothing))
        found += [
            f"{carrier}: {name.replace('_', ' ')} {have[name]}, should be {want[name]}"
            for name in want
            if have[name] != want[name]
        ]
    return found


@dataclass(frozen=True, slots=True)
class PauseFacts:
    """A node that was paused: `owned` messages were in its hands, `finished_late` of them it finished all the same
    after it was struck off, which must not be."""

    node_id: int
    owned: int
    dormant_after_seconds: float
    seconds: float
    finished_late: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of the demo at its end."""

    transport: str
    flights: int
    seed: int
    ours: Sums
    expected: Sums
    lost: Sequence[int]
    """Ids of flights that were not added up."""
    twice: Sequence[int]
    """Ids of flights that were added up more than once."""
    sent: int
    handled: int
    duplicates_refused_at_least: int
    """By the counts that the receiving nodes write down: what a killed one counted in its last 0.2 s is missing."""
    recovered_outgoing: int
    recovered_incoming: int
    """The number of take-overs of envelopes from a dead or silent node, by the history of each side."""
    failed_sends: int
    leases_lost_at_least: int
    latches: int
    """The total by the same counts."""
    latched: Sequence[Latch]
    """What was seen in the databases of it: latches of moments only may be missing."""
    kills: Mapping[str, int]
    in_hand: Mapping[str, int]
    """Messages that the nodes had in hand when they were killed or paused, by service: so many were to be recovered."""
    pauses: Sequence[PauseFacts]
    broker_away_seconds: Sequence[float]
    """The time for which the broker was away at each kill; empty without a broker."""
    events: Sequence[Event]
    began: datetime
    """The time at which the first flight was recorded."""
    seconds: float
    p50_seconds: float
    p99_seconds: float

    @property
    def differences(self) -> list[str]:
        found = differences(self.ours, self.expected)
        if self.lost:
            found.append(f"{several(len(self.lost), 'flights', 'were')} lost: {_some(self.lost)}")
        if self.twice:
            found.append(f"{several(len(self.twice), 'flights', 'were')} added twice: {_some(self.twice)}")
        for done, count in (("sent", self.sent), ("handled", self.handled)):
            if count != self.flights:
                found.append(f"{count} messages are {done} by the history, should be {self.flights}")
        for service, recovered in (("airline", self.recovered_outgoing), ("punctuality", self.recovered_incoming)):
            if recovered < self.in_hand[service]:
                found.append(f"{recovered} messages of {service} were taken over, should be {self.in_hand[service]}")
        for pause in self.pauses:
            if pause.finished_late:
                found.append(f"node {pause.node_id} finished {pause.finished_late} messages that it had lost")
        return found


class Told(TypedDict):
    """Facts that the supervisor knows of a run."""

    transport: str
    flights: int
    seed: int
    kills: Mapping[str, int]
    in_hand: Mapping[str, int]
    pauses: Sequence[PauseFacts]
    broker_away_seconds: Sequence[float]
    latched: Sequence[Latch]
    events: Sequence[Event]


def gather(observer: Observer, counts: Mapping[str, int], **told: Unpack[Told]) -> Evidence:
    """Read the databases once nothing is under way any more."""
    times_added: dict[int, int] = dict(observer.rows("punctuality", ADDED))
    sent, recovered_outgoing, failed_sends = map(int, observer.rows("airline", OUTCOMES, "outgoing")[0])
    handled, recovered_incoming, _ = map(int, observer.rows("punctuality", OUTCOMES, "incoming")[0])
    first, last = observer.value("airline", FIRST), observer.value("punctuality", LAST)
    p50, p99 = observer.rows("punctuality", LATENCY)[0]
    return Evidence(
        **told,
        ours=added_totals(observer),
        expected=expected_totals(told["flights"]),
        lost=[flight for flight in range(told["flights"]) if flight not in times_added],
        twice=sorted(flight for flight, times in times_added.items() if times > 1),
        sent=sent,
        handled=handled,
        duplicates_refused_at_least=counts.get("duplicate", 0),
        recovered_outgoing=recovered_outgoing,
        recovered_incoming=recovered_incoming,
        failed_sends=failed_sends,
        leases_lost_at_least=counts.get("lease_lost", 0),
        latches=counts.get("latched", 0),
        began=first,
        seconds=(last - first).total_seconds(),
        p50_seconds=float(p50),
        p99_seconds=float(p99),
    )


def _some(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:10])) + (", ..." if len(ids) > 10 else "")
