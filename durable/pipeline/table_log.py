"""The log of a table of the lake: read as a whole once, and then what was added to it.

    opened()    ──> are the last commit and the checkpoint as they were?  ──yes──> the commits since, if there is a next
                                                                          ──no───> the whole log: it was put back, or
                                                                                   cleaned
    numbers()   ──> of the newest checkpoint, of the commits since, and of those that came later

Delta reads every commit since the newest checkpoint, of which there are up to a hundred, whenever a table is opened and
for each number that it is asked for, and lists the log, which keeps the commits of weeks. On an object store each of
them is a request. Here a look asks for a few files by their names, however long the log is. So a file that is damaged,
or lost, after it was read is told by who reads the log as a whole: the next command, or this one when the last commit
or the checkpoint changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Final

from durable.errors import DurableError
from durable.pipeline import places
from durable.pipeline.places import FileState

if TYPE_CHECKING:
    from deltalake import DeltaTable

FOLDER: Final = "_delta_log"
COMMIT: Final = re.compile(r"(\d{20})\.json")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10})|\.[0-9a-f-]{36})?\.parquet")
"""One file, or one of as many parts as its name says; of other names there may be several that each are whole."""
_SHORTEST: Final = 2  # bytes of JSON with an action


class TableLog:
    """The log of one table, for one thread at a time."""

    def __init__(self, table_url: str) -> None:
        self._url = table_url
        self._table: DeltaTable | None = None
        self._checkpoint: tuple[int, Sequence[str]] = (-1, ())
        """Its version, and its files."""
        self._as_read: Set[FileState] = frozenset()
        """The last commit and the checkpoint, as they were read."""
        self._numbers: dict[str, int] = {}
        self._numbered_to: int | None = None

    def exists(self) -> bool:
        """Tell whether there is a table."""
        from deltalake import DeltaTable

        known = next(iter(self._as_read), None)  # the library lists the log for its answer
        is_there = known is not None and bool(places.states(self._url, [known.path]))
        return is_there or DeltaTable.is_deltatable(self._url)

    def opened(self) -> DeltaTable:
        """The table as it is now. Raises DurableError for an empty last commit, which the library passes over, and the
        errors of the library.
        """
        table = self._brought_up() or self._whole()
        last = _path(table.version())
        self._note(last)
        if any(file.path == last and file.size < _SHORTEST for file in self._as_read):
            raise DurableError(
                f"lake: {self._url}/{last}: is empty; put {FOLDER} back from a backup of the lake, and run the same "
                "command again"
            )
        return table

    def numbers(self) -> Mapping[str, int]:
        """The numbers that the log keeps, by their names, as of the last opened()."""
        version = -1 if self._table is None else self._table.version()
        try:
            self._count_to(version)
        except FileNotFoundError:  # the log was cleaned, and a checkpoint has them by now
            self._checkpoint, self._numbered_to = self._newest_checkpoint(version), None
            self._count_to(version)
        return self._numbers

    def _brought_up(self) -> DeltaTable | None:
        """The known table, with what was added to its log. None where there is none, or the log is not as it was read:
        the whole log tells why.
        """
        if self._table is None:
            return None
        following = _path(self._table.version() + 1)
        found = places.states(self._url, [*(file.path for file in self._as_read), following])
        if not self._as_read <= found:
            return None
        if any(file.path == following for file in found):
            try:
                self._table.update_incremental()
            except Exception:
                return None
        return self._table

    def _whole(self) -> DeltaTable:
        from deltalake import DeltaTable

        table = DeltaTable(self._url)
        self._checkpoint, self._numbered_to = self._newest_checkpoint(table.version()), None
        self._table, self._as_read = table, frozenset()
        return table

    def _note(self, last: str) -> None:
        """Note the states of the last commit, unless it is known, and of the checkpoint."""
        if all(file.path != last for file in self._as_read):
            self._as_read = places.states(self._url, [last, *self._checkpoint[1][:1]])

    def _newest_checkpoint(self, version: int) -> tuple[int, Sequence[str]]:
        """Return the version of the newest whole checkpoint up to this one, and its files."""
        found = checkpoints(places.names(self._url, FOLDER))
        newest = max((number for number in found if number <= version), default=-1)
        return newest, [f"{FOLDER}/{name}" for name in found.get(newest, ())]

    def _count_to(self, version: int) -> None:
        """Add the numbers of the commits up to this version."""
        if self._numbered_to is None:
            self._numbers = self._of_checkpoint()
            self._numbered_to = self._checkpoint[0]
        for number in range(self._numbered_to + 1, version + 1):
            self._numbers |= _numbers_of(places.read(self._url, _path(number)))
            self._numbered_to = number

    def _of_checkpoint(self) -> dict[str, int]:
        import pyarrow.parquet as pq

        numbers: dict[str, int] = {}
        for path in self._checkpoint[1]:
            with places.opened(self._url, path) as file:
                actions = pq.read_table(file, columns=["txn"]).to_pylist()
            numbers |= {action["txn"]["appId"]: action["txn"]["version"] for action in actions if action["txn"]}
        return numbers


def commits(names: Iterable[str]) -> dict[int, str]:
    """Return those of these names that are of commits, by the versions that they have made."""
    return {int(found[1]): found[0] for found in map(COMMIT.fullmatch, names) if found}


def checkpoints(names: Iterable[str]) -> dict[int, list[str]]:
    """Return the files of one whole checkpoint for each version that has one. A writer that died may have left the
    first parts of another, which readers pass over.
    """
    parts: dict[tuple[int, str | None], list[str]] = {}
    for found in filter(None, map(_CHECKPOINT.fullmatch, sorted(names))):
        parts.setdefault((int(found[1]), found[2]), []).append(found[0])
    return {
        version: files[: int(count or 1)] for (version, count), files in parts.items() if len(files) >= int(count or 1)
    }


def _path(version: int) -> str:
    return f"{FOLDER}/{version:020}.json"


def _numbers_of(commit: bytes) -> dict[str, int]:
    actions = [json.loads(line) for line in commit.splitlines() if b'"txn"' in line]
    return {action["txn"]["appId"]: action["txn"]["version"] for action in actions if "txn" in action}
