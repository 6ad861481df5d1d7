"""A coroutine in a copy of the context variables, whose waits are told: each step of it runs in the copy.

    task --send--> driven --send, in the copy--> coroutine
         <-future--       <-future--
                          when_waiting()

The task is that of the caller, so that timeouts and cancellation reach the coroutine as if it were awaited.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Generator
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")


@types.coroutine
def driven(work: Awaitable[T], when_waiting: Callable[[], None]) -> Generator[Any, Any, T]:
    """Run a coroutine to its end. Errors, cancellation and results are those of the coroutine; what it sets in context
    variables is gone with it. `when_waiting` is called whenever it begins to wait for something.
    """
    variables = copy_context()
    steps = work.__await__()
    step: Callable[[Any], Any] = steps.send
    given: Any = None
    while True:
        try:
            awaited = variables.run(step, given)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        when_waiting()
        try:
            given, step = (yield awaited), steps.send
        except BaseException as error:  # cancellation; GeneratorExit, which closes it
            given, step = error, steps.throw
