"""pipeline: history as data. Each step is a command; `run` takes several. Options that they share: pipeline_options."""

from __future__ import annotations

import typer

from durable.cli.pipeline import erase as pipeline_erase
from durable.cli.pipeline import export as pipeline_export
from durable.cli.pipeline import run as pipeline_run
from durable.cli.pipeline.plan import STEPS
from durable.cli.pipeline.steps import alone, in_text

app = typer.Typer(help="Archive history into a lake, report on it, audit it, replay it. Needs Spark.")


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


for step in STEPS.values():
    app.command()(alone(step))
for command in (pipeline_erase.erase, pipeline_export.export, pipeline_run.run):
    app.command()(in_text(command))
