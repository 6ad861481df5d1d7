"""Erasures among restores, compactions and databases that share a lake: no content stays, nobody else's goes.

Each case runs the same story on real databases and a real lake, and a checker that knows nothing of erasures reads
every file and every table afterwards.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from sqlalchemy.engine import make_url

from durable.pipeline import erasing
from durable.pipeline.archive import archive
from durable.pipeline.beginning import Wish
from durable.pipeline.compaction import compact
from durable.pipeline.copying import opened
from durable.pipeline.erasures import State
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, LakeTable
from durable.pipeline.origin import Origin
from durable.pipeline.purge import Retention, purge
from durable.pipeline.verify import claimed, verify
from durable.storage.erasures import Chosen
from tests.support.archiving import origin_of
from tests.support.history import add_history, add_old_day

ANNA, SECRET, KEPT = "customer anna", "of anna alone", "of bert"
BY_KEY = Chosen(keys=[ANNA])
BY_ID = Chosen(ids=[UUID(int=5), UUID(int=0x205)])
"""One of Anna's, which both choices hold, and one of hers of a day that is purged."""
RETENTION = Retention(timedelta(days=30), timedelta(days=30))
_FILL = """
UPDATE durable.envelope_history SET partition_key = %(key)s, error = CAST(%(text)s AS text),
    body = convert_to(CAST(%(text)s AS text), 'UTF8'), headers = jsonb_build_object('who', CAST(%(text)s AS text))
WHERE body IS NULL AND erasure_id IS NULL AND (right(CAST(id AS text), 1) = '5') = %(is_anna)s
"""
_LETTERS = """
INSERT INTO durable.dead_letters (side, address, id, message_type, source, correlation_id, content_type, headers, body,
    sent_at, exception_type, reason, traceback, fingerprint, node_id, replayable, partition_key)
SELECT 'incoming', 'shop', CAST(lpad(CAST(n AS text), 32, '0') AS uuid), 't', 's',
    CAST(lpad(CAST(n AS text), 32, '0') AS uuid), 'text/plain', '{}', convert_to(x.text, 'UTF8'), now(), 'ValueError',
    x.text, x.text, 'aa', 7, true, x.key
FROM generate_series(4, 5) AS n, LATERAL (SELECT CASE WHEN n = 5 THEN CAST(%s AS text) ELSE CAST(%s AS text) END,
    CASE WHEN n = 5 THEN CAST(%s AS text) END) AS x (text, key)
"""

RESTORED = ("nothing", "database", "lake", "tables", "both")
COMPACTED = ("never", "before", "lost", "dead")
CASES = [
    (restored, compacted, 1 + number % 2)
    for number, (compacted, restored) in enumerate(itertools.product(COMPACTED, RESTORED))
]


def no_spark() -> NoReturn:
    raise AssertionError("few rows need no Spark")


class Story:
    """One service with one or two databases in a lake."""

    def __init__(self, make_database: Callable[[str], str], folder: Path, count: int) -> None:
        self.lake, self.backup = Lake(str(folder / "lake")), folder / "backup"
        self.urls = [make_database(name) for name in ("a", "b")[:count]]
        self._spare = make_database("spare")

    @property
    def origins(self) -> list[Origin]:
        return [origin_of(url) for url in self.urls]

    def archive(self, **options: Any) -> None:
        for origin, table in itertools.product(self.origins, SOURCES):
            done = archive(no_spark, self.lake, table, origin, compact_above=None, **options)
            assert done.gone == {}

    def write(self, first: int, count: int = 6) -> None:
        """The same ids in each database; those that end with 5 are Anna's."""
        for url in self.urls:
            with psycopg.connect(url, autocommit=True) as conn:
                for number in range(first, first + count):
                    add_history(conn, 1, first=int(str(number), 16))
                fill(conn)

    def write_old_day_and_letters(self) -> None:
        for url in self.urls:
            with psycopg.connect(url, autocommit=True) as conn:
                add_old_day(conn, 40, 8, first=0x200)
                fill(conn)
                conn.execute(_LETTERS, (SECRET, KEPT, ANNA))

    def erase(self, *choices: Chosen) -> None:
        for origin, chosen in itertools.product(self.origins, choices):
            erasing.erase(origin, self.lake, chosen, actor="a test", reason="request 4711")

    def scrub(self) -> None:
        for origin in self.origins:
            assert erasing.scrub(origin, self.lake, BY_KEY).busy == 0

    def states(self) -> list[State]:
        found = []
        for origin in self.origins:
            with opened(origin.url) as engine, engine.connect() as conn:
                found += [each.state for each in erasing.listed(erasing.noted(conn, origin.schema), self.lake)]
        return found

    def back_up(self) -> None:
        shutil.copytree(self.lake.url, self.backup)
        self._copy = self._copied()

    def _copied(self) -> str:
        """A copy of the first database, which is another one to the archive."""
        name = make_url(self.urls[0]).database
        assert name is not None
        with psycopg.connect(self._spare, autocommit=True) as conn:
            conn.execute(f'CREATE DATABASE "{name}_copy" TEMPLATE "{name}"'.encode())
        return self.urls[0].replace(f"/{name}", f"/{name}_copy", 1)

    def restore(self, what: str) -> None:
        if what in {"lake", "both"}:
            shutil.rmtree(self.lake.url)
            shutil.copytree(self.backup, self.lake.url)
        if what == "tables":
            for table in SOURCES:
                shutil.rmtree(self.lake.table_url(table))
                shutil.copytree(self.backup / table, self.lake.table_url(table))
        if what in {"database", "both"}:
            self.urls[0] = self._copy
            archive_first = [
                archive(no_spark, self.lake, table, self.origins[0], wish=Wish(is_successor=True), compact_above=None)
                for table in SOURCES
            ]
            assert all(done.gone == {} for done in archive_first)

    def is_whole(self, origin: Origin) -> bool:
        return all(self._is_whole(origin, table) for table in SOURCES)

    def _is_whole(self, origin: Origin, table: LakeTable) -> bool:
        return verify(no_spark, self.lake, origin, claimed(origin, self.lake, table)).is_whole


def fill(conn: psycopg.Connection[Any]) -> None:
    for key, text, is_anna in ((ANNA, SECRET, True), ("customer bert", KEPT, False)):
        conn.execute(_FILL, {"key": key, "text": text, "is_anna": is_anna})


# ---------------------------------------------------------------- compactions


class LosingLake(Lake):
    """Between the moment when a compaction opens a table and its commit another process is quicker."""

    def __init__(self, url: str, meanwhile: Callable[[], None]) -> None:
        super().__init__(url)
        self._meanwhile: Callable[[], None] | None = meanwhile
        self._begun = False

    def files_by_day(self, table: LakeTable) -> Any:
        found = super().files_by_day(table)
        self._begun = True
        return found

    def opened(self, table: LakeTable) -> DeltaTable:
        found = super().opened(table)
        if self._begun and self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()
        return found


def leave_dead(lake: Lake, folder: Path) -> None:
    """The files of a compaction that died before its commit, and of an archiver on a day without other files."""
    copy = Lake(str(folder / "copy"))
    shutil.copytree(lake.url, copy.url)
    compact(copy, "history", above=1)
    before = next(Path(lake.table_url("history")).glob("day=*/part-*-0.parquet"))
    for file in Path(copy.table_url("history")).glob("day=*/*.parquet"):
        there = Path(lake.url) / file.relative_to(copy.url)
        if not there.exists():
            shutil.copy(file, there)
    shutil.rmtree(copy.url)
    other_day = before.parent.with_name("day=2020-01-01")
    other_day.mkdir()
    app = before.name.split("-")[1]
    shutil.copy(before, other_day / f"part-{app}-0-aaaaaaaa-0-0.parquet")
    (other_day / f"part-{app}-0-bbbbbbbb-0-0.parquet").write_bytes(f"PAR1 {SECRET}".encode())


# ---------------------------------------------------------------- the checker


def holding(folder: Path, text: str) -> list[str]:
    """Every file below this folder that holds the text: Parquet is read, and every file is looked at as it is."""
    found = []
    for file in filter(Path.is_file, folder.rglob("*")):
        rows = parquet_rows(file) if file.suffix == ".parquet" else []
        if text in str(rows) or text.encode() in file.read_bytes():
            found.append(str(file.relative_to(folder)))
    return found


def parquet_rows(file: Path) -> list[Any]:
    try:
        return list(pq.ParquetFile(file).read().to_pylist())
    except pa.ArrowInvalid:
        return []


def tables_holding(url: str, text: str) -> list[str]:
    found = []
    with psycopg.connect(url, autocommit=True) as conn:
        names = conn.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'durable'").fetchall()
        for (name,) in names:
            query = f'SELECT 1 FROM durable."{name}" AS t WHERE t::text LIKE %s OR t::text LIKE %s LIMIT 1'
            if conn.execute(query.encode(), (f"%{text}%", f"%{text.encode().hex()}%")).fetchone():
                found.append(name)
    return found


def bodies(lake: Lake, text: str) -> Mapping[str, list[bytes]]:
    """The ids of the rows of history in the lake with this body, by database."""
    found: dict[str, list[bytes]] = {}
    for row in DeltaTable(lake.table_url("history")).to_pyarrow_table(columns=["database", "id", "body"]).to_pylist():
        if row["body"] == text.encode():
            found.setdefault(row["database"], []).append(row["id"])
    return {database: sorted(ids) for database, ids in found.items()}


# ---------------------------------------------------------------- the story


@pytest.fixture
def story(make_database: Callable[[str], str], tmp_path: Path, databases: int) -> Story:
    return Story(make_database, tmp_path, databases)


@pytest.mark.parametrize(("restored", "compacted", "databases"), CASES)
def test_erasure_leaves_no_content_and_takes_no_other_when(
    story: Story, restored: str, compacted: str, databases: int, tmp_path: Path
) -> None:
    story.write_old_day_and_letters()
    story.write(1)
    story.archive()
    story.write(11)
    story.archive()
    if compacted == "before":
        assert compact(story.lake, "history", above=1).days > 0
    for origin in story.origins:
        assert purge(no_spark, story.lake, origin, RETENTION).rows == 8
    story.write(21)  # archived after the erasure only
    story.back_up()
    if compacted == "dead":
        leave_dead(story.lake, tmp_path)

    if compacted == "lost":
        losing = LosingLake(story.lake.url, lambda: story.erase(BY_ID, BY_KEY))
        assert compact(losing, "history", above=1).days < 2
        assert story.lake.orphans("history") == []
    else:
        story.erase(BY_ID, BY_KEY)
    story.scrub()
    assert holding(Path(story.lake.url), SECRET) == []
    story.archive()
    kept = bodies(story.lake, KEPT)
    assert [len(ids) for ids in kept.values()] == [22] * databases

    story.restore(restored)
    if restored in {"lake", "tables", "both"}:
        assert len(bodies(story.lake, SECRET)) == databases
    if restored in {"database", "both"}:
        assert tables_holding(story.urls[0], SECRET) != []
    if restored != "nothing":
        assert restored == "both" or {*story.states()} != {State.DONE}
    story.archive()
    story.erase(BY_KEY, BY_ID)  # in the other order
    story.scrub()
    story.archive()

    assert holding(Path(story.lake.url), SECRET) == []
    assert holding(Path(story.lake.url), ANNA) == []
    for origin in story.origins:
        assert tables_holding(origin.url, SECRET) == []
        assert tables_holding(origin.url, ANNA) == []
        assert story.is_whole(origin)
    assert {*story.states()} == {State.DONE}
    assert bodies(story.lake, KEPT) == kept
