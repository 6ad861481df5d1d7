"""Reading history in bulk: into the lake, and by Spark's own Parquet writer, against what reads it without durable.

    pyarrow + ADBC      one COPY into Parquet files, in one process without Spark
    archive             the same rows into the lake, with the offset: exactly once
    data source         format("durable") within one snapshot ──> Spark's Parquet writer
    JDBC                Spark's own source with the driver of Debian, a task for each day ──> the same writer

All go over TCP to one Postgres on loopback, and write zstd, the floor at the level of Spark's writer. The rows lie in
eight days, each a partition of its own, which is what JDBC can be told to read side by side.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psycopg
import pyarrow.dataset as ds
from adbc_driver_postgresql import dbapi

from durable.pipeline.archive import archive
from durable.pipeline.beginning import Wish
from durable.pipeline.columns import COLUMNS
from durable.pipeline.lake import Lake
from durable.pipeline.origin import Origin
from durable.pipeline.source import consistent, register
from tests.benchmarks.processors import Meter, Place, Taken
from tests.benchmarks.rows import Timing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAYS = 8
TASKS = 8

_FILL = """
INSERT INTO durable.envelope_history (id, side, outcome, address, message_type, source, correlation_id, sent_at,
    received_at, finished_at, attempts, interruptions, node_id, content_type, headers, body)
SELECT id, 'incoming', 'handled', 'orders', 'orders.order-' || n %% 8, 'shop', id, at - interval '3 s',
    at - interval '2 s', at, 0, 0, 7, 'application/json', '{"tenant": "a"}',
    convert_to(repeat(md5(CAST(n AS text)), 10), 'UTF8')
FROM (
    SELECT n, gen_random_uuid() AS id,
        CAST(current_date + CAST(n %% %(days)s AS integer) - 1 AS timestamptz) + n * interval '1 ms' AS at
    FROM generate_series(1, CAST(%(count)s AS bigint)) AS n
) AS rows
"""


class Archiving:
    """The contenders, on one database that none of them changes."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, count: int, meter: Meter) -> None:
        self._spark, self._url, self._count, self._meter = spark, url, count, meter
        self._out = folder / "out"
        register(spark)
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute(_FILL, {"count": count, "days": DAYS})
            conn.execute("VACUUM (FREEZE, ANALYZE) durable.envelope_history")
            conn.execute("CHECKPOINT")

    def adbc(self) -> int:
        """The floor."""
        columns = ", ".join(column.sql for column in COLUMNS["envelope_history"])
        with closing(dbapi.connect(self._url)) as conn, closing(conn.cursor()) as cursor:
            cursor.execute(f"SELECT {columns} FROM durable.envelope_history")
            with closing(cursor.fetch_record_batch()) as batches:
                options = ds.ParquetFileFormat().make_write_options(compression="zstd", compression_level=3)
                ds.write_dataset(batches, self._out, format="parquet", file_options=options)
        return self._written()

    def archive(self) -> int:
        origin = Origin(url=self._url, schema="durable", service="bench")
        return archive(
            lambda: self._spark, Lake(str(self._out)), "history", origin, wish=Wish(is_new_lake=True), local_rows=0
        ).rows

    def data_source(self) -> int:
        with consistent(self._url) as options:
            rows = self._spark.read.format("durable").options(**options).option("partitions", TASKS).load()
            rows.write.parquet(str(self._out))
        return self._written()

    def jdbc(self) -> int:
        parsed = urlsplit(self._url)
        rows = self._spark.read.jdbc(
            f"jdbc:postgresql://{parsed.hostname}:{parsed.port}{parsed.path}",
            "durable.envelope_history",
            predicates=[
                f"finished_at >= current_date + {day} AND finished_at < current_date + {day + 1}"
                for day in range(-1, DAYS - 1)
            ],
            properties={"user": parsed.username or "postgres", "fetchsize": "10000", "driver": "org.postgresql.Driver"},
        )
        rows.write.parquet(str(self._out))
        return self._written()

    def taken(self, contender: Callable[[], int]) -> Taken:
        shutil.rmtree(self._out, ignore_errors=True)
        taken, rows = self._meter.taken(contender)
        assert rows == self._count, (contender.__name__, rows)
        return taken

    def _written(self) -> int:
        return int(ds.dataset(self._out).count_rows())


def run(at: Place, count: int, rounds: int) -> Sequence[Timing]:
    archiving = Archiving(at.spark, at.url, at.folder, count, at.meter)
    archived = Timing("archive", "pyarrow + ADBC, without Spark")
    read = Timing("data source to Parquet", "pyarrow + ADBC, without Spark")
    beside = Timing("data source to Parquet", "Spark's JDBC source, partitioned")
    for contender in (archiving.data_source, archiving.jdbc, archiving.archive):
        archiving.taken(contender)  # the session is warm from here on
    for _ in range(rounds):
        floor = archiving.taken(archiving.adbc)
        archived.measured(floor, archiving.taken(archiving.archive))
        ours = archiving.taken(archiving.data_source)
        read.measured(floor, ours)
        beside.measured(archiving.taken(archiving.jdbc), ours)
    return archived, read, beside
