"""Spark's workers read a database that takes encrypted connections alone."""

from __future__ import annotations

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from durable.pipeline.source import register
from tests.support.history import add_history
from tests.support.tls_postgres import tls_postgres


def test_workers_read_over_tls(spark: SparkSession) -> None:
    register(spark)
    with tls_postgres() as server:
        with psycopg.connect(f"postgresql://owner@/orders?host={server.socket_folder}&port={server.port}") as conn:
            add_history(conn, 5)
        read = spark.read.format("durable")
        good = server.url(f"ssl=verify-full&sslrootcert={server.authority}")
        assert read.option("url", good).load().count() == 5
        with pytest.raises(PySparkException):
            read.option("url", server.url("sslmode=disable")).load().count()
