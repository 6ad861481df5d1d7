"""The streaming half of the data source: rows in the order of the horizon, from a checkpoint on.

    offset {"xid": n}: every row of a transaction below n was read

A micro-batch is a range of transactions that are all finished, so that one which commits late is never passed over,
and the same batch read again has the same rows. A long transaction holds the stream back for as long as it runs.
A dead letter is read again when it is resolved; one that changes twice between two micro-batches is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from durable.pipeline.copying import connection, copy
from durable.pipeline.read_options import ReadOptions, selected
from durable.pipeline.reader import SharePartition, as_spark
from durable.storage import archives, migrator, slices

if TYPE_CHECKING:
    import pyarrow

_PARTITIONS = 4
Offset = dict[str, Any]


class EnvelopeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in a Python process beside the driver for as long as the query runs; its partitions are read by tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        options.check_transactions()
        self._options = options
        self._schema = schema
        self._target: int | None = None

    def initialOffset(self) -> Offset:
        return {"xid": self._horizon() if self._options.is_latest else 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self._options.max_rows is None else ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._horizon()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """The end of the next micro-batch; `start` again when there is nothing to read, so that none is empty."""
        end = self._horizon() if self._target is None else self._target
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        options = self._options
        with connection(options.url) as conn:
            found = archives.end_of_batch(conn, options.schema, options.table, start["xid"], end, rows)
        return start if found is None else {"xid": found}

    def reportLatestOffset(self) -> Offset:
        return {"xid": self._horizon()}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        options = self._options
        count = options.partitions or _PARTITIONS
        shares = slices.by_transactions(options.schema, options.table, start["xid"], end["xid"], count)
        return [SharePartition(share) for share in shares]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        assert isinstance(partition, SharePartition)
        columns = selected(self._options, self._schema)
        yield from as_spark(copy(self._options.url, partition.share, columns), self._schema)

    def commit(self, end: Offset) -> None:
        """Nothing: Spark does not call it for the last batch of AvailableNow, so nobody may build on it."""

    def _horizon(self) -> int:
        with connection(self._options.url) as conn:
            migrator.check_version(conn, self._options.schema)
            return archives.horizon(conn, self._options.schema)
