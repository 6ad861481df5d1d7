"""The Spark session: which Java, which master, and what is said when something is missing."""

from __future__ import annotations

from pyspark.sql import SparkSession

from durable.pipeline.session import spark_session


def test_a_session_that_exists_is_used_again_and_counts_in_utc(spark: SparkSession) -> None:
    assert spark_session() is spark
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.sql("SELECT CAST(TIMESTAMP '2026-01-01 00:00:00Z' AS string)").collect()[0][0] == "2026-01-01 00:00:00"
