"""Types of Postgres, which asyncpg asks the server about."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from durable.storage import answering
from durable.storage.answering import open_asyncpg

IDS = [uuid4(), uuid4()]
OWN = "SELECT CAST($1 AS uuid[]), CAST($2 AS bigint[])"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The types that servers are asked about, in a process that has asked about none."""
    found: list[set[int]] = []
    ask = asyncpg.Connection._introspect_types

    async def asking(connection: Any, typeoids: Any, timeout: float | None) -> Any:  # noqa: ASYNC109
        found.append(set(typeoids))
        return await ask(connection, typeoids, timeout)

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", asking)
    monkeypatch.setattr(answering, "_described", {})
    return found


@pytest.mark.parametrize("kept", [0, 100])
async def test_types_of_postgres_are_asked_for_once_in_a_process(
    database_url: str, asked: list[set[int]], kept: int
) -> None:
    for _ in range(3):
        connection = await open_asyncpg(database_url, timeout=10, statement_cache_size=kept)
        for _ in range(2):
            assert await connection.fetchrow(OWN, IDS, [1, 2]) == (IDS, [1, 2])
        await connection.close()
    assert len(asked) == 1


async def test_types_of_an_application_are_asked_for_on_each_connection(
    database_url: str, asked: list[set[int]]
) -> None:
    for name in ("color", "shade"):
        connection = await open_asyncpg(database_url, timeout=10)
        await connection.execute(f"CREATE TYPE {name} AS ENUM ('red')")
        assert await connection.fetchval(f"SELECT CAST($1 AS {name}[])", ["red"]) == ["red"]
        await connection.close()
    assert len(asked) == 2
