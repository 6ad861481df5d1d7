"""Databases of a private Postgres, made by its own `psql`.

A driver in this process would read the variables PG* of its environment, which all threads share, and might be led to
another server.
"""

from __future__ import annotations

import subprocess
from typing import Final

from durable.embedded.environment import private
from durable.embedded.wheel import Programs
from durable.errors import InvalidSetting

_CREATE: Final = r"""
SELECT format('CREATE DATABASE %I', :'name') WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = :'name') \gexec
"""
_MADE_BY_ANOTHER: Final = ("42P04", "23505")  # a process that asked at the same time
_OPTIONS: Final = ("--no-psqlrc", "--quiet", "--tuples-only", "--set=ON_ERROR_STOP=1", "--set=VERBOSITY=verbose")


def create(programs: Programs, server: str, name: str) -> None:
    """Create this database unless it is there. Raises InvalidSetting, with the words of the server, when it cannot be.

    `server`: the URI of the database that administrators connect to.
    """
    done = subprocess.run(
        [programs.folder / "psql", *_OPTIONS, f"--set=name={name}", f"--dbname={server}"],
        env=private(),
        input=_CREATE.encode(),
        capture_output=True,
    )
    told = done.stderr.decode(errors="replace").strip()
    if done.returncode and not any(f"ERROR:  {state}:" in told for state in _MADE_BY_ANOTHER):
        raise InvalidSetting(f"postgres: database={name!r}: it cannot be made: {told}")
