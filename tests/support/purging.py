"""A purge that dies at the step of DURABLE_FAILPOINT: run as a program with a lake and a database's URL.

locked      the archiver's lock is held, and nothing was looked at
verified    the days were compared with the lake
dropping    the second day is being dropped: the database has the statement, and waits for a lock
dropped     one day is gone
done        all days are gone, and nothing was said
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any, Final

import psycopg

from durable import failpoints
from durable.pipeline.lake import Lake
from durable.pipeline.purge import Retention, purge
from durable.pipeline.session import spark_session
from durable.storage import purging
from tests.support.archiving import origin_of
from tests.support.killing import arm_session

STEPS: Final = {"locked": {0}, "verified": {0}, "dropping": {1, 2}, "dropped": {1}, "done": {3}}
"""How many of three days are gone then. A drop that waits for a lock may get it before the server notices the kill."""
_WAITS: Final = """
SELECT 1 FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


def _before(module: Any, name: str, act: Callable[[], None]) -> None:
    """From here on this function of a module does `act` first."""
    function = getattr(module, name)

    def acting(*args: Any, **named: Any) -> Any:
        act()
        return function(*args, **named)

    setattr(module, name, acting)


class _Drops:
    def __init__(self, url: str) -> None:
        self._url, self._count = url, 0

    def next(self) -> None:
        self._count += 1
        if self._count == 1:
            failpoints.failpoint("verified")
        if self._count == 2:
            failpoints.failpoint("dropped")
            if failpoints.is_armed("dropping"):
                self._die_amid_drop()

    def _die_amid_drop(self) -> None:
        """Takes a lock that the statement needs, and ends this session when it waits for it."""
        self._holding = psycopg.connect(self._url)
        self._holding.execute("LOCK TABLE durable.envelope_history IN ACCESS SHARE MODE")
        threading.Thread(target=self._die_when_it_waits, daemon=True).start()

    def _die_when_it_waits(self) -> None:
        with closing(psycopg.connect(self._url, autocommit=True)) as conn:
            while not conn.execute(_WAITS).fetchone():
                pass
        failpoints.failpoint("dropping")


if __name__ == "__main__":
    arm_session()
    lake, url = sys.argv[1:]
    _before(purging, "days_older_than", lambda: failpoints.failpoint("locked"))
    _before(purging, "drop_day", _Drops(url).next)
    keep = Retention(timedelta(days=30), timedelta(days=30))
    purge(lambda: spark_session(master="local[2]"), Lake(lake), origin_of(url), keep)
    failpoints.failpoint("done")
