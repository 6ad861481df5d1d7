"""Report of the verdict: tables for people, one document for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from durable.demo.flights import carrier_names
from durable.demo.latches import Latch
from durable.demo.verdict import Evidence, PauseFacts, Totals
from durable.grammar import several


def as_json(evidence: Evidence) -> str:
    found = evidence.differences
    document = {"equal": not found, "differences": found, **asdict(evidence)}
    document["messages_per_second"] = round(evidence.handled / evidence.seconds, 1)
    return json.dumps(document, indent=2, default=datetime.isoformat)


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
            f"[bold green]Equal to the minute: {several(evidence.handled, 'messages')}, none lost, none twice."
            "[/bold green]"
        )


def _carriers(evidence: Evidence) -> Table:
    table = Table(title="Delays by carrier, in minutes: by the messages / by the data set", box=SIMPLE_HEAD)
    table.add_column("carrier", no_wrap=True, min_width=10)
    for name in ("flights", "cancelled", "departure", "arrival"):
        table.add_column(name, justify="right", no_wrap=True)
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
    table = Table(title="What happened", box=SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _summary_rows(evidence).items():
        table.add_row(name, value)
    return table


def _summary_rows(evidence: Evidence) -> dict[str, str]:
    rows = {
        "sent and handled": f"{evidence.sent:,} and {several(evidence.handled, 'messages')} over {evidence.transport}",
        "nodes killed": " and ".join(f"{count} of {service}" for service, count in evidence.kills.items()),
        "nodes paused": "; ".join(map(_pause_line, evidence.pauses)) or "none",
        "broker killed": "; ".join(f"away for {seconds} s" for seconds in evidence.broker_away_seconds),
        "work taken over": f"{several(evidence.recovered_outgoing, 'messages')} of dead senders, "
        f"{evidence.recovered_incoming:,} of dead or paused receivers",
        "sends repeated": f"{evidence.failed_sends:,}, because a connection or what it led to was gone",
        "duplicates refused": f"at least {evidence.duplicates_refused_at_least:,} "
        "(what a killed node counted in its last moments is missing)",
        "latched": f"{evidence.latches} times a sender found nobody and waited for an answered ping",
        "seen latched": "\n".join(map(_latch_line, evidence.latched)),
        "throughput": f"{evidence.handled / evidence.seconds:,.0f} messages/s over {evidence.seconds:.1f} s",
        "send to handled": f"{evidence.p50_seconds:.2f} s (median), {evidence.p99_seconds:.2f} s (99th percentile)",
        "seed": str(evidence.seed),
    }
    return {name: value for name, value in rows.items() if value}


def _latch_line(latch: Latch) -> str:
    return f"{latch.key} in {latch.service} for {latch.seconds} s: {latch.reason}"


def _pause_line(pause: PauseFacts) -> str:
    late = f"it finished {pause.finished_late} of them too late" if pause.finished_late else "none finished too late"
    return (
        f"node {pause.node_id} for {pause.seconds} s with {pause.owned} messages in hand, "
        f"struck off after {pause.dormant_after_seconds} s; {late}"
    )


def _mark(equal: bool) -> str:
    return "[green]yes[/green]" if equal else "[red]no[/red]"
