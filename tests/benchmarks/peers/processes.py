"""The programs of the peers, each a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from dataclasses import asdict
from typing import NamedTuple, Self

from durable.errors import InvalidSetting
from tests.benchmarks.peers.program import Order
from tests.benchmarks.peers.sides import OURS, ROOT, Side, python_of

LONGEST_SECONDS = 900.0
STOPPING_SECONDS = 20.0
_SHOWN_LINES = 15


class Report(NamedTuple):
    """The line that a program prints at its end."""

    package: str
    version: str
    done: int


def read_report(output: str) -> Report:
    """Read the last line of this output.

    Raises ValueError when it is no report.
    """
    last = output.strip().rpartition("\n")[2]
    try:
        fields = json.loads(last)
        return Report(str(fields["package"]), str(fields["version"]), int(fields["done"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"no report of a program: {last!r}") from error


class Process:
    """A running program. To be used as a context manager, which ends it with its children."""

    def __init__(self, side: Side, order: Order) -> None:
        self._side = side
        self._order = order

    def __enter__(self) -> Self:
        # Files, because nobody reads a pipe while a worker runs.
        self._output = tempfile.TemporaryFile("w+")
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        command = [str(python_of(self._side.peer)), "-m", self._side.module, json.dumps(asdict(self._order))]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOPPING_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._output.close()
        self._errors.close()

    def write(self, line: str) -> None:
        """Write a line to its standard input."""
        self.check()
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def check(self) -> None:
        """Raise InvalidSetting when the program has ended."""
        if self._process.poll() is not None:
            raise self.failure(f"ended with exit code {self._process.returncode}")

    def wait(self) -> Report:
        """Wait for the end of the program, and return its report.

        Raises InvalidSetting when it fails, or takes too long.
        """
        try:
            code = self._process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            raise self.failure(f"did not end in {LONGEST_SECONDS:g} seconds") from None
        if code:
            raise self.failure(f"ended with exit code {code}")
        self._output.seek(0)
        return read_report(self._output.read())

    def failure(self, fault: str) -> InvalidSetting:
        """The error for a program that does not do its work, with the end of what it wrote."""
        self._errors.seek(0)
        written = "\n".join(self._errors.read().splitlines()[-_SHOWN_LINES:])
        way_out = "" if self._side.peer == OURS else f"\nTo leave it out: --without {self._side.peer}"
        work = self._order.work
        return InvalidSetting(f"{self._side.name}: {work}: the program {fault}; it wrote:\n{written}{way_out}")


def run(side: Side, order: Order) -> Report:
    """Run a program to its end."""
    with Process(side, order) as process:
        return process.wait()


def _environment() -> dict[str, str]:
    """The environment, without settings that would change one side only."""
    foreign = ("PYTHON", "DURABLE_", "PG", "DBOS", "CELERY", "PROCRASTINATE")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
