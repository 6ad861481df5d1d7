"""Errors of writing, in one line: the file or folder, the reason, and what helps."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from durable.errors import DurableError

_NUMBER: Final = re.compile(r"(?:\[errno |\(os error |\bOs \{ code: (?!2,))(\d+)", re.IGNORECASE)
"""The number of an error in the words of Arrow, and in two ways of the Delta library; 2 is a place that cannot be."""
_BRANCH: Final = re.compile(r"\n|\x1b\[\d*m|↳")
_ANSWER: Final = re.compile(r"<Code>\s*(\w+)\s*</Code>\s*<Message>([^<]*)<")
_WRAPPING: Final = ("deltalake", "_internal")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def writing(place: str, subject: str = "lake") -> Iterator[None]:
    """Translate a failure to write this file or folder, of the lake or of an option. Raises DurableError."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not is_of_the_system(error):
            raise
        raise DurableError(f"{subject}: {place} cannot be written: {_reason(error)}") from error


def in_one_line(said: str) -> str:
    """Return an object store's error in one line: it is a tree in colours, a cause below what it broke, with an answer
    in XML.
    """
    if answer := _ANSWER.search(said):
        return f"{answer[1]}: {' '.join(answer[2].split())}"
    parts = _BRANCH.split(said.strip())
    return ": ".join(" ".join(part.split()) for part in parts if part.strip())


def is_of_the_system(error: Exception) -> bool:
    """True where the Delta library wraps an error of the system in one of its own, as a compaction does."""
    return type(error).__module__.partition(".")[0] in _WRAPPING and _NUMBER.search(str(error)) is not None


def _reason(error: Exception) -> str:
    said = _NUMBER.search(str(error))
    number = getattr(error, "errno", None) or (int(said[1]) if said else None)
    reason = in_one_line(str(error)) if number is None else os.strerror(number)
    if number in _FULL:
        return f"{reason}; make room there, and run the same command again"
    if number in _REFUSED:
        return f"{reason}; let this user write there, and run the same command again"
    return f"{reason}; run the same command again when that is put right"
