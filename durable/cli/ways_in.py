"""Advice for a database that cannot be used, by the reason why it lets nobody in."""

from __future__ import annotations

import re
import shlex
from typing import Final

from durable.errors import StorageUnavailable

_WAYS_IN: Final = (
    ("3D000", r'database "(?P<it>.+)" does not exist', "create it: createdb {word}"),
    (
        "42501",
        r'permission denied for database "(?P<it>.+)"',
        "as owner of the database, run: GRANT CONNECT ON DATABASE {name} TO ROLE",
    ),
    (
        "55000",
        r'database "(?P<it>.+)" is not currently accepting connections',
        "as owner of the database, run: ALTER DATABASE {name} ALLOW_CONNECTIONS true",
    ),
    (None, r'role "(?P<it>.+)" is not permitted to log in', "run: ALTER ROLE {name} LOGIN"),
    (
        None,
        r'too many connections for (?P<kind>role|database) "(?P<it>.+)"',
        "lower pool_size, or run: ALTER {kind} {name} CONNECTION LIMIT -1",
    ),
    (None, r"too many clients already|remaining connection slots", "lower pool_size, or raise max_connections"),
    (
        None,
        r"session is read-only|target attribute requirement",
        "wait for a primary, or correct target_session_attrs in the setting database_url",
    ),
    (
        "28",
        r'authentication failed for user|role ".+" does not exist|no password supplied|no pg_hba.conf entry',
        "check user and password in the setting database_url",
    ),
)
"""SQLSTATE, words of an English server, advice. libpq has no SQLSTATE for a connection that was refused."""

_BEFORE_SERVER: Final = r"[^:]*: connection is bad: (?:connection to server .* failed: )?"
_MISTAKES: Final = (
    (
        r'definition of service ".+" not found|service file ".+" not found',
        "name a service of the service file (PGSERVICEFILE, ~/.pg_service.conf) in database_url or PGSERVICE",
    ),
    (
        r"invalid port number: .+|invalid \w+ value: .+|invalid integer value .+ for connection option .+",
        "correct it in the setting database_url, or in the environment (PGPORT, PGSSLMODE, ...)",
    ),
)
"""Words of libpq, which has asked no server yet; advice."""


def mistake(error: StorageUnavailable) -> str | None:
    """Advise where a word for libpq is wrong, whatever server runs; None for what a server may get over."""
    return next(
        (advice for words, advice in _MISTAKES if re.fullmatch(_BEFORE_SERVER + f"(?:{words})", str(error))), None
    )


def way_in(error: StorageUnavailable) -> str:
    """Advise by the server's words, or else by the SQLSTATE."""
    text, state = str(error), str(getattr(error.__cause__, "sqlstate", None) or "")
    for _, words, advice in _WAYS_IN:
        if found := re.search(words, text):
            return _written(advice, found.groupdict())
    for begin, _, advice in _WAYS_IN:
        if begin is not None and state.startswith(begin):
            return _written(advice, {})
    return "check that Postgres runs, and the setting database_url"


def _written(advice: str, named: dict[str, str]) -> str:
    it = named.get("it", "")
    quoted = '"' + it.replace('"', '""') + '"' if it else "NAME"
    return advice.format(name=quoted, word=shlex.quote(it) if it else "NAME", kind=named.get("kind", "").upper())
