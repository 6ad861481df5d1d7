"""Ownership of a private server: of one process at a time, and the server ends with it, even with one that is killed.

    the owner ends      the system unlocks the file "owner" at once; a shell tells the owner's server to end
    a new owner begins  it ends the server that still runs, and starts its own

It never takes over a server: that may be about to end. And a shell ends no server but the one that it was told of.
"""

from __future__ import annotations

import fcntl
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Self

from durable.errors import InvalidSetting

if TYPE_CHECKING:
    import psutil

_POLL_SECONDS: Final = 0.01
_PROGRAMS: Final = ("postgres", "pg_ctl", "initdb")
_SHELL: Final = 'while read -r told; do pid=$told; done; [ -z "$pid" ] || kill -QUIT "$pid"'


class Keeper:
    """A shell that reads a pipe of which only this process holds the other end, and ends the server at its end."""

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SHELL],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal is meant for this process
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(None)
        with self._shell:
            pass

    def keep(self, pid: int | None) -> None:
        """End this server, when the time comes, and no other; None: no server runs."""
        assert self._shell.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed the shell
            self._shell.stdin.write(f"{pid or ''}\n".encode())


@contextmanager
def owned(folder: Path) -> Iterator[bool]:
    """Own the server of this folder for a block. False when a living process owns it."""
    with (folder / "owner").open("w") as file:
        yield _is_locked(file)


def _is_locked(file: IO[str]) -> bool:
    """Lock the file, unless another has locked it."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def end_left_behind(data: Path, *, within: float) -> None:
    """End the server that runs on this data without an owner. Raises InvalidSetting when it does not end in time."""
    deadline = time.monotonic() + within
    while left := list(_left_behind(data)):
        if time.monotonic() >= deadline:
            pids = ", ".join(str(process.pid) for process in left)
            raise InvalidSetting(
                f"postgres: folder={str(data.parent)!r}: its last server does not end; end the processes {pids}"
            )
        for process in left:
            _end(process)
        time.sleep(_POLL_SECONDS)


def _left_behind(data: Path) -> Iterator[psutil.Process]:
    """Find a server without an owner, and the programs that are about to make one."""
    import psutil  # comes with the wheel

    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] in _PROGRAMS and str(data) in (process.info["cmdline"] or ()):
            yield process


def _end(process: psutil.Process) -> None:
    """Tell a server to end at once; the programs that make one end by themselves."""
    import psutil

    if process.info["name"] == "postgres":
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(signal.SIGQUIT)
