"""Blocking work in a thread of its own, which begins at once.

Those of the event loop's default executor may all be busy for as long as code of the application likes
(`asyncio.to_thread()` with a peer that says nothing): a bus that waited for one could neither start, stop nor rejoin.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_own_thread(work: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """Return what this returns, or raise what it raises. When cancelled, leave the thread to its end."""
    outcome: Future[T] = Future()

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            result = work(*given, **named)
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name="durable blocking work", daemon=True).start()
    return await asyncio.wrap_future(outcome)
