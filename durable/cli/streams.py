"""The streams of a command. Its work goes on where nobody takes what it says.

closed                 `>&-`: nothing is said; the command ends as it would
full                   the command ends its work, and tells then that its output was not written
without a reader       `| head`: the command ends where it says something on standard output, as by SIGPIPE
of few characters      a locale without UTF-8: a character that is not among them is written as an escape
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import TextIOWrapper
from typing import Any


def open_closed() -> None:
    """Let closed streams lead nowhere. The next file or socket that is opened would take their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)  # also those of the processes that a command starts
            setattr(sys, name, os.fdopen(nowhere, mode))


class NoReader(Exception):
    """The end of the reader of standard output. It is no OSError: Typer would end the process with 1."""


class Written:
    """A stream that drops what cannot be written, and keeps the fault; one that needs a reader raises NoReader."""

    def __init__(self, stream: Any, *, needs_reader: bool = False) -> None:
        self.fault: OSError | None = None
        self._stream = stream
        self._needs_reader = needs_reader

    def write(self, text: str) -> int:
        with self._keeping_fault():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._keeping_fault():
            self._stream.flush()

    def end(self) -> None:
        """Write the rest, or forget it: Python would try again when it ends."""
        self.flush()
        if self.fault is not None:
            self.forget()

    def forget(self) -> None:
        """Discard what is not written yet."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _keeping_fault(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._needs_reader and isinstance(error, BrokenPipeError):
                raise NoReader from error
            self.fault = error


@contextmanager
def written() -> Iterator[tuple[Written, Written]]:
    """Standard output and standard error in the block."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    out, err = Written(sys.stdout, needs_reader=True), Written(sys.stderr)
    told: Any = (out, err)
    with redirect_stdout(told[0]), redirect_stderr(told[1]):
        yield out, err
