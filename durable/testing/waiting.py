"""Waiting for what happens elsewhere, in tests against the real bus."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar, overload

T = TypeVar("T")

_PAUSE = 0.005  # seconds


@overload
async def eventually(
    condition: Callable[[], Awaitable[T]], *, within: timedelta | float = ..., what: str = ...
) -> T: ...
@overload
async def eventually(condition: Callable[[], T], *, within: timedelta | float = ..., what: str = ...) -> T: ...
async def eventually(
    condition: Callable[[], Any], *, within: timedelta | float = 20.0, what: str = "the condition"
) -> Any:
    """Ask until the answer is true, and return it; raises AssertionError when it is not within this time.

    `condition` may be a coroutine function; `within` is a timedelta or seconds.
    """
    deadline = time.monotonic() + (within.total_seconds() if isinstance(within, timedelta) else within)
    while True:
        asked = condition()
        answer = await asked if inspect.isawaitable(asked) else asked
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true in time; at last it was {answer!r}")
        await asyncio.sleep(_PAUSE)
