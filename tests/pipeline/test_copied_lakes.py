"""Copies of a lake, whose tables have the ids of its own: every command tells it from them by its place."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyiceberg.table import StaticTable

from durable.cli import main
from durable.errors import InvalidSetting
from durable.pipeline import erasing
from durable.pipeline.beginning import Wish
from durable.pipeline.copying import opened
from durable.pipeline.erasures import State
from durable.pipeline.iceberg import export
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, LakeTable
from durable.pipeline.purge import Retention, purge
from durable.pipeline.status import read_status
from durable.storage.erasures import Chosen
from tests.support.archiving import Archiver
from tests.support.history import add_history, add_letters, add_old_day

ANNA = "customer anna"
MONTH = Retention(timedelta(days=30), timedelta(days=30))
DECADE = Retention(timedelta(days=3_650), timedelta(days=3_650))
"""In which nothing is past its retention."""
OLD_ROWS = 4


def copied(own: Path, place: Path) -> None:
    shutil.copytree(own, place)


def moved(own: Path, place: Path) -> None:
    own.rename(place)


def moved_and_put_back_empty(own: Path, place: Path) -> None:
    own.rename(place)
    own.mkdir()


def linked(own: Path, place: Path) -> None:
    place.symlink_to(own)


def copied_by_links(own: Path, place: Path) -> None:
    """As `cp -rl`: another folder, in which the log may grow apart."""
    shutil.copytree(own, place, copy_function=lambda file, link: Path(link).hardlink_to(file))


MADE: Mapping[str, tuple[Callable[[Path, Path], None], bool]] = {
    "copied": (copied, True),
    "copied by links": (copied_by_links, True),
    "moved": (moved, False),
    "moved, and an empty folder stays": (moved_and_put_back_empty, False),
    "linked": (linked, False),
}
"""How the other place came to the tables of the own lake, and whether that is another lake."""


@pytest.fixture
def filled(archiver: Archiver, conn: psycopg.Connection[Any]) -> Archiver:
    """Rows of an old day and of this one, and letters, all of them Anna's and archived."""
    add_old_day(conn, 40, OLD_ROWS)
    add_history(conn, 3, first=100)
    add_letters(conn, 2)
    for name in ("envelope_history", "dead_letters"):
        conn.execute(f"UPDATE durable.{name} SET partition_key = %s".encode(), (ANNA,))
    for of in SOURCES:
        archiver.run(of, local_rows=1_000)
    return archiver


def content(lake: Path) -> set[object]:
    """The keys that the tables at this place have."""
    return {
        row["partition_key"]
        for of in SOURCES
        for row in Lake(str(lake)).opened(of).to_pyarrow_table().to_pylist()
        if row["partition_key"] is not None
    }


def states(archiver: Archiver, lake: Path) -> list[State]:
    with opened(archiver.origin.url) as engine, engine.connect() as conn:
        return [each.state for each in erasing.listed(erasing.noted(conn, "durable"), Lake(str(lake)))]


@pytest.mark.parametrize("how", MADE)
def test_erasure_reaches_the_own_lake_and_the_named_one(filled: Archiver, tmp_path: Path, how: str) -> None:
    make, is_another = MADE[how]
    own, place = Path(filled.lake.url), tmp_path / "place"
    make(own, place)
    chosen, named = Chosen(keys=[ANNA]), Lake(str(place))
    lakes = 2 if is_another else 1
    assert erasing.survey(filled.origin, named, chosen).lake["history"] == lakes * (OLD_ROWS + 3)
    done = erasing.erase(filled.origin, named, chosen, actor="a test", reason="request 4711")
    erasing.scrub(filled.origin, named, chosen)
    places = [each for each in (own, place) if Lake(str(each)).exists("history")]
    assert [content(each) for each in places] == [set() for _ in places]
    assert [states(filled, each) for each in places] == [[State.DONE] for _ in places]
    assert Path(done.lake or "") == (place if how.startswith("moved") else own)


@pytest.mark.parametrize("how", MADE)
def test_purge_compares_with_the_own_lake_alone(filled: Archiver, tmp_path: Path, how: str) -> None:
    make, is_another = MADE[how]
    place = tmp_path / "place"
    make(Path(filled.lake.url), place)
    named = Lake(str(place))
    if is_another:
        for keep in (MONTH, DECADE):
            with pytest.raises(InvalidSetting, match=r"is a copy of .*, into which envelope_history is archived; name"):
                purge(lambda: filled.spark, named, filled.origin, keep, local_rows=1_000)
    assert purge(lambda: filled.spark, filled.lake if is_another else named, filled.origin, MONTH).rows == OLD_ROWS


def test_erasure_of_the_own_lake_is_missing_in_an_earlier_copy(filled: Archiver, tmp_path: Path) -> None:
    copied(Path(filled.lake.url), tmp_path / "copy")
    erasing.erase(filled.origin, filled.lake, Chosen(keys=[ANNA]), actor="a test", reason="request 4711")
    assert states(filled, tmp_path / "copy") == [State.LAKE_RESTORED]
    assert states(filled, Path(filled.lake.url)) == [State.DONE]


@pytest.mark.parametrize("by", [erasing.survey, erasing.earlier])
def test_erasure_is_refused_when_the_known_place_cannot_be_opened(
    filled: Archiver, tmp_path: Path, by: Callable[..., object]
) -> None:
    own = Path(filled.lake.url)
    moved(own, tmp_path / "copy")
    own.write_text("a file")
    with pytest.raises(InvalidSetting, match=r"cannot be opened: .*; if that lake was moved, let .* archive go on in"):
        by(filled.origin, Lake(str(tmp_path / "copy")), Chosen(keys=[ANNA]))


@pytest.mark.parametrize("how", ["copied", "moved"])
def test_export_names_the_files_of_its_own_place(filled: Archiver, tmp_path: Path, how: str) -> None:
    own, place = Path(filled.lake.url), tmp_path / "place"
    first = export(filled.lake, "history")
    before = sorted((own / "iceberg").rglob("*"))
    MADE[how][0](own, place)
    done = export(Lake(str(place)), "history")
    assert (done.version, done.files) == (2, first.files)
    files = StaticTable.from_metadata(done.metadata).scan().plan_files()
    assert all(each.file.file_path.startswith(f"file://{place}/") for each in files)
    assert export(Lake(str(place)), "history").version == 2
    if own.exists():
        assert sorted((own / "iceberg").rglob("*")) == before


@pytest.mark.parametrize("wish", [Wish(), Wish(is_new_lake=True), Wish(is_successor=True)])
@pytest.mark.parametrize("how", MADE)
def test_archive_goes_on_in_the_own_lake_alone(filled: Archiver, tmp_path: Path, how: str, wish: Wish) -> None:
    make, is_another = MADE[how]
    own, place = filled.lake, tmp_path / "place"
    make(Path(own.url), place)
    filled.lake = Lake(str(place))
    if not is_another:
        assert [filled.run(of, wish=wish, local_rows=1_000).rows for of in SOURCES] == [0, 0]
        return
    for of in SOURCES:
        with pytest.raises(InvalidSetting, match=rf"is a copy of {own.url}/.*, into which .*; name that, or move it"):
            filled.run(of, wish=wish, local_rows=1_000)
    filled.lake = own
    assert [filled.run(of, local_rows=1_000).rows for of in SOURCES] == [0, 0]


@pytest.mark.parametrize("how", MADE)
def test_verify_compares_with_the_own_lake_alone(filled: Archiver, tmp_path: Path, how: str) -> None:
    make, is_another = MADE[how]
    make(Path(filled.lake.url), tmp_path / "place")
    filled.lake = Lake(str(tmp_path / "place"))
    if is_another:
        with pytest.raises(InvalidSetting, match="is a copy of"):
            filled.verify(local_rows=1_000)
    else:
        assert filled.verify(local_rows=1_000).is_whole


@pytest.mark.parametrize("how", MADE)
def test_status_tells_a_copy_from_the_own_lake(
    filled: Archiver, conn: psycopg.Connection[Any], tmp_path: Path, how: str
) -> None:
    """Though the copy is behind, nothing is gone, and no archive brings it on."""
    make, is_another = MADE[how]
    own, place = Path(filled.lake.url), tmp_path / "place"
    make(own, place)
    if is_another:
        add_old_day(conn, 39, 1, first=200)
        filled.run(local_rows=1_000)
        conn.execute("DELETE FROM durable.envelope_history WHERE finished_at < now() - interval '1 day'")
    found = read_status(filled.origin.url, "durable", Lake(str(place)))
    problems = [each.problem for each in found.tables]
    if is_another:
        assert [str(each).partition(", into")[0] for each in problems] == [
            f"{place}: is a copy of {own}/{of}" for of in SOURCES
        ]
        assert all("pipeline archive" not in str(each) for each in problems)
        assert [(each.gone, each.offset) for each in found.tables] == [({}, each.confirmed) for each in found.tables]
    else:
        assert problems == [None, None]


def test_archive_goes_on_in_another_place_when_the_known_one_cannot_be_opened(filled: Archiver, tmp_path: Path) -> None:
    own = Path(filled.lake.url)
    moved(own, tmp_path / "place")
    own.write_text("a file")
    filled.lake = Lake(str(tmp_path / "place"))
    assert [filled.run(of, local_rows=1_000).rows for of in SOURCES] == [0, 0]


def nothing(own: Path, _tmp_path: Path) -> None:
    own.unlink(missing_ok=True)


def a_file(own: Path, _tmp_path: Path) -> None:
    own.write_text("a file")


def an_empty_folder(own: Path, _tmp_path: Path) -> None:
    own.mkdir()


def a_dangling_link(own: Path, tmp_path: Path) -> None:
    own.symlink_to(tmp_path / "nowhere")


def another_lake(own: Path, tmp_path: Path) -> None:
    lake = Lake(str(own))
    for table in SOURCES:
        lake.create(table)


LEFT = (nothing, a_file, an_empty_folder, a_dangling_link, another_lake)
"""What is in the known place while its disk is away."""


def put_back(away: Path, own: Path) -> None:
    if own.is_dir():
        shutil.rmtree(own)
    else:
        own.unlink(missing_ok=True)
    away.rename(own)


@pytest.mark.parametrize("wish", [Wish(), Wish(is_successor=True)])
@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("newer", SOURCES)
def test_earlier_state_is_refused_when_the_lake_is_away(
    filled: Archiver,
    conn: psycopg.Connection[Any],
    tmp_path: Path,
    left: Callable[[Path, Path], None],
    newer: LakeTable,
    wish: Wish,
) -> None:
    """The own lake is back tomorrow; what it alone has would be archived again, or gone."""
    own, copy, away = Path(filled.lake.url), tmp_path / "copy", tmp_path / "away"
    copied(own, copy)
    add_history(conn, 3, first=200) if newer == "history" else add_letters(conn, 3)
    filled.run(newer, local_rows=1_000)
    own.rename(away)
    left(own, tmp_path)
    filled.lake = Lake(str(copy))
    lacks = rf"copy/{newer}: lacks what was archived last into {own}/{newer}, which is not there now; mount that, or"
    for table in SOURCES:
        with pytest.raises(InvalidSetting, match=lacks):
            filled.run(table, wish=wish, local_rows=1_000)
    with pytest.raises(InvalidSetting, match=lacks):
        filled.verify(newer, local_rows=1_000)
    found = {each.table: each for each in read_status(filled.origin.url, "durable", filled.lake).tables}[newer]
    assert "lacks what was archived last" in (found.problem or "")
    assert (found.offset, found.lag_rows, dict(found.gone)) == (found.confirmed, 0, {})
    put_back(away, own)
    filled.lake = Lake(str(own))
    assert [filled.run(table, local_rows=1_000).rows for table in SOURCES] == [0, 0]
    assert filled.verify(newer, local_rows=1_000).is_whole


@pytest.mark.parametrize("left", LEFT)
def test_earlier_state_is_filled_when_the_lake_is_left_behind(
    filled: Archiver, conn: psycopg.Connection[Any], tmp_path: Path, left: Callable[[Path, Path], None]
) -> None:
    own, copy = Path(filled.lake.url), tmp_path / "copy"
    copied(own, copy)
    add_history(conn, 3, first=200)
    filled.run(local_rows=1_000)
    own.rename(tmp_path / "away")
    left(own, tmp_path)
    filled.lake = Lake(str(copy))
    runs = [filled.run(table, wish=Wish(is_new_lake=True), local_rows=1_000) for table in SOURCES]
    assert [(each.rows, each.gone) for each in runs] == [(3, {}), (0, {})]
    assert filled.verify(local_rows=1_000).is_whole
    assert filled.run(local_rows=1_000).rows == 0


@pytest.mark.parametrize("left", [nothing, an_empty_folder, a_dangling_link, another_lake])
def test_missing_lake_is_told_in_its_own_place(
    filled: Archiver, tmp_path: Path, left: Callable[[Path, Path], None]
) -> None:
    """Nobody is sent to the place that was just named, nor to make another lake in it."""
    own = Path(filled.lake.url)
    own.rename(tmp_path / "away")
    left(own, tmp_path)
    told: list[str] = []
    commands: list[Callable[[], object]] = [
        lambda: filled.run(local_rows=1_000),
        lambda: filled.verify(local_rows=1_000),
        lambda: purge(lambda: filled.spark, filled.lake, filled.origin, MONTH, local_rows=1_000),
    ]
    if left is another_lake:
        told += [str(each.problem) for each in read_status(filled.origin.url, "durable", filled.lake).tables]
    else:
        commands += [lambda: read_status(filled.origin.url, "durable", filled.lake), lambda: erased(filled)]
    for command in commands:
        with pytest.raises(InvalidSetting) as refused:
            command()
        told.append(str(refused.value))
    assert len(told) == 5
    for text in told:
        assert "of this database is archived into; mount that lake, put its files back" in text
        assert "begin anew in another place" in text
        assert "name that lake" not in text


def erased(archiver: Archiver) -> object:
    return erasing.erase(archiver.origin, archiver.lake, Chosen(keys=[ANNA]), actor="a test", reason="request 4711")


def test_status_names_the_lake_of_the_database_beside_another_one(filled: Archiver, tmp_path: Path) -> None:
    """As archive does, which would not go on there."""
    own, other = filled.lake, Lake(str(tmp_path / "other"))
    for table in SOURCES:
        other.create(table)
    problems = [each.problem for each in read_status(filled.origin.url, "durable", other).tables]
    filled.lake = other
    for table, problem in zip(SOURCES, problems, strict=True):
        with pytest.raises(InvalidSetting) as refused:
            filled.run(table, local_rows=1_000)
        assert str(refused.value) == f"lake {other.url}/{table}: {str(problem).removeprefix(f'{other.url}: ')}"
        assert f"is archived into {own.url}/{table}; name that lake, or begin anew" in str(problem)


@pytest.mark.parametrize("how", MADE)
def test_readers_and_keepers_of_files_take_any_lake(filled: Archiver, tmp_path: Path, how: str) -> None:
    """They change nothing but the files of the place that is named."""
    place = tmp_path / "place"
    MADE[how][0](Path(filled.lake.url), place)
    before = sorted(Path(filled.lake.url).rglob("*.parquet"))
    named = str(place)
    for command in (
        ("compact", "--lake", named, "--above", "1"),
        ("vacuum", "--lake", named),
        ("conversations", "--lake", named),
        ("report", "--lake", named, "--out", str(tmp_path / "report.html")),
        ("audit", "--sender", named, "--receiver", named),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["pipeline", *command])
        assert (command[0], ended.value.code) == (command[0], 0)
    if how.startswith("copied"):
        assert sorted(Path(filled.lake.url).rglob("*.parquet")) == before
