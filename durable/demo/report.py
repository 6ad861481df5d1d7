"""The verdict: what the punctuality service has added up, against the data set itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from durable.demo.flights import carrier_names, data_folder
from durable.demo.observer import Observer

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
    """Of one carrier. Minutes are summed over the flights that have such a delay; early flights count below zero."""

    flights: int
    cancelled: int
    departure_minutes: int
    arrival_minutes: int


Sums = Mapping[str, Totals]
"""Totals by carrier."""


def expected_totals(flights: int) -> dict[str, Totals]:
    """From the data set, by pandas: nothing of what the services use is used here."""
    import pandas

    columns = ["carrier", "dep_delay", "arr_delay"]
    table = pandas.read_csv(data_folder() / "flights.csv.zip", usecols=columns, nrows=flights)
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
    """From the tables of the punctuality service."""
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
    """Everything that the demo can say for itself at the end."""

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
    duplicates_refused: int
    """By the counts that the receiving nodes write down; what a killed one counted in its last 0.2 s is missing."""
    recovered_outgoing: int
    recovered_incoming: int
    failed_sends: int
    leases_lost: int
    latches: int
    kills: Mapping[str, int]
    pauses: Sequence[PauseFacts]
    seconds: float
    p50_seconds: float
    p99_seconds: float

    @property
    def differences(self) -> list[str]:
        found = differences(self.ours, self.expected)
        if self.lost:
            found.append(f"{len(self.lost)} flights were lost: {_some(self.lost)}")
        if self.twice:
            found.append(f"{len(self.twice)} flights were added twice: {_some(self.twice)}")
        for pause in self.pauses:
            if pause.finished_late:
                found.append(f"node {pause.node_id} finished {pause.finished_late} messages after it was struck off")
        return found


def gather(
    observer: Observer,
    *,
    flights: int,
    seed: int,
    counts: Mapping[str, int],
    kills: Mapping[str, int],
    pauses: Sequence[PauseFacts],
) -> Evidence:
    """Read the databases once nothing is under way any more."""
    times_added: dict[int, int] = dict(observer.rows("punctuality", ADDED))
    sent, recovered_outgoing, failed_sends = map(int, observer.rows("airline", OUTCOMES, "outgoing")[0])
    handled, recovered_incoming, _ = map(int, observer.rows("punctuality", OUTCOMES, "incoming")[0])
    first, last = observer.value("airline", FIRST), observer.value("punctuality", LAST)
    p50, p99 = observer.rows("punctuality", LATENCY)[0]
    return Evidence(
        flights=flights,
        seed=seed,
        ours=added_totals(observer),
        expected=expected_totals(flights),
        lost=[flight for flight in range(flights) if flight not in times_added],
        twice=sorted(flight for flight, times in times_added.items() if times > 1),
        sent=sent,
        handled=handled,
        duplicates_refused=counts.get("duplicate", 0),
        recovered_outgoing=recovered_outgoing,
        recovered_incoming=recovered_incoming,
        failed_sends=failed_sends,
        leases_lost=counts.get("lease_lost", 0),
        latches=counts.get("latched", 0),
        kills=kills,
        pauses=pauses,
        seconds=(last - first).total_seconds(),
        p50_seconds=float(p50),
        p99_seconds=float(p99),
    )


def as_json(evidence: Evidence) -> str:
    found = evidence.differences
    document = {"equal": not found, "differences": found, **asdict(evidence)}
    document["messages_per_second"] = round(evidence.handled / evidence.seconds, 1)
    return json.dumps(document, indent=2)


def show(evidence: Evidence, console: Console) -> None:
    """The table of carriers, the summary, and the verdict."""
    console.print(_carriers(evidence))
    console.print(_summary(evidence))
    found = evidence.differences
    for difference in found:
        console.print(f"[red]{difference}[/red]")
    if found:
        console.print("[bold red]The totals differ.[/bold red]")
    else:
        console.print(
            f"[bold green]Equal to the minute: all {evidence.handled:,} messages were handled, each once.[/bold green]"
        )


def _carriers(evidence: Evidence) -> Table:
    table = Table(title="Delays by carrier, in minutes: added up from messages / computed from the data set")
    table.add_column("carrier")
    for name in ("flights", "cancelled", "departure", "arrival"):
        table.add_column(name, justify="right")
    table.add_column("equal", justify="center")
    names = carrier_names()
    for carrier in sorted({*evidence.ours, *evidence.expected}):
        ours, expected = evidence.ours.get(carrier), evidence.expected.get(carrier)
        table.add_row(f"{carrier} {names.get(carrier, '')}", *_cells(ours, expected), _mark(ours == expected))
    return table


def _cells(ours: Totals | None, expected: Totals | None) -> list[str]:
    def values(totals: Totals | None) -> list[str]:
        return [f"{value:,}" for value in asdict(totals).values()] if totals else ["none"] * 4

    return [f"{have} / {want}" for have, want in zip(values(ours), values(expected), strict=True)]


def _summary(evidence: Evidence) -> Table:
    table = Table(title="What happened", show_header=False)
    kills = " and ".join(f"{count} of {service}" for service, count in evidence.kills.items())
    rows = {
        "sent": f"{evidence.sent:,}",
        "handled": f"{evidence.handled:,}",
        "nodes killed": kills,
        "nodes paused": "; ".join(_pause_line(pause) for pause in evidence.pauses) or "none",
        "work taken over": f"{evidence.recovered_outgoing:,} envelopes of killed senders, "
        f"{evidence.recovered_incoming:,} messages of killed or paused receivers",
        "duplicates refused": f"at least {evidence.duplicates_refused:,}",
        "sends that failed": f"{evidence.failed_sends:,} (each was sent again)",
        "late work refused": f"at least {evidence.leases_lost:,} attempts of nodes that had lost the message",
        "destination latched": f"{evidence.latches} times",
        "throughput": f"{evidence.handled / evidence.seconds:,.0f} messages/s over {evidence.seconds:.1f} s",
        "send to handled": f"p50 {evidence.p50_seconds:.2f} s, p99 {evidence.p99_seconds:.2f} s",
        "seed": str(evidence.seed),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _pause_line(pause: PauseFacts) -> str:
    return (
        f"node {pause.node_id} for {pause.seconds} s, struck off after {pause.dormant_after_seconds} s; of its "
        f"{pause.owned} messages it finished {pause.finished_late} too late"
    )


def _mark(equal: bool) -> str:
    return "[green]yes[/green]" if equal else "[red]no[/red]"


def _some(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:10])) + (", ..." if len(ids) > 10 else "")
