"""The report of a run: a table at the terminal, JSON, and one page that loads nothing from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from tests.chaos.chart import chart
from tests.chaos.run import Outcome
from tests.chaos.summary import Summary, summarize

NAMES = {"lost": "lost", "twice": "twice", "order": "out of order", "stuck": "stuck"}
Rows = list[tuple[str, object]]


def write(outcome: Outcome, path: Path) -> Summary:
    """Write `path`.json and `path`.html, and print the rest."""
    summary = summarize(outcome)
    path.with_name(f"{path.name}.json").write_text(json.dumps(summary.as_json(), indent=1) + "\n")
    path.with_name(f"{path.name}.html").write_text(page(summary))
    show(summary, Console())
    print(f"report: {path}.html and .json; logs of the nodes: {outcome.folder}")
    return summary


def page(summary: Summary) -> str:
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    template = environment.get_template("page.html")
    return template.render(s=summary, chart=Markup(chart(summary)), tables=tables(summary))


def show(summary: Summary, console: Console) -> None:
    for title, rows in tables(summary):
        table = Table(title, "", box=None, header_style="bold")
        for name, value in rows:
            table.add_row(name, str(value))
        console.print(table)
    costs = Table("fault", "times", "recovery p50", "p99", "longest stall", "lines of log each", box=None)
    for each in summary.costs:
        values = (each.count, each.recovery_p50, each.recovery_p99, each.longest_stall, each.log_lines)
        costs.add_row(each.kind, *map(str, values))
    console.print(costs)
    for text in [*summary.restarts, *summary.named]:
        console.print(text, markup=False, style="red")
    verdict = "every promise was kept" if summary.is_right else "PROMISES WERE BROKEN"
    console.print(verdict, style="green" if summary.is_right else "bold red")


def tables(summary: Summary) -> list[tuple[str, Rows]]:
    faults, dead = summary.faults, summary.dead
    return [
        ("verdict", [(NAMES.get(rule, rule), count) for rule, count in summary.violations.items()]),
        (
            "messages",
            [
                ("committed", summary.messages),
                ("handled", summary.handled),
                ("expired", summary.expired),
                ("occurrences of the schedule", summary.occurrences),
                *((f"dead letter, {reason}", count) for reason, count in dead.items()),
                ("latency p50, s", summary.p50_seconds),
                ("latency p99, s", summary.p99_seconds),
            ],
        ),
        (
            "run",
            [
                ("faults", sum(faults.values())),
                ("kills", faults.get("kill", 0)),
                ("pauses", faults.get("pause", 0)),
                ("restarts of Postgres", sum(faults.get(each, 0) for each in ("restart", "crash", "away"))),
                ("behind PgBouncer", summary.pooled or "none"),
                ("TLS and a secret", "yes" if summary.is_secured else "no"),
                ("false deaths", len(summary.false_deaths)),
                ("processes that ended by themselves", len(summary.restarts)),
                ("lines of log per fault", summary.log_lines_per_fault),
                ("finished after the faults, s", summary.settled_seconds),
                *((f"peak memory of {name}, MiB", peak) for name, peak in summary.peak_mebibytes.items()),
            ],
        ),
    ]
