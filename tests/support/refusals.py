"""Ways in which Postgres, or a driver, refuses new connections to a database while the server is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import quote

import psycopg
from sqlalchemy import make_url

_ON_LOGIN = """
CREATE FUNCTION public.close() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
    IF session_user = '{role}' THEN RAISE EXCEPTION 'closed until 06:00'; END IF; END $$;
CREATE EVENT TRIGGER closed ON login EXECUTE FUNCTION public.close();
"""
_END = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s AND application_name NOT LIKE %s
"""
READ_WRITE = {"target_session_attrs": "read-write"}


class Refusal(NamedTuple):
    """Statements that close a database and open it again, what an error says, and the URL's parameters for that."""

    close: str
    open: str
    said: str
    parameters: Mapping[str, str] = MappingProxyType({})
    is_within: bool = False
    """Are they run in that database, not in another of the server?"""


REFUSALS = {
    "closed": Refusal(
        "ALTER DATABASE {0} ALLOW_CONNECTIONS false",
        "ALTER DATABASE {0} ALLOW_CONNECTIONS true",
        "not currently accepting connections",
    ),
    "without a right": Refusal(
        "REVOKE CONNECT ON DATABASE {0} FROM PUBLIC, {role}",
        "GRANT CONNECT ON DATABASE {0} TO PUBLIC, {role}",
        "permission denied for database",
    ),
    "without a login": Refusal("ALTER ROLE {role} NOLOGIN", "ALTER ROLE {role} LOGIN", "not permitted to log in"),
    "a limit of connections": Refusal(
        "ALTER DATABASE {0} CONNECTION LIMIT 0",
        "ALTER DATABASE {0} CONNECTION LIMIT -1",
        "too many connections for database",
    ),
    "a limit of the role": Refusal(
        "ALTER ROLE {role} CONNECTION LIMIT 0", "ALTER ROLE {role} CONNECTION LIMIT -1", "too many connections for role"
    ),
    "a trigger on login": Refusal(
        _ON_LOGIN,
        "DROP EVENT TRIGGER closed; DROP FUNCTION public.close()",
        "closed until 06:00",
        is_within=True,
    ),
    "no primary": Refusal(
        "ALTER DATABASE {0} SET default_transaction_read_only = on",
        "ALTER DATABASE {0} RESET default_transaction_read_only",
        "read.(write|only)",
        READ_WRITE,
    ),
}
LASTING = {
    "an unknown setting": Refusal("SELECT 1", "SELECT 1", "no_such_setting", {"options": "-c no_such_setting=1"}),
    "a wrong value": Refusal("SELECT 1", "SELECT 1", "work_mem", {"options": "-c work_mem=much"}),
}
"""Mistakes of a URL that the server alone knows."""


@contextmanager
def refusing(url: str, name: str, *, spared: str = "") -> Iterator[None]:
    """Refuse new connections to the database of this URL, of the role there, and end those that are open.

    `spared`: a pattern of names of connections that stay open.
    """
    refusal, place = (REFUSALS | LASTING)[name], make_url(url)
    database = place.database if refusal.is_within else "postgres"
    with psycopg.connect(_of_the_server(url, database), autocommit=True) as conn:

        def run(statement: str) -> None:
            conn.execute(statement.format(place.database, role=place.username).encode())

        run(refusal.close)
        try:
            conn.execute(_END, [place.username, spared])
            yield
        finally:
            run(refusal.open)


def with_parameters(url: str, parameters: Mapping[str, str]) -> str:
    """Return the URL with these parameters as well."""
    added = "&".join(f"{name}={quote(value)}" for name, value in parameters.items())
    return f"{url}{'&' if '?' in url else '?'}{added}" if added else url


def _of_the_server(url: str, database: str | None) -> str:
    """Return the URL by which the tests' own superuser reaches a database of the same server."""
    place = make_url(url)
    kept = {name: place.query[name] for name in ("host", "port") if name in place.query}
    own = place.set(drivername="postgresql", username="postgres", password=None, database=database, query=kept)
    return own.render_as_string(hide_password=False)
