"""Progress of a Spark job, while it runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

Show = Callable[[int, int], None]
"""Is given how many tasks, or rows, are done, and how many there are."""
Phases = Callable[[str], Show]
"""Is given the name of a phase as it begins, and returns what is to be told how far that has come."""
_LOOK_INTERVAL_SECONDS = 0.25


def silent(phase: str) -> Show:
    """Return the display of phases that are not shown."""
    return lambda done, total: None


def collected(spark: SparkSession, frame: DataFrame, tasks: int, show: Show) -> list[Row]:
    """The rows of a frame that `tasks` tasks make, with `show(done, tasks)` now and then until they are there."""
    with ThreadPoolExecutor(1, thread_name_prefix="spark job") as threads:
        job: Future[list[Row]] = threads.submit(frame.collect)
        while not wait([job], _LOOK_INTERVAL_SECONDS).done:
            show(_done(spark), tasks)
    show(tasks, tasks)
    return job.result()


def _done(spark: SparkSession) -> int:
    """Return the number of finished tasks in the stages that run now; 0 over Spark Connect, where it is unknown."""
    if not hasattr(spark, "_jsparkSession"):
        return 0
    tracker = spark.sparkContext.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    return sum(stage.numCompletedTasks for stage in stages if stage is not None)
