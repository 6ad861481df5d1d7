"""JVMs of Spark that start at half the cost: their classes are loaded and checked once, and kept for all that follow.

Most of Spark's start is classes from its jars, thousands of them. Run as a program this does some jobs in a JVM that
writes what it has loaded into an archive as it ends (class-data sharing), and each later JVM maps that. An archive that
does not fit the jars is ignored by the JVM; without one all is the same, but slower.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import numpy as np
import pyspark

from durable.pipeline.audit import Question, audit
from durable.pipeline.lake import Lake
from durable.pipeline.session import FEW_ROWS, find_java, java_version, spark_session
from tests.support.lakes import fill, frame, handled, many, sent
from tests.support.root import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_QUICK: Final = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"
"""One level of compilation has room for 48 MB of code, which a session of many tests would drop and compile again."""
_END_SECONDS: Final = 300.0


def archive() -> Path:
    """The place of the archive, beside the jars that it is of."""
    return Path(sys.prefix) / f"spark-{pyspark.__version__}-java-{java_version(find_java())}.jsa"


def java_options() -> str:
    """Options of JVMs for few rows, for SPARK_SUBMIT_OPTS: they compile little, and map the archive if there is one."""
    classes = archive()
    return f"{_QUICK} -XX:SharedArchiveFile={classes} -Xlog:disable" if classes.exists() else _QUICK


def _jobs(spark: SparkSession, folder: Path) -> None:
    """Do some of each kind of work, so that its classes are loaded."""
    numbers = np.arange(1_000)
    lake = fill(Lake(str(folder / "lake")), many(numbers, "outgoing"), many(numbers[:-1], "incoming"))
    audit(spark, [lake], [lake], Question())
    rows = frame(spark, [sent(1), sent(2)]).unionByName(frame(spark, [handled(1)]))
    place = str(folder / "rows")
    rows.repartition(2).write.parquet(place)
    read = spark.read.parquet(place)
    read.selectExpr("hex(id) AS id", "sent_at", "row_number() OVER (PARTITION BY side ORDER BY id) AS n").collect()
    read.join(read.groupBy("id").agg({"sent_at": "max"}), "id", "left").orderBy("id").toPandas()
    read.mapInArrow(lambda batches: batches, read.schema).count()


def main() -> None:
    """Make the archive, unless it is there."""
    classes = archive()
    if classes.exists():
        return
    print("Keeping the classes of Spark for the JVMs of the tests")
    made = classes.with_suffix(f".{os.getpid()}")
    os.environ["SPARK_SUBMIT_OPTS"] = f"{_QUICK} -XX:ArchiveClassesAtExit={made} -Xlog:disable"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # the workers import this tree
    spark = spark_session(master="local[2]", settings=FEW_ROWS)
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    jvm = gateway.proc
    assert jvm is not None
    assert jvm.stdin is not None
    with TemporaryDirectory() as folder:
        _jobs(spark, Path(folder))
    spark.stop()
    jvm.stdin.close()  # ends the JVM, which writes the archive then
    jvm.wait(_END_SECONDS)
    if made.exists():  # not every Java can
        made.rename(classes)


if __name__ == "__main__":
    main()
