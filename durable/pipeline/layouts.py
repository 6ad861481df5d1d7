"""Layout of the files of Parquet in a place: Spark reads those of one kind of folder, and passes over all others.

place/a.parquet                            read, unless there are folders of partitions
place/day=2030-05-01/a.parquet             read, where every file lies in folders of the same partitions
place/more/a.parquet                       passed over
place/_a.parquet, .a, a._COPYING_          passed over
place/a.parquet -> nowhere                 passed over
place/_SUCCESS, _temporary/, _metadata     no data: marks of writers
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import dropwhile, takewhile
from typing import Final

from durable.errors import InvalidSetting
from durable.grammar import several
from durable.pipeline import places

_MARK: Final = re.compile(
    r"_temporary|_metadata|_common_metadata|_spark_metadata|_delta_log|\.spark-staging.*|\.hive-staging.*|.*\.crc",
    re.DOTALL,
)
_HIDDEN: Final = re.compile(r"_[^=]*|\..*|.*\._COPYING_", re.DOTALL)
_MAGIC: Final = (b"PAR1", b"PARE")
"""Beginnings of a file of Parquet; the second one if it is encrypted."""


def check_files(place: str) -> None:
    """Raise InvalidSetting for the first file at this place which Spark would pass over, or which is empty, and for a
    symbolic link to nothing.
    """
    _refuse(
        [path for path in places.dangling(place) if not _is_mark(path) and not _is_hidden(path)],
        f"in {place} is a symbolic link to nothing",
        "and its messages would be left out; put back the file that it names, or remove it",
    )
    sizes = places.sizes(place)
    data = [path for path in sorted(sizes) if not _is_mark(path)]
    hidden = {path for path in data if _is_hidden(path)}
    shown = [path for path in data if path not in hidden]
    _refuse(
        [path for path in shown if not sizes[path]],
        f"in {place} is empty",
        "as a writer leaves it that has failed; write the files again, or remove it",
    )
    _refuse(
        [path for path in sorted(hidden) if sizes[path] and places.beginning(place, path, len(_MAGIC[0])) in _MAGIC],
        f"in {place} would be left out",
        "since its name, or that of its folder, begins with _ or . or ends with ._COPYING_; rename it, or remove it",
    )
    _refuse(
        passed_over(shown),
        f"in {place} would be left out",
        "since only files of one folder are read, or of folders of the same partitions such as day=2030-05-01; "
        "put the files together, or replay each folder under a name of its own",
    )


def passed_over(paths: Iterable[str]) -> list[str]:
    """The files at these paths that are not read together with the others."""
    layouts = {path: _layout(path) for path in paths}
    read = next((layout for layout in layouts.values() if layout[1]), ((), ()))
    return [path for path, layout in layouts.items() if layout != read]


def _is_mark(path: str) -> bool:
    return any(map(_MARK.fullmatch, path.split("/")))


def _is_hidden(path: str) -> bool:
    return any(map(_HIDDEN.fullmatch, path.split("/")))


def _layout(path: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return the folders above those of partitions, and the columns of the partitions."""
    upwards = path.split("/")[-2::-1]
    columns = (name.partition("=")[0].lower() for name in takewhile(_is_partition, upwards))
    return tuple(dropwhile(_is_partition, upwards)), tuple(columns)


def _is_partition(folder: str) -> bool:
    return "=" in folder


def _refuse(paths: Sequence[str], fault: str, advice: str) -> None:
    if paths:
        more = f", and {several(len(paths) - 1, 'other files', 'are')}" if len(paths) > 1 else ""
        raise InvalidSetting(f"--parquet: {paths[0]} {fault}{more}, {advice}")
