"""Ownership of a private server: of one process at a time, and the server ends with it, even with one that is killed.

    the owner ends its block   it stops the server, and dismisses its shell
    the owner is killed        the system unlocks the file "owner" at once; the shell sees the end of its pipe, and
                               becomes a process that ends the server, unless a new owner has begun
    a new owner begins         it ends the server that still runs, and starts its own

It never takes over a server: that may be about to end. A server is known by its command line, which has the path of its
data, and never by a file with its pid alone: after a crash that may be the pid of any process.

The file "lock" is locked while a server is started, joined, restarted or ended. Processes forked from the owner hold
neither lock, nor the pipe.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

from durable.errors import InvalidSetting

if TYPE_CHECKING:
    import psutil

_POLL_SECONDS: Final = 0.01
_ENDING_SECONDS: Final = 30.0
_PROGRAMS: Final = ("postgres", "pg_ctl", "initdb")
_SHELL: Final = 'read -r line; exec "$@"'
_ENDING: Final = "import sys; from durable.embedded.ownership import end_orphan; end_orphan(*sys.argv[1:])"

_held_here: Final = set[IO[Any]]()
"""Files of locks, and ends of pipes, that are for this process alone."""


def _close_in_child() -> None:
    """Close the copies of a forked process, which may outlive the owner."""
    for file in list(_held_here):
        file.close()
    _held_here.clear()


os.register_at_fork(after_in_child=_close_in_child)


class Keeper:
    """Keeper of the server on this data: leaving the block ends the server, as the death of this process does.

    A shell reads a pipe of which only this process holds the other end. At its end it becomes a process that ends the
    server, and the programs that are about to make one.
    """

    def __init__(self, folder: Path, data: Path) -> None:
        self._data = data
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SHELL, "keeper", sys.executable, "-c", _ENDING, str(folder), str(data)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # Ctrl-C at the terminal is meant for this process
        )
        assert self._shell.stdin is not None
        self._pipe = self._shell.stdin
        _held_here.add(self._pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            end_left_behind(self._data)
        finally:
            with self._shell:
                self._shell.kill()
            _held_here.discard(self._pipe)


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Start, join or end the server of this folder while no other process does."""
    with _opened(folder / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def owned(folder: Path) -> Iterator[bool]:
    """Own the server of this folder for a block. False when a living process owns it."""
    with _opened(folder / "owner") as file:
        yield _is_locked(file)


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    with path.open("w") as file:
        _held_here.add(file)
        try:
            yield file
        finally:
            _held_here.discard(file)


def _is_locked(file: IO[str]) -> bool:
    """Lock the file, unless another has locked it."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def end_orphan(folder: str, data: str) -> None:
    """End the server of an owner that was killed. A new owner, if there is one, has ended it before."""
    try:
        with changing(Path(folder)), owned(Path(folder)) as is_free:
            if is_free:
                end_left_behind(Path(data))
    except FileNotFoundError:  # the folder was removed: nobody can own it
        end_left_behind(Path(data))


def end_left_behind(data: Path) -> None:
    """End the server that runs on this data without an owner. Raises InvalidSetting when it does not end in time.

    Then the data have no server: the file with its pid is removed, because that may be the pid of another process now.
    """
    deadline = time.monotonic() + _ENDING_SECONDS
    while left := list(_programs_on(data)):
        if time.monotonic() >= deadline:
            pids = ", ".join(str(process.pid) for process in left)
            raise InvalidSetting(
                f"postgres: folder={str(data.parent)!r}: its last server does not end; end the processes {pids}"
            )
        for process in left:
            _end(process)
        time.sleep(_POLL_SECONDS)
    (data / "postmaster.pid").unlink(missing_ok=True)


def serves(pid: int, data: Path) -> bool:
    """Tell whether this pid is the one of a server that runs on this data."""
    import psutil  # comes with the wheel

    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(pid)
        return process.name() == "postgres" and str(data) in process.cmdline()
    return False


def is_served(data: Path) -> bool:
    """Tell whether a server runs on this data, or is about to."""
    return next(_programs_on(data), None) is not None


def _programs_on(data: Path) -> Iterator[psutil.Process]:
    """Find the server on this data, and the programs that are about to make one."""
    import psutil

    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] in _PROGRAMS and str(data) in (process.info["cmdline"] or ()):
            yield process


def _end(process: psutil.Process) -> None:
    """Tell a server to end at once; the programs that make one end by themselves."""
    import psutil

    if process.info["name"] == "postgres":
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(signal.SIGQUIT)
