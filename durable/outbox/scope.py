"""The unit of work in which `bus.send()` finds itself.

Tasks and threads that are started in a block inherit it. Within one task it holds for the code of the block and what
that calls, until the block ends:

    the block is entered in     it holds in
    a function or coroutine     that, and what it calls
    a context manager           the block of its user: `@contextmanager def orders(): with bus.enlist(...): yield`
    an iterated generator       that alone: between two of its values, its consumer is in the block from before;
                                tasks that either of them starts meanwhile are told to name the one they mean

A block may be left in another context than it was entered in: a generator that is not run to its end is closed by a
task of the event loop, and web frameworks run the parts of a dependency in threads.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Final

from durable.errors import NoUnitOfWork

if TYPE_CHECKING:
    from durable.outbox.outbox import Outbox

_LEFT: Final = (
    "the unit of work in which this task was started is over, and the task goes on: open another in it by "
    "`async with bus.unit_of_work()`"
)
_AMBIGUOUS: Final = (
    "this task or thread was started while a generator had a unit of work open within another one, and either may be "
    "meant: send with the unit of work itself, by its send(), or by ctx.send() in a handler"
)
_GENERATORS: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class _Entered:
    """A unit of work in scope. Tasks that are started meanwhile inherit it, and may outlive it."""

    def __init__(self, outbox: Callable[[], Outbox], before: _Entered | None, generator: FrameType | None) -> None:
        self.outbox = outbox
        self.before = before
        self.is_over = False
        self._generator = generator
        self._place = _place() if generator is not None else None

    @property
    def holds_here(self) -> bool:
        """False for the consumer of a generator that has entered it. Without a block from before it holds: a fixture
        of a test is a generator, too. Raises NoUnitOfWork where nobody can tell.
        """
        if self._generator is None or self.before is None:
            return True
        if self._place != _place():
            raise NoUnitOfWork(_AMBIGUOUS)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._generator:
            frame = frame.f_back
        return frame is not None


class Scope:
    """The unit of work in scope: one for each task and thread.

    What is in scope is a function: the unit of work of a web request begins with the first message that is sent, and a
    scoped session is that of the thread or task that sends.
    """

    def __init__(self) -> None:
        self._current: ContextVar[_Entered | None] = ContextVar("durable.outbox.scope", default=None)

    @property
    def outbox(self) -> Outbox:
        """The outbox in scope; raises NoUnitOfWork."""
        current = self._current.get()
        while current is not None and not current.holds_here:
            current = current.before
        if current is None:
            raise NoUnitOfWork
        if current.is_over:
            raise NoUnitOfWork(_LEFT)
        return current.outbox()

    @contextmanager
    def entered(self, outbox: Callable[[], Outbox], *, by_application: bool = False) -> Iterator[None]:
        """Put it in scope in this block. `by_application`: the block may be that of a generator."""
        generator = _iterated_generator() if by_application else None
        current = _Entered(outbox, self._current.get(), generator)
        token = self._current.set(current)
        try:
            yield
        finally:
            current.is_over = True
            with suppress(ValueError):  # in another context: this one never had it
                self._current.reset(token)


def _place() -> int:
    """The task or thread that runs here; of one that has ended another may have the number."""
    task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
    return threading.get_ident() if task is None else id(task)


def _iterated_generator() -> FrameType | None:
    """The generator whose block is entered now, unless contextlib runs it: then the block is that of its user."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_is_between(frame) or _is_context_manager(frame)):
        frame = frame.f_back
    return frame if frame is not None and frame.f_code.co_flags & _GENERATORS else None


def _is_between(frame: FrameType) -> bool:
    """Tell whether this is code of durable or contextlib, between the block and what enters it."""
    name = frame.f_globals.get("__name__", "")
    return bool(name == "contextlib" or name.startswith("durable."))


def _is_context_manager(frame: FrameType) -> bool:
    user = frame.f_back
    is_generator = bool(frame.f_code.co_flags & _GENERATORS)
    return is_generator and user is not None and user.f_globals.get("__name__") == "contextlib"
