"""Compaction: few files, the same rows, undisturbed readers; and a lake is archived into as before."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from durable.errors import InvalidSetting
from durable.pipeline.compaction import compact, vacuum
from tests.support.archiving import Archiver
from tests.support.history import add_history

MIDNIGHT = datetime(2026, 11, 20, tzinfo=UTC)
DAY = MIDNIGHT.date()


def archive_often(
    archiver: Archiver, conn: psycopg.Connection[Any], times: int, first: int = 1, **options: Any
) -> None:
    """Two rows each time, one of each side."""
    for number in range(first, first + times):
        add_history(conn, 1, first=number, finished_at=MIDNIGHT)
        add_history(conn, 1, first=number + 1_000, side="outgoing", outcome="sent", finished_at=MIDNIGHT)
        archiver.run(local_rows=1_000, **options)


def is_whole(archiver: Archiver) -> bool:
    return archiver.verify().is_whole


def test_compaction_keeps_every_row_in_few_files(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    archive_often(archiver, conn, 20, compact_above=None)
    assert len(archiver.lake.sizes("history")) == 40
    done = compact(archiver.lake, "history")
    assert (done.days, done.files_before, done.files_after) == (1, 40, 1)
    assert [*archiver.lake.sizes("history").values()] == [40]
    assert archiver.ids() == [*range(1, 21), *range(1_001, 1_021)]
    assert is_whole(archiver)
    assert compact(archiver.lake, "history").days == 0


def test_reader_of_the_previous_version_is_undisturbed(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    archive_often(archiver, conn, 5, compact_above=None)
    before = archiver.lake.read(archiver.spark, "history")
    compact(archiver.lake, "history")
    archive_often(archiver, conn, 1, first=6)  # which removes what dead attempts have left behind
    assert vacuum(archiver.lake, "history", timedelta(days=7)) == 0
    assert before.count() == 10
    assert archiver.lake.read(archiver.spark, "history").count() == 12


def test_vacuum_removes_replaced_files_only(
    archiver: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive_often(archiver, conn, 5, compact_above=None)
    compact(archiver.lake, "history")
    stranger = archiver.files()[0].with_name("part-of-something-else.parquet")
    stranger.write_bytes(b"not ours")
    monkeypatch.setattr("durable.pipeline.compaction._SHORTEST", timedelta(0))
    assert vacuum(archiver.lake, "history", timedelta(0)) == 10
    assert len(archiver.files()) == 2
    assert stranger in archiver.files()
    assert archiver.lake.read(archiver.spark, "history").count() == 10


def test_vacuum_refuses_to_remove_files_younger_than_an_hour(archiver: Archiver) -> None:
    with pytest.raises(InvalidSetting, match="is below an hour"):
        vacuum(archiver.lake, "history", timedelta(minutes=59))


def test_archive_compacts_a_day_of_many_files_by_itself(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    archive_often(archiver, conn, 12, compact_above=10)
    files = archiver.lake.files_by_day("history")[DAY]
    assert len(files) <= 10
    assert archiver.ids() == [*range(1, 13), *range(1_001, 1_013)]
    assert is_whole(archiver)
    archive_often(archiver, conn, 1, first=13, compact_above=10)
    assert is_whole(archiver)


def test_compact_and_vacuum_commands_report_their_work(
    archiver: Archiver, conn: psycopg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from tests.support.command import Agent

    archive_often(archiver, conn, 3, compact_above=None)
    agent = Agent(tmp_path, monkeypatch, capsys)
    done = agent("pipeline", "compact", "--lake", archiver.lake.url)
    assert (done.code, done.err) == (0, "")
    assert [line.split() for line in done.out.splitlines()[3:]] == [
        ["history", "1", "6", "1"],
        ["dead_letters", *"000"],
    ]
    removed = agent("pipeline", "vacuum", "--lake", archiver.lake.url, "--json")
    assert (removed.code, '"history": 0' in removed.out) == (0, True)
    assert agent("pipeline", "vacuum", "--lake", archiver.lake.url, "--keep", "0.01").code == 2


def test_files_open_at_once_are_few_for_any_number_of_days(
    archiver: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from durable.pipeline import files

    monkeypatch.setattr(files, "_MOST_OPEN", 8)
    most = 0
    begun = files.TaskFiles._begun

    def begin(self: Any, *key: Any) -> Any:
        nonlocal most
        most = max(most, len(self._open))
        return begun(self, *key)

    monkeypatch.setattr(files.TaskFiles, "_begun", begin)
    for days in range(60):
        for side, outcome in (("incoming", "handled"), ("outgoing", "sent")):
            at, first = MIDNIGHT - timedelta(days=days), 1 + days * 2 + (side == "outgoing")
            add_history(conn, 1, first=first, side=side, outcome=outcome, finished_at=at)
    assert archiver.run(local_rows=1_000).rows == 120
    assert most <= 8
    assert archiver.ids() == [*range(1, 121)]
    assert date(2026, 9, 22) in archiver.lake.files_by_day("history")
