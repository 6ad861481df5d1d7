"""The times of commits, which Postgres keeps of every transaction: one clock for all sides, and no work for them.

The jobs of a side are the rows of `business` with positive numbers, their effects the rows with negative ones. A time
is taken when the COMMIT begins, before it is written to disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psycopg

from durable.embedded import Embedded
from durable.errors import InvalidSetting

POLLING_SECONDS = 0.2
LONGEST_SECONDS = 900.0

_BETWEEN_FIRST_AND_LAST = """
SELECT count(*), count(*) FILTER (WHERE at > first), extract(epoch FROM max(at) - min(at))
FROM (SELECT at, min(at) OVER () AS first FROM (SELECT pg_xact_commit_timestamp(xmin) AS at FROM business
      WHERE sign(number) = %s) AS commits) AS timed
"""
_LATENCIES = """
SELECT extract(epoch FROM pg_xact_commit_timestamp(effect.xmin) - pg_xact_commit_timestamp(job.xmin))
FROM business AS job JOIN business AS effect ON effect.number = -job.number WHERE job.number > %s
"""
JOBS, EFFECTS = 1, -1


def keep_times(server: Embedded) -> None:
    """Let the server keep the times of commits; this restarts it."""
    with psycopg.connect(server.uri(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET track_commit_timestamp = on")
    server.restart()


def make_business(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE business (number integer NOT NULL)")


def rate(url: str, kind: int, count: int) -> float:
    """How many rows of this kind were committed a second, from the first to the last.

    Raises InvalidSetting when there are more or fewer rows, or too few for a rate.
    """
    with psycopg.connect(url) as connection:
        row = connection.execute(_BETWEEN_FIRST_AND_LAST, (kind,)).fetchone()
    assert row is not None
    found, later, seconds = row
    if found != count:
        raise InvalidSetting(
            f"{found} rows in place of {count}: jobs were lost or repeated; look at the peer's program"
        )
    if not seconds:
        raise InvalidSetting(f"--count {count}: all were committed at once; give a larger one")
    return float(later) / float(seconds)


def latencies(url: str, warm_up: int) -> list[float]:
    """The seconds from the commit of each job to that of its effect, of the numbers above `warm_up`."""
    with psycopg.connect(url) as connection:
        return [float(seconds) for (seconds,) in connection.execute(_LATENCIES, (warm_up,))]


def wait_for_effects(side: str, url: str, count: int, check: Callable[[], None]) -> None:
    """Wait until this many effects are committed. `check` raises when they will never be.

    Raises InvalidSetting when it takes too long.
    """
    deadline = time.monotonic() + LONGEST_SECONDS
    with psycopg.connect(url, autocommit=True) as connection:
        while (found := _count(connection, EFFECTS)) < count:
            check()
            if time.monotonic() > deadline:
                made = _count(connection, JOBS)
                raise InvalidSetting(
                    f"{side}: {made} of {count} jobs were enlisted and {found} handled in {LONGEST_SECONDS:g} s; "
                    "give less --count"
                )
            time.sleep(POLLING_SECONDS)


def _count(connection: psycopg.Connection, kind: int) -> int:
    row = connection.execute("SELECT count(*) FROM business WHERE sign(number) = %s", (kind,)).fetchone()
    assert row is not None
    return int(row[0])
