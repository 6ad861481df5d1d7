"""Postgres clusters that are copied, restored, promoted and upgraded: run by the wheel's own tools, in one folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from durable.embedded.account import Account, unprivileged
from durable.embedded.wheel import find_programs, run_by

_CONFIGURATION = """
listen_addresses = ''
fsync = off
max_connections = 50
max_prepared_transactions = 10
wal_level = replica
log_min_messages = fatal
"""
_PORT = 5432
_CLOG_PAGE = 1 << 15  # transactions; at the beginning of a page the server needs no file of the pages before it


def _tools(version: int) -> Path:
    """The wheel's programs, where the user that owns the data can run them."""
    return run_by(_account(), find_programs(version)).folder


class Cluster:
    """One data folder with its socket beside it."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.tools = _tools(version)

    def run(self, tool: str, *arguments: str) -> None:
        """One of Postgres's own programs, as the user that owns the data."""
        with tempfile.TemporaryFile() as said:  # not a pipe, which a server that goes on would keep open
            ended = subprocess.run(
                [self.tools / tool, *arguments],
                cwd=self.folder,
                stdout=said,
                stderr=said,
                check=False,
                **_unprivileged(),
            )
            said.seek(0)
            assert ended.returncode == 0, f"{tool}: {said.read().decode()}"

    def make(self, *options: str) -> None:
        self.run("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync", *options)

    def configure(self) -> None:
        with (self.data / "postgresql.auto.conf").open("a") as file:  # a standby's has its primary in it
            file.write(f"{_CONFIGURATION}port = {_PORT}\nunix_socket_directories = '{self.folder}'\n")

    def start(self) -> None:
        self.configure()
        self.run("pg_ctl", "-D", str(self.data), "-w", "-t", "60", "-l", str(self.folder / "log"), "start")

    def stop(self, mode: str = "fast") -> None:
        self.run("pg_ctl", "-D", str(self.data), "-w", "-m", mode, "stop")

    @property
    def is_running(self) -> bool:
        return (self.data / "postmaster.pid").exists()

    def uri(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self.folder}&port={_PORT}"

    def execute(self, statement: str, database: str = "postgres") -> None:
        with psycopg.connect(self.uri(database), autocommit=True) as conn:
            conn.execute(statement.encode())

    def copy_dump(self, database: str, into: Cluster) -> None:
        """Dump this database, and restore it in another cluster under the same name."""
        file = str(self.folder / "dump")
        self.run("pg_dump", "-Fc", "-f", file, self.uri(database))
        into.execute(f"CREATE DATABASE {database}")
        into.run("pg_restore", "-d", into.uri(database), file)

    def back_up(self, into: Cluster, *options: str) -> None:
        """The files of this running cluster, as pg_basebackup copies them; with -R those of a standby."""
        self.run("pg_basebackup", "-D", str(into.data), "-d", self.uri("postgres"), "-c", "fast", "--no-sync", *options)

    def promote(self) -> None:
        """End being a standby, whatever its primary has had besides."""
        self.run("pg_ctl", "-D", str(self.data), "-w", "promote")

    def wind_on(self, epoch: int) -> None:
        """Bring its transaction numbers to the last page before their end, as if it had lived for years.

        By jumps, since no row may be older than half of all numbers; before each every row is frozen.
        """
        self.execute("UPDATE pg_database SET datallowconn = true")
        for number in (2 << 29, 5 << 29, (8 << 29) - _CLOG_PAGE):
            for database in self.databases():
                self.execute("VACUUM (FREEZE)", database)
            self.stop()
            self.run("pg_resetwal", "-D", str(self.data), "-x", str(number), "-e", str(epoch))
            self.start()

    def databases(self) -> list[str]:
        with psycopg.connect(self.uri("postgres")) as conn:
            return [name for (name,) in conn.execute("SELECT datname FROM pg_database")]

    def use_up(self, count: int) -> None:
        """So many transaction numbers, for nothing."""
        self.execute(f"DO $$ BEGIN FOR n IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$")

    def take_over(self, old: Cluster) -> None:
        """Upgrade the files of a cluster that is stopped into this one, which is empty."""
        folders = ("-d", str(old.data), "-D", str(self.data), "-b", str(old.tools), "-B", str(self.tools))
        self.run("pg_upgrade", *folders, "-U", "postgres", "-s", str(self.folder), "--no-sync")


class Clusters:
    """Makes clusters, each in a folder with a short path, as sockets need it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[Cluster] = []

    def empty(self, version: int = 18) -> Cluster:
        """A folder for a cluster."""
        where = self.folder / str(len(self.made))
        where.mkdir(mode=0o700)
        if account := _account():
            os.chown(where, account.user, account.group)
        self.made.append(Cluster(where, version))
        return self.made[-1]

    def new(self, version: int = 18, *options: str) -> Cluster:
        """A running cluster without databases of ours."""
        cluster = self.empty(version)
        cluster.make(*options)
        cluster.start()
        return cluster


@contextmanager
def clusters() -> Iterator[Clusters]:
    folder = Path(tempfile.mkdtemp(prefix="durable-pgs-"))
    folder.chmod(0o755)
    made = Clusters(folder)
    try:
        yield made
    finally:
        for cluster in made.made:
            if cluster.is_running:
                cluster.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


def _account() -> Account | None:
    """Postgres refuses to run as root."""
    return unprivileged() if os.geteuid() == 0 else None


def _unprivileged() -> dict[str, Any]:
    account = _account()
    return {} if account is None else {"user": account.user, "group": account.group, "extra_groups": []}
