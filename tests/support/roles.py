"""A role of Postgres that owns nothing, with the rights of `durable-agent migrate --grant-to`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from uuid import uuid4

import psycopg
from psycopg import sql

from durable.database_url import parse
from durable.storage import grants
from tests.failure.leftovers import SCHEMA, transaction


@contextmanager
def runtime_role(url: str, role: str | None = None) -> Iterator[str]:
    """The URL by which the role reaches this database, for as long as the context lasts; by default one of its own."""
    role = role or f"runner_{uuid4().hex[:12]}"
    name = sql.Identifier(role)
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'f9-Kestrel-40'").format(name))
        try:
            with transaction(url) as granting:
                grants.grant_runtime(granting, SCHEMA, role)
            yield replace(parse(url), user=role, password="f9-Kestrel-40").libpq()
        finally:
            conn.execute(sql.SQL("DROP OWNED BY {}").format(name))
            conn.execute(sql.SQL("DROP ROLE {}").format(name))
