"""Folders of private servers, as their users name them."""

from __future__ import annotations

from pathlib import Path

from durable.errors import InvalidSetting


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
