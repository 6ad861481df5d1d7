"""Rows that only a lake has are told from those that the database has, too, while both are in use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from durable.errors import StorageUnavailable
from durable.pipeline import foreign
from durable.pipeline.copying import connection
from durable.pipeline.foreign import Parted
from durable.pipeline.lake_tables import Whose
from durable.storage import archives
from tests.support.archiving import Archiver
from tests.support.history import add_history, add_old_day
from tests.support.partitions import drop_partitions


def parted(archiver: Archiver) -> Parted:
    """All rows of history."""
    offset = archiver.run("history").high
    with connection(archiver.origin.url) as conn:
        whose = Whose(archiver.origin.service, archives.database(conn, "durable"))
    return Parted(archiver.lake, "history", whose, since=0, below=offset)


def test_wait_for_a_lock_behind_its_own_ends(
    archiver: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transaction holds who waits for it, who holds its reader."""
    add_history(conn, 2)
    found = parted(archiver)
    monkeypatch.setattr(foreign, "PATIENCE", timedelta(milliseconds=200))
    lock = "BEGIN; LOCK TABLE durable.envelope_history IN ACCESS EXCLUSIVE MODE; ROLLBACK"
    with ThreadPoolExecutor(1) as others, connection(archiver.origin.url) as here:
        archives.days(here, "durable", "envelope_history")
        waiting = others.submit(conn.execute, lock)
        while not here.exec_driver_sql("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)").scalar_one():
            pass
        with pytest.raises(StorageUnavailable, match="lock timeout"):
            found.foreign(here, archiver.origin)
        here.rollback()
        waiting.result(timeout=60)
    with connection(archiver.origin.url) as here:
        assert found.foreign(here, archiver.origin).noted == []


def test_compared_day_is_kept_until_the_transaction_ends(archiver: Archiver, conn: psycopg.Connection[Any]) -> None:
    name = add_old_day(conn, 2, 3)
    found = parted(archiver)
    conn.execute("DELETE FROM durable.archives")  # as in a state of before the first archive
    with connection(archiver.origin.url) as here:
        assert found.foreign(here, archiver.origin).noted == []
        with pytest.raises(StorageUnavailable, match="lock timeout"):
            drop_history(archiver)
    assert name in drop_history(archiver)


def drop_history(archiver: Archiver) -> list[str]:
    """As a node's maintenance does; returns the days that went."""
    with connection(archiver.origin.url) as conn:
        dropped = drop_partitions(conn, "durable", keep_ids=timedelta(days=8), keep_history=timedelta(hours=2))
    return [name for name in dropped if name.startswith("envelope_history")]
