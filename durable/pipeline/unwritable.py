"""Errors of writing into the lake, in one line: the file or folder, the reason, and what helps."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from durable.errors import DurableError

_NUMBER: Final = re.compile(r"\[errno (\d+)\]|\(os error (\d+)\)", re.IGNORECASE)  # of Arrow, and of the Delta library
_BRANCH: Final = re.compile(r"\n|\x1b\[\d*m|↳")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def writing(place: str) -> Iterator[None]:
    """Translate a failure to write this file or folder of the lake. Raises DurableError."""
    try:
        yield
    except OSError as error:
        raise DurableError(f"lake: {place} cannot be written: {_reason(error)}") from error


def in_one_line(said: str) -> str:
    """An object store's error is a tree in colours, a cause below what it broke."""
    parts = _BRANCH.split(said.strip())
    return ": ".join(" ".join(part.split()) for part in parts if part.strip())


def _reason(error: OSError) -> str:
    said = _NUMBER.search(str(error))
    number = error.errno or (int(said[1] or said[2]) if said else None)
    reason = in_one_line(str(error)) if number is None else os.strerror(number)
    if number in _FULL:
        return f"{reason}; make room there, and run the same command again"
    if number in _REFUSED:
        return f"{reason}; let this user write there, and run the same command again"
    return f"{reason}; run the same command again when that is put right"
