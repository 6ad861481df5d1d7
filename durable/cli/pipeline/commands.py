"""pipeline: history as data. Each step is a command; `run` takes several. Options that they share: pipeline_options."""

from __future__ import annotations

import typer

from durable.cli.pipeline import run as pipeline_run
from durable.cli.pipeline.plan import STEPS
from durable.cli.pipeline.steps import alone

app = typer.Typer(help="History as data: archive it into a lake, report on it, audit it, replay it. Needs Spark.")


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


for step in STEPS.values():
    app.command()(alone(step))
app.command()(pipeline_run.run)
