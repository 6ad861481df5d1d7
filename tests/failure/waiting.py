"""Waiting for what happens soon, with a deadline, instead of sleeping for as long as it might take."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")

_PAUSE = 0.02


@overload
async def eventually(check: Callable[[], Awaitable[T]], *, within: float = 30.0) -> T: ...


@overload
async def eventually(check: Callable[[], T], *, within: float = 30.0) -> T: ...


async def eventually(check: Callable[[], object], *, within: float = 30.0) -> object:
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
