"""A job's lock is nobody's for ever: a node that was paused while it held it must not keep the others from the job."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import create_engine, pool
from sqlalchemy.exc import DBAPIError

from durable.storage import locks
from durable.storage.locks import Job, try_lock

SCHEMA = "durable"


def test_a_node_that_is_paused_with_the_lock_loses_it(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LONGEST_IDLE", "100ms")
    url = database_url.replace("postgresql://", "postgresql+psycopg://", 1)
    engine = create_engine(url, poolclass=pool.NullPool)

    with engine.connect() as paused, engine.connect() as other:
        assert try_lock(paused, SCHEMA, Job.SWEEP)
        deadline = time.monotonic() + 10
        while not try_lock(other, SCHEMA, Job.SWEEP):
            other.rollback()
            assert time.monotonic() < deadline
        with pytest.raises(DBAPIError, match="idle-in-transaction timeout"):
            paused.exec_driver_sql("SELECT 1")
