"""Publishing a million messages in bulk, against one connection that copies the same rows into the same table.

Both begin with the same Parquet files and end with the same rows in the outbox, committed. The floor's files hold the
ids already, and it checks nothing; durable computes the ids, screens each row, and adds none that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
import pyarrow.dataset
from adbc_driver_postgresql import dbapi

from durable.pipeline import publish
from durable.pipeline.source import register
from tests.benchmarks.processors import Meter, Place, Taken
from tests.benchmarks.rows import Timing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILES = 4
DESTINATION = "tcp://127.0.0.1:1"
_ADDRESS = ("destination", "message_type", "source", "correlation_id")
COLUMNS = ["id", *_ADDRESS, "content_type", "headers", "body", "sent_at"]


class Publishing:
    """The contenders, on one database that is emptied before each."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, count: int, meter: Meter) -> None:
        self._url, self._count, self._meter = url, count, meter
        orders = spark.range(0, count, 1, FILES).selectExpr("id AS number", "repeat('x', 270) AS text")
        orders.write.parquet(str(folder / "orders"))
        self._orders = spark.read.parquet(str(folder / "orders"))
        self._messages().selectExpr(
            *("id", "destination", "message_type", "source", "id AS correlation_id"),
            *("'application/json' AS content_type", "'{}' AS headers", "body", "current_timestamp() AS sent_at"),
        ).write.parquet(str(folder / "messages"))
        self._files = pyarrow.dataset.dataset(str(folder / "messages"), format="parquet")

    def _messages(self) -> DataFrame:
        return publish.envelopes(
            self._orders, key="number", message_type="bench.note", source="bench", destination=DESTINATION
        )

    def copy(self) -> None:
        """The floor: ADBC, one connection, one COPY."""
        schema = pa.schema([*self._as_stored(next(self._batches())).schema])
        rows = pa.RecordBatchReader.from_batches(schema, map(self._as_stored, self._batches()))
        with closing(dbapi.connect(self._url)) as conn, closing(conn.cursor()) as cursor:
            cursor.adbc_ingest("outgoing_envelopes", rows, mode="append", db_schema_name="durable")
            conn.commit()

    def publish(self, mode: str) -> None:
        self._messages().write.format("durable").mode("append").options(url=self._url, mode=mode).save()

    def taken(self, contender: Callable[[], None]) -> Taken:
        with psycopg.connect(self._url, autocommit=True) as conn:
            conn.execute("TRUNCATE durable.outgoing_envelopes, durable.published_batches")
            conn.execute("CHECKPOINT")
            taken, _ = self._meter.taken(contender)
            assert conn.execute("SELECT count(*) FROM durable.outgoing_envelopes").fetchone() == (self._count,)
        return taken

    def _batches(self) -> Iterator[pa.RecordBatch]:
        yield from self._files.to_batches(columns=COLUMNS)

    def _as_stored(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = {name: batch.column(name) for name in COLUMNS}
        for name in ("id", "correlation_id"):
            columns[name] = pa.ExtensionArray.from_storage(pa.uuid(), columns[name].cast(pa.binary(16)))
        columns["headers"] = pa.ExtensionArray.from_storage(pa.json_(), columns["headers"])
        columns["body"] = columns["body"].cast(pa.binary())
        columns["owner_id"] = pa.repeat(pa.scalar(0, pa.int32()), batch.num_rows)
        return pa.RecordBatch.from_pydict(columns)


def run(at: Place, count: int, rounds: int) -> Sequence[Timing]:
    register(at.spark)
    publishing = Publishing(at.spark, at.url, at.folder, count, at.meter)
    modes = {"atomic": Timing("publish, atomic", "ADBC: one COPY"), "fast": Timing("publish, fast", "ADBC: one COPY")}
    publishing.taken(partial(publishing.publish, "atomic"))  # the session is warm from here on
    for _ in range(rounds):
        floor = publishing.taken(publishing.copy)
        for mode, timing in modes.items():
            timing.measured(floor, publishing.taken(partial(publishing.publish, mode)))
    return list(modes.values())
