"""Folders of private servers, as their users name them, and the files that durable keeps there.

Another user may own such a folder, or the data in it, and could lead root elsewhere: by a link in the place of a file,
or of the folder of the file. So each file is opened through its folder, and no link is followed; as no file has a
second name, it is none of another folder either.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from durable.errors import InvalidSetting

_APPENDED: Final = os.O_RDWR | os.O_APPEND
_PLAIN: Final = os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe without another end would be waited for


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
        path.mkdir(0o755, parents=True, exist_ok=True)  # closed to other writers, whatever the mask of this process is
    except OSError as error:
        raise InvalidSetting(f"{kind}: folder={str(folder)!r} cannot be made: {error.strerror}") from error
    return path


def unfinished(data: Path) -> Path:
    """The folder in which `initdb` makes these data, with a name that durable alone uses; it is renamed when whole."""
    return data.with_name(f"{data.name}.durable-new")


@contextmanager
def entered(folder: Path) -> Iterator[int]:
    """Hold a folder open for a block. Raises OSError for a symbolic link."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield opened
    finally:
        os.close(opened)


def opened(path: Path) -> IO[bytes]:
    """Open a file to read. Raises OSError for a link, and for anything else than a file."""
    with entered(path.parent) as folder:
        return os.fdopen(_plain(path, os.O_RDONLY, folder), "rb")


def appended(path: Path) -> IO[bytes]:
    """Open a file to read and append. One that is new belongs to the owner of its folder, also when root makes it.

    Raises OSError for a link, and for anything else than a file.
    """
    with entered(path.parent) as folder:
        try:
            new = _plain(path, _APPENDED | os.O_CREAT | os.O_EXCL, folder)
        except FileExistsError:
            return os.fdopen(_plain(path, _APPENDED, folder), "a+b")
        if os.geteuid() == 0:
            owner = os.fstat(folder)
            os.fchown(new, owner.st_uid, owner.st_gid)
        return os.fdopen(new, "a+b")


def write(path: Path, text: str) -> None:
    """Write a file whole, as `appended()` opens it."""
    with appended(path) as file:
        file.truncate(0)
        file.write(text.encode())


def _plain(path: Path, flags: int, folder: int) -> int:
    try:
        opened = os.open(path.name, flags | _PLAIN, 0o644, dir_fd=folder)
    except OSError as error:
        error.filename = str(path)
        raise
    found = os.fstat(opened)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return opened
    os.close(opened)
    raise OSError(errno.EINVAL, "it is no file, or one with several names", str(path))
