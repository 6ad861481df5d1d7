"""What tests of the pipeline share: one Spark session, which takes seconds to start, and a database each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from durable.embedded import Embedded
from durable.pipeline.session import spark_session
from durable.storage import migrator
from tests.support.archiving import Archiver
from tests.support.asked_jvm import forget_answers
from tests.support.clusters import Cluster, clusters
from tests.support.command import Agent
from tests.support.object_store import BUCKET, object_store
from tests.support.quick_spark import java_options
from tests.support.root import ROOT
from tests.support.servers import EMBEDDED
from tests.support.tables import Tables, shared_tables
from tests.support.warm_workers import warm_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session", autouse=True)
def quick_jvms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For every JVM that a test starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_SUBMIT_OPTS", java_options())
        patch.setenv("PYSPARK_PYTHON", str(warm_python(tmp_path_factory.mktemp("warm"))))
        yield


def pytest_exception_interact() -> None:
    """What the JVM still answers to a test that ran out of time is not the answer to the next one."""
    forget_answers()


@pytest.fixture(scope="session")
def spark(quick_jvms: None) -> Iterator[SparkSession]:
    """Two workers, each task tried up to four times, as on a cluster."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))  # the workers import this tree
        session = spark_session(master="local[2,4]", app_name="durable tests")
        session.conf.set("spark.sql.shuffle.partitions", "2")
        yield session
        session.stop()


@pytest.fixture(scope="session")
def bucket() -> Iterator[Mapping[str, str]]:
    """The environment of an object store, in which each test has a folder of its own."""
    with object_store() as environment:
        yield environment


@pytest.fixture
def store_url(bucket: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A place in an object store that this process reaches."""
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture(scope="module")
def tables(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    """One database for a module whose tests ask for `emptied_url`."""
    with shared_tables(servers(EMBEDDED)) as found:
        yield found


@pytest.fixture
def emptied_url(tables: Tables) -> str:
    """The URL of a database that other tests of this module have used, and in which all tables are empty."""
    tables.clear()
    return tables.url


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Postgres whose databases go back to earlier states: copies of each other, the first of them of `empty`."""
    with clusters() as made:
        cluster = made.new()
        cluster.execute("CREATE DATABASE empty")
        migrator.upgrade(cluster.uri("empty").replace("postgresql://", "postgresql+psycopg://"), "durable")
        yield cluster


@pytest.fixture
def conn(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def archiver(spark: SparkSession, database_url: str, tmp_path: Path) -> Archiver:
    return Archiver(spark, database_url, tmp_path)


@pytest.fixture
def agent(
    spark: SparkSession,
    tmp_path: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Agent:
    """Commands on this database and a lake of their own, with the session that is there."""
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    monkeypatch.setenv("DURABLE_LAKE", str(tmp_path / "lake"))
    return Agent(tmp_path, monkeypatch, capsys)
