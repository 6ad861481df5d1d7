"""A lake on a disk that is full, or read-only: each command that writes tells the file and the reason."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import psycopg
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from durable.errors import DurableError, StorageUnavailable
from durable.pipeline import erasing, places
from durable.pipeline.copying import connection, opened
from durable.pipeline.lake import Lake
from durable.pipeline.origin import locked
from durable.pipeline.undisturbed import publishing
from durable.pipeline.unwritable import writing
from durable.settings import load_settings
from durable.storage.erasures import Chosen
from tests.support.archiving import Archiver
from tests.support.command import Agent
from tests.support.history import add_history, add_old_day

COMMANDS: dict[str, Sequence[str]] = {
    "archive": ("archive", "--service", "shop"),
    "erase": ("erase", "--service", "shop", "--id", f"{1:032x}", "--reason", "r", "--yes"),
    "compact": ("compact", "--above", "1"),
    "export": ("export",),
    "report": ("report",),
}
FAULTS = {
    "full": "cannot be written: No space left on device; make room there, and run the same command again",
    "read-only": "cannot be written: Read-only file system; let this user write there, and run the same command again",
}


class Disk:
    """A file system of its own, in memory."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def fill(self, *, room: int = 0) -> None:
        """Leave room for so many bytes."""
        filler = self.place / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4_096))
        os.truncate(filler, filler.stat().st_size - room)

    def break_by(self, fault: str) -> None:
        if fault == "full":
            self.fill()
        else:
            self._remount("ro")

    def repair(self) -> None:
        self._remount("rw")
        (self.place / "filler").unlink(missing_ok=True)

    def _remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.place)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount")
    try:
        yield Disk(place)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", COMMANDS)
def test_command_names_the_unwritable_file_and_goes_on_later(
    agent: Agent, disk: Disk, emptied_url: str, monkeypatch: pytest.MonkeyPatch, name: str, fault: str
) -> None:
    lake = str(disk.place / "lake")
    monkeypatch.setenv("DURABLE_DATABASE_URL", emptied_url)
    monkeypatch.setenv("DURABLE_LAKE", lake)
    with psycopg.connect(emptied_url, autocommit=True) as conn:
        for first in (1, 11):
            add_history(conn, 10, first=first)
            assert agent("pipeline", *COMMANDS["archive"]).code == 0
        add_history(conn, 10, first=21)
    disk.break_by(fault)

    ended = agent("pipeline", *COMMANDS[name])
    assert (ended.code, ended.err.count("\n")) == (1, 1), ended
    assert ended.err.startswith(f"error: lake: {lake}/")
    assert ended.err.endswith(f"{FAULTS[fault]}\n")

    disk.repair()
    again = agent("pipeline", *COMMANDS[name])
    assert (again.code, again.err) == (0, "")


def test_failed_archive_leaves_no_files(
    agent: Agent, disk: Disk, emptied_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = disk.place / "lake"
    monkeypatch.setenv("DURABLE_DATABASE_URL", emptied_url)
    monkeypatch.setenv("DURABLE_LAKE", str(lake))
    with psycopg.connect(emptied_url, autocommit=True) as conn:
        for day in range(1, 5):
            add_old_day(conn, day, 4_000, first=day * 10_000)
    disk.fill(room=80 * 1024)  # for some of the four files

    for _ in range(2):
        ended = agent("pipeline", *COMMANDS["archive"])
        assert (ended.code, "No space left on device" in ended.err) == (1, True), ended
        assert list(lake.rglob("day=*/*")) == []

    disk.repair()
    assert agent("pipeline", *COMMANDS["archive"]).code == 0
    assert len(list(lake.rglob("history/day=*/*.parquet"))) == 4


# ---------------------------------------------------------------- commits that fail

FULL, REFUSED, UNKNOWN = OSError(28, "No space left on device"), CommitFailedError("was first"), ValueError("who knows")


def failing(error: Exception, *, is_done: bool) -> Callable[..., None]:
    """A commit that ends in an error, before it is written or after it, as where a checkpoint finds no room."""
    commit = DeltaTable.create_write_transaction

    def fail(*args: Any, **options: Any) -> None:
        if is_done:
            commit(*args, **options)
        raise error

    return fail


def _archive(archiver: Archiver) -> object:
    return archiver.run(local_rows=1_000)


def _erase(archiver: Archiver) -> object:
    chosen = Chosen(ids=[UUID(int=1)])
    return erasing.erase(archiver.origin, archiver.lake, chosen, actor="a test", reason="4711")


STAYS = {
    ("folder", FULL, False): False,
    ("folder", FULL, True): True,
    ("folder", UNKNOWN, False): False,
    ("folder", UNKNOWN, True): True,
    ("folder", REFUSED, False): False,
    ("folder", REFUSED, True): True,
    ("store", FULL, False): True,  # an object store may yet carry it out
    ("store", FULL, True): True,
    ("store", UNKNOWN, False): True,
    ("store", REFUSED, False): False,
    ("store", REFUSED, True): True,
}


@pytest.mark.parametrize("use", [_archive, _erase])
@pytest.mark.parametrize(("where", "error", "is_done"), STAYS)
def test_commit_removes_its_files_when_failed_for_certain(
    archiver: Archiver,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    use: Callable[[Archiver], object],
    where: str,
    error: Exception,
    is_done: bool,
) -> None:
    if where == "store":
        archiver.lake = Lake(request.getfixturevalue("store_url"))
    add_history(conn, 5)
    archiver.run(local_rows=1_000)
    add_history(conn, 5, first=11)
    table_url = archiver.lake.table_url("history")

    def files() -> set[str]:
        return {each.path for each in places.files(table_url) if each.path.endswith((".parquet", ".blake2b"))}

    before = files()
    with monkeypatch.context() as patch:
        patch.setattr(DeltaTable, "create_write_transaction", failing(error, is_done=is_done))
        patch.setattr("durable.pipeline.lake_erasure._TRIES", 1)
        with pytest.raises((DurableError, ValueError)):
            use(archiver)
    assert bool(files() - before) == STAYS[where, error, is_done]

    use(archiver)
    archiver.run(local_rows=1_000)
    found = archiver.verify(local_rows=1_000)
    assert (found.is_whole, found.rows, found.without_checksum) == (True, 10, 0)


def test_erasure_leaves_no_files_when_there_is_no_room(
    archiver: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_history(conn, 5)
    archiver.run(local_rows=1_000)
    before = archiver.files()
    with monkeypatch.context() as patch:
        patch.setattr("durable.pipeline.checksums.note", Mock(side_effect=DurableError("no room")))
        with pytest.raises(DurableError, match="no room"):
            _erase(archiver)
    assert archiver.files() == before
    _erase(archiver)
    assert archiver.verify(local_rows=1_000).is_whole


# ---------------------------------------------------------------- whose error it is

SAID = {
    "a number of the system": (OSError(28, "No space left on device"), "No space left on device; make room"),
    "a number in Arrow's text": (
        OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space"),
        "No space left on device; make room",
    ),
    "a number in Delta's text": (
        OSError("Generic LocalFileSystem error\n  \x1b[31m↳\x1b[0m Read-only file system (os error 30)\n"),
        "Read-only file system; let this user write",
    ),
    "no right": (PermissionError(13, "Permission denied"), "Permission denied; let this user write"),
    "a limit": (OSError(27, "File too large"), "File too large; make room"),
    "an object store": (
        OSError("store error\n \x1b[31m↳\x1b[0m 503"),
        "store error: 503; run the same command",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_reason_is_told_with_advice(name: str) -> None:
    error, reason = SAID[name]
    with pytest.raises(DurableError) as told, writing("/lake/history"):
        raise error
    assert str(told.value).startswith(f"lake: /lake/history cannot be written: {reason}")


@contextmanager
def _locked(url: str) -> Iterator[None]:
    with opened(url) as engine, locked(engine, "durable"):
        yield


BLOCKS: dict[str, Callable[[str], AbstractContextManager[object]]] = {
    "locked": _locked,
    "connection": connection,
    "publishing": lambda url: publishing(load_settings(database_url=url), None),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", SAID)
def test_error_of_a_file_passes_through_database_blocks(emptied_url: str, block: str, name: str) -> None:
    error, _ = SAID[name]
    with pytest.raises(type(error), match=re.escape(str(error))), BLOCKS[block](emptied_url):
        raise error


@pytest.mark.parametrize("block", BLOCKS)
def test_unreachable_database_is_told_by_the_same_blocks(block: str) -> None:
    url = "postgresql://nobody@127.0.0.1:1/nothing"
    with pytest.raises(StorageUnavailable, match="the database cannot be used"), BLOCKS[block](url):
        pass
