"""`durable-agent demo --pipeline FOLDER`: the history that the demo leaves behind, through the pipeline.

    FOLDER/demo     its databases ──archive──> FOLDER/lake ──audit──> lost 0, twice 0
                                                  │    └────report──> FOLDER/report.html
                                                  └─replay one day─┐
    FOLDER/again    a fresh service               <────────────────┘
                    its database  ──archive──> FOLDER/again/lake ──audit──> lost 0, twice 0

A demo that is in FOLDER already is used, with its lake; the fresh service is made anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from durable.demo import stage, verdict
from durable.demo.again import Again, fresh_service
from durable.demo.fleet import SERVICES
from durable.demo.run import Wish, console_of_some_width, interrupted_by_sigterm, play, wish_for
from durable.demo.steps import RunStep, Steps
from durable.demo.verdict import Totals
from durable.embedded import postgres
from durable.errors import InvalidSetting
from durable.grammar import several
from durable.pipeline.session import find_java

DAY = date(2013, 1, 1)
"""Of which the flights are replayed; it is the first of the data set, so that a small run has it too."""
REPLAY = f"flights of {DAY}"
CHOSEN = f'get_json_object(CAST(body AS STRING), "$.day") = "{DAY}"'

Facts = Mapping[str, Any]


def run_pipeline(
    run_step: RunStep,
    *,
    folder: Path,
    flights: int | None,
    all_flights: bool,
    json_output: bool,
    seed: int | None,
    transport: str = "tcp",
) -> int:
    """Run all of it and return the exit code: 0, or 1 when anything is lost, comes twice, or is not as it should be.

    `run_step` runs a step of the pipeline. The options are those of run_demo; the folder may be there. Raises
    InvalidSetting when it holds the demo of another number of flights, or a requirement is not installed.
    """
    wish = wish_for(flights, all_flights, seed, transport)
    _check_installed()
    console = console_of_some_width()
    steps = Steps(console, run_step, silent=json_output)
    with interrupted_by_sigterm():
        job = Pipeline(folder, wish, steps, silent=json_output)
        job.run()
    if json_output:
        print(json.dumps(job.as_document(), indent=2))
    else:
        steps.show()
        job.show(console)
    return 1 if job.differences else 0


class Pipeline:
    """The job, step by step. What should have been otherwise is in `differences`."""

    def __init__(self, folder: Path, wish: Wish, steps: Steps, *, silent: bool) -> None:
        self.differences: list[str] = []
        self._folder = folder
        self._wish = wish
        self._steps = steps
        self._silent = silent

    @property
    def lake(self) -> Path:
        return self._folder / "lake"

    @property
    def page(self) -> Path:
        return self._folder / "report.html"

    def run(self) -> None:
        demo = self._demo()
        with postgres(self._folder / "demo") as server:
            for service in SERVICES:
                self._archive(service, server.url(service), self.lake)
        began = datetime.fromisoformat(demo["began"])
        self._audit("Audit sender against receiver", self.lake, began, self._wish.flights)
        self._report(demo["events"])
        self._again()

    def _demo(self) -> Facts:
        """The one that is in the folder, or a new one; a new one makes everything new."""
        folder = self._folder / "demo"
        result = folder / stage.RESULT
        with self._steps.step(f"Two services, {several(self._wish.flights, 'flights')}, nodes killed") as step:
            is_new = not result.exists()
            if is_new:
                self._clear("demo", "lake")
                folder.mkdir(parents=True)
                play(folder.resolve(), self._wish, silent=self._silent, bodies=True)
            found: Facts = json.loads(result.read_text())
            if found["flights"] != self._wish.flights:
                raise InvalidSetting(
                    f"--pipeline: {self._folder} holds a demo of {several(found['flights'], 'flights')}; "
                    "name another folder"
                )
            self.differences += found["differences"]
            handled = f"{found['handled']:,} handled, {sum(found['kills'].values())} nodes killed"
            step.result = f"{handled}, every total {'right' if found['equal'] else 'NOT right'}"
            step.result += "" if is_new else f"; from an earlier run, in {folder}"
        return found

    def _archive(self, service: str, url: str, lake: Path) -> None:
        self._steps.pipeline(
            f"Archive {service} into {lake}",
            "archive",
            *("--service", service, "--lake", str(lake)),
            environment={"DURABLE_DATABASE_URL": url},
            summary=_archived,
        )

    def _audit(self, title: str, lake: Path, since: datetime, count: int) -> None:
        found = self._steps.pipeline(
            title,
            "audit",
            *("--sender", str(lake), "--receiver", str(lake)),
            *("--since", (since - timedelta(minutes=1)).isoformat(timespec="seconds"), "--settle", "0s"),
            environment={},
            summary=_audited,
        )
        for outcome, rows in _outcomes(found).items():
            if rows != count:
                self.differences.append(f"{lake}: {several(rows, 'messages')} {outcome}, should be {count:,}")
        self.differences += [f"{lake}: {count:,} {kind}" for kind, count in found["counts"].items() if count]

    def _report(self, events: Sequence[Mapping[str, str]]) -> None:
        marks = [argument for event in events for argument in ("--mark", f"{event['time']}={event['what']}")]
        self._steps.pipeline(
            f"Report to {self.page}",
            "report",
            *("--lake", str(self.lake), "--out", str(self.page)),
            *("--title", "Flights from New York City", "--by", "body.carrier", *marks),
            environment={},
            summary=lambda found: f"{several(found['totals']['total'], 'rows')} of history on {found['page']}",
        )

    def _again(self) -> None:
        """Replay one day into a fresh service, twice, and look at what it has then."""
        self._clear("again")
        folder = self._folder / "again"
        expected = verdict.expected_totals(self._wish.flights, DAY)
        count = sum(each.flights for each in expected.values())
        with fresh_service(folder.resolve()) as again:
            since = again.watch.now()
            self._replay(f"Replay the {REPLAY} into a fresh service", again, count, added=count)
            self._handle(again, count, expected)
            self._replay("The same replay once more", again, count, added=0)
            again.nodes.stop()
            self._archive("punctuality", again.url, folder / "lake")
        self._audit("Audit the fresh service", folder / "lake", since, count)

    def _replay(self, title: str, again: Again, count: int, *, added: int) -> None:
        done = self._steps.pipeline(
            title,
            "replay",
            *("--lake", str(self.lake), "--name", REPLAY),
            *("--service", "airline", "--side", "outgoing", "--where", CHOSEN, "--destination", again.address),
            environment={"DURABLE_DATABASE_URL": again.url},
            summary=lambda found: (
                f"{several(found['messages'], 'messages')} replayed, {found['added']:,} of them added"
            ),
        )
        if (done["messages"], done["added"]) != (count, added):
            self.differences.append(f"{title}: {several(done['added'], 'messages', 'were')} added, should be {added:,}")

    def _handle(self, again: Again, count: int, expected: Mapping[str, Totals]) -> None:
        with self._steps.step("The fresh service adds them up") as step:
            again.wait_until_handled(count)
            found = verdict.differences(verdict.added_totals(again.watch), expected)
            self.differences += found
            right = "NOT as in the data set" if found else "as in the data set, to the minute"
            step.result = (
                f"{several(again.watch.handled(), 'flights')} of {several(len(expected), 'carriers')}, {right}"
            )

    def _clear(self, *names: str) -> None:
        """Remove the files that this job makes anew."""
        for name in names:
            stage.remove_folder(self._folder / name)

    def as_document(self) -> Facts:
        return {
            "equal": not self.differences,
            "differences": self.differences,
            "flights": self._wish.flights,
            "lake": str(self.lake),
            "page": str(self.page),
            "steps": [asdict(step) for step in self._steps.taken],
        }

    def show(self, console: Console) -> None:
        for difference in self.differences:
            console.print(f"[red]{difference}[/red]")
        if self.differences:
            console.print("[bold red]Something is not as it should be.[/bold red]")
        else:
            console.print("[bold green]Nothing lost, nothing twice: the first time, and again.[/bold green]")
        console.print(f"The report: {self.page.resolve()}", soft_wrap=True)


def _check_installed() -> None:
    """Check the installed packages before minutes are spent on the demo."""
    for module in ("pyspark", "pyarrow", "deltalake", "plotly"):
        if find_spec(module) is None:
            raise InvalidSetting(f"--pipeline needs {module}; run: pip install 'durable-bus[spark]'")
    find_java()


def _archived(found: Facts) -> str:
    (history,) = (table for table in found["tables"] if table["table"] == "history")
    rows, files = several(history["rows"], "rows"), several(history["files"], "files")
    return f"{rows} of history in {files}, {history['size'] / 1e6:.1f} MB"


def _audited(found: Facts) -> str:
    ends = ", ".join(f"{count:,} {outcome}" for outcome, count in _outcomes(found).items())
    return f"{ends}: {', '.join(f'{kind} {count:,}' for kind, count in found['counts'].items())}"


def _outcomes(found: Facts) -> Mapping[str, int]:
    """Count messages by outcome; the wanted outcomes are there even when 0."""
    counts = {"sent": 0, "handled": 0}
    for row in found["totals"]:
        counts[row["outcome"]] = counts.get(row["outcome"], 0) + row["count"]
    return counts
