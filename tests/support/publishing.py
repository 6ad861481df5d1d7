"""Orders that are published in bulk, and how tests look at what became of them.

Run as a program with a database's URL it publishes a thousand of them, and dies at the failpoint of DURABLE_FAILPOINT.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from durable.pipeline import publish, writer
from durable.pipeline.publish import uuid8_of
from durable.pipeline.session import spark_session
from durable.pipeline.source import EnvelopeSource
from durable.pipeline.writer import EnvelopeWriter, Target, Written
from durable.storage import staging
from durable.storage.staging import Staged
from tests.support.killing import arm_session, until_killed

PEER = "tcp://127.0.0.1:2301"
MESSAGE_TYPE = "orders.order-placed"
SOURCE = "orders"


def orders(spark: SparkSession, count: int, *, first: int = 0, partitions: int = 2) -> DataFrame:
    return spark.range(first, first + count, 1, partitions).selectExpr("id AS order_id", "id * 2 AS total")


def messages(rows: DataFrame, destination: str = PEER, **options: Any) -> DataFrame:
    named: dict[str, Any] = {
        "key": "order_id",
        "message_type": MESSAGE_TYPE,
        "source": SOURCE,
        "destination": destination,
    }
    return publish.envelopes(rows, **named, **options)


def write(rows: DataFrame, url: str, *, save_mode: str = "append", source: str = "durable", **options: object) -> None:
    named = {name: str(value) for name, value in options.items()}
    rows.write.format(source).mode(save_mode).options(url=url, **named).save()


# ---------------------------------------------------------------- what a task does, without Spark


_BINARY = ("id", "correlation_id")
COLUMNS = StructType(
    [
        StructField(name, BinaryType() if name in _BINARY else StringType())
        for name in ("id", "destination", "endpoint", "message_type", "source", "body", "correlation_id")
    ]
)


def staged(to: Target, numbers: Sequence[int], *, attempt: int = 1, endpoint: str | None = None) -> Written:
    """The result of a task with these rows."""
    texts = {"destination": PEER, "endpoint": endpoint, "message_type": MESSAGE_TYPE, "source": SOURCE, "body": "{}"}
    ids = pa.array([uuid8_of(str(number)).bytes for number in numbers], pa.binary())
    columns = {name: pa.array([value] * len(numbers), pa.string()) for name, value in texts.items()}
    rows = pa.RecordBatch.from_pydict(columns | dict.fromkeys(_BINARY, ids))
    intake, table = writer._Intake(to, 0), staging.table_name(to.job, attempt)
    writer._copy(to, table, intake.staged(iter([rows])))
    written = Written(to.job, Staged(table, intake.rows, intake.local_rows), intake.contents, query="q")
    return writer._part(to, written) if to.mode == "fast" and intake.rows else written


class Outbox:
    """What was published, as Postgres has it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def rows(self, query: str, *params: object) -> list[Any]:
        with psycopg.connect(self.url, autocommit=True) as conn:
            cursor = conn.execute(query.encode(), params)
            return cursor.fetchall() if cursor.description else []

    def one(self, query: str, *params: object) -> Any:
        ((value,),) = self.rows(query, *params)
        return value

    @property
    def orders(self) -> list[int]:
        """Those that wait to be sent, in order; one that waits twice is there twice."""
        return self._orders("outgoing_envelopes")

    @property
    def inbox(self) -> list[int]:
        return self._orders("incoming_envelopes")

    @property
    def batches(self) -> list[tuple[int, int]]:
        """Rows and added rows of each batch, in the order in which they were published."""
        return self.rows("SELECT row_count, added_count FROM durable.published_batches ORDER BY published_at")

    @property
    def leftovers(self) -> list[str]:
        """The staging tables."""
        return [name for (name,) in self.rows("SELECT relname FROM pg_class WHERE relname ~ '^staged_' ORDER BY 1")]

    def empty(self) -> None:
        """As if all of it had been sent."""
        self.rows("DELETE FROM durable.outgoing_envelopes")

    def _orders(self, table: str) -> list[int]:
        number = "(convert_from(body, 'UTF8')::json->>'order_id')::integer"
        return [order for (order,) in self.rows(f"SELECT {number} AS n FROM durable.{table} ORDER BY n")]


# ---------------------------------------------------------------- tasks that fail


class FailingWriter(EnvelopeWriter):
    """The first attempt of its second partition comes to grief."""

    def __init__(self, source: FailingSource, schema: StructType, overwrite: bool) -> None:
        options = dict(source.options)
        self._end, self._died = options.pop("end"), Path(options.pop("died"))
        super().__init__(options, schema, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() != 1 or context.attemptNumber() > 0:
            return super().write(iterator)
        if self._end == "in mid-copy":
            return super().write(until_killed(iterator, 200, self._died))
        written = super().write(iterator)
        self._died.write_text(f"{written.staged.rows}")
        raise RuntimeError("the task fails after its copy was committed")


class FailingSource(EnvelopeSource):
    """`format("failing")`."""

    @classmethod
    def name(cls) -> str:
        return "failing"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return FailingWriter(self, schema, overwrite)


# ---------------------------------------------------------------- drivers that die


class MortalWriter(EnvelopeWriter):
    """At the failpoint of DURABLE_FAILPOINT its whole driver dies, and not only the process that commits."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        arm_session()
        super().commit(messages)


class MortalSource(EnvelopeSource):
    """`format("mortal")`."""

    @classmethod
    def name(cls) -> str:
        return "mortal"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return MortalWriter(self.options, schema, overwrite)


if __name__ == "__main__":
    session = spark_session(master="local[2]")
    session.dataSource.register(MortalSource)
    write(messages(orders(session, 1_000)), sys.argv[1], source="mortal")
