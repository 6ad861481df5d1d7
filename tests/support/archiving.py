"""An archiver of one database into one lake, and how tests look at what became of it.

Run as a program with a lake and a database's URL it archives the history, and dies at the failpoint of
DURABLE_FAILPOINT.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from pyspark.sql import SparkSession

from durable.pipeline import archive as archiving
from durable.pipeline import copying, files
from durable.pipeline.archive import Archived, ArchiveTask, archive
from durable.pipeline.copying import copy
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import DataFile, LakeTable
from durable.pipeline.origin import Origin
from durable.pipeline.session import spark_session
from durable.pipeline.verify import Verified, claimed, verify
from tests.support.history import numbers
from tests.support.killing import arm_session, copy_in_small_batches, dies_at, is_first_attempt, until_killed


def origin_of(url: str) -> Origin:
    return Origin(url=url, schema="durable", service="shop")


class Archiver:
    """Archives one database into one lake, and looks at what is there."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self.spark = spark
        self.lake = Lake(str(folder / "lake"))
        self.origin = origin_of(url)

    def run(self, table: LakeTable = "history", **options: Any) -> Archived:
        options = {"local_rows": 0} | options  # what is tested is the way of many rows, unless a test says otherwise
        return archive(lambda: self.spark, self.lake, table, self.origin, **options)

    def dies_at(self, failpoint: str) -> None:
        """In a session of its own."""
        dies_at(failpoint, "archiving", self.lake.url, self.origin.url)

    def verify(self, table: LakeTable = "history", **options: Any) -> Verified:
        of = claimed(self.origin, self.lake, table)
        return verify(lambda: self.spark, self.lake, self.origin, of, **options)

    def ids(self, table: LakeTable = "history") -> list[int]:
        return numbers([row.id for row in self.lake.read(self.spark, table).select("id").collect()])

    def files(self) -> list[Path]:
        """Also those that are no part of it."""
        return sorted(Path(self.lake.table_url("history")).glob("day=*/*.parquet"))


# ---------------------------------------------------------------- tasks that die


class MortalTask:
    """Its first attempt is killed amid COPY, after so many rows, of which all that were read are written."""

    def __init__(self, rows: int, died: Path, **task: Any) -> None:
        self._rows, self._died, self._task = rows, died, task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if is_first_attempt():
            self._doom()
        return ArchiveTask(**self._task)(batches)

    def _doom(self) -> None:
        """Of this worker, which ends with the attempt, so that nothing needs to be put back."""
        copy_in_small_batches()
        files._GROUP_ROWS = 1
        patch.object(archiving, "copy", self._copied).start()

    def _copied(self, *args: Any, **named: Any) -> Iterator[pa.RecordBatch]:
        return until_killed(copy(*args, **named), self._rows, self._died)


class DeprivedTask:
    """While its first share is read, after so many rows, the server that it reads from comes to grief, once."""

    def __init__(self, ends: Callable[[], None], after: int, ended: Path, **task: Any) -> None:
        self._ends, self._after, self._ended, self._task = ends, after, ended, task
        self.shares = task["shares"]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with self._deprived():
            yield from ArchiveTask(**self._task)(batches)

    def write(self, number: int) -> list[DataFile]:
        with self._deprived():
            return ArchiveTask(**self._task).write(number)

    @contextmanager
    def _deprived(self) -> Iterator[None]:
        with (
            patch.object(archiving, "copy", self._copied),
            patch.object(copying, "_BATCH_BYTES", 1 << 14),
            patch.object(files, "_GROUP_ROWS", 1),
        ):
            yield

    def _copied(self, *args: Any, **named: Any) -> Iterator[pa.RecordBatch]:
        count = 0
        for batch in copy(*args, **named):
            yield batch
            count += batch.num_rows
            if count >= self._after and not self._ended.exists():
                self._ended.touch()
                self._ends()


if __name__ == "__main__":
    arm_session()
    archive(
        lambda: spark_session(master="local[2]"), Lake(sys.argv[1]), "history", origin_of(sys.argv[2]), local_rows=0
    )
