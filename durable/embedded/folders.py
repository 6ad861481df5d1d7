"""Folders of private servers, as their users name them, and the files that durable keeps there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Final

from durable.errors import InvalidSetting

_APPENDED: Final = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW


def made(kind: str, folder: Path | str, *, refused: str = "") -> Path:
    """Make the folder of a server, unless it is there. Raises InvalidSetting when it cannot be made, or used.

    `refused`: the characters that this server takes in no path, besides those that no file with a path can hold.
    """
    if not isinstance(folder, str | Path):
        raise InvalidSetting(f"{kind}: folder={folder!r}: give a path")
    path = Path(folder).absolute()
    if odd := [each for each in str(path) if each < " " or each == "\x7f" or each in refused]:
        raise InvalidSetting(f"{kind}: folder={str(folder)!r}: a path with {odd[0]!r} cannot be used; give another one")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSetting(f"{kind}: folder={str(folder)!r} cannot be made: {error.strerror}") from error
    return path


def appended(path: Path) -> IO[bytes]:
    """Open a file to read and append. One that is new belongs to the owner of its folder, also when root makes it.

    Raises OSError for a symbolic link: the owner of the folder could lead root to any file.
    """
    try:
        opened = os.open(path, _APPENDED | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return os.fdopen(os.open(path, _APPENDED), "a+b")
    file = os.fdopen(opened, "a+b")
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.fchown(opened, owner.st_uid, owner.st_gid)
    return file


def write(path: Path, text: str) -> None:
    """Write a file whole, as `appended()` opens it."""
    with appended(path) as file:
        file.truncate(0)
        file.write(text.encode())
