"""Steps of a job, one after the other: announced, timed, and summed up.

Those of the pipeline are printed as the commands that a user would run, and taken in this process: so they share one
Spark session, as those of `durable-agent pipeline run` do.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

RunStep: TypeAlias = Callable[[str, Sequence[str]], Mapping[str, Any]]
"""Runs a step of the pipeline, by its name and arguments, and returns its document."""


@dataclass(slots=True)
class Step:
    title: str
    command: str = ""
    seconds: float = 0.0
    result: str = ""


class Steps:
    """Steps taken so far."""

    def __init__(self, console: Console, run_step: RunStep, *, silent: bool) -> None:
        self.taken: list[Step] = []
        self._console = console
        self._run_step = run_step
        self._silent = silent
        self._began = time.monotonic()

    @contextmanager
    def step(self, title: str, command: str = "") -> Iterator[Step]:
        """Announce and time a step; its block sets `result`."""
        step, began = Step(title, command), time.monotonic()
        self._tell(f"\n[bold]{len(self.taken) + 1}. {title}[/bold]")
        if command:
            self._tell(f"$ {command}")
        yield step
        step.seconds = round(time.monotonic() - began, 1)
        self.taken.append(step)
        self._tell(f"{step.result} [dim]({step.seconds} s)[/dim]")

    def pipeline(
        self, title: str, name: str, *arguments: str, environment: Mapping[str, str], summary: Callable[[Any], str]
    ) -> Mapping[str, Any]:
        """Take a step of the pipeline with these arguments, and only these settings, and return its document.

        What it finds wrong is in the document. Raises what its command raises.
        """
        with self.step(title, shlex.join(["durable-agent", "pipeline", name, *arguments])) as step:
            with _settings(environment):
                document = self._run_step(name, arguments)
            step.result = summary(document)
        return document

    def show(self) -> None:
        table = Table(title="The pipeline", box=SIMPLE_HEAD)
        table.add_column("step", no_wrap=True)
        table.add_column("seconds", justify="right", no_wrap=True)
        table.add_column("result")
        for number, step in enumerate(self.taken, 1):
            table.add_row(f"{number}. {step.title}", f"{step.seconds:.1f}", step.result)
        table.add_row("all", f"{time.monotonic() - self._began:.1f}", "")
        self._console.print(table)

    def _tell(self, line: str) -> None:
        if not self._silent:
            self._console.print(line, highlight=False, soft_wrap=True)


@contextmanager
def _settings(given: Mapping[str, str]) -> Iterator[None]:
    """Set these settings in the environment in this block, and none of the user's own."""
    theirs = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("DURABLE_")}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            os.environ.pop(name, None)
        os.environ.update(theirs)
