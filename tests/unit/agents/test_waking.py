"""How many NOTIFYs the commits of a process cost."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from durable import Settings
from durable.agents.waking import Waker
from durable.testing import eventually


class TellingTimes:
    """A database that only notes when nodes are told."""

    def __init__(self) -> None:
        self.times: list[float] = []

    async def statement(self, _wake_nodes: Any, _new: Any) -> None:
        self.times.append(asyncio.get_running_loop().time())

    @property
    def pauses(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


async def told(waker: Waker, database: TellingTimes, times: int, *, commits: int) -> None:
    """Wait for so many NOTIFYs; so many commits share each of them."""
    for _ in range(times):
        before = len(database.times)
        for _ in range(commits):
            waker.wake()
        await eventually(lambda: len(database.times) > before)  # noqa: B023  waited for at once


async def test_many_commits_share_a_later_notify_and_few_are_told_at_once_again() -> None:
    waker, database = Waker(Settings()), TellingTimes()
    waker.start(database)  # type: ignore[arg-type]

    await told(waker, database, 8, commits=10)
    under_load = database.pauses[2:]
    database.times.clear()
    await told(waker, database, 20, commits=1)
    await waker.stop()

    assert min(under_load) >= 0.0199
    assert min(database.pauses) < 0.0199
    assert min(database.pauses) >= 0.0049
