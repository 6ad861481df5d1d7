"""The batch half of the data source: slices of a table, each one COPY, with Spark's filters answered by Postgres."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from durable.errors import InvalidSetting
from durable.pipeline.columns import COLUMNS
from durable.pipeline.copying import copy, opened
from durable.pipeline.filters import condition
from durable.pipeline.read_options import ReadOptions, selected
from durable.storage import slices
from durable.storage.outages import translated
from durable.storage.readiness import check_ready
from durable.storage.slices import Share, Slice, Snapshot

if TYPE_CHECKING:
    import pyarrow


_PARTITIONS = 8


class SharePartition(InputPartition):
    """Rows that one task reads."""

    def __init__(self, share: Share) -> None:
        super().__init__(share)
        self.share = share


class EnvelopeReader(DataSourceReader):
    """Planned in the driver, pickled, and read by tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._conditions: list[str] = []
        if options.snapshot is None and (options.partitions or 1) > 1:
            raise InvalidSetting(
                "option partitions: several tasks see one state of a table only within one snapshot; "
                "read within `with consistent(url) as options`, or leave partitions out"
            )

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with opened(options.url) as engine, translated():
            with engine.begin() as conn:
                check_ready(conn, options.schema)
            if options.snapshot is None:
                shares: list[Share] = [(Slice(slices.relation(options.schema, options.table)),)]
            else:
                with slices.joined(engine, Snapshot(options.snapshot)) as conn:
                    shares = slices.by_blocks(conn, options.schema, options.table, options.partitions or _PARTITIONS)
        filters = tuple(self._conditions)
        return [SharePartition(tuple(replace(part, filters=filters) for part in share)) for share in shares]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        assert isinstance(partition, SharePartition)
        columns = selected(self._options, self._schema)
        yield from as_spark(
            copy(self._options.url, partition.share, columns, snapshot=self._options.snapshot), self._schema
        )


class FilteringReader(EnvelopeReader):
    """The same where Spark asks which filters it may leave to the source."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Accept the filters that mean the same in Postgres; yield the others back to Spark."""
        kinds = {column.name: column.kind for column in COLUMNS[self._options.table]}
        for each in filters:
            sql = condition(each, kinds)
            if sql is None:
                yield each
            else:
                self._conditions.append(sql)


def as_spark(batches: Iterator[pyarrow.RecordBatch], schema: StructType) -> Iterator[pyarrow.RecordBatch]:
    """Convert batches to exactly the Arrow schema that Spark wants: names, types and nullable columns."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    target = to_arrow_schema(schema, timezone="UTC")
    for batch in batches:
        yield pa.RecordBatch.from_arrays(batch.columns, schema=target)
