"""pipeline run: several steps one after the other, in one Spark session, until one of them fails."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from durable.cli.command import taking
from durable.cli.endings import ending_of
from durable.cli.output import Table, emit, is_debug, is_json, one_line, print_blocks
from durable.cli.pipeline import plan as pipeline_plan
from durable.cli.pipeline.plan import Checked, Plan, shared_options
from durable.cli.pipeline.steps import Ended, finished
from durable.errors import InvalidSetting

Steps = Annotated[
    str | None,
    typer.Option("--steps", metavar="NAMES", help="steps with commas between them, such as archive,audit,report"),
]
File = Annotated[
    Path | None, typer.Option("--file", metavar="FILE", help="the steps of this TOML file, each with its own options")
]
From = Annotated[int, typer.Option("--from", metavar="N", help="number of the first step: those before it were done")]


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was taken, and how it ended; without a document it broke off."""

    number: int
    step: str
    exit_code: int
    seconds: float
    document: Mapping[str, Any] | None = None
    error: str | None = None


@taking(shared=shared_options)
def run(shared: Mapping[str, str], steps: Steps = None, file: File = None, begin: From = 1) -> None:
    """Run several steps in one Spark session, until one of them fails; ends with its exit code.

    The options of all steps are checked before the first one begins.
    """
    if (steps is None) == (file is None):
        raise InvalidSetting("run: name the steps, by --steps archive,audit,report or by --file FILE; not both")
    plan = pipeline_plan.named(steps) if steps is not None else pipeline_plan.read(file or Path())
    checked = pipeline_plan.checked(replace(plan, shared={**plan.shared, **shared}), begin)
    taken = _all(plan, checked)
    last = taken[-1]
    resume = last.number if last.exit_code else None
    document = {"exit_code": last.exit_code, "resume": resume, "steps": [asdict(each) for each in taken]}
    emit(document, _summary(taken))
    if last.exit_code:
        print(f"error: {_said(plan, last)}", file=sys.stderr)
        raise typer.Exit(last.exit_code)


def _all(plan: Plan, checked: Sequence[Checked]) -> list[Taken]:
    """Run the steps until one fails."""
    taken: list[Taken] = []
    for step in checked:
        if not is_json() or sys.stderr.isatty():
            title = f"{step.number}/{len(plan.steps)} {step.name}"
            print(f"\n{title}", file=sys.stderr if is_json() else sys.stdout, flush=True)
        began = time.monotonic()
        try:
            ended = finished(step.work)
        except (Exception, KeyboardInterrupt) as error:
            if is_debug():
                traceback.print_exc()
            ending = ending_of(error)
            taken.append(Taken(step.number, step.name, ending.code, _since(began), error=ending.message))
            break
        if not is_json():
            print_blocks(ended.blocks)
        taken.append(_taken(step, ended, began))
        if ended.failed:
            break
    return taken


def _taken(step: Checked, ended: Ended, began: float) -> Taken:
    return Taken(step.number, step.name, ended.exit_code, _since(began), ended.document)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def _summary(taken: Sequence[Taken]) -> Table:
    rows = [(f"{each.number}. {each.step}", f"{each.seconds:.1f}", _outcome(each)) for each in taken]
    return Table("the run", ("step", "seconds", ""), rows)


def _outcome(taken: Taken) -> str:
    return "done" if not taken.exit_code else f"failed, with {taken.exit_code}"


def _said(plan: Plan, last: Taken) -> str:
    why = f": {last.error}" if last.error else ""
    return one_line(
        f"step {last.number} of {len(plan.steps)}, {last.step}, ended with {last.exit_code}{why}; "
        f"to go on there, run the same command with --from {last.number}"
    )
