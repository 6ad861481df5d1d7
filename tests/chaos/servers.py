"""The Postgres servers of a run, each with what an operator or an accident does to it.

A server may be replaced by its standby: `target` is where its clients are led to, and changes then. The standby is
synchronous, so that what was acknowledged is there. The connections that faults need come by the server's own socket,
as another role: not through the proxies, and also when the nodes have used up all connections.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from durable.storage import migrator
from tests.chaos.ledger import FULL, FULL_TABLES, ROLE, TABLES
from tests.support.clusters import Cluster, Clusters, clusters

CATCH_UP_SECONDS = 60.0
GREEDY = "greedy"
"""Name of the sessions that use up all connections."""
IS_CAUGHT_UP = """
SELECT EXISTS (SELECT FROM pg_stat_replication
    WHERE state = 'streaming' AND sync_state = 'sync' AND flush_lsn >= pg_current_wal_flush_lsn())
"""


class Server:
    """One primary, with a standby when it is about to be promoted."""

    def __init__(self, name: str, made: Clusters, guards: ExitStack) -> None:
        self.name = name
        self._made = made
        self._guards = guards
        self.cluster = made.new()
        self._guard(self.cluster)
        self.execute(f"CREATE ROLE {ROLE} LOGIN")
        self.execute("ALTER SYSTEM SET max_connections = 60")
        self.execute("ALTER SYSTEM SET log_min_messages = 'fatal'")

    @property
    def target(self) -> str:
        """Where it listens, for a proxy."""
        return f"unix://{self.cluster.folder}/.s.PGSQL.5432"

    def make_database(self, name: str) -> None:
        """A database with durable's tables, which the nodes own, and the ledger, which they do not."""
        self.execute(f"CREATE DATABASE {name} OWNER {ROLE}")
        url = f"postgresql+psycopg://{ROLE}@/{name}?host={self.cluster.folder}&port=5432"
        migrator.upgrade(url, "durable")
        with self.connect(name) as conn:
            conn.execute(TABLES.encode())
            for table in FULL_TABLES:
                conn.execute(FULL.format(table=table).encode())

    def connect(self, database: str = "postgres", user: str = "postgres") -> psycopg.Connection[Any]:
        uri = self.cluster.uri(database).replace("postgres@", f"{user}@")
        return psycopg.connect(uri, autocommit=True, connect_timeout=10)

    def execute(self, statement: str, database: str = "postgres") -> None:
        with self.connect(database) as conn:
            conn.execute(statement.encode())

    # ---------------------------------------------------------------- accidents

    def stop(self, mode: str) -> None:
        self.cluster.stop(mode)

    def start(self) -> None:
        self.cluster.start()

    def terminate_backends(self, database: str) -> int:
        """End every session of the nodes."""
        with self.connect() as conn:
            ended = conn.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE datname = %s AND usename = %s AND application_name <> %s",
                (database, ROLE, GREEDY),
            ).fetchone()
        return int(ended[0]) if ended else 0

    def set_read_only(self, on: bool) -> None:
        """For sessions that are open, too."""
        self.execute(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}")
        self.execute("SELECT pg_reload_conf()")

    def switch(self, database: str, name: str, on: bool) -> None:
        statement = sql.SQL(
            "INSERT INTO switches VALUES ({}) ON CONFLICT DO NOTHING" if on else "DELETE FROM switches WHERE name = {}"
        ).format(sql.Literal(name))
        with self.connect(database) as conn:
            conn.execute("SET default_transaction_read_only = off")
            conn.execute(statement)

    @contextmanager
    def used_up(self, database: str) -> Iterator[None]:
        """Take every connection that the role of the nodes may have, those that nodes have now included."""
        with ExitStack() as taken:
            self._take_all(database, taken)
            self.terminate_backends(database)
            self._take_all(database, taken)
            yield

    def _take_all(self, database: str, taken: ExitStack) -> None:
        uri = self.cluster.uri(database).replace("postgres@", f"{ROLE}@")
        try:
            while True:
                taken.enter_context(psycopg.connect(uri, autocommit=True, application_name=GREEDY))
        except psycopg.OperationalError:
            return

    @contextmanager
    def snapshot(self, database: str) -> Iterator[None]:
        """Hold an old snapshot, as a dump or a forgotten session does."""
        with self.connect(database) as conn:
            conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            conn.execute("SELECT count(*) FROM durable.envelope_history")
            try:
                yield
            finally:
                conn.close()

    # ---------------------------------------------------------------- the standby

    def fail_over(self, away: Callable[[], None]) -> None:
        """Crash the primary while a synchronous standby follows it; after `away`, the standby is the server."""
        standby = self._made.empty()
        self.cluster.back_up(standby, "-R")
        standby.start()
        self._guard(standby)
        self.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        self.execute("SELECT pg_reload_conf()")
        self._wait_until_caught_up()
        self.cluster.stop("immediate")
        away()
        standby.promote()
        self.cluster = standby

    def _wait_until_caught_up(self) -> None:
        deadline = time.monotonic() + CATCH_UP_SECONDS
        with self.connect() as conn:
            while conn.execute(IS_CAUGHT_UP).fetchone() != (True,):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the standby of {self.name} does not catch up")
                time.sleep(0.1)

    def _guard(self, cluster: Cluster) -> None:
        """End it when this process is killed."""
        self._guards.enter_context(_ending_with_this_process(cluster.data))


@contextmanager
def _ending_with_this_process(data: Path) -> Iterator[None]:
    """Even if it is killed: then a shell sees the end of a pipe that only this process holds, and ends the server."""
    script = 'cat; kill -QUIT "$(head -n 1 "$0/postmaster.pid")"'
    with subprocess.Popen(
        ["/bin/sh", "-c", script, str(data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C at the terminal is meant for this process
    ):
        yield


@contextmanager
def servers(*names: str) -> Iterator[dict[str, Server]]:
    with ExitStack() as guards, clusters() as made:
        yield {name: Server(name, made, guards) for name in names}
