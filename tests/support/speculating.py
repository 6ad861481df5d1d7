"""Jobs on two workers, with speculation, whose tasks, worker and driver come to grief.

Run as a program with Spark's master, three databases' URLs and a folder: archives the first, then publishes a thousand
orders into the first at once and into the second part by part, and prints what it did as JSON. Of the tasks that
publish

    one        dies by SIGKILL in its first attempt
    one        takes its whole worker with it
    one        is run twice at the same time, and both attempts stage all of their rows, and in fast mode move them

Last it publishes into the third, where the driver is killed while the tasks are at work.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceWriter
from pyspark.sql.types import StructType

from durable.pipeline.archive import archive
from durable.pipeline.lake import Lake
from durable.pipeline.session import spark_session
from durable.pipeline.source import EnvelopeSource
from durable.pipeline.writer import EnvelopeWriter, Written
from tests.support.archiving import origin_of
from tests.support.publishing import messages, orders, write
from tests.support.root import ROOT

ORDERS, PARTITIONS = 1_000, 8
_DIES, _TAKES_ITS_WORKER, _TWICE, _KILLS_THE_DRIVER = 1, 3, 5, 6
_LONGEST_WAIT = 120
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.executorEnv.PYTHONPATH": str(ROOT),
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.25",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.task.maxFailures": "8",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}


class TroubledWriter(EnvelopeWriter):
    """What happens is noted in a folder, by files without anything in them."""

    def __init__(self, source: TroubledSource, schema: StructType, overwrite: bool) -> None:
        options = dict(source.options)
        self._noted = Path(options.pop("noted"))
        self._driver = [int(pid) for pid in options.pop("driver", "").split()]
        super().__init__(options, schema, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.attemptNumber()
        if self._driver:
            written = super().write(iterator)
            if partition == _KILLS_THE_DRIVER:
                for pid in self._driver:
                    os.kill(pid, signal.SIGKILL)
            return written
        if partition == _DIES and self._is_first("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        if partition == _TAKES_ITS_WORKER and self._is_first("took its worker"):
            os.kill(_worker(), signal.SIGKILL)
        if partition == _TWICE:
            return self._twice(iterator, attempt)
        return super().write(iterator)

    def _twice(self, iterator: Iterator[pa.RecordBatch], attempt: int) -> Written:
        """The first attempt waits for a second, and both end only when both have done all of their work."""
        mine = f"attempt {attempt}"
        (self._noted / f"{mine} begun").touch()
        _wait_for(lambda: len([*self._noted.glob("attempt * begun")]) >= 2)
        written = super().write(iterator)
        (self._noted / f"{mine} done").touch()
        _wait_for(lambda: len([*self._noted.glob("attempt * done")]) >= 2)
        return written

    def _is_first(self, event: str) -> bool:
        try:
            (self._noted / event).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class TroubledSource(EnvelopeSource):
    """`format("troubled")`, with the options `noted` and `driver`."""

    @classmethod
    def name(cls) -> str:
        return "troubled"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return TroubledWriter(self, schema, overwrite)


def _wait_for(condition: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not condition() and time.monotonic() < began + _LONGEST_WAIT:
        time.sleep(0.05)


def _worker() -> int:
    """The JVM that has started this process's daemon."""
    pid = os.getpid()
    while Path(f"/proc/{pid}/comm").read_text().strip() != "java":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def main(master: str, at_once: str, by_parts: str, cut_off: str, folder: Path) -> None:
    settings = " ".join(f"--conf {name}={value}" for name, value in SETTINGS.items())
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"{settings} pyspark-shell"
    spark = spark_session(master=master)
    spark.dataSource.register(TroubledSource)
    archived = archive(lambda: spark, Lake(str(folder / "lake")), "history", origin_of(at_once), local_rows=0)
    told: dict[str, Any] = {"archived": archived.rows}
    rows = messages(orders(spark, ORDERS, partitions=PARTITIONS))
    for mode, url in (("atomic", at_once), ("fast", by_parts)):
        noted = folder / mode
        noted.mkdir()
        write(rows, url, source="troubled", mode=mode, noted=noted)
        told[mode] = sorted(each.name for each in noted.iterdir())
    print(json.dumps(told), flush=True)
    gateway: Any = spark.sparkContext._gateway
    jvm = gateway.proc.pid
    write(rows, cut_off, source="troubled", noted=folder, driver=f"{jvm} {os.getpid()}")


if __name__ == "__main__":
    where, one, other, last, noted = sys.argv[1:]
    main(where, one, other, last, Path(noted))
