"""The files of a table of the lake as its log has them, and errors about a log, or a place, that cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from durable.errors import DurableError, InvalidSetting
from durable.pipeline import places
from durable.pipeline.lake_tables import Whose
from durable.pipeline.table_log import FOLDER, checkpoints, commits
from durable.pipeline.unwritable import in_one_line, is_of_the_system
from durable.storage.archives import Absent
from durable.storage.days import midnight

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

_DAY: Final = timedelta(days=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_PRECISION: Final = 1_000  # microseconds
_OF_THE_PLACE: Final = re.compile(r"Generic (?!delta kernel)|HTTP error|Object at location")
_LONGEST: Final = 200


class Statistics(NamedTuple):
    """Statistics of a column of a file by which readers pass it over; None where the log has none.

    Times are in microseconds. Delta cuts them to milliseconds, so the highest one is the end of its millisecond.
    """

    low: Any
    high: Any
    nulls: int | None


_UNKNOWN: Final = Statistics(None, None, None)


class LakeFile(NamedTuple):
    """A file of the table, as the log has it."""

    day: date
    path: str
    rows: int | None
    size: int
    statistics: Mapping[str, Statistics]


def adds(opened: DeltaTable) -> list[tuple[date, str, int]]:
    """Day, path and number of rows of each file."""
    return [(file.day, file.path, file.rows or 0) for file in _files(_actions(opened), ())]


def files(opened: DeltaTable) -> list[LakeFile]:
    """The files of the table with their statistics."""
    found = _actions(opened)
    return _files(found, [name.removeprefix("min.") for name in found.column_names if name.startswith("min.")])


def rows_from(opened: DeltaTable, time: str, whose: Whose, xid: int) -> dict[str, Absent]:
    """The files that may have rows of this database of this transaction or a later one."""
    found = {}
    for file in files(opened):
        bounds = {name: file.statistics.get(name, _UNKNOWN) for name in ("service", "database", "xid", time)}
        is_other = any(
            not bounds[name].low <= own <= bounds[name].high
            for name, own in zip(("service", "database"), whose, strict=True)
            if bounds[name].low is not None
        )
        last_xid = bounds["xid"].high
        if not is_other and (last_xid is None or last_xid >= xid):
            below = xid + 1 if last_xid is None else last_xid + 1
            found[file.path] = Absent(file.day, *_moments(file.day, bounds[time]), file.rows or 0, below)
    return found


def _moments(day: date, times: Statistics) -> tuple[datetime, datetime]:
    """Return the first and the last time of a file; those of its day where the log has none."""
    first, last = (None if each is None else _EPOCH + each * _MICROSECOND for each in times[:2])
    return first or midnight(day), last or midnight(day + _DAY)


def _actions(opened: DeltaTable) -> pa.Table:
    import pyarrow as pa

    return pa.table(opened.get_add_actions(flatten=True))


def _files(actions: pa.Table, columns: Any) -> list[LakeFile]:
    each = {name: _plain(actions, name) for name in ("partition.day", "path", "num_records", "size_bytes")}
    found = {
        name: (_plain(actions, f"min.{name}"), _highest(actions, f"max.{name}"), _plain(actions, f"null_count.{name}"))
        for name in columns
    }
    return [
        LakeFile(
            day,
            unquote(path),
            rows,
            size,
            {name: Statistics(*(values[place] for values in lists)) for name, lists in found.items()},
        )
        for place, (day, path, rows, size) in enumerate(zip(*each.values(), strict=True))
    ]


def _plain(actions: pa.Table, name: str) -> list[Any]:
    """A time as its microseconds: not every time of Postgres is a datetime."""
    import pyarrow as pa

    if name not in actions.column_names:
        return [None] * len(actions)
    column = actions[name]
    if _is_time(actions, name):
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())
    found: list[Any] = column.to_pylist()
    return found


def _highest(actions: pa.Table, name: str) -> list[Any]:
    if not _is_time(actions, name):
        return _plain(actions, name)
    return [each if each is None else each - each % _PRECISION + _PRECISION - 1 for each in _plain(actions, name)]


def _is_time(actions: pa.Table, name: str) -> bool:
    import pyarrow as pa

    return name in actions.column_names and pa.types.is_timestamp(actions.schema.field(name).type)


# ---------------------------------------------------------------- what cannot be read


@contextmanager
def readable(url: str) -> Iterator[None]:
    """Turn the library's error about an unusable place into one line that names the place."""
    from deltalake.exceptions import DeltaError

    try:
        yield
    except (DeltaError, OSError, ValueError) as error:
        said = in_one_line(str(error))
        raise InvalidSetting(
            f"lake {url}: {said}; name a folder or the URL of an object store that this machine may read"
        ) from error


@contextmanager
def sound_log(table_url: str) -> Iterator[None]:
    """Turn the library's error about a log into one line that names its file. Raises DurableError."""
    from deltalake.exceptions import DeltaError, TableNotFoundError

    try:
        yield
    except (DeltaError, ValueError) as error:
        is_of_the_place = is_of_the_system(error) or _OF_THE_PLACE.search(str(error))
        if isinstance(error, TableNotFoundError) or is_of_the_place:
            raise
        raise DurableError(
            f"lake: {table_url}/{_damaged_commit(table_url, error)}; put {FOLDER} back from a backup of the lake, and "
            "run the same command again"
        ) from error


def _damaged_commit(table_url: str, error: Exception) -> str:
    """Describe the first commit that is not there, or is no JSON; else the fault in the library's own words."""
    names = places.names(table_url, FOLDER)
    known = commits(names)
    for number in range(max(checkpoints(names), default=-1) + 1, max(known, default=-1) + 1):
        if number not in known:
            return f"{FOLDER}/{number:020}.json: is not there"
        if not _is_json(places.read(table_url, f"{FOLDER}/{known[number]}")):
            return f"{FOLDER}/{known[number]}: is damaged"
    said = in_one_line(str(error))
    return f"{FOLDER}: is damaged: {said if len(said) <= _LONGEST else f'{said[:_LONGEST]}...'}"


def _is_json(content: bytes) -> bool:
    try:
        for line in content.splitlines():
            if line.strip():
                json.loads(line)
    except ValueError:
        return False
    return True
