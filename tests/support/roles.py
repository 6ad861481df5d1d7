"""A role of Postgres that owns nothing, with the rights of `durable-agent migrate --grant-to`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import psycopg
from sqlalchemy import make_url

from durable.storage import grants
from tests.failure.leftovers import SCHEMA, transaction


@contextmanager
def runtime_role(url: str) -> Iterator[str]:
    """The URL by which the role reaches this database, for as long as the context lasts."""
    role = f"runner_{uuid4().hex[:12]}"
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'f9-Kestrel-40'".encode())
        try:
            with transaction(url) as granting:
                grants.grant_runtime(granting, SCHEMA, role)
            yield make_url(url).set(username=role, password="f9-Kestrel-40").render_as_string(hide_password=False)
        finally:
            conn.execute(f"DROP OWNED BY {role}".encode())
            conn.execute(f"DROP ROLE {role}".encode())
