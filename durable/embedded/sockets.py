"""The directory of a private Postgres's socket, and the URLs that lead there.

It is the data folder, where that has a short and plain path. Others do not fit into an address of a socket, have
characters that a driver takes for several hosts, or that have a meaning in settings: a directory of its own stands in.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

from durable.embedded.account import Account
from durable.embedded.folders import entered

_PLAIN: Final = re.compile(r"[A-Za-z0-9_./+-]+")
_MOST_BYTES: Final = 103 - len("/.s.PGSQL.54321")
_SOCKET: Final = ".s.PGSQL."
_PREFIX: Final = "durable-pg-socket-"
_COMMON: Final = Path("/tmp")


def socket_directory(data: Path, account: Account | None) -> Path:
    """The data folder, or a new directory in its stead: `remove_socket_directories()` when the server has ended."""
    if _is_usable(data):
        return data
    shared = Path(tempfile.gettempdir())
    if not _is_usable(shared / _prefix(data) / "12345678") or (account and not account.enters(shared)):
        shared = _COMMON
    made = Path(tempfile.mkdtemp(prefix=_prefix(data), dir=shared))
    if account is not None:
        os.chown(made, account.user, account.group)
    return made


def remove_sockets(sockets: Path) -> None:
    """Remove what a killed server has left here: the pid in it may be that of another process now.

    Raises OSError for a symbolic link, which may lead to the sockets of another server.
    """
    with suppress(FileNotFoundError), entered(sockets) as folder:
        for left in os.listdir(folder):
            if left.startswith(_SOCKET):
                with suppress(FileNotFoundError):
                    os.unlink(left, dir_fd=folder)


def remove_socket_directories(data: Path) -> None:
    """Remove the directories that were made for the sockets of this data, whose server has ended."""
    for shared in {Path(tempfile.gettempdir()), _COMMON}:
        for made in shared.glob(f"{_prefix(data)}*"):
            with suppress(OSError):
                remove_sockets(made)
                made.rmdir()


def url_to(sockets: Path, port: int, database: str) -> str:
    """Return a URL that leads there whatever PGHOST, PGHOSTADDR and PGPORT say."""
    place = f"host={quote(os.fspath(sockets))}&hostaddr=&port={port}"
    return f"postgresql://postgres:@/{quote(database, safe='')}?{place}"


def _prefix(data: Path) -> str:
    return f"{_PREFIX}{hashlib.sha256(os.fsencode(data)).hexdigest()[:12]}-"


def _is_usable(path: Path) -> bool:
    return _PLAIN.fullmatch(os.fspath(path)) is not None and len(os.fsencode(path)) <= _MOST_BYTES
