"""One Spark session for all tests of the pipeline: it takes seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from durable.pipeline.session import spark_session
from tests.support.command import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Two workers, each task tried up to four times, as on a cluster."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))  # the workers import this tree
        session = spark_session(master="local[2,4]", app_name="durable tests")
        session.conf.set("spark.sql.shuffle.partitions", "2")
        yield session
        session.stop()
