"""Whose data they are: those of others are refused before anything is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from durable.embedded.cluster import MARK, check_own, make_ready
from durable.embedded.processes import postmaster
from durable.embedded.wheel import Programs
from durable.errors import InvalidSetting

BY_INITDB = ("pg_wal/000000010000000000000001", "global/pg_control", "base/1/1259", "base/5/1259", "PG_VERSION")
STARTED = '/opt/postgres "-D" "/srv/data" "-k" "/srv/data" "-c" "{}"\n'


def lay(data: Path, *files: str) -> Path:
    for name in files:
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return data


@pytest.mark.parametrize("files", [(), (MARK,), (*BY_INITDB, MARK)])
def test_missing_and_marked_data_are_own(tmp_path: Path, files: tuple[str, ...]) -> None:
    check_own(lay(tmp_path / "data", *files))


def test_data_last_started_by_durable_are_own_without_the_mark(tmp_path: Path) -> None:
    lay(tmp_path, *BY_INITDB)
    (tmp_path / "postmaster.opts").write_text(STARTED.format("cluster_name=durable-0123456789abcdef"))
    check_own(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["cluster_name=durable-shop", "cluster_name=durable-0123456789abcdef0", "x_cluster_name=durable-0123456789abcdef"],
)
def test_data_last_started_by_another_are_refused(tmp_path: Path, name: str) -> None:
    lay(tmp_path, *BY_INITDB)
    (tmp_path / "postmaster.opts").write_text(STARTED.format(name))
    with pytest.raises(InvalidSetting, match="its data are another Postgres's"):
        check_own(tmp_path)


@pytest.mark.parametrize("count", range(1, len(BY_INITDB) + 1))
def test_data_without_the_mark_are_refused_and_kept(tmp_path: Path, count: int) -> None:
    """Also those that no server was started on: their owner may have edited the settings."""
    data = lay(tmp_path / "data", *BY_INITDB[:count])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidSetting, match=r"another Postgres's|is in the way"):
        make_ready(data, Programs(18, tmp_path, None))
    assert sorted(tmp_path.rglob("*")) == before


def test_linked_data_are_refused(tmp_path: Path) -> None:
    lay(tmp_path / "first" / "data", *BY_INITDB, MARK)
    (tmp_path / "data").symlink_to(tmp_path / "first" / "data")
    with pytest.raises(InvalidSetting, match=f"its data are a symbolic link to {tmp_path}/first/data, which other"):
        check_own(tmp_path / "data")


@pytest.mark.parametrize(
    ("version", "told"),
    [("16\n", "its data are of Postgres 16, not 18; give version=16"), ("x", "has no version"), ("", "has no version")],
)
def test_data_of_another_version_are_refused_and_kept(tmp_path: Path, version: str, told: str) -> None:
    data = lay(tmp_path / "data", *BY_INITDB, MARK)
    (data / "PG_VERSION").write_text(version)
    with pytest.raises(InvalidSetting, match=told):
        make_ready(data, Programs(18, tmp_path, None))
    assert (data / "base" / "5" / "1259").exists()
    (data / "PG_VERSION").unlink()
    with pytest.raises(InvalidSetting, match="has no version"):
        make_ready(data, Programs(18, tmp_path, None))


@pytest.mark.parametrize("name", ["postmaster.opts", "PG_VERSION", "postmaster.pid"])
@pytest.mark.parametrize("trap", ["link", "name", "pipe"])
def test_trap_in_the_place_of_a_file_is_not_read(tmp_path: Path, name: str, trap: str) -> None:
    data = lay(tmp_path / "data", *(each for each in (*BY_INITDB, "postmaster.opts") if each != name))
    (data / name).unlink(missing_ok=True)
    secret = tmp_path / "secret"
    lines = ["1", "", "", "5432", "/tmp", "", "", "ready"]
    secret.write_text({"postmaster.pid": "\n".join(lines), "PG_VERSION": "18"}.get(name, "cluster_name=durable-"))
    if trap == "link":
        (data / name).symlink_to(secret)
    elif trap == "name":
        os.link(secret, data / name)
    else:
        os.mkfifo(data / name)
    if name == "postmaster.pid":
        assert postmaster(data) is None
        return
    if name == "PG_VERSION":
        (data / MARK).write_text("")
    with pytest.raises((OSError, InvalidSetting), match=r"symbolic link|it is no file"):
        make_ready(data, Programs(18, tmp_path, None))
