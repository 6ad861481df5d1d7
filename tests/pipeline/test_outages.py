"""Postgres that goes away in the middle of an archive, and comes back: each row is archived once, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from durable.errors import StorageUnavailable
from durable.pipeline import archive as archiving
from durable.pipeline.lake import Lake
from durable.storage import archives, migrator
from tests.support.archiving import Archiver, DeprivedTask
from tests.support.clusters import Cluster, clusters
from tests.support.history import add_history

ROWS = 3_000


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A server of its own, which comes to grief."""
    with clusters() as made:
        yield made.new()


@pytest.fixture
def archiver(spark: SparkSession, cluster: Cluster, tmp_path: Path) -> Archiver:
    cluster.execute("CREATE DATABASE shop")
    url = cluster.uri("shop")
    migrator.upgrade(url.replace("postgresql://", "postgresql+psycopg://"), "durable")
    with psycopg.connect(url, autocommit=True) as conn:
        add_history(conn, ROWS)
    return Archiver(spark, url, tmp_path)


def crash(cluster: Cluster) -> None:
    cluster.stop("immediate")


def crash_and_recover(cluster: Cluster) -> None:
    cluster.stop("immediate")
    cluster.start()


def whole(archiver: Archiver) -> None:
    """Each row is there once, and no file that is not part of the lake."""
    assert archiver.ids() == [*range(1, ROWS + 1)]
    assert [f"file://{file}" for file in archiver.files()] == sorted(archiver.lake.files("history"))


@pytest.mark.parametrize("local_rows", [0, ROWS], ids=["on Spark", "here"])
@pytest.mark.parametrize("ends", [crash, crash_and_recover])
def test_loss_of_postgres_during_the_copy_is_reported_and_the_next_run_archives_the_rows(
    archiver: Archiver,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    local_rows: int,
    ends: Any,
) -> None:
    """A task that is tried again finds neither its snapshot nor, perhaps, the server."""
    task = partial(DeprivedTask, ends=partial(ends, cluster), after=500, ended=tmp_path / "ended")
    with monkeypatch.context() as patch:
        patch.setattr(archiving, "ArchiveTask", task)
        with pytest.raises(StorageUnavailable, match=r"reading from the database failed|the database cannot be used"):
            archiver.run(local_rows=local_rows)
    assert (tmp_path / "ended").exists()
    assert archiver.files() == []
    assert archiver.ids() == []
    if not cluster.is_running:
        with pytest.raises(StorageUnavailable, match="the database cannot be used"):
            archiver.run()
        cluster.start()

    assert archiver.run(local_rows=local_rows).rows == ROWS
    whole(archiver)


STEPS = {
    "claim": (archives, "claim", False),
    "note": (archives, "note_commit", False),
    "commit": (Lake, "commit", True),
    "confirm": (archives, "confirm", True),
}
"""Where Postgres goes away, and whether the rows are in the lake when it is back."""


@pytest.mark.parametrize("step", STEPS)
def test_loss_of_postgres_before_a_step_of_the_driver_leaves_all_or_nothing(
    archiver: Archiver, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    where, name, is_archived = STEPS[step]
    function = getattr(where, name)

    def crash_before(*given: Any, **named: Any) -> Any:
        if step != "confirm" or given[-1] > 0:  # the first one says what an earlier run has left to say
            crash_and_recover(cluster)
        return function(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, crash_before)
        with pytest.raises(StorageUnavailable, match="the database cannot be used"):
            archiver.run(local_rows=ROWS)
    assert archiver.ids() == ([*range(1, ROWS + 1)] if is_archived else [])
    assert archiver.run(local_rows=ROWS).rows == (0 if is_archived else ROWS)
    whole(archiver)
    with psycopg.connect(archiver.origin.url) as conn:
        below = conn.execute("SELECT archived_below = claimed_below FROM durable.archives").fetchone()
    assert below == (True,)
