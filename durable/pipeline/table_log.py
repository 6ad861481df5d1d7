"""The log of a table of the lake: read as a whole once, and then what was added to it.

    opened()    ──> are all files of the log as they were?  ──> the commits since
                                                 is one not?  ──> the whole log: it was damaged, cleaned or put back
    numbers()   ──> of the newest checkpoint, of the commits since, and of those that came later

Delta reads every commit since the newest checkpoint, of which there are up to a hundred, whenever a table is opened and
for each number that it is asked for. On an object store each of them is a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Set
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
_LASTING: Final = re.compile(rf"{COMMIT.pattern}|{_CHECKPOINT.pattern}")
"""Files that nobody writes a second time."""
_SHORTEST: Final = 2  # bytes of JSON with an action


class TableLog:
    """The log of one table, for one thread at a time."""

    def __init__(self, table_url: str) -> None:
        self._url = table_url
        self._table: DeltaTable | None = None
        self._files: Set[FileState] = frozenset()
        self._numbers: dict[str, int] = {}
        self._numbered_to: int | None = None

    def opened(self) -> DeltaTable:
        """The table as it is now. Raises DurableError for an empty last commit, which the library passes over, and the
        errors of the library.
        """
        from deltalake import DeltaTable

        before = self._files
        self._files = {file for file in places.states(self._url, FOLDER) if _LASTING.fullmatch(file.name)}
        if self._table is None or not before <= self._files or not self._is_brought_up(before):
            self._table = self._numbered_to = None  # an attempt that fails leaves nothing behind
            self._table = DeltaTable(self._url)
        name = _name(self._table.version())
        if any(file.name == name and file.size < _SHORTEST for file in self._files):
            raise DurableError(
                f"lake: {self._url}/{FOLDER}/{name}: is empty; put {FOLDER} back from a backup of the lake, and run "
                "the same command again"
            )
        return self._table

    def numbers(self) -> Mapping[str, int]:
        """The numbers that the log keeps, by their names, as of the last opened()."""
        version = -1 if self._table is None else self._table.version()
        if self._numbered_to is None:
            self._numbered_to, self._numbers = self._of_checkpoint(version)
        for number in range(self._numbered_to + 1, version + 1):
            self._numbers |= _numbers_of(places.read(self._url, f"{FOLDER}/{_name(number)}"))
            self._numbered_to = number
        return self._numbers

    def _is_brought_up(self, before: Set[FileState]) -> bool:
        """Add what the log has besides these files to the table. False where that fails: the whole log tells why."""
        assert self._table is not None
        if before != self._files:
            try:
                self._table.update_incremental()
            except Exception:
                return False
        return True

    def _of_checkpoint(self, version: int) -> tuple[int, dict[str, int]]:
        """Return the version of the newest checkpoint up to this one, and its numbers."""
        import pyarrow.parquet as pq

        found = checkpoints([file.name for file in self._files])
        newest = max((number for number in found if number <= version), default=-1)
        numbers: dict[str, int] = {}
        for name in found.get(newest, ()):
            with places.opened(self._url, f"{FOLDER}/{name}") as file:
                actions = pq.read_table(file, columns=["txn"]).to_pylist()
            numbers |= {action["txn"]["appId"]: action["txn"]["version"] for action in actions if action["txn"]}
        return newest, numbers


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


def _name(version: int) -> str:
    return f"{version:020}.json"


def _numbers_of(commit: bytes) -> dict[str, int]:
    actions = [json.loads(line) for line in commit.splitlines() if b'"txn"' in line]
    return {action["txn"]["appId"]: action["txn"]["version"] for action in actions if "txn" in action}
