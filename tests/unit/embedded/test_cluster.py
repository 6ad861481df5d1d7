"""Data that nobody would miss: those of an `initdb` that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from durable.embedded.cluster import is_half_made, make_ready
from durable.embedded.wheel import Programs
from durable.errors import InvalidSetting

BY_INITDB = ("pg_wal/000000010000000000000001", "global/pg_control", "base/1/1259", "base/5/1259", "PG_VERSION")


def lay(data: Path, *files: str) -> Path:
    for name in files:
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return data


@pytest.mark.parametrize("count", range(1, len(BY_INITDB) + 1))
def test_data_with_nothing_but_files_of_initdb_are_half_made(tmp_path: Path, count: int) -> None:
    assert is_half_made(lay(tmp_path, *BY_INITDB[:count]))


@pytest.mark.parametrize(
    "kept",
    [
        "postmaster.opts",
        "backup_label",
        "standby.signal",
        "base/16384/1259",
        "base/5/16384",
        "customers.csv",
        "global.txt",
    ],
)
def test_data_with_a_trace_of_use_are_kept(tmp_path: Path, kept: str) -> None:
    assert not is_half_made(lay(tmp_path, *BY_INITDB, kept))


@pytest.mark.parametrize("files", [(), ("base/customers.csv",), ("global/pg_control", "PG_VERSION")])
def test_data_without_the_first_folder_of_initdb_are_kept(tmp_path: Path, files: tuple[str, ...]) -> None:
    assert not is_half_made(lay(tmp_path, *files))


@pytest.mark.parametrize(
    ("version", "told"),
    [("16\n", "its data are of Postgres 16, not 18; give version=16"), ("x", "has no version"), ("", "has no version")],
)
def test_data_of_another_version_are_refused_and_kept(tmp_path: Path, version: str, told: str) -> None:
    lay(tmp_path, *BY_INITDB, "postmaster.opts")
    (tmp_path / "PG_VERSION").write_text(version)
    with pytest.raises(InvalidSetting, match=told):
        make_ready(tmp_path, Programs(18, tmp_path, None))
    assert (tmp_path / "base" / "5" / "1259").exists()
