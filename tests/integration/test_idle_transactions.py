"""No transaction is idle for ever: a node that is paused in one must not keep its locks from the others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import create_engine, pool, text
from sqlalchemy.exc import DBAPIError

from durable.settings import load_settings
from durable.storage import database
from durable.storage.database import Database, end_idle_transactions
from durable.storage.locks import Job, try_lock
from tests.failure.waiting import eventually


async def test_a_node_that_is_paused_with_a_jobs_lock_loses_it(database_url: str) -> None:
    url = database_url.replace("postgresql://", "postgresql+psycopg://", 1)
    engine = create_engine(url, poolclass=pool.NullPool)
    end_idle_transactions(engine, timedelta(milliseconds=100))

    with engine.connect() as paused, engine.connect() as other:
        assert try_lock(paused, "durable", Job.SWEEP)

        def taken_over() -> bool:
            got = try_lock(other, "durable", Job.SWEEP)
            other.rollback()
            return got

        await eventually(taken_over)
        with pytest.raises(DBAPIError, match="idle-in-transaction timeout"):
            paused.exec_driver_sql("SELECT 1")


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_the_agents_connections_have_the_limit(
    database_url: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "AGENTS_LONGEST_IDLE", timedelta(seconds=7))
    agents = Database(load_settings(database_url=database_url.replace("postgresql://", f"postgresql+{driver}://", 1)))
    show: Callable[..., str] = lambda conn, _: conn.execute(  # noqa: E731
        text("SHOW idle_in_transaction_session_timeout")
    ).scalar_one()
    assert await agents.transaction(show) == "7s"
    await agents.close()
