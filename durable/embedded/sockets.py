"""The directory of a private Postgres's socket, and the URLs that lead there.

It is the data folder, where that has a short and plain path. Others do not fit into an address of a socket, have
characters that a driver takes for several hosts, or that have a meaning in settings: a directory of its own stands in.
"""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

_PLAIN: Final = re.compile(r"[A-Za-z0-9_./+-]+")
_MOST_BYTES: Final = 103 - len("/.s.PGSQL.54321")
_PREFIX: Final = "durable-pg-socket-"


def socket_directory(data: Path) -> Path:
    """The data folder, or a new directory in its stead: `remove_socket_directory()` when the server has ended."""
    if _is_usable(data):
        return data
    shared = Path(tempfile.gettempdir())
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=shared if _is_usable(shared / _PREFIX / "12345678") else "/tmp"))


def remove_sockets(sockets: Path) -> None:
    """Remove what a killed server has left here: the pid in it may be that of another process now."""
    for left in sockets.glob(".s.PGSQL.*"):
        left.unlink(missing_ok=True)


def remove_socket_directory(sockets: Path | None) -> None:
    """Remove the directory of a server that has ended, if it was made for its socket."""
    if sockets is not None and sockets.name.startswith(_PREFIX):
        with suppress(OSError):
            remove_sockets(sockets)
            sockets.rmdir()


def url_to(sockets: Path, database: str) -> str:
    return f"postgresql://postgres:@/{quote(database, safe='')}?host={quote(os.fspath(sockets))}"


def _is_usable(path: Path) -> bool:
    return _PLAIN.fullmatch(os.fspath(path)) is not None and len(os.fsencode(path)) <= _MOST_BYTES
