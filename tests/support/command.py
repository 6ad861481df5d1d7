"""`durable-agent`, as tests run it: in this process where that is enough, as a process of its own where it is not."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from durable.cli import main
from durable.redaction import has_password
from tests.support.root import ROOT

APPLICATION = """
import msgspec
from durable import Bus, Retry, message

@message("NAME.order-placed")
class OrderPlaced(msgspec.Struct):
    order_id: int

@message("NAME.order-shipped")
class OrderShipped(msgspec.Struct):
    order_id: int

bus = Bus("NAME")
"""


def heed_interrupts() -> None:
    """A shell ignores SIGINT for what it runs in the background, and whatever that starts inherits it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def logging_put_back() -> Iterator[None]:
    """Put the log back as it was: `run` sets it up for a process that ends with it, on a stream that a test closes."""
    root, own = logging.getLogger(), logging.getLogger("durable")
    handlers, levels = [*root.handlers], (root.level, own.level)
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(levels[0])
        own.setLevel(levels[1])


def by_environment(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Move a database's URL that has a password, as that of a server given by URL may, into the environment."""
    given = list(arguments)
    if "--database" in given[:-1]:
        place = given.index("--database")
        if has_password(given[place + 1]):
            return given[:place] + given[place + 2 :], {"DURABLE_DATABASE_URL": given[place + 1]}
    return given, {}


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Agent:
    """Runs the command in a folder of its own, which also holds the applications."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [*sys.path])

    def application(self, source: str = "") -> str:
        """Write a module with a bus and two messages, and this source after them; returns the module's name.

        Messages are registered for the whole process, so each module has names of its own.
        """
        name = f"app{uuid.uuid4().hex}"
        (self.folder / f"{name}.py").write_text((APPLICATION + source).replace("NAME", name))
        return name

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Ended:
        """In this process. A password is given by the environment, as the command wants it."""
        rest, environment = by_environment(arguments)
        with self._monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return self.as_given(*rest, stdin=stdin)

    def as_given(self, *arguments: str, stdin: bytes = b"") -> Ended:
        """In this process, with exactly these arguments."""
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended, logging_put_back():
            main(arguments)
        printed = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, printed.out, printed.err)

    @contextmanager
    def process(self, *arguments: str, **streams: int) -> Iterator[subprocess.Popen[bytes]]:
        """As a process of its own, which is killed at the end if it still runs."""
        rest, given = by_environment(arguments)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | given
        command = [sys.executable, "-m", "durable.cli", *rest]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
        options: dict[str, Any] = {"cwd": self.folder, "env": environment, "preexec_fn": heed_interrupts}
        with subprocess.Popen[bytes](command, **options, **pipes) as process:
            try:
                yield process
            finally:
                process.kill()
