"""The archiver's lock: for one at a time, free as soon as its holder is done, and waited for when that one has died."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from pydantic import SecretStr
from sqlalchemy import Connection, Engine, create_engine

from durable.errors import ArchiveConflict, InvalidSetting, StorageUnavailable
from durable.pipeline.origin import find_origin, locked
from durable.settings import Settings
from durable.storage import archives


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """Its connections stay open when they are given back, so that none frees a lock by ending."""
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://", 1))
    yield engine
    engine.dispose()


def is_free(engine: Engine) -> bool:
    """For any connection: to the one that has it, it is."""
    with engine.connect() as one, engine.connect() as other:
        return all(map(can_lock, (one, other)))


def can_lock(conn: Connection) -> bool:
    got = archives.try_lock(conn, "durable")
    if got:
        archives.unlock(conn, "durable")
    return got


def test_lock_is_released_at_once_also_after_an_error(engine: Engine) -> None:
    with locked(engine, "durable"):
        assert not is_free(engine)
    assert is_free(engine)
    with pytest.raises(LookupError), locked(engine, "durable"):
        raise LookupError
    assert is_free(engine)


def test_lock_of_a_dying_archiver_is_awaited(engine: Engine) -> None:
    with engine.connect() as dead:
        assert archives.try_lock(dead, "durable")
        dying = threading.Timer(0.3, dead.invalidate)
        dying.start()
        with locked(engine, "durable"):
            assert not is_free(engine)
        dying.join()


def test_lock_of_a_live_archiver_raises_conflict(engine: Engine) -> None:
    second = locked(engine, "durable")
    with locked(engine, "durable"), pytest.raises(ArchiveConflict, match="another archiver is at work"):
        second.__enter__()


def test_lost_connection_of_the_lock_raises_the_error_of_the_work(engine: Engine) -> None:
    with pytest.raises(StorageUnavailable, match="terminating connection"), locked(engine, "durable") as conn:
        conn.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b", "a:b", "ser\nvice", "größe", "it's", ".", "-a", "a" * 101])
def test_first_archive_refuses_odd_names_of_services(database_url: str, name: str) -> None:
    """It would be that of all rows in the lake, for good."""
    settings = Settings(database_url=SecretStr(database_url))
    with pytest.raises(InvalidSetting, match=r"^--service: service=.* is no name; give letters") as told:
        find_origin(settings, name)
    assert str(told.value).isprintable()
    assert find_origin(settings, "a.b-c_d").service == "a.b-c_d"
