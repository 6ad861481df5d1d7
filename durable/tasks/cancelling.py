"""Cancellation of a task, asked of the task itself: its exception may be replaced on its way.

A cancelled task closes its session; on a dead connection that raises an error of the driver instead of CancelledError.
Code that catches errors and goes on asks here first, or it goes on for ever:

    raise_if_cancelled(error)    first in an `except`
    end_if_cancelled()           in a loop, and where there is no error to name
    run_to_completion(work)      around what must be done to its end
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def end_if_cancelled() -> None:
    """Raise CancelledError when the current task was cancelled; outside of a task, do nothing."""
    if is_cancelled():
        raise asyncio.CancelledError


def raise_if_cancelled(error: BaseException) -> None:
    """Raise CancelledError when this task must end, and errors that must not be stopped. First in an `except`."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if is_cancelled():
        raise asyncio.CancelledError from error


def is_cancelled() -> bool:
    task = current_task()
    return task is not None and task.cancelling() > 0


def current_task() -> asyncio.Task[object] | None:
    """The current task; None outside of an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


async def run_to_completion(work: Coroutine[Any, Any, None]) -> None:
    """Await this work to its end, however often the current task is cancelled meanwhile; raise CancelledError then,
    whatever has become of the work.

    SQLAlchemy ends its own blocks so from 2.1 on; 2.0 leaves the rest to the background at the second cancellation.
    """
    task = asyncio.create_task(work, name="run to completion")
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    task.result()
