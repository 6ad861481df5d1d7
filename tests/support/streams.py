"""A streaming read of history, and what it has read."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from tests.support.history import numbers


class Stream:
    """A query into Parquet files with a checkpoint, run until it has read what was there when it began."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self._spark, self._url, self._folder = spark, url, folder
        self.batches = 0

    def run(self, **options: str | int) -> list[int]:
        frame = self._spark.readStream.format("durable").options(url=self._url, columns="id,xid", **options).load()
        writing = frame.writeStream.format("parquet").option("checkpointLocation", str(self._folder / "checkpoint"))
        query = writing.trigger(availableNow=True).start(str(self._folder / "rows"))
        assert query.awaitTermination(60)
        self.batches = sum(1 for each in query.recentProgress if each["numInputRows"])
        read = self._spark.read.schema("id BINARY").parquet(str(self._folder / "rows"))
        return numbers([row.id for row in read.select("id").collect()])
