"""The processes of a private Postgres, found by its data.

A file with a pid alone would not do: after a crash that may be the pid of any process. So these are known by

    their command line          the server, and the programs that make one: it has the path of the data, or the name
    their title                 the server's own processes, which outlive it when it is killed: it has that name
    their working folder        both, and those of `initdb`, which show neither; not every system tells it

Servers of others may run on the same data. durable ends none of them: it knows its own by their name.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from durable.embedded.account import HERE
from durable.embedded.folders import opened, unfinished
from durable.errors import InvalidSetting, said

if TYPE_CHECKING:
    import psutil

_POLL_SECONDS: Final = 0.01
_ENDING_SECONDS: Final = 30.0
_PROGRAMS: Final = ("postgres", "pg_ctl", "initdb")
_NAME: Final = r"durable-[0-9a-f]{16}"
_OF_DURABLE: Final = re.compile(rf'\Apostgres: {_NAME}: |[ "]cluster_name={_NAME}\b')  # a title, or arguments


class Postmaster(NamedTuple):
    """A server, as its own file tells."""

    pid: int
    port: int
    sockets: Path
    is_ready: bool


def postmaster(data: Path) -> Postmaster | None:
    """Read the server's own file. None when there is none, and while it is not whole."""
    with suppress(OSError, IndexError, ValueError):
        with opened(data / "postmaster.pid") as file:
            lines = os.fsdecode(file.read()).split("\n")
        sockets = Path(lines[4])
        is_ready = lines[7].strip() == "ready"
        return Postmaster(int(lines[0]), int(lines[3]), data if sockets == HERE else sockets, is_ready)
    return None


def server_name(data: Path) -> str:
    """The name that the server of this data has in the titles of its processes."""
    return f"durable-{hashlib.sha256(os.fsencode(data)).hexdigest()[:16]}"


def is_by_durable(data: Path) -> bool:
    """Tell whether durable started the last server of this data."""
    try:
        with opened(data / "postmaster.opts") as file:
            return _OF_DURABLE.search(os.fsdecode(file.read())) is not None
    except FileNotFoundError:
        return False


def is_ready(data: Path) -> bool:
    """Tell whether a server runs on this data, and takes connections."""
    found = postmaster(data)
    return found is not None and found.is_ready and _serves(found.pid, data)


def is_served(data: Path) -> bool:
    """Tell whether a server runs on this data, or is about to."""
    return next(_programs_on(data), None) is not None


def end_left_behind(data: Path) -> None:
    """End the server that runs on this data without an owner, and what is left of one that was killed.

    Then the data have no server: the file with its pid is removed, because that may be the pid of another process now.
    Raises InvalidSetting when a process does not end in time, and when another than durable has started the server.
    """
    deadline = time.monotonic() + _ENDING_SECONDS
    while left := list(_programs_on(data)):
        if others := [process.pid for process in left if _is_anothers(process, data)]:
            raise InvalidSetting(
                f"postgres: folder={str(data.parent)!r}: another than durable has started the server that runs on its"
                f" data, process {min(others)}; stop it, or give another folder"
            )
        if time.monotonic() >= deadline:
            pids = ", ".join(str(process.pid) for process in left)
            raise InvalidSetting(
                f"postgres: folder={str(data.parent)!r}: its last server does not end; end the processes {pids}"
            )
        for process in left:
            _end(process)
        time.sleep(_POLL_SECONDS)
    try:
        (data / "postmaster.pid").unlink(missing_ok=True)
    except NotADirectoryError:
        pass
    except OSError as error:
        raise InvalidSetting(
            f"postgres: folder={str(data.parent)!r}: its data/postmaster.pid cannot be removed: {said(error)}"
        ) from error


def _serves(pid: int, data: Path) -> bool:
    """Tell whether this pid is the one of a server that runs on this data."""
    import psutil  # comes with the wheel

    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.name() == "postgres" and _is_on(process, data) and not _is_anothers(process, data)
    return False


def _programs_on(data: Path) -> Iterator[psutil.Process]:
    """Find the server on this data, its processes, and the programs that are about to make one."""
    import psutil

    for process in psutil.process_iter(["name"]):
        if process.info["name"] in _PROGRAMS and _is_on(process, data):
            yield process


def _is_on(process: psutil.Process, data: Path) -> bool:
    import psutil

    with suppress(psutil.Error):
        command = process.cmdline()
        if {*_places(data), f"cluster_name={server_name(data)}"} & set(command):
            return True
        if " ".join(command).startswith(f"postgres: {server_name(data)}: "):
            return True
    with suppress(psutil.Error):
        return process.cwd() in _places(data)
    return False


def _places(data: Path) -> set[str]:
    return {str(data), str(unfinished(data))}


def _is_anothers(process: psutil.Process, data: Path) -> bool:
    """Tell whether another than durable has started this server. One that is ending has no command line."""
    import psutil

    with suppress(psutil.Error):
        if process.name() != "postgres" or process.cwd() == str(unfinished(data)):
            return False
    with suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return command != "" and _OF_DURABLE.search(command) is None
    return False


def _end(process: psutil.Process) -> None:
    """Tell a server to end at once; the programs that make one end by themselves."""
    import psutil

    if process.info["name"] == "postgres":
        with suppress(psutil.Error):
            process.send_signal(signal.SIGQUIT)
