"""A database that takes the place of the one that was archived: no row is lost, none is archived twice, none dropped.

Each is tried for real: a dump that is restored into another cluster, a copy within one, a failover to a standby, a
state of the files from before, and an upgrade of the cluster.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from durable.errors import InvalidSetting
from durable.pipeline import erasing
from durable.pipeline.beginning import Wish
from durable.pipeline.choosing import Choice, choose
from durable.pipeline.compaction import compact
from durable.pipeline.copying import connection
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, LakeTable, Whose
from durable.pipeline.purge import Retention, purge
from durable.pipeline.rows import records
from durable.pipeline.spans import Gap
from durable.pipeline.status import TableGap, read_status
from durable.pipeline.transform import causes
from durable.storage import archives, dead_letters, migrator
from durable.storage.erasures import Chosen
from tests.support.archiving import Archiver, origin_of
from tests.support.clusters import Cluster, Clusters, clusters
from tests.support.history import add_history, add_letters, add_old_day
from tests.support.partitions import drop_partitions, purge_undated

MONTH = Retention(timedelta(days=30), timedelta(days=30))


@pytest.fixture(scope="module")
def made() -> Iterator[Clusters]:
    with clusters() as found:
        yield found


@pytest.fixture
def primary(made: Clusters) -> Cluster:
    return new_service(made.new())


def new_service(cluster: Cluster) -> Cluster:
    cluster.execute("CREATE DATABASE shop")
    migrator.upgrade(url(cluster).replace("postgresql://", "postgresql+psycopg://"), "durable")
    return cluster


def url(cluster: Cluster) -> str:
    return cluster.uri("shop")


def write(cluster: Cluster, count: int, first: int, **options: Any) -> None:
    """Rows of as many transactions, so that numbers of different clusters overlap."""
    with psycopg.connect(url(cluster), autocommit=True) as conn:
        for number in range(count):
            add_history(conn, 1, first=first + number, **options)


def drop_history(database: str, keep: timedelta) -> list[str]:
    """As a node's maintenance does; returns the days that went."""
    with connection(database) as conn:
        dropped = drop_partitions(conn, "durable", keep_ids=timedelta(days=8), keep_history=keep)
    return [name for name in dropped if name.startswith("envelope_history")]


def letters(cluster: Cluster, count: int, *, first: int = 1) -> None:
    with psycopg.connect(url(cluster), autocommit=True) as conn:
        add_letters(conn, count, first=first)


def resolve_letters(cluster: Cluster, first: int) -> None:
    """Those with this number and above."""
    with psycopg.connect(url(cluster), autocommit=True) as conn:
        conn.execute(
            "UPDATE durable.dead_letters SET resolution = 'discarded', resolved_at = now(), xid = DEFAULT "
            "WHERE letter_id >= %s",
            (first,),
        )


class Succession:
    """One lake, and the databases that follow each other."""

    def __init__(self, spark: SparkSession, folder: Path, first: Cluster) -> None:
        self.archiver = Archiver(spark, url(first), folder)

    def take_over(self, cluster: Cluster) -> None:
        self.archiver.origin = origin_of(url(cluster))

    def refuses(self, said: str = "is not the database that was archived") -> None:
        """Nothing is archived, nothing is dropped, and the status says why."""
        for table in ("history", "dead_letters"):
            with pytest.raises(InvalidSetting, match=said):
                self.archiver.run(table)
        with pytest.raises(InvalidSetting, match="rows were not purged"):
            purge(lambda: self.archiver.spark, self.archiver.lake, self.archiver.origin, MONTH)
        status = read_status(self.archiver.origin.url, "durable", self.archiver.lake)
        assert all(each.problem is not None for each in status.tables)
        with psycopg.connect(self.archiver.origin.url, autocommit=True) as conn:
            rows = conn.execute("SELECT count(*) FROM durable.envelope_history").fetchone()
            drop_history(self.archiver.origin.url, timedelta(hours=2))
            assert conn.execute("SELECT count(*) FROM durable.envelope_history").fetchone() == rows

    def archive(self, **options: Any) -> tuple[int, int]:
        """The rows that were archived: of the history, and letters."""
        history, dead = self.archiver.run("history", **options), self.archiver.run("dead_letters", **options)
        assert (history.gone, dead.gone) == ({}, {})
        return history.rows, dead.rows

    def is_whole(self) -> None:
        """The lake has what the database has, once, and nothing is behind."""
        archiver = self.archiver
        assert archiver.verify("history").is_whole
        assert archiver.verify("dead_letters").is_whole
        status = read_status(archiver.origin.url, "durable", archiver.lake)
        assert [(each.problem, each.lag_rows) for each in status.tables] == [(None, 0), (None, 0)]

    def ids(self) -> list[int]:
        return self.archiver.ids()


@pytest.fixture
def succession(spark: SparkSession, tmp_path: Path, primary: Cluster) -> Succession:
    return Succession(spark, tmp_path, primary)


def test_restored_dump_is_refused_then_archived_once(
    made: Clusters, primary: Cluster, succession: Succession, tmp_path: Path
) -> None:
    primary.execute("SELECT pg_current_xact_id() FROM generate_series(1, 5)")
    with psycopg.connect(url(primary), autocommit=True) as conn:
        add_old_day(conn, 40, 5, first=1001)
    write(primary, 30, first=1)
    letters(primary, 2)
    assert succession.archive() == (35, 2)
    write(primary, 5, first=31)  # never archived from there
    restored = made.new()
    primary.copy_dump("shop", restored)

    succession.take_over(restored)
    write(restored, 10, first=101)  # numbered as rows that were archived
    letters(restored, 1)
    succession.refuses()
    assert succession.archive(wish=Wish(is_successor=True)) == (15, 1)
    succession.is_whole()
    write(restored, 3, first=201)
    assert succession.archive() == (3, 0)
    assert succession.ids() == sorted([*range(1, 36), *range(101, 111), *range(201, 204), *range(1001, 1006)])
    succession.is_whole()


def test_dump_restored_before_the_first_archive_is_archived_whole(
    made: Clusters, primary: Cluster, succession: Succession
) -> None:
    write(primary, 20, first=1)
    with psycopg.connect(url(primary), autocommit=True) as conn:
        conn.execute("UPDATE durable.envelope_history SET xid = xid + 1000000")  # a cluster that has lived long
    restored = made.new()
    primary.copy_dump("shop", restored)
    succession.take_over(restored)
    write(restored, 5, first=21)
    assert succession.archive() == (25, 0)
    write(restored, 1, first=26)
    assert succession.archive() == (1, 0)
    assert succession.ids() == [*range(1, 27)]
    succession.is_whole()


def test_restored_dump_goes_whole_into_another_lake(
    made: Clusters, primary: Cluster, succession: Succession, tmp_path: Path
) -> None:
    write(primary, 20, first=1)
    assert succession.archive() == (20, 0)
    with psycopg.connect(url(primary), autocommit=True) as conn:
        conn.execute("UPDATE durable.envelope_history SET xid = xid + 1000000")  # a cluster that has lived long
    restored = made.new()
    primary.copy_dump("shop", restored)
    succession.take_over(restored)
    succession.refuses()
    succession.archiver.lake = Lake(str(tmp_path / "other"))
    assert succession.archive(wish=Wish(is_new_lake=True)) == (20, 0)
    assert succession.ids() == [*range(1, 21)]


def test_second_restored_dump_is_archived_whole(made: Clusters, primary: Cluster, succession: Succession) -> None:
    """Two dumps of one database have generations of the same number."""
    write(primary, 10, first=1)
    letters(primary, 1)
    assert succession.archive() == (10, 1)
    older, newer = made.new(), made.new()
    primary.copy_dump("shop", older)
    write(primary, 50, first=11)  # never archived from there
    letters(primary, 5)
    primary.copy_dump("shop", newer)

    succession.take_over(older)
    assert succession.archive(wish=Wish(is_successor=True)) == (0, 0)
    succession.take_over(newer)
    succession.refuses()
    assert succession.archive(wish=Wish(is_successor=True)) == (50, 5)
    assert succession.ids() == [*range(1, 61)]
    succession.is_whole()


@pytest.mark.parametrize("way", ["dump", "files"])
@pytest.mark.parametrize("are_readable", [True, False])
@pytest.mark.parametrize("are_resolved", [True, False])
def test_letters_are_told_from_lost_ones_of_the_same_numbers_when_a_database_is_restored(
    made: Clusters, primary: Cluster, succession: Succession, *, way: str, are_readable: bool, are_resolved: bool
) -> None:
    """The restored database gives its new letters the numbers of those that were written after the dump."""
    archiver = succession.archiver
    letters(primary, 5)
    succession.archive()
    restored = made.empty() if way == "files" else made.new()
    if way == "files":
        primary.back_up(restored)
    else:
        primary.copy_dump("shop", restored)
    letters(primary, 10, first=101)
    succession.archive()
    if are_resolved:
        resolve_letters(primary, 6)
        succession.archive()
    primary.stop("immediate")
    if way == "files":
        restored.start()

    letters(restored, 10, first=201)
    if not are_readable:
        with psycopg.connect(url(restored), autocommit=True) as conn:
            conn.execute("UPDATE durable.dead_letters SET id = NULL, message_type = NULL WHERE letter_id > 5")
    succession.take_over(restored)
    assert succession.archive(wish=Wish(is_successor=True)) == (0, 10)
    succession.is_whole()
    rows = archiver.lake.read(archiver.spark, "dead_letters")
    still_open = 15 if are_resolved else 25
    chosen = choose(archiver.spark, archiver.lake, Choice(table="dead_letters"))
    assert chosen.count() == still_open
    assert [row.letter_id for row in chosen.where("id IS NULL OR hex(id) > repeat('0', 30) || 'C8'").collect()] == [
        *range(6, 16)
    ]
    found = records(causes(rows))
    assert (sum(row["total"] for row in found), sum(row["unresolved"] for row in found)) == (25, still_open)


def test_files_put_back_twice_are_archived_whole(made: Clusters, primary: Cluster, succession: Succession) -> None:
    """Two lives that begin with the same files have generations of the same number."""
    write(primary, 10, first=1)
    succession.archive()
    lives = [made.empty(), made.empty()]
    for each in lives:
        primary.back_up(each)
    write(primary, 5, first=11)
    assert succession.archive() == (5, 0)
    primary.stop("immediate")
    for number, each in enumerate(lives):
        each.start()
        succession.take_over(each)
        write(each, 3, first=101 + 10 * number)
        assert succession.archive(wish=Wish(is_successor=True))[0] == 3
        write(each, 4, first=201 + 10 * number)
        assert succession.archive() == (4, 0)
        succession.is_whole()
        each.stop("immediate")
    assert succession.ids() == [*range(1, 16), 101, 102, 103, 111, 112, 113, *range(201, 205), *range(211, 215)]


def test_copy_gets_no_lake_of_its_living_original(made: Clusters, primary: Cluster, succession: Succession) -> None:
    write(primary, 5, first=1)
    succession.archive()
    copied = made.new()
    primary.copy_dump("shop", copied)
    original = succession.archiver.origin
    succession.take_over(copied)
    write(copied, 3, first=101)
    for table in SOURCES:
        with pytest.raises(InvalidSetting, match="belongs to the database of which this one is a copy"):
            succession.archiver.run(table, wish=Wish(is_new_lake=True))
    succession.archiver.origin = original
    write(primary, 2, first=6)
    assert succession.archive() == (2, 0)
    assert succession.ids() == [*range(1, 8)]


def test_second_of_two_copies_of_the_same_files_is_refused(
    made: Clusters, primary: Cluster, succession: Succession
) -> None:
    """Such as two machines that run on one snapshot of a disk. Whoever archives first, the other is told."""
    write(primary, 10, first=1)
    succession.archive()
    copied = made.empty()
    primary.back_up(copied)
    copied.start()
    original = succession.archiver.origin
    write(primary, 50, first=101)
    succession.take_over(copied)
    write(copied, 25, first=201)
    letters(copied, 2)
    assert succession.archive() == (25, 2)
    succession.archiver.origin = original
    letters(primary, 1)
    succession.refuses("by a commit that this database does not know")
    assert succession.archive(wish=Wish(is_successor=True)) == (50, 1)
    succession.is_whole()
    assert succession.ids() == [*range(1, 11), *range(101, 151), *range(201, 226)]
    succession.take_over(copied)
    write(copied, 5, first=226)
    succession.refuses("by a commit that this database does not know")
    copied.stop("immediate")


def put_back(lake: Path, backup: Path) -> None:
    shutil.rmtree(lake)
    shutil.copytree(backup, lake)


def test_lake_of_another_life_is_filled_with_every_row(
    made: Clusters, primary: Cluster, succession: Succession, tmp_path: Path
) -> None:
    """Database and lake go back to one state, and then the lake to a later one, which the database has lost."""
    lake = Path(succession.archiver.lake.url)
    write(primary, 20, first=1)
    letters(primary, 2)
    succession.archive()
    earlier = made.empty()
    primary.back_up(earlier)
    shutil.copytree(lake, tmp_path / "first")
    write(primary, 60, first=101)
    letters(primary, 3)
    succession.archive()
    shutil.copytree(lake, tmp_path / "second")
    primary.stop("immediate")
    earlier.start()
    put_back(lake, tmp_path / "first")

    succession.take_over(earlier)
    write(earlier, 100, first=201)
    letters(earlier, 1, first=50)
    assert succession.archive() == (100, 1)
    put_back(lake, tmp_path / "second")
    succession.refuses("by a commit that this database does not know")
    assert succession.archive(wish=Wish(is_successor=True)) == (100, 1)
    succession.is_whole()
    assert succession.ids() == [*range(1, 21), *range(101, 161), *range(201, 301)]
    write(earlier, 4, first=301)
    assert succession.archive() == (4, 0)

    put_back(lake, tmp_path / "first")
    assert succession.archive() == (104, 1)
    succession.is_whole()
    earlier.stop("immediate")


def test_rows_dropped_before_the_lake_of_another_life_came_are_named(
    made: Clusters, primary: Cluster, succession: Succession, tmp_path: Path
) -> None:
    lake = Path(succession.archiver.lake.url)
    write(primary, 20, first=1)
    succession.archive()
    earlier = made.empty()
    primary.back_up(earlier)
    shutil.copytree(lake, tmp_path / "first")
    write(primary, 60, first=101)
    succession.archive()
    shutil.copytree(lake, tmp_path / "second")
    primary.stop("immediate")
    earlier.start()
    put_back(lake, tmp_path / "first")
    succession.take_over(earlier)
    old = datetime.now(UTC) - timedelta(days=40)
    with psycopg.connect(url(earlier), autocommit=True) as conn:
        add_old_day(conn, 40, 7, first=201)
    write(earlier, 5, first=301)
    succession.archive()
    assert purge(lambda: succession.archiver.spark, succession.archiver.lake, origin_of(url(earlier)), MONTH).rows == 7

    put_back(lake, tmp_path / "second")
    with pytest.raises(InvalidSetting, match="by a commit that this database does not know"):
        succession.archiver.run("history")
    done = succession.archiver.run("history", wish=Wish(is_successor=True))
    assert (done.rows, done.gone) == (5, {old.date(): 7})
    assert succession.ids() == [*range(1, 21), *range(101, 161), *range(301, 306)]
    earlier.stop("immediate")


def test_copy_within_one_cluster_is_refused(primary: Cluster, succession: Succession) -> None:
    write(primary, 5, first=1)
    succession.archive()
    primary.execute("CREATE DATABASE copied TEMPLATE shop")
    succession.archiver.origin = replace(succession.archiver.origin, url=primary.uri("copied"))
    succession.refuses()


def test_promoted_standby_is_archived_from_its_last_position(
    made: Clusters, primary: Cluster, succession: Succession
) -> None:
    write(primary, 20, first=1)
    succession.archive()
    standby = made.empty()
    primary.back_up(standby, "-R")
    write(primary, 10, first=21)  # the standby never hears of them, and the lake does
    assert succession.archive() == (10, 0)
    primary.stop("immediate")
    standby.start()
    standby.promote()

    succession.take_over(standby)
    write(standby, 15, first=101)  # under the numbers of those that were lost
    succession.refuses()
    assert succession.archive(wish=Wish(is_successor=True)) == (15, 0)
    assert succession.ids() == [*range(1, 31), *range(101, 116)]
    write(standby, 2, first=201)
    assert succession.archive() == (2, 0)
    succession.is_whole()


def test_files_of_an_earlier_state_are_archived_from_there(
    made: Clusters, primary: Cluster, succession: Succession
) -> None:
    """Such as a snapshot of the disk: cluster, timeline and database are the same, only the numbers come again."""
    write(primary, 20, first=1)
    succession.archive()
    earlier = made.empty()
    primary.back_up(earlier)
    write(primary, 10, first=21)
    letters(primary, 2)
    assert succession.archive() == (10, 2)
    primary.stop("immediate")
    earlier.start()

    succession.take_over(earlier)
    write(earlier, 15, first=101)
    letters(earlier, 3)
    succession.refuses("was restored to an earlier state")
    assert succession.archive(wish=Wish(is_successor=True)) == (15, 3)
    assert succession.ids() == [*range(1, 31), *range(101, 116)]
    succession.is_whole()


def test_earlier_lake_gets_every_row_when_files_are_put_back(
    made: Clusters, primary: Cluster, succession: Succession, tmp_path: Path
) -> None:
    """Its offset is that of the lost life, and below it lie rows of the new one."""
    write(primary, 20, first=1)
    succession.archive()
    earlier = made.empty()
    primary.back_up(earlier)
    write(primary, 10, first=21)
    letters(primary, 2)
    assert succession.archive() == (10, 2)
    primary.stop("immediate")
    earlier.start()

    succession.take_over(earlier)
    write(earlier, 30, first=101)
    first_lake, succession.archiver.lake = succession.archiver.lake, Lake(str(tmp_path / "other"))
    assert succession.archive(wish=Wish(is_new_lake=True)) == (50, 0)
    succession.archiver.lake = first_lake
    with pytest.raises(InvalidSetting, match="belongs to the database of which this one is a copy"):
        succession.archive(wish=Wish(is_new_lake=True))
    assert succession.archive(wish=Wish(is_new_lake=True, is_successor=True)) == (30, 0)
    assert succession.ids() == [*range(1, 31), *range(101, 131)]
    succession.is_whole()


def test_upgraded_cluster_is_archived_from_its_last_position(
    made: Clusters, spark: SparkSession, tmp_path: Path
) -> None:
    old = new_service(made.new(16))
    succession = Succession(spark, tmp_path, old)
    write(old, 20, first=1)
    letters(old, 2)
    assert succession.archive() == (20, 2)
    write(old, 5, first=21)
    old.stop()
    upgraded = made.empty(18)
    upgraded.make("--no-data-checksums")
    upgraded.take_over(old)
    upgraded.start()

    succession.take_over(upgraded)
    write(upgraded, 5, first=26)
    succession.refuses()
    assert succession.archive(wish=Wish(is_successor=True)) == (10, 0)
    assert succession.ids() == [*range(1, 31)]
    succession.is_whole()


# ---------------------------------------------------------------- a lake that was restored


@pytest.fixture
def backed_up(archiver: Archiver, conn: psycopg.Connection[Any]) -> Archiver:
    """A lake with the rows 1 to 5 was backed up; then 200 more were archived, and the backup was restored."""
    add_history(conn, 5)
    archiver.run()
    backup = Path(archiver.lake.url).with_name("backup")
    shutil.copytree(archiver.lake.url, backup)
    add_old_day(conn, 40, 50, first=1001)
    add_history(conn, 150, first=6)
    archiver.run()
    shutil.rmtree(archiver.lake.url)
    shutil.copytree(backup, archiver.lake.url)
    return archiver


def test_restored_lake_is_reported_and_filled_again(backed_up: Archiver) -> None:
    status = read_status(backed_up.origin.url, "durable", backed_up.lake).tables[0]
    assert "the lake ends before what was archived" in str(status.problem)
    assert backed_up.verify().missing == 200
    done = backed_up.run()
    assert (done.rows, done.gone) == (200, {})
    assert backed_up.ids() == [*range(1, 156), *range(1001, 1051)]
    assert backed_up.verify().is_whole
    assert read_status(backed_up.origin.url, "durable", backed_up.lake).tables[0].problem is None


def test_rows_gone_from_restored_lake_and_database_are_named(
    backed_up: Archiver, conn: psycopg.Connection[Any]
) -> None:
    day = (datetime.now(UTC) - timedelta(days=40)).date()
    conn.execute(f"DROP TABLE durable.envelope_history_{day:%Y%m%d}".encode())
    assert read_status(backed_up.origin.url, "durable", backed_up.lake).tables[0].gone == {day: 50}
    found = backed_up.verify()
    assert (found.missing, found.gone, found.is_whole) == (150, {day: 50}, False)
    done = backed_up.run()
    assert (done.rows, done.gone) == (150, {day: 50})
    assert backed_up.ids() == [*range(1, 156)]


def gaps_of(archiver: Archiver, table: LakeTable = "history") -> tuple[Gap, ...]:
    with connection(archiver.origin.url) as conn:
        whose = Whose("shop", archives.database(conn, "durable"))
    return archiver.lake.span(table, whose).gaps


def test_rows_gone_from_restored_lake_and_database_are_kept_as_a_gap(
    backed_up: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when an archiver dies before it has said so, and when the lake is restored once more."""
    day = (datetime.now(UTC) - timedelta(days=40)).date()
    begin = datetime(day.year, day.month, day.day, tzinfo=UTC)
    conn.execute(f"DROP TABLE durable.envelope_history_{day:%Y%m%d}".encode())
    lake, backup = Path(backed_up.lake.url), Path(backed_up.lake.url).with_name("backup")
    with monkeypatch.context() as patch:
        patch.setattr(Lake, "commit", lambda *_, **__: pytest.fail("dies before the lake has anything"))
        with pytest.raises(pytest.fail.Exception):
            backed_up.run()
    assert gaps_of(backed_up) == ()
    for _ in range(2):
        backed_up.run()
        assert gaps_of(backed_up) == (Gap(begin, begin + timedelta(days=1)),)
        shutil.rmtree(lake)
        shutil.copytree(backup, lake)


def days_of(gaps: Iterable[Gap | TableGap]) -> set[date]:
    """The days of gaps, none of which is of two days that do not touch."""
    found: set[date] = set()
    for gap in gaps:
        last = (gap.end - timedelta(microseconds=1)).date()
        found |= {gap.begin.date() + timedelta(days=each) for each in range((last - gap.begin.date()).days + 1)}
    return found


BACKUPS = {
    "poor": [1],
    "poor, then better": [1, 2],
    "poor, better, poor": [1, 2, 1],
    "middling": [2],
    "poor, middling, better": [1, 2, 3],
    "middling, poor, better": [2, 1, 3],
    "better, poor, middling": [3, 1, 2],
    "poor, better, middling, better": [1, 3, 2, 3],
    "poor twice, better": [1, 1, 3],
}
"""The backups that are put back one after the other, each by the days of rows in it, of three."""


@pytest.mark.parametrize("name", BACKUPS)
def test_gap_ends_when_the_lake_has_its_rows_again(
    archiver: Archiver, conn: psycopg.Connection[Any], tmp_path: Path, name: str
) -> None:
    """A gap would excuse losses of its day for good."""
    days = [(datetime.now(UTC) - timedelta(days=each)).date() for each in (50, 45, 40)]
    lake = Path(archiver.lake.url)
    for number, each in enumerate((50, 45, 40), 1):
        add_old_day(conn, each, 4, first=1_000 * number)
        for table in SOURCES:
            archiver.run(table, local_rows=1_000)
        shutil.copytree(lake, tmp_path / f"backup {number}")
    month = Retention(timedelta(days=30), timedelta(days=30))
    assert len(purge(lambda: archiver.spark, archiver.lake, archiver.origin, month, local_rows=1_000).days) == len(days)
    for step, number in enumerate(BACKUPS[name]):
        shutil.rmtree(lake)
        shutil.copytree(tmp_path / f"backup {number}", lake)
        add_history(conn, 2, first=10_000 + 10 * step)
        archiver.run(local_rows=1_000)
        lacking = days[number:]
        known = read_status(archiver.origin.url, "durable", archiver.lake).gaps
        assert (step, days_of(gaps_of(archiver))) == (step, {*lacking})
        assert days_of(known) == {*lacking}


def test_rows_dropped_while_nothing_archives_are_kept_as_gaps(
    archiver: Archiver, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """Of history by day and in no day, and letters of messages that have no history. Each lake is told of them."""
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    add_old_day(conn, 41, 2, first=1)
    add_old_day(conn, 40, 2, first=11)
    for table in SOURCES:
        archiver.run(table)
    with connection(archiver.origin.url) as of:
        archives.end(of, "durable")
    first, last = (midnight - timedelta(days=40, hours=-hour) for hour in (3, 4))
    add_history(conn, 1, first=101, finished_at=first)
    add_history(conn, 1, first=102, finished_at=last)
    stray = midnight - timedelta(days=60)
    add_history(conn, 1, first=103, finished_at=stray)
    add_letters(conn, 2, first=201)
    letter = midnight + timedelta(days=400)  # behind what the lake has already
    conn.execute(
        "UPDATE durable.dead_letters SET failed_at = %s, resolved_at = now() - interval '40 days', "
        "resolution = 'discarded', exception_type = CASE letter_id WHEN 1 THEN 'quarantined on arrival' ELSE 'x' END",
        (letter,),
    )
    conn.execute("UPDATE durable.dead_letters SET failed_at = failed_at + interval '1 day' WHERE letter_id = 2")
    assert len(drop_history(archiver.origin.url, timedelta(days=30))) == 2
    with connection(archiver.origin.url) as of:
        assert sum(purge_undated(of, "durable", keep_ids=timedelta(days=8), keep_history=timedelta(days=30))) == 1
        assert dead_letters.purge(of, "durable", keep=timedelta(days=30)) == 2

    microsecond = timedelta(microseconds=1)
    expected = (Gap(stray, stray + microsecond), Gap(first, last + microsecond))
    for lake in (archiver.lake, Lake(str(tmp_path / "other"))):
        archiver.lake = lake
        for table in SOURCES:
            archiver.run(table, wish=Wish(is_new_lake=True))
        assert (gaps_of(archiver), gaps_of(archiver, "dead_letters")) == (
            expected,
            (Gap(letter, letter + microsecond),),
        )


def test_history_is_not_dropped_between_restoring_a_lake_and_archiving_again(
    backed_up: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise RuntimeError("before the lake has anything")

    monkeypatch.setattr(Lake, "commit", die)
    with pytest.raises(RuntimeError):
        backed_up.run()
    assert not drop_history(backed_up.origin.url, timedelta(days=30))


def unarchived_copy(made: Clusters, primary: Cluster, days: int) -> Cluster:
    """Write a history of some days, and return a dump of it in another cluster, from before its first archive."""
    with psycopg.connect(url(primary), autocommit=True) as conn:
        for day in range(days):
            add_old_day(conn, 40 + day, 150, first=1_000 * (day + 1))
    write(primary, 20, first=1)
    restored = made.new()
    primary.copy_dump("shop", restored)
    return restored


def test_state_of_before_the_first_archive_is_refused_when_old_days_were_never_archived(
    made: Clusters, primary: Cluster, succession: Succession
) -> None:
    restored = unarchived_copy(made, primary, 2)
    with psycopg.connect(url(primary), autocommit=True) as conn:
        # As the nodes did: the lake has nothing of the oldest rows.
        conn.execute("DELETE FROM durable.envelope_history WHERE finished_at < now() - interval '39 d'")
    assert succession.archive() == (20, 0)
    succession.take_over(restored)
    with pytest.raises(InvalidSetting, match="was never archived"):
        succession.archiver.run("history")
    assert succession.ids() == list(range(1, 21))


def test_erasure_in_a_state_of_before_the_first_archive_is_refused(
    made: Clusters, primary: Cluster, succession: Succession
) -> None:
    restored = unarchived_copy(made, primary, 1)
    assert succession.archive() == (170, 0)
    succession.take_over(restored)
    archiver, chosen = succession.archiver, Chosen(keys=["customer 17"])
    with pytest.raises(InvalidSetting, match="was never archived"):
        erasing.erase(archiver.origin, archiver.lake, chosen, actor="a test", reason="request 4711")
    with pytest.raises(InvalidSetting, match="was never archived"):
        archiver.run("history")
    assert len(succession.ids()) == 170


def test_table_put_back_by_restore_is_refused(backed_up: Archiver) -> None:
    for count in (1, 2):
        with psycopg.connect(backed_up.origin.url, autocommit=True) as conn:
            add_history(conn, 5, first=500 + 10 * count)
        backed_up.run("history")
    opened = backed_up.lake.opened("history")
    opened.restore(opened.version() - 1)
    for _ in range(2):
        with pytest.raises(InvalidSetting, match="an earlier version was put back by RESTORE"):
            backed_up.run("history")
        [history, _] = read_status(backed_up.origin.url, "durable", backed_up.lake).tables
        assert history.problem is not None
        assert "RESTORE" in history.problem
        compact(backed_up.lake, "history", above=1)
