"""Remembers 20 million ids without a day, then makes a day and purges: `python -m tests.load.undated_ids`.

A day must be made in less than 50 ms, whatever is remembered, and a purge must cost in proportion to what it deletes.
Ends with 1 when that is not so. Takes some 5 GB of disk and some minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console
from sqlalchemy import Connection, Engine, create_engine

from durable.embedded import postgres
from durable.storage import maintenance, migrator
from durable.storage.maintenance import HISTORY, IDS, Day
from durable.storage.sql import housekeeping

T = TypeVar("T")

KEEP: Final = timedelta(days=8)
LONGEST_DAY_MS: Final = 50.0
AT_MOST_TIMES: Final = 3.0  # what a row of a purge may cost of 20 million ids, against one of as many as it deletes
PURGED: Final = (10_000, 100_000, 1_000_000)

FILL = """
INSERT INTO durable.undated_ids (id, endpoint, message_digest, sent_at, received_at)
SELECT gen_random_uuid(), 'local', number, now(), now() - interval '7 days' + interval '7 days' * number / {count}
FROM generate_series({first}, {last}) AS number
"""
GROW_OLD = """
UPDATE durable.undated_ids SET received_at = now() - interval '30 days' WHERE (id, endpoint) IN (
    SELECT id, endpoint FROM durable.undated_ids ORDER BY received_at LIMIT {count})
"""


def fill(conn: Connection, count: int) -> None:
    """The primary key is built at the end: 20 million random keys go into it in a fraction of the time."""
    conn.exec_driver_sql("ALTER TABLE durable.undated_ids DROP CONSTRAINT undated_ids_pkey")
    for first in range(1, count + 1, 1_000_000):
        last = min(count, first + 999_999)
        conn.exec_driver_sql(FILL.format(first=first, last=last, count=count))
    conn.exec_driver_sql("SET maintenance_work_mem = '512MB'")
    conn.exec_driver_sql("ALTER TABLE durable.undated_ids ADD PRIMARY KEY (id, endpoint)")
    conn.exec_driver_sql("VACUUM (ANALYZE) durable.undated_ids")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Milliseconds, and what the work returned."""
    began = time.perf_counter()
    result = work()
    return (time.perf_counter() - began) * 1_000, result


def make_days(engine: Engine) -> dict[str, float]:
    """The median of making a day of each table, in milliseconds."""
    took: dict[str, list[float]] = {}
    for parent in (IDS, HISTORY):
        with engine.begin() as conn:
            missing = maintenance.missing_days(conn, "durable", parent, 12)
        for day in missing:
            milliseconds, made = timed(partial(make_day, engine, day))
            assert made
            took.setdefault(parent, []).append(milliseconds)
    return {parent: statistics.median(each) for parent, each in took.items()}


def make_day(engine: Engine, day: Day) -> bool:
    with engine.begin() as conn:
        return maintenance.make_day(conn, "durable", day)


def purge(engine: Engine) -> int:
    """As a node does it: batch after batch, each in a transaction of its own."""
    total, purged = 0, 1
    while purged:
        with engine.begin() as conn:
            purged = maintenance.purge(conn, "durable", housekeeping.PURGE_UNDATED_IDS, keep=KEEP)
        total += purged
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=20_000_000)
    count: int = parser.parse_args().ids
    console = Console()
    with (
        tempfile.TemporaryDirectory(prefix="undated") as folder,
        warnings.catch_warnings(action="ignore"),
        postgres(Path(folder)) as server,
    ):
        url = server.url("ids").replace("postgresql://", "postgresql+psycopg://")
        migrator.upgrade(url, "durable")
        engine = create_engine(url)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            for setting in ("fsync = off", "full_page_writes = off", "max_wal_size = '1GB'"):
                conn.exec_driver_sql(f"ALTER SYSTEM SET {setting}")
            conn.exec_driver_sql("SELECT pg_reload_conf()")
            seconds = timed(lambda: fill(conn, count))[0] / 1_000
            size = conn.exec_driver_sql(
                "SELECT pg_size_pretty(pg_relation_size('durable.undated_ids')), "
                "pg_size_pretty(pg_indexes_size('durable.undated_ids'))"
            ).one()
            console.print(
                f"{count:,} ids remembered: {size[0]} of rows, {size[1]} of indexes ({seconds:.0f} s to fill)"
            )
            days = make_days(engine)
            for parent, milliseconds in days.items():
                console.print(f"a day of {parent}: {milliseconds:.1f} ms")
            nothing, _ = timed(lambda: purge(engine))
            console.print(f"a purge that finds nothing: {nothing:.1f} ms")
            costs = []
            for old in (each for each in PURGED if each <= count / 2):
                conn.exec_driver_sql(GROW_OLD.format(count=old))
                milliseconds, purged = timed(lambda: purge(engine))
                assert purged == old, f"{purged} of {old} purged"
                costs.append(milliseconds / old * 1_000)
                console.print(f"a purge of {old:>9,}: {milliseconds:,.0f} ms, {costs[-1]:.1f} ms for a thousand")
        engine.dispose()
    is_right = max(days.values()) < LONGEST_DAY_MS and max(costs) < AT_MOST_TIMES * min(costs)
    console.print("as it must be" if is_right else "NOT as it must be")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
