"""Blocking work in a thread of its own: results, errors, cancellations, and nothing in the default executor."""

from __future__ import annotations

import ast
import asyncio
import threading
from pathlib import Path
from typing import Final

import pytest

from durable.tasks.own_threads import in_own_thread

ROOT: Final = Path(__file__).parents[3]
OF_THE_LOOP: Final = ("to_thread", "run_in_executor")


async def test_blocking_work_returns_its_result_while_the_loop_goes_on() -> None:
    go_on = threading.Event()
    asyncio.get_running_loop().call_soon(go_on.set)
    assert await in_own_thread(go_on.wait, timeout=5)


async def test_blocking_work_raises_its_error() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await in_own_thread(int, "one")


async def test_cancelled_wait_leaves_blocking_work_to_its_end() -> None:
    began, go_on, ended = asyncio.Event(), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(began.set)
        go_on.wait(5)
        loop.call_soon_threadsafe(ended.set)

    waiting = asyncio.create_task(in_own_thread(work), name="wait")
    await began.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    await asyncio.wait_for(ended.wait(), 5)


def test_default_executor_is_left_to_the_application() -> None:
    """Handlers may have filled it, with threads that hang."""
    users = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("durable", "recovery", "transports")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in OF_THE_LOOP
    ]
    assert users == []
