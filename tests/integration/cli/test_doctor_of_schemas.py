"""What doctor advises for a schema of another version: a migration for an older one, newer code for a newer one."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy import create_engine

from durable.cli.doctor.database import schema_version


@pytest.mark.parametrize(
    ("version", "advice"),
    [("9999", "run: pip install --upgrade durable-bus"), ("", "run: durable-agent migrate APP:BUS")],
    ids=["newer", "none"],
)
def test_advice_follows_the_version_of_the_schema(database_url: str, version: str, advice: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as conn:
        if version:
            conn.execute("UPDATE durable.alembic_version SET version_num = %s", [version])
        else:
            conn.execute("DROP SCHEMA durable CASCADE")
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://", 1))
    with engine.connect() as connected:
        found = schema_version(connected, "durable")
    engine.dispose()
    assert found.advice == advice
    assert advice not in found.detail
