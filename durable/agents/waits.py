"""Waits of a coroutine: each is told as it begins.

task --send--> watched --send--> coroutine
     <-future--        <-future--            tell()
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")


@types.coroutine
def watched(work: Awaitable[T], tell: Callable[[], None]) -> Generator[Any, Any, T]:
    """Run a coroutine to its end, and call `tell` whenever it begins to wait for something. Errors, cancellation and
    results are those of the coroutine.
    """
    steps = work.__await__()
    step: Callable[[Any], Any] = steps.send
    given: Any = None
    while True:
        try:
            awaited = step(given)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        tell()
        try:
            given, step = (yield awaited), steps.send
        except BaseException as error:  # cancellation; GeneratorExit, which closes it
            given, step = error, steps.throw
