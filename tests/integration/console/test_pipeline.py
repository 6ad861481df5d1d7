"""The console's page of the pipeline: it tells what `pipeline status` tells, without Spark and without the lake."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import date, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import Connection, create_engine

from durable.console import pipeline
from durable.embedded import Embedded
from durable.pipeline.archive import archive
from durable.pipeline.lake import Lake
from durable.pipeline.status import Status, read_status
from durable.storage import archives, erasures, replays
from durable.storage.erasures import Chosen, Erasure
from tests.conftest import fresh_databases
from tests.support.archiving import origin_of
from tests.support.console_pages import OPERATOR, VIEWER, plain, row, rows, section, shown
from tests.support.history import add_history, add_letters, add_old_day
from tests.support.roles import runtime_role
from tests.support.root import ROOT

HISTORY, LETTERS = "envelope_history", "dead_letters"
RUNS = "Runs of the archive"
ERASURE = Erasure(uuid4(), "shop", "olga", "asked by letter 17", "key", 2, b"digest")


@pytest.fixture
def url(every_server: Embedded) -> Iterator[str]:
    with fresh_databases(every_server) as make:
        yield make("app")


@pytest.fixture
def conn(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, autocommit=True) as conn:
        yield conn


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


@contextmanager
def storing(url: str) -> Iterator[Connection]:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as conn:
        yield conn
    engine.dispose()


def archived(url: str, lake: Lake) -> None:
    """Archive all; so few rows need no Spark."""
    for table in ("history", "dead_letters"):
        archive(_no_spark, lake, table, origin_of(url))


def _no_spark() -> Any:
    raise AssertionError("so few rows are archived without Spark")


def status(url: str, lake: Lake | None = None) -> Status:
    return read_status(url, "durable", lake, timedelta(days=30))


async def test_page_without_an_archive_tells_how_to_begin(url: str, conn: psycopg.Connection[Any]) -> None:
    add_history(conn, 7)
    page = await shown(url, "/pipeline")
    assert "History is not archived" in page
    assert "Nodes drop it after 30 days" in page
    assert "durable-agent pipeline archive APP:BUS" in page
    assert row(section(page, "Archive"), "history")[1:] == ["not archived", "", "never"]
    assert "Rows behind" not in page
    assert 'class="verdict "' in page
    for title in ("Erasures", "Published and replayed"):
        assert 'class="empty"' in section(page, title)
    assert ">Lakes<" not in page
    for command in ("status", "verify", "audit", "report"):
        assert f"durable-agent pipeline {command} " in section(page, "Commands")


async def test_archive_is_shown_as_by_status(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    add_history(conn, 11)
    add_old_day(conn, 3, 4, first=50)
    add_letters(conn, 2)
    archived(url, lake)
    add_history(conn, 3, first=100, age=timedelta(hours=5))
    page = await shown(url, "/pipeline")
    found = status(url, lake)
    for each in found.tables:
        cells = row(section(page, "Archive"), each.table)
        assert cells[0] == f"{each.table} {each.lake}"
        assert cells[1:3] == ["archived", str(each.offset)]
        assert cells[3].startswith(f"{each.archived_at:%Y-%m-%d %H:%M:%S} UTC")
        assert cells[4] == str(each.lag_rows)
    assert [each.lag_rows for each in found.tables] == [3, 0]
    assert [row(section(page, "Archive"), name)[5] for name in ("history", "dead_letters")] == ["5 h", ""]
    assert f"Transaction {found.horizon} is the horizon" in page
    assert "Nothing needs you" in page
    runs = [*rows(section(page, RUNS))]
    assert {(cells[0], cells[2], cells[5]) for cells in runs} == {
        ("history", "15", "in the lake"),
        ("dead_letters", "2", "in the lake"),
    }
    first, last = conn.execute("SELECT min(day), max(day) FROM durable.archive_commits").fetchone() or ("", "")
    assert row(section(page, RUNS), "history")[3] == f"{first} to {last}"
    known = conn.execute("SELECT lake, lake_id FROM durable.archives ORDER BY table_name DESC").fetchall()
    tables = ["history", "dead_letters"]
    assert [*rows(section(page, "Lakes"))] == [[lake, of, name] for of, (lake, name) in zip(tables, known, strict=True)]
    (database,) = conn.execute("SELECT database FROM durable.generations").fetchone() or ("",)
    assert f"They know this database as {database}, of shop" in plain(page)
    assert "No gap is known" in page


async def test_counts_of_rows_behind_end(
    url: str, conn: psycopg.Connection[Any], lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "MOST_BEHIND", 5)
    archived(url, lake)
    add_history(conn, 9)
    add_letters(conn, 4)
    found = section(await shown(url, "/pipeline"), "Archive")
    assert [row(found, table)[4] for table in ("history", "dead_letters")] == ["5+", "4"]


@pytest.mark.parametrize("token", [OPERATOR, VIEWER])
async def test_holder_of_the_horizon_is_named_and_quoted_to_operators_alone(
    url: str, conn: psycopg.Connection[Any], lake: Lake, token: str
) -> None:
    add_history(conn, 2)
    archived(url, lake)
    with closing(psycopg.connect(url, application_name="holder")) as holder:
        holder.execute("SELECT pg_current_xact_id(), 'the salary'")
        add_history(conn, 4, first=10)
        found = section(await shown(url, "/pipeline", token), "Archive")
        known = status(url).holder
        assert known is not None
        assert f"process {holder.info.backend_pid} (holder, role " in plain(found)
        assert known.who in plain(found)
        assert ("the salary" in found) == (token == OPERATOR)
        assert ("(for operators)" in found) == (token == VIEWER)
        assert row(found, "history")[4] == "4"
        holder.rollback()
    assert "no transaction holds it back" in section(await shown(url, "/pipeline", token), "Archive")


async def test_long_wait_is_a_problem(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    add_history(conn, 1)
    archived(url, lake)
    add_history(conn, 1, first=2, age=timedelta(days=1))
    assert "Nothing needs you" in await shown(url, "/pipeline")
    add_history(conn, 1, first=3, age=timedelta(days=4))
    assert "history: rows have waited for 4 days to be archived" in await shown(url, "/pipeline")


async def test_due_decision_is_told_with_its_command(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    add_history(conn, 3)
    archived(url, lake)
    conn.execute("UPDATE durable.archives SET identity = 'another' WHERE table_name = 'envelope_history'")
    page = await shown(url, "/pipeline")
    assert "1 thing needs you" in page
    assert (status(url).tables[0].problem or "none") in plain(page)
    assert "durable-agent pipeline archive --successor" in page
    assert [row(section(page, "Archive"), name)[1] for name in ("history", "dead_letters")] == [
        "to be decided",
        "archived",
    ]
    assert row(section(page, "Archive"), "history")[4] == "3", "no number tells what was archived"


async def test_rows_of_another_cluster_are_a_problem(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    add_history(conn, 3)
    archived(url, lake)
    add_history(conn, 2, first=10)
    assert "Nothing needs you" in await shown(url, "/pipeline")
    conn.execute("UPDATE durable.envelope_history SET xid = xid + 2000000 WHERE id > %s", (UUID(int=9),))
    page = await shown(url, "/pipeline")
    assert (status(url).tables[0].problem or "none") in plain(page)
    assert row(section(page, "Archive"), "history")[1] == "to be decided"


async def test_restored_lake_is_told(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    add_history(conn, 3)
    archived(url, lake)
    conn.execute("UPDATE durable.archives SET lost_above = 1, lost_below = 2 WHERE table_name = 'envelope_history'")
    assert "the lake was restored without rows" in await shown(url, "/pipeline")


async def test_ended_archive_is_told(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    add_history(conn, 3)
    archived(url, lake)
    with storing(url) as storage:
        archives.end(storage, "durable")
    add_history(conn, 2, first=10, age=timedelta(days=20))
    page = await shown(url, "/pipeline")
    assert row(section(page, "Archive"), "history")[1].startswith("ended since 20")
    assert row(section(page, "Archive"), "history")[4] == "2"
    assert "Nothing needs you" in page


async def test_unconfirmed_commit_is_told(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    """Of an archiver that runs, or that died before its commit."""
    add_history(conn, 3)
    archived(url, lake)
    (low,) = conn.execute("SELECT archived_below FROM durable.archives").fetchone() or (0,)
    with storing(url) as storage:
        assert archives.try_lock(storage, "durable")
        archives.note_commit(storage, "durable", HISTORY, low, low + 9, {date(2026, 1, 5): 5})
        storage.commit()
        page = await shown(url, "/pipeline")
    newest, before = [each for each in rows(section(page, RUNS)) if each[0] == "history"]
    assert (newest[2], newest[4:]) == ("5", [f"{low} to {low + 9}", "not confirmed"])
    assert before[5] == "in the lake"
    assert "an archiver is at work" in page
    assert "an archiver is at work" not in await shown(url, "/pipeline")


async def test_newest_commits_are_shown(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    for number in range(12):
        add_history(conn, 2, first=10 * number + 1)
        archive(_no_spark, lake, "history", origin_of(url))
    found = [*rows(section(await shown(url, "/pipeline"), RUNS))]
    ends = [high for (high,) in conn.execute("SELECT high FROM durable.archive_commits ORDER BY high DESC LIMIT 10")]
    assert [int(cells[4].rpartition(" ")[2]) for cells in found] == ends


async def test_gaps_are_those_of_status(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    add_history(conn, 3)
    archived(url, lake)
    conn.execute(
        "INSERT INTO durable.absent_rows (table_name, day, kind, first_at, last_at, row_count, below) VALUES"
        " ('envelope_history', '2026-01-05', 'gap', '2026-01-05 01:00+0', '2026-01-05 02:00+0', 7, 9),"
        " ('envelope_history', '2026-01-06', 'dropped', '2026-01-06 01:00+0', '2026-01-06 02:00+0', 7, 9)"
    )
    found = [*rows(section(await shown(url, "/pipeline"), "Gaps"))]
    assert found == [["history", "2026-01-05 01:00:00 UTC", "2026-01-05 02:00:00 UTC"]]
    assert [each.begin.hour for each in status(url).gaps] == [1]


async def test_past_days_of_an_archive_wait_for_a_purge(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    days = [add_old_day(conn, days, 2, first=days * 10) for days in (50, 49, 48)]
    assert "past their retention" not in await shown(url, "/pipeline")
    archived(url, lake)
    page = await shown(url, "/pipeline")
    first = status(url).days_to_purge[0]
    assert days[0].endswith(f"{first:%Y%m%d}")
    assert f"3 archived days of history, from {first} on, are past their retention" in page
    assert "pipeline purge" in section(page, "Archive")


async def test_unfinished_erasure_is_a_problem(url: str, conn: psycopg.Connection[Any]) -> None:
    add_history(conn, 3)
    conn.execute("UPDATE durable.envelope_history SET partition_key = 'k'")
    with storing(url) as storage:
        erasures.begin(storage, "durable", ERASURE)
        erasures.erase(storage, "durable", ERASURE, Chosen(keys=["k"]))
    page = await shown(url, "/pipeline")
    assert "1 erasure is not done; run: durable-agent pipeline erase" in page
    cells = row(section(page, "Erasures"), "asked by letter 17")
    assert (cells[0], cells[1], cells[3:]) == (
        f"asked by letter 17 {ERASURE.erasure_id}",
        "olga",
        ["2 by key", "3", "0", "not done"],
    )
    with storing(url) as storage:
        done = ERASURE._replace(lake="/lakes/old", lake_id="the-old-one", lake_history_rows=9)
        erasures.finish(storage, "durable", done)
    page = await shown(url, "/pipeline")
    assert row(section(page, "Erasures"), "asked by letter 17")[4:] == ["3", "9", "done"]
    assert "not done" not in page


async def test_undone_erasures_come_first(url: str, conn: psycopg.Connection[Any]) -> None:
    with storing(url) as storage:
        for number in range(12):
            each = ERASURE._replace(erasure_id=uuid4(), reason=f"reason {number}")
            erasures.begin(storage, "durable", each)
            if number:
                erasures.finish(storage, "durable", each)
    found = [cells[0].split()[1] for cells in rows(section(await shown(url, "/pipeline"), "Erasures"))]
    assert found == ["0", *[str(number) for number in range(11, 2, -1)]]


async def test_batches_and_replays_are_shown(url: str, conn: psycopg.Connection[Any]) -> None:
    conn.execute(
        "INSERT INTO durable.published_batches (batch, job, number, row_count, added_count, published_at)"
        " VALUES ('invoices', gen_random_uuid(), NULL, 1200, 1100, now()),"
        " ('stream', gen_random_uuid(), 8, 5, 5, now() - interval '1 h')"
    )
    with storing(url) as storage:
        replays.begin(storage, "durable", "again", {"chosen": "the salary"})
    page = await shown(url, "/pipeline")
    found = [(cells[0], cells[1], *cells[3:]) for cells in rows(section(page, "Published and replayed"))]
    assert found == [
        ("invoices", "batch", "1,200", "1,100"),
        ("stream", "stream, micro-batch 8", "5", "5"),
        ("again", "replay, begun", "", ""),
    ]
    assert "salary" not in page


async def test_lakes_of_before_are_known_by_their_ids(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    add_history(conn, 3)
    archived(url, lake)
    before = [lake_id for (lake_id,) in conn.execute("SELECT lake_id FROM durable.archives ORDER BY table_name DESC")]
    with storing(url) as storage:
        for table in (HISTORY, LETTERS):
            place = archives.Place("shop", f"shop-{table}", f"/lakes/new/{table}", f"new-{table}")
            archives.move(storage, "durable", table, place)
        erasures.begin(storage, "durable", ERASURE)
        erasures.finish(storage, "durable", ERASURE._replace(lake="/lakes/old", lake_id="the-old-one"))
    found = [*rows(section(await shown(url, "/pipeline"), "Lakes"))]
    assert found == [
        [f"/lakes/new/{HISTORY}", "history", f"new-{HISTORY}"],
        ["an earlier lake", "history", before[0]],
        [f"/lakes/new/{LETTERS}", "dead_letters", f"new-{LETTERS}"],
        ["an earlier lake", "dead_letters", before[1]],
        ["/lakes/old", "erasures", "the-old-one"],
    ]


async def test_locked_table_leaves_the_rest_of_the_page(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    add_history(conn, 3)
    archived(url, lake)
    with closing(psycopg.connect(url)) as locker:
        locker.execute("LOCK TABLE durable.envelope_history IN ACCESS EXCLUSIVE MODE")
        page = await shown(url, "/pipeline")
        assert row(section(page, "Archive"), "history")[4] == "unknown"
        assert row(section(page, "Archive"), "dead_letters")[4] == "0"
        assert "history: its rows were not counted: a table is locked just now" in plain(page)
        assert "history: whether rows of another database are here was not found out" in plain(page)
        assert row(section(page, RUNS), "history")[2] == "3"


async def test_least_privileged_role_sees_the_same(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    add_history(conn, 5)
    add_letters(conn, 1)
    archived(url, lake)
    add_history(conn, 2, first=10)
    with runtime_role(url) as mine, closing(psycopg.connect(url, application_name="holder")) as holder:
        holder.execute("SELECT pg_current_xact_id()")
        pages = [await shown(each, "/pipeline") for each in (url, mine)]
        for title in (RUNS, "Lakes", "Gaps"):
            assert section(pages[0], title) == section(pages[1], title)
        assert row(section(pages[1], "Archive"), "history")[4] == "2"
        assert f"process {holder.info.backend_pid} (holder, role " in plain(pages[1])
        assert "unknown: this role may not see it" in pages[1]


def test_page_loads_neither_spark_nor_arrow(url: str, conn: psycopg.Connection[Any], lake: Lake) -> None:
    add_history(conn, 5)
    archived(url, lake)
    code = (
        "import asyncio, sys; from tests.support.console_pages import shown; "
        f"assert {lake.url!r} in asyncio.run(shown({url!r}, '/pipeline')); "
        "print(*{name.partition('.')[0] for name in sys.modules} & {'pyarrow', 'pyspark', 'deltalake', 'py4j'})"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=False, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, ""), ended.stderr
