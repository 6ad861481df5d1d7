"""A read whose workers are killed amid their tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from durable.pipeline.source import EnvelopeSource
from tests.support.killing import copy_in_small_batches, is_first_attempt, until_killed


class DyingReader(DataSourceReader):
    """Reads as this reader does; the first attempt of a task is killed after so many rows."""

    def __init__(self, reader: DataSourceReader, rows: int, died: Path) -> None:
        self._reader, self._rows, self._died = reader, rows, died

    def partitions(self) -> Sequence[InputPartition]:
        return self._reader.partitions()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not is_first_attempt():
            return self._reader.read(partition)
        copy_in_small_batches()
        batches: Iterator[pa.RecordBatch] = self._reader.read(partition)
        return until_killed(batches, self._rows, self._died)


class DyingSource(EnvelopeSource):
    """`format("dying")`, with the options `rows` and `died` of its reader."""

    def __init__(self, options: Mapping[str, str]) -> None:
        own = dict(options)
        self._rows, self._died = int(own.pop("rows")), Path(own.pop("died"))
        super().__init__(own)

    @classmethod
    def name(cls) -> str:
        return "dying"

    def reader(self, schema: StructType) -> DataSourceReader:
        return DyingReader(super().reader(schema), self._rows, self._died)
