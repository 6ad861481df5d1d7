"""The streaming half of the data source: rows in the order of the horizon, from a checkpoint on.

    offset {"xid": n, "identity": i, "last": r, "drop": d, "begin": b}: every row of a transaction below n of this
    cluster was read, r last, and the drop of rows that was the last then has the number d; the micro-batch that ends
    here began at b, which has the xid and the drop of its own

A micro-batch is a range of transactions that are all finished, so that one which commits late is never passed over, and
the same batch read again has the same rows. It begins where its end says: a checkpoint does not have the start of the
first batch, and Spark asks for another one where it reads that batch again. A long transaction holds the stream back
for as long as it runs. A database that was restored, upgraded or failed over numbers its transactions anew, so that a
checkpoint of before says nothing of it, and is refused. Where its files were put back, the numbers come again without
another identity: so a batch ends with its last row, and a database that does not have this row is refused as well. No
stream begins on one with rows of numbers that it has not come to: they would be read late, or never.

A purge, or a retention, drops rows whether a stream has read them or not. Each drop is numbered in its own transaction,
with its newest row: where one after d has dropped a row of n or above, the batch from n on is refused, after it was
read, so that a drop amid the read is noticed, too.

A dead letter is read again when it is resolved; one that changes twice between two micro-batches is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType
from sqlalchemy import Connection

from durable.errors import InvalidSetting
from durable.pipeline.copying import connection, copy
from durable.pipeline.read_options import ReadOptions, selected
from durable.pipeline.reader import SharePartition, as_spark
from durable.storage import archives, horizons, purging, slices
from durable.storage.horizons import LastRow
from durable.storage.readiness import check_ready
from durable.storage.slices import Share

if TYPE_CHECKING:
    import pyarrow

_PARTITIONS = 4
_OF_ANOTHER_STATE: Final = (
    "checkpointLocation: the checkpoint is of another state of the database, which was restored, copied, upgraded or "
    "failed over since, and numbers its transactions anew; begin with a new checkpoint, and deduplicate rows that are "
    "read again by id and outcome"
)
_NUMBERED_ANEW: Final = (
    "url: {table} has rows of another cluster, restored from its dump, with transaction numbers that this one has not "
    "come to; archive this database with durable-agent pipeline archive, which numbers new rows above all of them, and "
    "begin the stream then"
)
Offset = dict[str, Any]


class StreamPartition(SharePartition):
    """Rows that one task reads of a micro-batch that begins there."""

    def __init__(self, share: Share, begin: Offset) -> None:
        super().__init__(share)
        self.begin = begin


class EnvelopeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in a Python process beside the driver for as long as the query runs; its partitions are read by tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        options.check_transactions()
        self._options = options
        self._schema = schema
        self._target: Offset | None = None

    def initialOffset(self) -> Offset:
        end = self._target or self._end()  # never beyond the target, which is set before
        begin = end if self._options.is_latest else end | {"xid": min(self._start(), end["xid"])}
        with connection(self._options.url) as conn:
            self._check_numbers(conn)
            begin = begin | {"drop": self._last_drop(conn)}
        return begin | {"begin": _begin(begin)}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self._options.max_rows is None else ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._end()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """The end of the next micro-batch; `start` again when there is nothing to read, so that none is empty."""
        end = self._target or self._end()
        _check(start, end)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        options = self._options
        with connection(options.url) as conn:
            self._check_last(conn, start)
            last = horizons.last_of_batch(conn, options.schema, options.table, start["xid"], end["xid"], rows)
            if last is not None:
                read = {"xid": last.xid + 1, "last": [last.key, last.moment], "drop": self._last_drop(conn)}
                end = end | read | {"begin": _begin(start)}
            self._check_drops(conn, start)  # after those that `end` knows of
        return start if last is None else end

    def reportLatestOffset(self) -> Offset:
        return self._end()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        options = self._options
        _check(end, self._end())
        with connection(options.url) as conn:
            self._check_last(conn, end)
        count = options.partitions or _PARTITIONS
        begin = end.get("begin", start)
        shares = slices.by_transactions(options.schema, options.table, begin["xid"], end["xid"], count)
        return [StreamPartition(share, begin) for share in shares]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        assert isinstance(partition, StreamPartition)
        columns = selected(self._options, self._schema)
        yield from as_spark(copy(self._options.url, partition.share, columns), self._schema)
        with connection(self._options.url) as conn:
            self._check_drops(conn, partition.begin)

    def commit(self, end: Offset) -> None:
        """Ignore the commit: Spark does not call it for the last batch of AvailableNow, so it cannot be relied on."""

    def _check_numbers(self, conn: Connection) -> None:
        """Raise InvalidSetting when rows have numbers which this database has not come to, and may give once more."""
        if archives.is_numbered_anew(conn, self._options.schema, self._options.table):
            raise InvalidSetting(_NUMBERED_ANEW.format(table=self._options.table))

    def _check_last(self, conn: Connection, read: Offset) -> None:
        """Raise InvalidSetting when the database has not the last row that was read, though it was not dropped."""
        if "last" not in read:
            return
        last = LastRow(read["xid"] - 1, *read["last"])
        if horizons.is_of_another_life(conn, self._options.schema, self._options.table, last):
            raise InvalidSetting(_OF_ANOTHER_STATE)

    def _last_drop(self, conn: Connection) -> int:
        return purging.last_drop(conn, self._options.schema, self._options.table)

    def _check_drops(self, conn: Connection, read: Offset) -> None:
        """Raise InvalidSetting when rows were dropped that this query has not read."""
        options = self._options
        dropped = purging.dropped_since(conn, options.schema, options.table, read.get("drop", 0), read["xid"])
        if dropped is not None:
            raise InvalidSetting(
                f"checkpointLocation: rows of {dropped.first_day} to {dropped.last_day} were dropped from "
                f"{options.table} before this query had read them, and may be missing; read these days from the "
                "lake, if they were archived, begin with a new checkpoint, and deduplicate rows that are read again by "
                "id and outcome"
            )

    def _start(self) -> int:
        """Return the number where the rows begin: tasks share the numbers between start and end, which may lie far
        above 0.
        """
        with connection(self._options.url) as conn:
            return horizons.start(conn, self._options.schema, self._options.table)

    def _end(self) -> Offset:
        """The horizon of now."""
        with connection(self._options.url) as conn:
            schema = self._options.schema
            check_ready(conn, schema)
            return {"xid": horizons.horizon(conn, schema), "identity": archives.identity(conn, schema)}


def _begin(start: Offset) -> Offset:
    """The start of a batch, as its end tells it."""
    return {"xid": start["xid"], "drop": start.get("drop", 0)}


def _check(read: Offset, end: Offset) -> None:
    """Raise InvalidSetting when what was read is of a database that numbered its transactions otherwise."""
    if read.get("identity") != end["identity"] or read["xid"] > end["xid"]:
        raise InvalidSetting(_OF_ANOTHER_STATE)
