"""Cancellation of a task, asked of the task itself: its exception may be replaced on its way.

A cancelled task closes its session; on a dead connection that raises an error of the driver instead of CancelledError.
Code that catches errors and goes on asks here first, or it goes on for ever.
"""

from __future__ import annotations

import asyncio


def end_if_cancelled() -> None:
    """Raise CancelledError when the current task was cancelled; outside of a task, do nothing."""
    if is_cancelled():
        raise asyncio.CancelledError


def is_cancelled() -> bool:
    task = current_task()
    return task is not None and task.cancelling() > 0


def current_task() -> asyncio.Task[object] | None:
    """The current task; None outside of an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
