"""A coroutine in a context of its own, whose waits are told: each step of it runs in that context.

    task --send--> driven --send, in its context--> coroutine
         <-future--       <-future--
                          when_waiting()

The task is that of the caller, so that timeouts and cancellation reach the coroutine as if it were awaited.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Generator
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


@types.coroutine
def driven(variables: Context, work: Awaitable[T], when_waiting: Callable[[], None]) -> Generator[Any, Any, T]:
    """Run a coroutine to its end. Errors, cancellation and results are those of the coroutine; what it sets in context
    variables is seen in its context only. `when_waiting` is called whenever it begins to wait for something.
    """
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
