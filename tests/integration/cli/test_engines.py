"""doctor on the way to the database: a pooler, and the engines that the application gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Agent
from tests.support.pooler import pooler

SAFE = {
    "asyncpg": "statement_cache_size=0, prepared_statement_cache_size=0, prepared_statement_name_func=lambda: ''",
    "psycopg": "prepare_threshold=None",
}
LIMITED = """
from sqlalchemy import event
@event.listens_for(LISTENED, "begin")
def limit(conn):
    conn.exec_driver_sql(
        "SELECT set_config('statement_timeout', '9000', true),"
        " set_config('idle_in_transaction_session_timeout', '9000', true)"
    )
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.fixture
def pooled(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    with pooler(database_url) as url:
        yield url


def given(kind: str, driver: str, url: str, connect_args: str = "", limited: bool = False) -> str:
    """An application whose bus has this engine."""
    is_async = kind == "engine"
    made = (
        "from sqlalchemy import create_engine\n"
        "from sqlalchemy.ext.asyncio import create_async_engine\n"
        f"engine = create_{'async_' if is_async else ''}engine("
        f"{url.replace('postgresql://', f'postgresql+{driver}://', 1)!r}, connect_args=dict({connect_args}))\n"
    )
    limits = LIMITED.replace("LISTENED", "engine.sync_engine" if is_async else "engine") if limited else ""
    return f"\n{made}{limits}\nbus = Bus('NAME', {kind}=engine)\n"


KINDS = [("engine", "asyncpg"), ("engine", "psycopg"), ("sync_engine", "psycopg")]


@pytest.mark.parametrize(("kind", "driver"), KINDS)
def test_doctor_fails_an_engine_when_a_pooler_loses_its_statements(
    agent: Agent, pooled: str, kind: str, driver: str
) -> None:
    examined = agent("doctor", f"{agent.application(given(kind, driver, pooled))}:bus")
    assert examined.code == 1
    assert f"fail  {kind}: prepares statements, and goes through a pooler" in examined.out


@pytest.mark.parametrize(("kind", "driver"), KINDS)
def test_doctor_accepts_an_engine_without_prepared_statements_behind_a_pooler(
    agent: Agent, pooled: str, kind: str, driver: str
) -> None:
    source = given(kind, driver, pooled, SAFE[driver], limited=True)
    examined = agent("doctor", f"{agent.application(source)}:bus")
    assert f"ok    {kind}: through a pooler, without prepared statements" in examined.out


@pytest.mark.parametrize(("kind", "driver"), KINDS)
def test_doctor_warns_of_an_engine_without_limits(
    agent: Agent, pooled: str, database_url: str, kind: str, driver: str
) -> None:
    examined = agent("doctor", f"{agent.application(given(kind, driver, database_url))}:bus")
    assert f"warn  {kind}: direct; without statement_timeout, idle_in_transaction_session_timeout" in examined.out


def test_doctor_fails_a_pooler_without_a_direct_lock_connection(
    agent: Agent, pooled: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined = agent("doctor", "--database", pooled)
    assert examined.code == 1
    assert "fail  pooler: database_url goes through one" in examined.out
    assert "set DURABLE_LOCK_DATABASE_URL to a direct connection" in examined.out
    monkeypatch.setenv("DURABLE_LOCK_DATABASE_URL", database_url)
    examined = agent("doctor", "--database", pooled)
    assert "ok    pooler: database_url goes through one" in examined.out
    assert "ok    lock connection: direct" in examined.out


def test_doctor_recognises_a_direct_connection(agent: Agent, pooled: str) -> None:
    assert "ok    pooler: none" in agent("doctor").out
