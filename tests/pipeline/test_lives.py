"""Lives of databases and lakes: both are put back to earlier states, in any order, while archivers and purges run.

Each generated story does so with real databases and lakes. Its checker knows which rows each lake ever had and which
rows each database ever dropped; whatever happened, it demands of each finished archive:

    a row of the database                       is in the lake, once, and a letter in the state that it has
    a row that the lake had, or the database    is in the lake, or in a gap of it: an audit never takes it for lost
    a gap                                       is of a day of which a row was missing once: it hides no other day
    a row that is named as gone                 is missing
    a row that only the lake has                is named as one of a lost life, unless the database has dropped it
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import psycopg
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from durable.errors import InvalidSetting
from durable.pipeline import archive as archiving
from durable.pipeline import lost_lives
from durable.pipeline.archive import Archived, archive
from durable.pipeline.beginning import Wish
from durable.pipeline.compaction import compact
from durable.pipeline.copying import connection
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, LakeTable, Whose
from durable.pipeline.purge import Retention, purge
from durable.pipeline.spans import Gap
from durable.pipeline.verify import claimed, verify
from durable.storage import archives, dead_letters, horizons
from durable.storage.rows import QUARANTINED
from tests.support.archiving import origin_of
from tests.support.clusters import Cluster
from tests.support.history import add_history, add_letters

pytestmark = pytest.mark.timeout(1_200)

STORIES = int(os.environ.get("DURABLE_STORIES", "12"))
"""More of them are a test by hand."""
STEPS = 30
BEGIN = timedelta(days=60)
"""A story began so long ago, and takes as many days as rows are written."""
KEEP = timedelta(days=20)


class Killed(Exception):
    """The archiver is killed."""


def no_spark() -> NoReturn:
    raise AssertionError("few rows need no Spark")


class Lives(RuleBasedStateMachine):
    """One service; its databases and lakes are told apart by numbers."""

    cluster: Cluster
    folder: Path
    count = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).count += 1
        self.home = self.folder / str(self.count)
        self.home.mkdir()
        self.databases = 0
        self.next_id = 1
        self.backups: list[str] = []
        self.lake_backups: list[Path | None] = [None, None]
        self.lake_number = 0
        self.moves = self.is_restored = self.is_archived = False
        self.now = datetime.now(UTC) - BEGIN
        self.times: dict[LakeTable, dict[int, datetime]] = {table: {} for table in SOURCES}
        self.had: dict[tuple[LakeTable, int], set[int]] = {(table, lake): set() for table in SOURCES for lake in (0, 1)}
        """The ids that a lake had in any of its lives."""
        self.dropped: dict[str, dict[LakeTable, set[int]]] = {}
        """The ids that a database, and those that it was copied from, have dropped."""
        self.missed: dict[LakeTable, set[date]] = {table: set() for table in SOURCES}
        """Days of which a row was missing in some lake at some time."""
        self.strange = {each: set[int]() for each in self.had}
        """The ids of a lake that belong, as far as anything tells, to another database: this one had no name yet, and
        none of its rows was there.
        """

    @initialize()
    def begin(self) -> None:
        self.database = self._copy_of("empty")
        self.dropped[self.database] = {table: set() for table in SOURCES}
        self.write(days=0, count=1)  # an audit judges what came after it

    def teardown(self) -> None:
        for name in [*self.dropped]:
            self.cluster.execute(f"DROP DATABASE IF EXISTS {name} (FORCE)")
        shutil.rmtree(self.home, ignore_errors=True)

    # ------------------------------------------------------------ what happens

    @rule(days=st.integers(0, 9), count=st.integers(1, 3))
    def write(self, days: int, count: int) -> None:
        """As many days later."""
        self._pass(days)
        with psycopg.connect(self.url, autocommit=True) as conn:
            conn.execute("SELECT durable.make_partition('envelope_history', %s)", (self.now.date(),))
            add_history(conn, count, first=self.next_id, finished_at=self.now)
        for number in range(self.next_id, self.next_id + count):
            self.times["history"][number] = self.now
        self.next_id += count

    @rule(days=st.integers(0, 9))
    def give_up(self, days: int) -> None:
        """A message that was quarantined on arrival: only its letter tells of it."""
        self._pass(days)
        with psycopg.connect(self.url, autocommit=True) as conn:
            add_letters(conn, 1, first=self.next_id)
            conn.execute(
                "UPDATE durable.dead_letters SET exception_type = %s, failed_at = %s WHERE id = %s",
                (QUARANTINED, self.now, f"{self.next_id:032x}"),
            )
        self.times["dead_letters"][self.next_id] = self.now
        self.next_id += 1

    @rule(age=st.sampled_from([timedelta(0), timedelta(days=30)]))
    def resolve(self, age: timedelta) -> None:
        """The oldest letter that is open."""
        with psycopg.connect(self.url, autocommit=True) as conn:
            conn.execute(
                "UPDATE durable.dead_letters SET resolution = 'discarded', resolved_at = now() - %s, xid = DEFAULT "
                "WHERE letter_id = (SELECT min(letter_id) FROM durable.dead_letters WHERE resolved_at IS NULL)",
                (age,),
            )

    @precondition(lambda self: self.is_archived)
    @rule()
    def purge(self) -> None:
        before = {table: self._here(table) for table in SOURCES}
        with suppress(InvalidSetting):  # something has to be archived first
            purge(no_spark, self.lake, origin_of(self.url), Retention(KEEP, timedelta(days=20)))
        for table in SOURCES:
            self.dropped[self.database][table] |= before[table].keys() - self._here(table).keys()

    @precondition(lambda self: not self.is_archived)
    @rule()
    def purge_letters(self) -> None:
        """As a node's maintenance does."""
        before = self._here("dead_letters")
        with connection(self.url) as conn:
            dead_letters.purge(conn, "durable", keep=timedelta(days=20))
        self.dropped[self.database]["dead_letters"] |= before.keys() - self._here("dead_letters").keys()

    @precondition(lambda self: self.is_archived)
    @rule(dies=st.sampled_from([None, None, "A1", "A2"]), after=st.integers(0, 3))
    def archive(self, dies: str | None, after: int) -> None:
        self.finish(dies, after)

    @rule()
    def archive_for_the_first_time(self) -> None:
        if not self.is_archived:
            self.finish(None, 0)

    @precondition(lambda self: self.is_archived)
    @rule()
    def compact(self) -> None:
        for table in self.lake.tables():
            compact(self.lake, table, above=1)

    @rule()
    def back_up_database(self) -> None:
        self.backups.append(self._copy_of(self.database))
        self.dropped[self.backups[-1]] = {table: set(ids) for table, ids in self.dropped[self.database].items()}

    @precondition(lambda self: self.backups)
    @rule(data=st.data())
    def restore_database(self, data: st.DataObject) -> None:
        self.restore(data.draw(st.sampled_from(self.backups)))

    def restore(self, backup: str) -> None:
        self.database = self._copy_of(backup)
        self.dropped[self.database] = {table: set(ids) for table, ids in self.dropped[backup].items()}
        with connection(self.url) as conn:
            self.is_archived = archives.find(conn, "durable", "envelope_history") is not None
        self.is_restored = True

    @precondition(lambda self: self.is_archived and not self.moves)
    @rule()
    def back_up_lake(self) -> None:
        if self.lake.tables() == [*SOURCES]:
            place = self.home / f"backup{self.lake_number}"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(self.lake.url, place)
            self.lake_backups[self.lake_number] = place

    @precondition(lambda self: self.lake_backups[self.lake_number])
    @rule()
    def restore_lake(self) -> None:
        backup = self.lake_backups[self.lake_number]
        assert backup is not None
        shutil.rmtree(self.lake.url)
        shutil.copytree(backup, self.lake.url)

    @precondition(lambda self: self.is_archived)
    @rule()
    def move(self) -> None:
        """To the other lake, at the next archive."""
        self.lake_number = 1 - self.lake_number
        self.moves = not self.moves

    # ------------------------------------------------------------ what must hold

    def finish(self, dies: str | None, after: int) -> bool:
        """Archive both tables; return whether the archiver lived to the end, and check what it left then."""
        done: dict[LakeTable, Archived] = {}
        if self._is_known_by_another_name():
            with pytest.raises(InvalidSetting, match="its name before it was restored"):
                self._run("history", Wish(is_new_lake=True, is_successor=True))
            self.move()  # back to where it is archived
        if not self._is_known():
            for table in SOURCES:
                self.strange[table, self.lake_number] |= self._there(table).keys()
        wish = Wish(is_new_lake=True, is_successor=self.is_restored)
        left = [after]

        def passed(name: str) -> None:
            if name == dies:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed

        until = patch.object(horizons.Running, "complete_until", lambda *_: self.now + timedelta(seconds=1))
        with until, patch.object(archiving, "failpoint", passed), suppress(Killed):
            for table in SOURCES:
                try:
                    done[table] = self._run(table, wish)
                except InvalidSetting:  # of a lake that only a lost life knew
                    wish = Wish(is_new_lake=True, is_successor=True)
                    done[table] = self._run(table, wish)
        for table in SOURCES:
            self.had[table, self.lake_number] |= self._there(table).keys()
        if done.keys() == SOURCES.keys():
            self.is_restored = self.moves = False
            self.is_archived = True
            for table, found in done.items():
                self._check(table, found)
        return done.keys() == SOURCES.keys()

    def _pass(self, days: int) -> None:
        self.now = min(self.now + timedelta(days=days, seconds=9), datetime.now(UTC) - timedelta(days=1))

    def _run(self, table: LakeTable, wish: Wish) -> Archived:
        return archive(no_spark, self.lake, table, origin_of(self.url), wish=wish, compact_above=None)

    def _check(self, table: LakeTable, done: Archived) -> None:
        here, there = self._here(table), self._there(table)
        strange = self.strange[table, self.lake_number] - here.keys()
        assert here.keys() <= there.keys(), "a row of the database is not in the lake"
        if table == "history":
            assert set(there.values()) <= {1}, "a row is in the lake twice"
        else:
            assert here.items() <= self._newest_letters().items(), "the lake has another state of a letter"
        times = self.times[table]
        absent = (self.had[table, self.lake_number] | self.dropped[self.database][table]) - there.keys() - strange
        begin, gaps = self._span(table)
        for number in absent:
            is_before = begin is not None and times[number] < begin
            is_in_gap = any(gap.begin <= times[number] < gap.end for gap in gaps)
            assert is_before or is_in_gap, f"{number} would be taken for lost"
        lost = times.keys() - there.keys()
        if table == "dead_letters":  # of a letter that was dropped the lake may have lost the last state alone
            lost |= self.dropped[self.database][table]
        missing = Counter(times[number].date() for number in lost)
        self.missed[table] |= missing.keys()
        assert {gap.begin.date() for gap in gaps} <= self.missed[table], "a gap of a day of which no row was missing"
        assert all(rows <= missing[day] for day, rows in done.gone.items()), "a row is gone that is there"
        assert not done.foreign or missing, "rows of a lost life are gone that are there"
        named, dropped = self._lost(table), self.dropped[self.database][table]
        assert named >= there.keys() - here.keys() - dropped - strange, "a row of a lost life is not named"
        assert not named & here.keys(), "a row of the database is named as one of a lost life"
        if table == "history":  # letters may be dropped before the first archive, and one then looks as if it were lost
            assert not named & dropped, "a row that was dropped is named as one of a lost life"
        claim = claimed(origin_of(self.url), self.lake, table)
        assert verify(no_spark, self.lake, origin_of(self.url), claim).is_whole

    def _is_known(self) -> bool:
        """Tell whether the database is named, or a row of it is in this lake."""
        return self._name() is not None or any(self._here(table).keys() & self._there(table) for table in SOURCES)

    def _name(self) -> str | None:
        with connection(self.url) as conn:
            return archives.known_database(conn, "durable")

    def _is_known_by_another_name(self) -> bool:
        """Tell whether the database is named, and this lake has its rows by another name only."""
        name = self._name()
        found = set()
        for table in SOURCES:
            if self.lake.exists(table):
                rows = DeltaTable(self.lake.table_url(table)).to_pyarrow_table(columns=["id", "database"]).to_pylist()
                found |= {row["database"] for row in rows if int.from_bytes(row["id"]) in self._here(table)}
        return name is not None and bool(found) and name not in found

    @property
    def lake(self) -> Lake:
        return Lake(str(self.home / f"lake{self.lake_number}"))

    @property
    def url(self) -> str:
        return self.cluster.uri(self.database)

    def _copy_of(self, name: str) -> str:
        self.databases += 1
        made = f"story{self.count}_{self.databases}"
        self.cluster.execute(f"CREATE DATABASE {made} TEMPLATE {name}")
        return made

    def _here(self, table: LakeTable) -> dict[int, Any]:
        """The ids of the database, and whether a letter is resolved."""
        what = "true" if table == "history" else "resolved_at IS NOT NULL"
        with psycopg.connect(self.url, autocommit=True) as conn:
            rows = conn.execute(f"SELECT id, {what} FROM durable.{SOURCES[table]}".encode())
            return {key.int: value for key, value in rows}

    def _there(self, table: LakeTable) -> Counter[int]:
        """The ids of the lake."""
        if not self.lake.exists(table):
            return Counter()
        rows = DeltaTable(self.lake.table_url(table)).to_pyarrow_table(columns=["id"])
        return Counter(int.from_bytes(each) for each in rows["id"].to_pylist())

    def _lost(self, table: LakeTable) -> set[int]:
        """The ids that the lake names as those of lost lives."""
        with connection(self.url) as conn:
            whose = Whose("shop", archives.database(conn, "durable"))
        return {int.from_bytes(each) for each in lost_lives.read(self.lake, table, whose)["id"].to_pylist()}

    def _newest_letters(self) -> dict[int, bool]:
        rows = DeltaTable(self.lake.table_url("dead_letters")).to_pyarrow_table(columns=["id", "xid", "resolved_at"])
        ordered = sorted(rows.to_pylist(), key=lambda row: row["xid"])
        return {int.from_bytes(row["id"]): row["resolved_at"] is not None for row in ordered}

    def _span(self, table: LakeTable) -> tuple[datetime | None, tuple[Gap, ...]]:
        with connection(self.url) as conn:
            whose = Whose("shop", archives.database(conn, "durable"))
        begin, _, gaps = self.lake.span(table, whose)
        return begin, gaps


TOLD: dict[str, Sequence[str | tuple[str, Any]]] = {
    "the lake goes back to before a successor": (
        *(("write", 3), "archive", "back_up_database", ("write", 6), "archive", "back_up_lake"),
        *(("restore", 0), ("write", 9), "archive", "restore_lake", "archive"),
    ),
    "rows of a lost life go with the lake": (
        *(("write", 3), "archive", "back_up_database", "back_up_lake", ("write", 6), ("give_up", 6), "archive"),
        *(("restore", 0), ("write", 9), "archive", "restore_lake", "archive"),
    ),
    "a letter was resolved in a lost life": (
        *(("give_up", 3), "archive", "back_up_database", ("resolve", 0), "archive"),
        *(("restore", 0), "archive"),
    ),
    "a purge, a move, and back to the first lake": (
        *(("write", 3), "archive", ("write", 3), ("give_up", 3), ("resolve", 30), ("write", 40), "move", "archive"),
        *("purge", "move", "archive"),
    ),
    "a move back, and rows that no lake but the first one has": (
        *(("write", 3), "archive", "move", "archive", "move", "archive", ("write", 1), "archive"),
    ),
    "gone rows, and an archiver that is killed before it names them": (
        *(("write", 3), ("give_up", 3), "archive", "back_up_lake", ("write", 3), ("give_up", 3), ("resolve", 30)),
        *(("resolve", 30), "archive", ("write", 40), "archive", "purge", "restore_lake"),
        *(("killed", "A1"), ("killed", "A2"), "archive"),
    ),
    "an archiver is killed in a lake half filled again, and the archive moves away and back": (
        *(("write", 3), ("give_up", 3), "archive", "back_up_lake", ("write", 3), "archive", ("write", 40), "archive"),
        *("purge", "restore_lake", ("killed", "A2"), "move", "archive", "move", "archive"),
    ),
    "rows of a lost life go with a lake that was left, and is used again": (
        *(("write", 3), "archive", "back_up_database", "back_up_lake", ("write", 6), "archive"),
        *(("restore", 0), ("write", 9), "archive", "move", "archive", ("write", 1), "archive"),
        *("move", "restore_lake", "archive"),
    ),
    "letters were purged before the archive moves to a lake that is new": (
        *(("give_up", 3), ("write", 30), "archive", ("resolve", 30), "archive", "purge", "move", "archive"),
    ),
    "letters were purged before the first archive": (
        *(("give_up", 3), ("resolve", 30), "purge_letters", "archive", ("write", 3), "archive"),
    ),
    "a restored database returns to a lake that it has left": (
        *(("write", 3), "archive", "back_up_lake", ("write", 3), "archive", "move", ("write", 3), "archive"),
        *("back_up_database", ("restore", 0), "move", "archive", "restore_lake", "archive"),
    ),
    "the lake goes back twice, once while it is filled again": (
        *(("write", 3), "archive", "back_up_lake", ("write", 3), "archive", ("write", 40), "archive", "purge"),
        *("restore_lake", ("killed", "A2"), "restore_lake", "archive"),
    ),
    "the database goes back to before its first archive": (
        *(("write", 3), ("give_up", 3), "back_up_database", "archive", ("restore", 0), ("write", 6), "archive"),
    ),
    "an archiver is killed between the tables of a new lake, and the database goes back": (
        *("archive", "back_up_database", ("write", 0), "archive", ("restore", 0), "archive", ("write", 0)),
        *(("give_up", 7), "move", ("write", 7), ("killed at the second", "A2"), ("restore", 0)),
        *(("give_up", 4), "archive"),
    ),
    "a letter that was resolved is not gone with its earlier state": (
        *(("give_up", 3), "archive", "back_up_lake", ("give_up", 6), "archive", ("resolve", 0), ("resolve", 0)),
        *("archive", "restore_lake", "archive"),
    ),
    "rows from before the first archive are not gone with a lake that is left": (
        *(("give_up", 3), "back_up_database", "archive", ("restore", 0), "archive", "move", "archive"),
    ),
    "rows that were archived after the backup are not gone with a lake that is left": (
        *("archive", ("write", 3), ("give_up", 3), "back_up_database", ("write", 0), ("resolve", 0), "archive"),
        *("compact", ("restore", 0), "archive", "move", "archive"),
    ),
    "rows that were archived after the backup are not gone with a lake that goes back": (
        *("archive", "back_up_lake", ("write", 3), ("give_up", 3), "back_up_database", "archive"),
        *(("restore", 0), ("write", 3), ("give_up", 3), "archive", "restore_lake", "archive"),
    ),
    "a database that was never archived returns to a lake in which an archiver was killed": (
        *("back_up_database", "archive", ("give_up", 0), ("restore", 0), ("give_up", 0), ("give_up", 4)),
        *("back_up_database", "archive", "move", ("killed at the fourth", "A2"), "purge", ("give_up", 4)),
        *(("restore", 1), "archive"),
    ),
    "rows that a lost life had archived are dropped, and their lake goes back": (
        *("archive", "back_up_lake", ("write", 3), ("give_up", 3), "back_up_database", "archive", ("restore", 0)),
        *(("resolve", 30), "archive", ("write", 40), "archive", "purge", "restore_lake", ("killed", "A2"), "archive"),
    ),
    "a day was purged, and has rows again, before the archive moves to a lake that is new": (
        *("archive", "purge", ("write", 0), "move", "archive"),
    ),
    "a lake with rows of a lost life alone is not known by a database of before them": (
        *("back_up_database", "archive", ("write", 40), "archive", "purge", "move"),
        *(("killed at the second", "A1"), ("restore", 0), "archive", ("write", 1), "archive"),
    ),
    "an archiver is killed in a lake that goes back to before a lost life": (
        *("archive", "back_up_lake", "back_up_database", ("write", 3), ("give_up", 3), "archive"),
        *(("restore", 0), ("write", 3), "archive", "restore_lake", ("killed", "A2"), "archive"),
    ),
}


@pytest.mark.parametrize("story", TOLD.values(), ids=TOLD)
def test_restored_databases_and_lakes_keep_every_row_or_a_gap(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: Sequence[str | tuple[str, Any]]
) -> None:
    monkeypatch.setattr(Lives, "cluster", cluster, raising=False)
    monkeypatch.setattr(Lives, "folder", tmp_path, raising=False)
    lives = Lives()
    lives.begin()
    try:
        for step in story:
            match step:
                case "archive":
                    assert lives.finish(None, 0)
                case ("killed", point):
                    assert not lives.finish(point, 0)
                case ("killed at the second", point):
                    assert not lives.finish(point, 1)
                case ("killed at the fourth", point):
                    assert not lives.finish(point, 3)
                case ("write", days):
                    lives.write(days=days, count=2)
                case ("give_up", days):
                    lives.give_up(days=days)
                case ("resolve", days):
                    lives.resolve(age=timedelta(days=days))
                case ("restore", number):
                    lives.restore(lives.backups[number])
                case _:
                    getattr(lives, str(step))()
    finally:
        lives.teardown()


def test_generated_restores_keep_every_row_or_a_gap(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lives, "cluster", cluster, raising=False)
    monkeypatch.setattr(Lives, "folder", tmp_path, raising=False)
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    how: dict[str, Any] = {"stateful_step_count": STEPS, "deadline": None, "suppress_health_check": checks}
    if "DURABLE_STORIES" not in os.environ:
        how["phases"] = set(Phase) - {Phase.shrink}  # which would take five minutes of all tests
    run_state_machine_as_test(Lives, settings=settings(max_examples=STORIES, **how))
