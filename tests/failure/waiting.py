"""Waiting for what happens soon, with a deadline, instead of sleeping for as long as it might take."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")

_PAUSES = (0.02, 0.2)


@overload
async def eventually(check: Callable[[], Awaitable[T]], *, within: float = 30.0) -> T: ...


@overload
async def eventually(check: Callable[[], T], *, within: float = 30.0) -> T: ...


async def eventually(check: Callable[[], object], *, within: float = 30.0) -> object:
    """Call `check` until it returns something true, and return that.

    A check may raise AssertionError to say what is still missing; after `within` seconds that is raised. The longer it
    takes, and the longer each check, the longer are the pauses: what is waited for needs the machine more.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    deadline = began + within
    while True:
        looked = loop.time()
        try:
            result = check()
            value = await result if inspect.isawaitable(result) else result
            assert value, f"{check.__qualname__} was still {value!r} after {within:g} seconds"
            return value
        except AssertionError:
            if loop.time() >= deadline:
                raise
        shortest, longest = _PAUSES
        now = loop.time()
        await asyncio.sleep(min(max(shortest, (now - began) / 20, 2 * (now - looked)), longest))
