"""The benchmarks of messages run: their floors use durable's own statements, which change."""

from __future__ import annotations

import asyncio

from durable.embedded import Embedded
from tests.benchmarks import contests
from tests.benchmarks.databases import Databases
from tests.benchmarks.local import Local
from tests.benchmarks.racing import Processes

COUNT = 20


def test_rows_of_messages_have_figures_of_both_sides(server: Embedded) -> None:
    databases = Databases(server)
    local, contest = Local(databases, COUNT), contests.of("tcp", None)
    asyncio.run(local.run_round())
    with Processes() as processes:
        contest.run_round(databases, processes, COUNT)
    rows = [*local.storing, *local.handling, *contest.rows]
    assert rows
    assert all(row.floor > 0 and row.ours > 0 for row in rows)
