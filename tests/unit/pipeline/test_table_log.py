"""The log of a table of the lake, read as a whole once: what another reader finds, the same reader finds, too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from deltalake.transaction import Transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from durable.errors import DurableError
from durable.pipeline import places
from durable.pipeline.table_log import FOLDER, TableLog, checkpoints

NAMES: Final = ("a", "b", "durable:begin:shop:db")


def commit(place: Path, number: int) -> None:
    marks = CommitProperties(app_transactions=[Transaction(NAMES[number % len(NAMES)], number)])
    write_deltalake(place, pa.table({"n": [number]}), mode="append", commit_properties=marks)


def seen(log: TableLog) -> tuple[int, list[str], dict[str, int]]:
    opened = log.opened()
    return opened.version(), sorted(opened.file_uris()), dict(log.numbers())


def back_up(place: Path) -> None:
    shutil.rmtree(place.with_name("backup"), ignore_errors=True)
    shutil.copytree(place, place.with_name("backup"))


def put_back(place: Path, backup: Path) -> None:
    shutil.rmtree(place)
    shutil.copytree(backup, place)


def clean(place: Path) -> None:
    """Remove the commits that a whole checkpoint holds, as Delta does after some weeks."""
    folder = place / FOLDER
    newest = max(checkpoints(path.name for path in folder.iterdir()), default=-1)
    for path in folder.glob("*.json"):
        if int(path.name[:20]) < newest:
            path.unlink()


def restore(place: Path) -> None:
    table = DeltaTable(place)
    with suppress(DeltaError):  # of the first version there is none before, and a cleaned log may have lost it
        table.restore(table.version() - 1)


def checkpoint_in_parts(place: Path, *, kept: int) -> None:
    """As Spark writes a large one, with the numbers in its last part; of the parts only the first are kept."""
    folder, version = place / FOLDER, DeltaTable(place).version()
    DeltaTable(place).create_checkpoint()
    (folder / "_last_checkpoint").unlink(missing_ok=True)
    whole = folder / f"{version:020}.checkpoint.parquet"
    if not whole.exists():  # there are parts already
        return
    rows = pq.read_table(whole)
    whole.unlink()
    parts = (rows.filter(rows["txn"].is_null()), rows.filter(rows["txn"].is_valid()))
    for number, part in enumerate(parts[:kept], start=1):
        pq.write_table(part, folder / f"{version:020}.checkpoint.{number:010}.{len(parts):010}.parquet")


STEPS: Final[dict[str, Callable[[Path], Any]]] = {
    "commit": lambda place: commit(place, DeltaTable(place).version() + 1),
    "checkpoint": lambda place: DeltaTable(place).create_checkpoint(),
    "checkpoint in parts": lambda place: checkpoint_in_parts(place, kept=2),
    "first part of a checkpoint": lambda place: checkpoint_in_parts(place, kept=1),
    "compact": lambda place: DeltaTable(place).optimize.compact(),
    "clean": clean,
    "restore": restore,
    "back up": back_up,
    "put back": lambda place: put_back(place, place.with_name("backup")),
}


LOOKS: Final = ("none", "opened", "seen")
"""After a step the known log is looked at by nobody, opened, or opened and asked for its numbers."""


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from(LOOKS)), max_size=10))
def test_known_log_reads_as_a_new_one(tmp_path: Path, steps: list[tuple[str, str]]) -> None:
    place = tmp_path / "table"
    for old in (place, tmp_path / "backup"):
        shutil.rmtree(old, ignore_errors=True)
    commit(place, 0)
    STEPS["back up"](place)
    log = TableLog(str(place))
    for step, look in steps:
        STEPS[step](place)
        if look == "opened":
            log.opened()
        elif look == "seen":
            assert seen(log) == seen(TableLog(str(place)))
    found = seen(log)
    assert found == seen(TableLog(str(place)))
    numbers = {name: DeltaTable(place).transaction_version(name) for name in NAMES}
    assert found[2] == {name: number for name, number in numbers.items() if number is not None}


def nth(folder: Path, place: int) -> Path:
    return sorted(folder.glob("*.json"))[place]


DAMAGES: Final[dict[str, Callable[[Path], Any]]] = {
    "first removed": lambda folder: nth(folder, 0).unlink(),
    "middle removed": lambda folder: nth(folder, 1).unlink(),
    "middle of as many bytes": lambda folder: nth(folder, 1).write_bytes(b"?" * nth(folder, 1).stat().st_size),
    "last of as many bytes": lambda folder: nth(folder, -1).write_bytes(b"?" * nth(folder, -1).stat().st_size),
    "last emptied": lambda folder: nth(folder, -1).write_bytes(b""),
    "new one of other bytes": lambda folder: (folder / f"{3:020}.json").write_bytes(b"????"),
    "new one empty": lambda folder: (folder / f"{3:020}.json").write_bytes(b""),
}
OF_WHAT_WAS_READ: Final = ("first removed", "middle removed", "middle of as many bytes")
"""Damages that only a reader of the whole log can see."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A table of three commits."""
    place = tmp_path / "table"
    for number in range(3):
        commit(place, number)
    return place


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("is_known", [True, False])
def test_damaged_log_is_told_each_time(place: Path, how: str, is_known: bool) -> None:
    log = TableLog(str(place))
    before = seen(log) if is_known else None
    DAMAGES[how](place / FOLDER)
    for _ in range(2):
        if is_known and how in OF_WHAT_WAS_READ:
            assert seen(log) == before, "nothing of it is read again"
            continue
        with pytest.raises((DurableError, DeltaError, ValueError)):
            seen(log)


def test_known_log_is_read_as_a_whole_when_its_checkpoint_is_gone(place: Path) -> None:
    """The library reads the files that were replaced from there, whenever it is asked for them."""
    DeltaTable(place).create_checkpoint()
    commit(place, 3)
    log = TableLog(str(place))
    before = seen(log)
    for path in (place / FOLDER).glob("*checkpoint*"):
        path.unlink()
    assert log.opened().vacuum(0, dry_run=True, enforce_retention_duration=False) == []
    assert seen(log) == before


def test_removed_table_exists_no_more(place: Path) -> None:
    log = TableLog(str(place))
    assert log.exists()
    seen(log)
    assert log.exists()
    shutil.rmtree(place)
    assert not log.exists()


def test_numbers_are_known_when_their_commits_were_cleaned_between_two_looks(place: Path) -> None:
    log = TableLog(str(place))
    seen(log)
    for number in range(3, 7):
        commit(place, number)
    log.opened()
    DeltaTable(place).create_checkpoint()
    clean(place)
    assert seen(log) == seen(TableLog(str(place)))


@pytest.mark.parametrize("step", ["none", "commit"])
def test_look_at_a_known_log_asks_for_as_few_files_when_the_log_is_long(
    place: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    asked: list[str] = []

    def noted(called: Callable[..., Any]) -> Callable[..., Any]:
        def asking(table_url: str, of: str | list[str]) -> Any:
            asked.extend([of] if isinstance(of, str) else of)
            return called(table_url, of)

        return asking

    for name in ("names", "read", "opened", "states"):
        monkeypatch.setattr(places, name, noted(getattr(places, name)))
    counts = []
    for length in (10, 250):
        for number in range(DeltaTable(place).version() + 1, length):
            (place / FOLDER / f"{number:020}.json").write_text('{"commitInfo": {}}\n')
        DeltaTable(place).create_checkpoint()
        log = TableLog(str(place))
        assert log.exists()
        seen(log)
        if step == "commit":
            commit(place, length)
        asked.clear()
        assert (log.exists(), seen(log)[0]) == (True, DeltaTable(place).version())
        counts.append(len(asked))
        assert FOLDER not in asked, "no list of all files"
    assert counts == [counts[0]] * 2
    assert counts[0] <= 7


def test_known_log_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, opened = tmp_path / "table", list[str]()
    whole = DeltaTable.__init__

    def counted(self: DeltaTable, *args: Any, **named: Any) -> None:
        opened.append(str(args))
        whole(self, *args, **named)

    commit(place, 0)
    monkeypatch.setattr(DeltaTable, "__init__", counted)
    log = TableLog(str(place))
    for number in range(1, 5):
        assert seen(log)[0] == number - 1
        commit(place, number)
    assert seen(log)[0] == 4
    assert len(opened) == 1 + 4, "once, and by each writer of the test"


@pytest.mark.parametrize("later", [0, 2])
@pytest.mark.parametrize("is_known", [True, False])
def test_parts_of_a_checkpoint_are_no_checkpoint(place: Path, later: int, is_known: bool) -> None:
    """Its writer has died, before or after one that is whole."""
    log = TableLog(str(place))
    if is_known:
        seen(log)
    checkpoint_in_parts(place, kept=2)
    commit(place, 3)
    checkpoint_in_parts(place, kept=1)
    for number in range(4, 4 + later):
        commit(place, number)
    numbers = {name: max(range(index, 4 + later, len(NAMES))) for index, name in enumerate(NAMES)}
    assert seen(log)[2] == seen(TableLog(str(place)))[2] == numbers
