"""A purge that is killed at each of its steps: a day is here whole, or it is gone and in the lake."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from durable.pipeline.purge import Retention, purge
from tests.support.archiving import Archiver
from tests.support.history import add_history, add_old_day
from tests.support.killing import dies_at
from tests.support.purging import STEPS

DAYS, ROWS = 3, 20
KEEP = timedelta(days=30)
DETACHED = "SELECT relname FROM pg_class WHERE relname ~ '^envelope_history_' AND relkind = 'r' AND NOT relispartition"


def days(conn: psycopg.Connection[Any]) -> list[int]:
    """How many rows each day has that is past the retention."""
    rows = conn.execute(
        "SELECT count(*) FROM durable.envelope_history WHERE finished_at < now() - interval '30 days' "
        "GROUP BY CAST(finished_at AT TIME ZONE 'UTC' AS date)"
    )
    return [count for (count,) in rows]


@pytest.mark.parametrize("step", STEPS)
def test_purge_killed_at_a_step_leaves_whole_days_and_is_finished_by_the_next(
    archiver: Archiver, conn: psycopg.Connection[Any], step: str
) -> None:
    for number in range(DAYS):
        add_old_day(conn, 40 + number, ROWS, first=1 + number * ROWS)
    add_history(conn, 5, first=1_001)
    archiver.run()
    archiver.run("dead_letters")
    everything = archiver.ids()
    dies_at(step, "purging", archiver.lake.url, archiver.origin.url)

    left = days(conn)
    assert DAYS - len(left) in STEPS[step]
    assert set(left) <= {ROWS}
    assert archiver.ids() == everything
    detached = (
        "SELECT relname FROM pg_class WHERE relname ~ '^envelope_history_' AND relkind = 'r' AND NOT relispartition"
    )
    assert conn.execute(detached).fetchall() == []

    add_history(conn, 5, first=1_006)
    assert archiver.run().rows == 5, "the lock of the one that died is free"
    done = purge(lambda: archiver.spark, archiver.lake, archiver.origin, Retention(KEEP, KEEP))
    assert len(done.days) == len(left)
    assert days(conn) == []
    assert archiver.ids() == [*everything, *range(1_006, 1_011)]
