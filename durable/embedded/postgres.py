"""A private Postgres from a wheel (`durable-bus[embedded]`), for the demo, for tests and for a first try.

The server listens on a Unix socket only, belongs to the block that started it and ends with it, or with its process.
A second block on the same folder joins the server and leaves it running. Started by root, it runs as the owner of its
data, or of the folder, or as an unprivileged user of the system, because Postgres refuses to run as root.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from durable.embedded import databases
from durable.embedded.account import account_of
from durable.embedded.cluster import check_own, check_version, make_ready
from durable.embedded.folders import made
from durable.embedded.ownership import Keeper, changing, end_last, owned
from durable.embedded.server import Server
from durable.embedded.sockets import remove_socket_directories, socket_directory
from durable.embedded.wheel import find_programs, run_by
from durable.errors import InvalidSetting, said
from durable.telemetry import log

START_SECONDS = 30.0
_POLL_SECONDS: Final = 0.05
_ADMINISTRATION: Final = "postgres"


class Embedded:
    """A running private server; `url()` makes a database on it the first time that it is asked for."""

    def __init__(self, server: Server, folder: Path, *, owner: int | None) -> None:
        self.server = server
        self._folder = folder
        self._owner = owner

    @property
    def owned(self) -> bool:
        """True when the server ends with this block; False when another block, or process, has started it."""
        return self._owner == os.getpid()

    @property
    def is_running(self) -> bool:
        """True while the server takes connections."""
        return self.server.is_running

    def uri(self, database: str | None = None) -> str:
        """The URI of this database, or of the one that administrators connect to."""
        return self.server.url(_ADMINISTRATION if database is None else database)

    def url(self, database: str) -> str:
        """A SQLAlchemy URL of this database, which is created when it is missing.

        It leads to this server whatever PGHOST, PGHOSTADDR and PGPORT say, in durable and libpq. SQLAlchemy's own
        parser drops its empty `hostaddr`: unset PGHOSTADDR for engines made of the text. Other variables of libpq, such
        as PGOPTIONS and PGSSLMODE, change connections of the application as they do everywhere.

        Raises InvalidSetting when there can be no database of this name, and when the server has ended.
        """
        if not isinstance(database, str) or not database or "\0" in database:
            raise InvalidSetting(f"postgres: database={database!r}: give a name")
        try:
            databases.create(self.server.programs, self.uri(), database)
        except InvalidSetting as error:
            if self.is_running:
                raise
            folder = str(self._folder)
            raise InvalidSetting(f"postgres: folder={folder!r}: its server has ended; start it again") from error
        return self.uri(database)

    def restart(self) -> None:
        """Stop the server as an operator would, cutting every connection, and start it again.

        Raises InvalidSetting when the server belongs to another block, which would lose sight of it.
        """
        if not self.owned:
            raise InvalidSetting(f"postgres: folder={str(self._folder)!r}: restart() is for its owner")
        with changing(self._folder):
            self.server.restart()


@contextmanager
def postgres(folder: Path | str, *, version: int | None = None) -> Iterator[Embedded]:
    """Start a private server that keeps its data in `folder`, which is made when it is missing; stop it at the end.

    A server that runs there already is joined, and left running at the end. Settings of ALTER SYSTEM last until then:
    each start writes its own. Data and servers that another than durable has made are left alone. Raises
    InvalidSetting when the wheel is not installed, when the server does not start, and when it cannot use the folder.
    """
    programs = find_programs(version)
    folder = made("postgres", folder).resolve()
    server = Server(folder / "data", programs)
    check_own(server.data)
    owning = ExitStack()
    owner = os.getpid() if _owns_or_joins(server, folder, owning) else None
    try:
        yield Embedded(server, folder, owner=owner)
    except BaseException:
        if owner == os.getpid():
            try:
                _end(server, folder, owning)
            except Exception as error:  # the block's own error says more
                log.error("embedded Postgres has not ended: folder %s: %s", folder, said(error))
        raise
    if owner == os.getpid():  # the server of a forked process is its parent's
        _end(server, folder, owning)


def _end(server: Server, folder: Path, owning: ExitStack) -> None:
    with owning:
        if folder.exists():  # nobody starts a server in one that was removed
            with changing(folder):
                server.stop()


def _owns_or_joins(server: Server, folder: Path, owning: ExitStack) -> bool:
    """Start the server as its owner, or return False when it runs and belongs to another block."""
    for _ in range(round(START_SECONDS / _POLL_SECONDS)):
        with changing(folder), ExitStack() as held:
            if held.enter_context(owned(folder)):
                _start(server, folder, held)
                owning.push(held.pop_all())
                return True
            if server.join():
                check_version(server.data, server.programs)
                return False
        time.sleep(_POLL_SECONDS)  # its owner is about to start or end it
    raise InvalidSetting(f"postgres: folder={str(folder)!r}: its server does not answer; end the process that owns it")


def _start(server: Server, folder: Path, held: ExitStack) -> None:
    end_last(server.data)
    held.callback(remove_socket_directories, server.data)
    held.callback(server.stop)  # ended by its keeper then
    held.enter_context(Keeper(folder, server.data))
    try:
        server.programs = run_by(account_of(folder, server.data), server.programs)
        make_ready(server.data, server.programs)
        sockets = socket_directory(server.data, server.programs.account)
    except OSError as error:
        raise InvalidSetting(
            f"postgres: folder={str(folder)!r} cannot be used: {said(error)}; mend that, or give another folder"
        ) from error
    server.run(sockets)
