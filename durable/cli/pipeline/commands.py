"""pipeline: history as data. Each step is a command; `run` takes several."""

from __future__ import annotations

from durable.cli.command import group
from durable.cli.pipeline import erase as pipeline_erase
from durable.cli.pipeline import run as pipeline_run
from durable.cli.pipeline.plan import STEPS
from durable.cli.pipeline.steps import alone

app = group("Archive history into a lake, report on it, audit it, replay it. Needs Spark.")

for step in STEPS.values():
    app.command()(alone(step))
for command in (pipeline_erase.erase, pipeline_run.run):
    app.command()(command)
