"""Archiving: each row of history is in the lake once, whatever dies, commits late, or runs at the same time."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from durable.errors import ArchiveConflict, DurableError, InvalidSetting, StorageUnavailable
from durable.pipeline.archive import ArchiveTask, archive
from durable.pipeline.beginning import Wish
from durable.pipeline.copying import opened
from durable.pipeline.lake import Lake
from durable.storage import archives
from tests.support.archiving import Archiver
from tests.support.history import add_history, add_letters, add_old_day

MIDNIGHT = datetime(2026, 11, 20, tzinfo=UTC)


# ---------------------------------------------------------------- what is archived


def test_archive_adds_only_rows_new_since_the_last_run(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    add_history(conn, 100)
    first = archiver.run()
    assert (first.rows, archiver.ids()) == (100, [*range(1, 101)])
    assert archiver.run().rows == 0
    add_history(conn, 3, first=101)
    assert archiver.run().rows == 3
    assert archiver.ids() == [*range(1, 104)]


def test_rows_keep_their_values_and_carry_their_service_and_day(
    archiver: Archiver, conn: psycopg.Connection[Any]
) -> None:
    add_history(conn, 1, first=1, side="outgoing", outcome="sent", finished_at=MIDNIGHT - timedelta(microseconds=1))
    add_history(conn, 1, first=2, finished_at=MIDNIGHT)
    archiver.run()
    rows = archiver.lake.read(archiver.spark, "history").orderBy("id").collect()

    assert [(row.service, row.day, row.side, row.outcome) for row in rows] == [
        ("shop", date(2026, 11, 19), "outgoing", "sent"),
        ("shop", date(2026, 11, 20), "incoming", "handled"),
    ]
    assert rows[0].finished_at.replace(tzinfo=UTC) == MIDNIGHT - timedelta(microseconds=1)
    assert rows[1].received_at.replace(tzinfo=UTC) == MIDNIGHT - timedelta(seconds=2)
    written = conn.execute("SELECT xid FROM durable.envelope_history ORDER BY id").fetchall()
    assert [(row.xid,) for row in rows] == written


def test_each_side_of_a_day_has_files_of_its_own_with_statistics(
    archiver: Archiver, conn: psycopg.Connection[Any]
) -> None:
    add_history(conn, 10, finished_at=MIDNIGHT)
    add_history(conn, 5, first=11, side="outgoing", outcome="sent", finished_at=MIDNIGHT)
    archiver.run()
    actions = archiver.lake.opened("history").get_add_actions(flatten=True)
    described = {
        side: (count, low, high)
        for side, count, low, high in zip(
            *(actions[name].to_pylist() for name in ("min.side", "num_records", "min.finished_at", "max.finished_at")),
            strict=True,
        )
    }
    assert described == {"incoming": (10, MIDNIGHT, MIDNIGHT), "outgoing": (5, MIDNIGHT, MIDNIGHT)}


def test_rows_of_many_days_are_archived_in_one_run(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    days = range(2, 32)
    for number, day in enumerate(days):
        add_old_day(conn, day, 5, first=5 * number + 1)
    tasks = set()
    assert archiver.run(show=lambda done, total: tasks.add(total)).rows == 150
    assert tasks == {1}, "a day is no reason for a task"
    assert archiver.ids() == [*range(1, 151)]
    counted = archiver.lake.read(archiver.spark, "history").groupBy("day").count().collect()
    today = datetime.now(UTC).date()
    assert {row.day: row["count"] for row in counted} == {today - timedelta(days=day): 5 for day in days}


def test_letter_is_archived_again_when_resolved(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    add_letters(conn, 2)
    assert archiver.run("dead_letters").rows == 2
    with opened(archiver.origin.url) as engine, engine.begin() as storage:
        from durable.storage import dead_letters

        survey = dead_letters.survey(storage, "durable", dead_letters.Selection())
        stretch = dead_letters.LetterRange(0, 1, survey.total)
        dead_letters.discard(storage, "durable", dead_letters.Selection(), stretch, actor="a test", reason="enough")
    assert archiver.run("dead_letters").rows == 1
    states = archiver.lake.read(archiver.spark, "dead_letters").orderBy("letter_id", "xid")
    assert [(row.letter_id, row.resolution) for row in states.collect()] == [(1, None), (1, "discarded"), (2, None)]


@pytest.mark.parametrize("local_rows", [0, 1_000])
def test_last_day_of_the_calendar_is_archived_and_compared(
    archiver: Archiver, conn: psycopg.Connection[Any], local_rows: int
) -> None:
    """And a row of an outcome that no clock can have told stops nothing."""
    add_history(conn, 2, finished_at=datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
    add_history(conn, 3, first=11)
    assert archiver.run(local_rows=local_rows).rows == 5
    assert archiver.run(local_rows=local_rows).rows == 0
    assert archiver.ids() == [1, 2, 11, 12, 13]
    found = archiver.verify(local_rows=local_rows)
    assert (found.rows, found.is_whole) == (5, True)


# ---------------------------------------------------------------- exactly once


def test_rows_of_a_transaction_committed_late_are_archived_by_the_next_run(
    archiver: Archiver, conn: psycopg.Connection[Any], database_url: str
) -> None:
    add_history(conn, 5)
    with psycopg.connect(database_url) as late:
        add_history(late, 1, first=6)
        add_history(conn, 4, first=7)
        assert archiver.run().rows == 5, "what began after the oldest transaction that runs waits for it"
    assert archiver.run().rows == 5
    assert archiver.ids() == [*range(1, 11)]


def test_foreign_files_are_left_unchanged(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    add_history(conn, 5, finished_at=MIDNIGHT)
    archiver.run()
    folder = archiver.files()[0].parent
    committed = archiver.files()[0].name.split("-")
    others = [
        folder / "part-00000000-1-aaaaaaaa-1-0.parquet",
        folder / "-".join([*committed[:2], "999999999999", *committed[3:]]),
        folder / "part-of-something-else.parquet",
    ]
    for other in others:
        other.write_bytes(b"not ours, or not yet past")
    add_history(conn, 5, first=6, finished_at=MIDNIGHT)
    archiver.run()
    assert set(others) <= set(archiver.files())


def test_second_concurrent_archiver_is_refused(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    add_history(conn, 5)
    with opened(archiver.origin.url) as engine, engine.connect() as other:
        assert archives.try_lock(other, "durable")
        with pytest.raises(ArchiveConflict, match="another archiver is at work"):
            archiver.run()
    assert archiver.run().rows == 5


def test_second_of_two_archivers_raises_a_conflict_when_neither_sees_the_lock_of_the_other(
    archiver: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the connection that holds the lock is cut, and its driver lives on."""
    add_history(conn, 20)
    monkeypatch.setattr(archives, "try_lock", lambda conn, schema: True)
    commit, outcomes = Lake.commit, []

    def commit_after_the_other(lake: Lake, *args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(Lake, "commit", commit)
        outcomes.append(archiver.run().rows)
        commit(lake, *args, **kwargs)

    monkeypatch.setattr(Lake, "commit", commit_after_the_other)
    with pytest.raises(ArchiveConflict, match="Run the command again"):
        archiver.run()
    assert outcomes == [20]
    assert archiver.ids() == [*range(1, 21)]


def test_history_moved_between_partitions_during_a_run_is_archived_once(
    archiver: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day that is made late takes its rows out of the default partition."""
    add_history(conn, 40, finished_at=datetime.now(UTC) + timedelta(days=9))
    copied = archives.claim

    def move_and_claim(*args: Any) -> None:
        conn.execute("SELECT durable.make_partition('envelope_history', current_date + 9)")
        copied(*args)

    monkeypatch.setattr(archives, "claim", move_and_claim)
    assert archiver.run().rows == 40
    assert archiver.ids() == [*range(1, 41)]


def test_archive_commits_nothing_when_tasks_wrote_fewer_rows_than_counted(
    archiver: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_history(conn, 5)
    from durable.storage import slices

    def miscount(*args: Any) -> Any:
        return [each._replace(rows=each.rows + 1) for each in survey(*args)]

    survey = slices.survey
    monkeypatch.setattr(slices, "survey", miscount)
    with pytest.raises(DurableError, match="wrote 5 rows of 6"):
        archiver.run()
    assert (archiver.ids(), archiver.files()) == ([], [])


# ---------------------------------------------------------------- refusals


def test_second_lake_is_refused_without_the_option_new_lake(
    archiver: Archiver, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    add_history(conn, 5)
    archiver.run()
    first, archiver.lake = archiver.lake, Lake(str(tmp_path / "elsewhere"))
    with pytest.raises(InvalidSetting, match=f"is archived into {first.table_url('history')}.*--new-lake"):
        archiver.run()
    assert archiver.run(wish=Wish(is_new_lake=True)).rows == 5
    assert archiver.run().rows == 0


@pytest.mark.parametrize("goes_back", [False, True], ids=["goes-on", "goes-back"])
def test_fault_after_a_move_tells_the_lake_of_now_and_the_way_on(
    archiver: Archiver, conn: psycopg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_back: bool
) -> None:
    add_history(conn, 5)
    archiver.run(local_rows=10)
    former, new = archiver.lake, Lake(str(tmp_path / "elsewhere"))
    add_history(conn, 2, first=6)
    archiver.lake = new
    with monkeypatch.context() as patch:
        patch.setattr(ArchiveTask, "write", failing)
        with pytest.raises(StorageUnavailable) as raised:
            archiver.run(wish=Wish(is_new_lake=True), local_rows=10)
        assert str(raised.value) == (
            f"the server went away; the database has moved to lake {new.url} all the same: run the same command again, "
            f"which goes on there, or go back by --new-lake --lake {former.url}"
        )
        with pytest.raises(StorageUnavailable, match=r"^the server went away$"):  # nothing moves
            archiver.run(wish=Wish(is_new_lake=True), local_rows=10)
    archiver.lake = former if goes_back else new
    assert archiver.run(wish=Wish(is_new_lake=True), local_rows=10).rows == (2 if goes_back else 7)
    assert archiver.ids() == [*range(1, 8)]
    assert archiver.verify().is_whole


def failing(*_: Any) -> Any:
    raise StorageUnavailable("the server went away")


def test_archive_refuses_a_database_restored_to_an_earlier_state(
    archiver: Archiver, conn: psycopg.Connection[Any]
) -> None:
    add_history(conn, 5)
    archiver.run()
    conn.execute("UPDATE durable.archives SET claimed_below = 3, archived_below = 3")
    with pytest.raises(InvalidSetting, match="it was restored to an earlier state"):
        archiver.run()


def test_two_databases_of_one_service_have_offsets_of_their_own(
    archiver: Archiver, conn: psycopg.Connection[Any], make_database: Any
) -> None:
    second = make_database("second")
    with psycopg.connect(second, autocommit=True) as other:
        add_history(other, 3, first=100)
    add_history(conn, 2)
    archiver.run()
    archive(lambda: archiver.spark, archiver.lake, "history", replace(archiver.origin, url=second))
    assert archiver.ids() == [1, 2, 100, 101, 102]


def test_archive_raises_storage_unavailable_when_the_database_goes_away_during_reading(
    archiver: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_history(conn, 5)
    confirm = archives.claim

    def cut(*args: Any) -> None:
        confirm(*args)
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND state = 'idle in transaction'"
        )

    monkeypatch.setattr(archives, "claim", cut)
    with pytest.raises(StorageUnavailable):
        archiver.run()
    assert archiver.ids() == []


def test_lake_at_another_place_is_noted_there(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    add_history(conn, 5)
    archiver.run()
    moved = Path(archiver.lake.url).with_name("moved")
    shutil.move(archiver.lake.url, moved)
    archiver.lake = Lake(str(moved))
    assert archiver.run().rows == 0
    assert conn.execute("SELECT lake FROM durable.archives").fetchall() == [(f"{moved}/history",)]
