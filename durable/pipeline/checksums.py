"""Checksums of the files of a table of the lake, each in a file of its own, which no reader of the table looks at.

    LAKE/history/day=2026-11-20/part-1.parquet ──> LAKE/history/_checksums/day=2026-11-20/part-1.parquet.blake2b

Whoever writes a file notes its checksum before the commit; only a compaction, whose files the Delta library writes and
commits at once, notes it afterwards. A file without one was written by an older version, by another program, or by a
compaction that died; a text that is no checksum is as good as none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from durable.pipeline import places
from durable.pipeline.progress import Show
from durable.pipeline.unwritable import in_one_line

DIFFERS: Final = "its bytes are not those that were written: their checksum differs"
FOLDER: Final = "_checksums"
_ENDING: Final = ".blake2b"
_BYTES: Final = 32
_FORM: Final = re.compile(rb"[0-9a-f]{64}")


class Summed:
    """A stream of a new file, with the checksum of what was written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._sum = hashlib.blake2b(digest_size=_BYTES)

    def write(self, data: Any) -> Any:
        self._sum.update(data)
        return self._stream.write(data)

    def checksum(self) -> str:
        return self._sum.hexdigest()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def of(content: Any) -> str:
    """Return the checksum of bytes, or of a buffer."""
    return hashlib.blake2b(content, digest_size=_BYTES).hexdigest()


def note(table_url: str, path: str, checksum: str) -> None:
    """Write it down at once as a whole: readers find it, or none."""
    with places.replaced(table_url, _place(path)) as stream:
        stream.write(checksum.encode())


def note_lacking(table_url: str, path: str) -> None:
    """Note that of a file as it is now, unless it has one."""
    with _readable(table_url, path):
        checksum = None if noted(table_url, path) is not None else of(places.read(table_url, path))
    if checksum is not None:
        note(table_url, path, checksum)


def noted(table_url: str, path: str) -> str | None:
    """Return the checksum of this file; None if it has none. Raises OSError where that cannot be read."""
    try:
        found = places.read(table_url, _place(path))
    except FileNotFoundError:
        return None
    return found.decode() if _FORM.fullmatch(found) else None


def check(table_url: str, paths: Iterable[str], show: Show = lambda done, total: None) -> None:
    """Raise DurableError, which names it, for the first of these files that is not there, or not as it was written.

    What is made of a damaged file would have a checksum of its own, which hides the damage.
    """
    places.check_present(table_url, paths := list(paths))
    for done, path in enumerate(paths):
        show(done, len(paths))
        with _readable(table_url, path):
            is_altered = differs(table_url, path)
        if is_altered:
            raise places.unreadable(f"{table_url}/{path}", DIFFERS)
    show(len(paths), len(paths))


def differs(table_url: str, path: str) -> bool:
    """Tell whether a file has a checksum, and another content. Raises OSError where one of them cannot be read."""
    checksum = noted(table_url, path)
    return checksum is not None and checksum != of(places.read(table_url, path))


class Compared:
    """Files that a command has compared with their checksums: each is read for that once."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    def check(self, table_url: str, paths: Iterable[str]) -> None:
        """Raise DurableError, as the function check() does, for the first file that is not as it was written."""
        fresh = [path for path in paths if (table_url, path) not in self._known]
        if fresh:
            check(table_url, fresh)
            self._known |= {(table_url, path) for path in fresh}


def remove(table_url: str, path: str) -> None:
    places.remove(table_url, _place(path))


def remove_stray(table_url: str) -> None:
    """Remove those of files that are not there any more."""
    known = [file.path for file in places.files(f"{table_url}/{FOLDER}")]  # first: a file is there before its checksum
    there = {file.path for file in places.files(table_url)} if known else set()
    for path in known:
        if path.removesuffix(places.NEW).removesuffix(_ENDING) not in there:  # the new one of a writer at work stays
            places.remove(table_url, f"{FOLDER}/{path}")


@contextmanager
def _readable(table_url: str, path: str) -> Iterator[None]:
    """Translate a failure to read a file, or its checksum. Raises DurableError, which names the file."""
    try:
        yield
    except OSError as error:
        raise places.unreadable(f"{table_url}/{path}", in_one_line(str(error))) from error


def _place(path: str) -> str:
    return f"{FOLDER}/{path}{_ENDING}"
