"""Processes that are killed: a driver around the commit of the lake, and workers amid COPY. Each row is there once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from durable.pipeline import archive as archiving
from durable.pipeline.lake import Lake
from durable.pipeline.source import consistent
from tests.support.archiving import Archiver, MortalTask
from tests.support.history import add_history, numbers
from tests.support.reading import DyingSource

pytestmark = pytest.mark.timeout(600)  # to be cut off amid a call leaves the session of all tests unusable

ROWS, ROWS_IN_TIME = 5_000, 1_000


# ---------------------------------------------------------------- drivers


def test_driver_killed_before_the_commit_has_archived_nothing(
    archiver: Archiver, conn: psycopg.Connection[Any]
) -> None:
    add_history(conn, 50)
    archiver.dies_at("A1")
    left_behind = archiver.files()
    assert left_behind
    assert archiver.ids() == []

    archiver.run()
    assert archiver.ids() == [*range(1, 51)]
    assert not set(left_behind) & set(archiver.files()), "what the dead attempt has written is removed"


def test_driver_killed_after_the_commit_has_archived_everything(
    archiver: Archiver, conn: psycopg.Connection[Any]
) -> None:
    add_history(conn, 50)
    archiver.dies_at("A2")
    assert archiver.ids() == [*range(1, 51)]
    confirmed = "SELECT archived_below >= claimed_below FROM durable.archives"
    assert conn.execute(confirmed).fetchone() == (False,)

    assert archiver.run().rows == 0
    assert conn.execute(confirmed).fetchone() == (True,)
    assert archiver.ids() == [*range(1, 51)]


# ---------------------------------------------------------------- workers


def test_worker_killed_during_its_task_archives_its_rows_once(
    archiver: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add_history(conn, ROWS)
    died = tmp_path / "died"
    monkeypatch.setattr(archiving, "ArchiveTask", partial(MortalTask, ROWS_IN_TIME, died))
    commit, written = Lake.commit, {}

    def look_and_commit(lake: Lake, *args: Any, **named: Any) -> None:
        written.update({file: file.stat().st_size for file in archiver.files()})
        commit(lake, *args, **named)

    monkeypatch.setattr(Lake, "commit", look_and_commit)
    assert archiver.run().rows == ROWS

    assert ROWS_IN_TIME <= int(died.read_text()) < ROWS
    assert archiver.ids() == [*range(1, ROWS + 1)]
    (whole,) = archiver.files()
    (left_behind,) = written.keys() - {whole}
    assert written[left_behind] > 0
    assert archiver.lake.files("history") == [f"file://{whole}"]


def test_worker_killed_during_a_read_returns_its_rows_once(
    spark: SparkSession, conn: psycopg.Connection[Any], database_url: str, tmp_path: Path
) -> None:
    add_history(conn, ROWS)
    spark.dataSource.register(DyingSource)
    died = tmp_path / "died"
    with consistent(database_url) as options:
        own = {"partitions": "1", "rows": str(ROWS_IN_TIME), "died": str(died)}
        read = spark.read.format("dying").options(**options, **own).load().select("id").collect()
    assert ROWS_IN_TIME <= int(died.read_text()) < ROWS
    assert numbers([row.id for row in read]) == [*range(1, ROWS + 1)]
