"""The Spark session: which Java, which master, and what is said when something is missing."""

from __future__ import annotations

import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
from pyspark.sql import SparkSession

from durable.errors import DurableError, InvalidSetting, StorageUnavailable
from durable.pipeline import session
from durable.pipeline.session import find_java, spark_errors, spark_session
from tests.support.asked_jvm import forget_answers


def test_existing_session_is_used_again_and_keeps_utc(spark: SparkSession) -> None:
    assert spark_session() is spark
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.sql("SELECT CAST(TIMESTAMP '2026-01-01 00:00:00Z' AS string)").collect()[0][0] == "2026-01-01 00:00:00"


def test_session_survives_a_test_out_of_time(spark: SparkSession) -> None:
    def run_out(*_: object) -> NoReturn:
        pytest.fail("ran out of time")

    main, before = threading.main_thread().ident, signal.signal(signal.SIGUSR1, run_out)
    assert main is not None
    jvm = cast(Any, spark.sparkContext._jvm)
    clock = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    try:
        clock.start()
        with pytest.raises(pytest.fail.Exception) as kept:
            jvm.java.lang.Thread.sleep(1_000)
    finally:
        signal.signal(signal.SIGUSR1, before)
    forget_answers()
    assert jvm.java.lang.Math.abs(-3) == 3
    assert kept.traceback


def test_session_takes_either_master_or_remote() -> None:
    with pytest.raises(InvalidSetting, match="give one of them"):
        spark_session(master="local", remote="sc://localhost")


def test_missing_spark_extra_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(InvalidSetting, match=r"pip install 'durable-bus\[spark\]'"):
        spark_session()


def java(home: Path, version: str) -> Path:
    """A home whose Java says that it is of this version."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2030-01-01' >&2\n")
    program.chmod(0o755)
    return home


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(session, "_JVMS", tmp_path / "jvm")
    return tmp_path


def test_find_java_tries_each_place_until_one_is_new_enough(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(no_java / "old", "1.8.0_402")))
    java(no_java / "jvm" / "java-11", "11.0.2")
    expected = java(no_java / "jvm" / "java-21", "21.0.1")
    assert find_java() == expected


def test_outdated_java_is_named_in_the_error(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = java(no_java / "old", "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(home))
    with pytest.raises(InvalidSetting, match=f"there is none .{home} is version 11.*openjdk-17"):
        find_java()


def test_error_of_a_task_keeps_its_type_in_the_driver(spark: SparkSession) -> None:
    def fail(batches: object) -> object:
        raise StorageUnavailable("the database went away")

    with pytest.raises(StorageUnavailable, match=r"^the database went away$"), spark_errors():
        spark.range(0, 1, 1, 1).mapInArrow(fail, "id bigint").collect()  # type: ignore[arg-type]
    with pytest.raises(DurableError, match=r"Spark failed: .*PARSE_SYNTAX_ERROR"), spark_errors():
        spark.sql("SELEKT 1")


def test_unreadable_file_is_named_in_the_error(spark: SparkSession, tmp_path: Path) -> None:
    """By Spark's own reader, and by one in a Python worker."""
    place = tmp_path / "cut"
    spark.range(0, 1_000, 1, 1).write.parquet(str(place))
    (file,) = place.glob("part-*.parquet")
    file.write_bytes(file.read_bytes()[:-9])
    next(place.glob(".part-*.crc")).unlink()
    named = re.escape(str(file))

    def read(batches: object) -> None:
        from pyarrow import dataset

        dataset.dataset([str(file)], format="parquet").to_table()

    rows = spark.read.schema("id bigint").parquet(str(place))
    with (
        pytest.raises(DurableError, match=rf"^Spark failed: file file:/+{named[1:]} cannot be read: \S.+"),
        spark_errors(),
    ):
        rows.toArrow()
    with pytest.raises(DurableError, match=rf"ArrowInvalid: .*'{named}'"), spark_errors():
        spark.range(0, 1, 1, 1).mapInArrow(read, "id bigint").collect()  # type: ignore[arg-type]


def test_exception_of_a_python_worker_is_told_without_values(spark: SparkSession) -> None:
    def fail(batches: object) -> object:
        try:
            raise OSError("the first")
        except OSError as error:
            raise ValueError("it can't be read: 'O'Neil' in column \"name\" of row 3: 'cut\noff'") from error

    told = "Spark failed: ValueError: it can't be read: '...' in column '...' of row 3: '...' (in a Python worker)"
    with pytest.raises(DurableError, match=f"^{re.escape(told)}$"), spark_errors():
        spark.range(0, 1, 1, 1).mapInArrow(fail, "id bigint").collect()  # type: ignore[arg-type]
