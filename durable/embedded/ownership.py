"""Ownership of a private server: of one process at a time, and the server ends with it, even with one that is killed.

    the owner ends its block   it stops the server, and dismisses its shell
    the owner is killed        the system unlocks the file "owner" at once; the shell sees the end of its pipe, and
                               becomes a process that ends the server, unless a new owner has begun
    a new owner begins         it ends the server that still runs, and starts its own

It never takes over a server: that may be about to end.

The file "lock" is locked while a server is started, joined, restarted or ended, and has the pid of the process that
does so. Processes forked from the owner hold neither lock, nor the pipe.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final, Self

from durable.embedded.folders import appended
from durable.embedded.forks import hold, let_go
from durable.embedded.processes import end_left_behind
from durable.embedded.sockets import remove_socket_directories
from durable.errors import InvalidSetting

LOCK_SECONDS = 660.0  # longer than a recovery of the data, during which the owner holds it
_POLL_SECONDS: Final = 0.02
_SHELL: Final = 'read -r line; exec "$@"'
_ENDING: Final = "import sys; from durable.embedded.ownership import end_orphan; end_orphan(*sys.argv[1:])"


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
        hold(self._pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            end_left_behind(self._data)
        finally:
            with self._shell:
                self._shell.kill()
            let_go(self._pipe)


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Start, join or end the server of this folder while no other process does.

    Raises InvalidSetting when another process does so for too long.
    """
    with _opened(folder / "lock") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _is_locked(file):
            if time.monotonic() >= deadline:
                raise InvalidSetting(
                    f"postgres: folder={str(folder)!r}: process {_holder(file)} has been starting or ending its server"
                    f" for {LOCK_SECONDS:.0f} s; end that process"
                )
            time.sleep(_POLL_SECONDS)
        with suppress(OSError):  # of a full disk; others are told the pid, no more
            file.truncate(0)
            os.write(file.fileno(), str(os.getpid()).encode())
        yield


@contextmanager
def owned(folder: Path) -> Iterator[bool]:
    """Own the server of this folder for a block. False when a living process owns it."""
    with _opened(folder / "owner") as file:
        yield _is_locked(file)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        file = appended(path)
    except OSError as error:
        raise InvalidSetting(
            f"postgres: folder={str(path.parent)!r}: its file {path.name!r} cannot be opened: {error.strerror}"
        ) from error
    with file:
        hold(file)
        try:
            yield file
        finally:
            let_go(file)


def _is_locked(file: IO[bytes]) -> bool:
    """Lock the file, unless another has locked it."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _holder(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace") or "(unknown)"


def end_orphan(folder: str, data: str) -> None:
    """End the server of an owner that was killed. A new owner, if there is one, has ended it before."""
    try:
        with changing(Path(folder)), owned(Path(folder)) as is_free:
            if is_free:
                end_last(Path(data))
    except InvalidSetting:
        if Path(folder).exists():
            raise
        end_last(Path(data))  # the folder was removed: nobody can own it


def end_last(data: Path) -> None:
    """End the server of the last owner, and remove what it leaves outside its folder."""
    end_left_behind(data)
    remove_socket_directories(data)
