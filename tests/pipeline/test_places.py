"""A lake lies wherever its operator wants it, whatever characters the path has."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psycopg
import pytest

from durable.errors import InvalidSetting
from durable.pipeline import checksums, places
from durable.pipeline.lake import Lake
from tests.support.archiving import Archiver
from tests.support.command import Agent
from tests.support.history import add_history, add_letters, add_old_day

NAMES = ["with space", "été", "a [1] b", "{x,y}", "50% *?", "a+b&c=d#e", "quo'te"]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_reads_and_writes_the_lake(
    archiver: Archiver,
    conn: psycopg.Connection[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    add_history(conn, 3)
    add_history(conn, 3, first=1, side="outgoing", outcome="sent")
    add_letters(conn, 2)
    place = str(tmp_path / name / "lake")
    agent = Agent(tmp_path, monkeypatch, capsys)
    monkeypatch.setenv("DURABLE_DATABASE_URL", archiver.origin.url)
    monkeypatch.setattr("durable.cli.pipeline.options.spark_session", lambda **_: archiver.spark)
    service = ("--service", "shop", "--lake", place)
    for command in (
        ("archive", *service),
        ("status", "--lake", place),
        ("verify", *service),
        ("compact", "--lake", place, "--above", "1"),
        ("verify", *service),
        ("report", "--lake", place, "--out", str(tmp_path / name / "report.html")),
        ("audit", "--sender", place, "--receiver", place),
        ("conversations", "--lake", place),
        ("purge", *service),
        ("vacuum", "--lake", place),
    ):
        ended = agent("pipeline", *command)
        if "[" in name and command[0] == "report":
            assert (ended.code, "path with brackets; move the lake" in ended.err) == (2, True)
        else:
            assert (command[0], ended.code, ended.err) == (command[0], 0, "")


def lake_in(request: pytest.FixtureRequest, folder: Path, where: str) -> Lake:
    """A lake in a folder, or in an object store."""
    return Lake(request.getfixturevalue("store_url") if where == "store" else str(folder / "lake"))


@pytest.mark.parametrize("where", ["folder", "store"])
@pytest.mark.parametrize("there", [["file", "checksum"], ["file"], ["checksum"], []])
def test_removed_file_may_be_gone_already(
    request: pytest.FixtureRequest, tmp_path: Path, where: str, there: list[str]
) -> None:
    """As of a writer that was killed before it noted the checksum."""
    lake, path = lake_in(request, tmp_path, where), "day=2030-05-04/part-1.parquet"
    table_url = lake.table_url("history")
    if "file" in there:
        with places.created(table_url, path) as file:
            file.write(b"PAR1")
    if "checksum" in there:
        checksums.note(table_url, path, checksums.of(b"PAR1"))
    lake.remove("history", path)
    assert places.files(table_url) == []


@pytest.mark.parametrize("where", ["folder", "store"])
def test_archive_removes_the_files_of_a_killed_one(
    archiver: Archiver, conn: psycopg.Connection[Any], request: pytest.FixtureRequest, tmp_path: Path, where: str
) -> None:
    """They have no checksum, and do not keep the next archive from its end."""
    archiver.lake = lake_in(request, tmp_path, where)
    add_history(conn, 3)
    archiver.run(local_rows=1_000)
    (path,) = archiver.lake.sizes("history")
    folder, _, name = path.rpartition("/")
    left = [f"{folder}/part-{name.split('-')[1]}-0-{number:08x}-0-0.parquet" for number in range(3)]
    for each in left:
        with places.created(archiver.lake.table_url("history"), each) as file:
            file.write(b"PAR1")
    add_history(conn, 3, first=11)
    archiver.run(local_rows=1_000)
    assert {*left}.isdisjoint(file.path for file in places.files(archiver.lake.table_url("history")))
    assert archiver.verify(local_rows=1_000).is_whole


def test_every_command_reads_and_writes_a_lake_by_each_of_its_names(
    archiver: Archiver,
    conn: psycopg.Connection[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also one without checksums, as older versions have written it."""
    add_old_day(conn, 40, 3)
    add_history(conn, 3, first=101)
    conn.execute(
        "UPDATE durable.envelope_history SET partition_key = 'anna' WHERE finished_at > now() - interval '1 d'"
    )
    place, agent = tmp_path / "lake", Agent(tmp_path, monkeypatch, capsys)
    url, service = f"file://{place}", ("--service", "shop")
    monkeypatch.setenv("DURABLE_DATABASE_URL", archiver.origin.url)

    def ended(named: str, command: str, *options: str) -> tuple[int, str]:
        ended = agent("pipeline", command, "--lake", named, *options)
        return ended.code, ended.err

    assert ended(url, "archive", *service) == (0, "")
    for table in ("history", "dead_letters"):
        shutil.rmtree(place / table / checksums.FOLDER, ignore_errors=True)
    assert ended(f"FILE://localhost{place}/", "vacuum") == (0, "")
    assert ended(str(place), "archive", *service) == (0, "")
    (tmp_path / "link").symlink_to(place / "history")
    assert ended(f"{tmp_path}/link/..", "archive", *service) == (0, "")
    assert ended(f"{url}//", "verify", *service) == (0, "")
    assert ended(url, "status") == (0, "")
    chosen = ("--reason", "request 4711", "--key", "anna", "--yes", "--vacuum")
    assert ended(url, "erase", *service, *chosen) == (0, "")
    assert ended(f"file:{place}", "purge", *service, "--keep", "30") == (0, "")
    assert ended(f"/{place}", "export") == (0, "")


@pytest.mark.parametrize("name", ["50%25", "a%2Fb", "back\\slash", "\\", "a\\"])
def test_path_read_as_another_one_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidSetting, match="a path with per cent signs or backslashes is read as another one"):
        Lake(str(tmp_path / name))
    assert [*tmp_path.iterdir()] == []
