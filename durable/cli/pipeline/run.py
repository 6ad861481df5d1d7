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

from durable.cli.endings import ending_of
from durable.cli.output import Table, one_line, print_blocks, print_json
from durable.cli.pipeline import plan as pipeline_plan
from durable.cli.pipeline.options import LakeUrl, Master, Remote, Service
from durable.cli.pipeline.plan import Checked, Plan
from durable.cli.pipeline.steps import Ended, finished
from durable.cli.target import DatabaseUrl, Debug, Json, OptionalBusName, SchemaName
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


def run(
    app: OptionalBusName = None,
    steps: Steps = None,
    file: File = None,
    begin: From = 1,
    lake: LakeUrl = None,
    service: Service = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    json: Json = False,
    master: Master = None,
    remote: Remote = None,
    debug: Debug = False,
) -> None:
    """Run several steps in one Spark session, until one of them fails; ends with its exit code.

    The options of all steps are checked before the first one begins.
    """
    if (steps is None) == (file is None):
        raise InvalidSetting("run: name the steps, by --steps archive,audit,report or by --file FILE; not both")
    plan = pipeline_plan.named(steps) if steps is not None else pipeline_plan.read(file or Path())
    given = {"app": app, "lake": lake, "service": service, "database": database, "schema": schema}
    given |= {"master": master, "remote": remote}
    shared = {**plan.shared, **{name: value for name, value in given.items() if value is not None}, "debug": debug}
    checked = pipeline_plan.checked(replace(plan, shared=shared), begin)
    taken = _all(plan, checked, json=json, debug=debug)
    last = taken[-1]
    resume = last.number if last.exit_code else None
    if json:
        print_json({"exit_code": last.exit_code, "resume": resume, "steps": [asdict(each) for each in taken]})
    else:
        print_blocks([_summary(taken)])
    if last.exit_code:
        print(f"error: {_said(plan, last)}", file=sys.stderr)
        raise typer.Exit(last.exit_code)


def _all(plan: Plan, checked: Sequence[Checked], *, json: bool, debug: bool) -> list[Taken]:
    """Run the steps until one fails."""
    taken: list[Taken] = []
    for step in checked:
        if not json or sys.stderr.isatty():
            title = f"{step.number}/{len(plan.steps)} {step.name}"
            print(f"\n{title}", file=sys.stderr if json else sys.stdout, flush=True)
        began = time.monotonic()
        try:
            ended = finished(step.work)
        except (Exception, KeyboardInterrupt) as error:
            if debug:
                traceback.print_exc()
            ending = ending_of(error)
            taken.append(Taken(step.number, step.name, ending.code, _since(began), error=ending.message))
            break
        if not json:
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
