"""The life of a process, as far as it needs no database."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from durable.process import life as module
from durable.process.last_resort import EXIT_STUCK
from durable.process.life import Life
from durable.settings import load_settings
from durable.tasks.crew import Stuck


class Ended(Exception):
    """A process that has ended, with its exit code."""


class StandingNode:
    """A node of which a task does not end, before its agents run."""

    node_id = 0

    async def run(self, stopping: asyncio.Event, started: asyncio.Future[None]) -> None:
        task = asyncio.create_task(asyncio.sleep(0), name="node 1")
        await task
        raise Stuck("node 1", [task])

    def slowest_step(self) -> None: ...


async def _empty() -> None: ...


def _end_process(code: int, message: str, *names: object) -> None:
    raise Ended(code, message % names)


@pytest.mark.parametrize("owns_process", [True, False])
async def test_stuck_task_of_a_start_ends_the_process_of_a_bus_and_is_told_to_an_application(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owns_process: bool
) -> None:
    monkeypatch.setattr(module, "end_process", _end_process)
    node: Any = StandingNode()
    life = Life(load_settings(), lambda memberships: node, _empty)
    life.owns_process = owns_process

    with pytest.raises(Ended if owns_process else Stuck) as error:
        await life.start()
    life.end_watch()

    if owns_process:
        assert error.value.args == (EXIT_STUCK, "the process ends: node 1 did not end when cancelled")
    else:
        assert "tasks left behind, which did not end when cancelled: node 1" in caplog.text
