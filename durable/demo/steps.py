"""Commands of `durable-agent`, one after the other: announced, run as a user would run them, timed, and summed up."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from durable.errors import DurableError


@dataclass(slots=True)
class Step:
    title: str
    command: str = ""
    seconds: float = 0.0
    result: str = ""


class Steps:
    """Steps taken so far."""

    def __init__(self, console: Console, *, silent: bool) -> None:
        self.taken: list[Step] = []
        self._console = console
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

    def agent(self, title: str, *arguments: str, environment: dict[str, str], summary: Callable[[Any], str]) -> Any:
        """Run `durable-agent` with these arguments and settings, and return its document.

        What it finds wrong is in the document. Raises DurableError when it has none; it has said why by then.
        """
        with self.step(title, shlex.join(["durable-agent", *arguments])) as step:
            printed = run_agent([*arguments, "--json"], environment)
            if not printed:
                raise DurableError(f"durable-agent {' '.join(arguments[:2])} did not do it; see above")
            document = json.loads(printed)
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


def run_agent(arguments: Sequence[str], environment: dict[str, str]) -> str:
    """Run a command and return its output; its progress and errors go where ours go."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DURABLE_")}
    command = [sys.executable, "-m", "durable.cli", *arguments]
    return subprocess.run(command, env=inherited | environment, stdout=subprocess.PIPE, text=True).stdout
