"""Waiting for what happens soon, with a deadline, instead of sleeping for as long as it might take."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_PAUSE = 0.02


async def eventually(check: Callable[[], T | Awaitable[T]], *, within: float = 15.0) -> T:
    """Call `check` until it returns something true, and return that.

    A check may raise AssertionError to say what is still missing; after `within` seconds that is raised.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within
    while True:
        try:
            result = check()
            value = await result if inspect.isawaitable(result) else result
            assert value, f"{check.__qualname__} was still {value!r} after {within:g} seconds"
            return value
        except AssertionError:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(_PAUSE)
