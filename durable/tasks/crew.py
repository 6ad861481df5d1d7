"""Tasks that live and end together, and tasks that must end.

    a task fails, whatever it raises -----> the others are cancelled, and the owner of the crew is told
    a task is cancelled by an accident ---> the same: code of the application may have cancelled the task it ran in
    the owner is cancelled ---------------> every task is cancelled, and again when the owner is cancelled again
    a task does not end when cancelled ---> end() cancels it until its deadline, and returns it
    a task has work to do before it ends -> cancel_once() leaves it in peace until its deadline; then end()

An `asyncio.TaskGroup` passes a second cancellation on to nobody, takes a task that was cancelled by an accident for one
that has ended well, and lets errors of its tasks replace the cancellation of their owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from durable.errors import BrokeOff, DurableError, said
from durable.tasks.cancelling import raise_if_cancelled
from durable.telemetry import log

T = TypeVar("T")

_ROUND: Final = 0.5  # seconds; a task that goes on is cancelled again in each
_OVERTIME: Final = 1.0  # seconds in which end() cuts off what a task does before it ends


class Stuck(DurableError):
    """An agent stands still, or does not end when it is cancelled.

    `tasks` go on, although their node has ended: nothing that they write is committed.
    """

    def __init__(self, message: str | None = None, tasks: Sequence[asyncio.Task[Any]] = ()) -> None:
        super().__init__(message)
        self.tasks = tasks


async def contained(work: Awaitable[T]) -> T:
    """Run this, raising nothing but Exceptions and the CancelledError of a task that was asked to end."""
    try:
        return await work
    except BaseException as error:
        raise_if_cancelled(error)
        if isinstance(error, Exception):
            raise
        raise BrokeOff(f"task broken off: {said(error)}") from error


class Crew:
    """A group of tasks. Leaving the block waits for all of them. Only cancel() and the crew itself may cancel one.

    Raises the CancelledError of its owner, before anything else; or the error of the task that failed, several of them
    as an ExceptionGroup.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asked: set[asyncio.Task[Any]] = set()
        """Those that were cancelled on purpose."""
        self._failures: list[Exception] = []
        self._ended = asyncio.Event()
        self._owner: asyncio.Task[Any] | None = None
        self._breaks_off = False

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        return self

    def create_task(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(contained(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        task.add_done_callback(lambda _: work.close())  # of a task that was cancelled before it began
        return task

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Ask one of the tasks to end."""
        if task in self._tasks:
            self._asked.add(task)
            task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        owner, self._owner = self._owner, None
        assert owner is not None
        if self._breaks_off:
            owner.uncancel()
        if error is not None:
            self._cancel()
        while self._tasks:
            self._ended.clear()
            try:
                await self._ended.wait()
            except asyncio.CancelledError:
                self._cancel()
        if owner.cancelling():
            self._tell_failures()
            raise asyncio.CancelledError
        if error is not None and not (self._breaks_off and isinstance(error, asyncio.CancelledError)):
            self._tell_failures()
            return
        if len(self._failures) == 1:
            raise self._failures[0]
        if self._failures:
            raise ExceptionGroup("several tasks failed", self._failures)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._ended.set()
        error = task.exception() if not task.cancelled() else self._unless_asked(task)
        self._asked.discard(task)
        if not isinstance(error, Exception):  # KeyboardInterrupt has left the event loop already
            return
        self._failures.append(error)
        self._cancel()
        if self._owner is not None and not self._breaks_off:
            self._breaks_off = True
            self._owner.cancel()

    def _unless_asked(self, task: asyncio.Task[Any]) -> BrokeOff | None:
        return None if task in self._asked else BrokeOff(f"{task.get_name()}: cancelled by an accident")

    def _cancel(self) -> None:
        for task in list(self._tasks):
            self.cancel(task)

    def _tell_failures(self) -> None:
        for failure in self._failures:
            log.debug("a task failed while its crew ended: %s", said(failure))


async def end(tasks: Iterable[asyncio.Task[Any]], *, within: float) -> Sequence[asyncio.Task[Any]]:
    """Cancel these until they have ended; return those that have not while the process ran for so many seconds."""
    return await _rounds(tasks, within, asyncio.Task.cancel)


async def cancel_once(tasks: Iterable[asyncio.Task[Any]], *, within: float) -> Sequence[asyncio.Task[Any]]:
    """Cancel these, and let them do for so many seconds what they do before they end; return those that never end."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await wait(cancelled, within=within)
    return await end(cancelled, within=_OVERTIME)


async def wait(tasks: Iterable[asyncio.Task[Any]], *, within: float) -> Sequence[asyncio.Task[Any]]:
    """Wait for these; return those that have not ended while the process ran for so many seconds."""
    return await _rounds(tasks, within)


async def _rounds(
    tasks: Iterable[asyncio.Task[Any]], seconds: float, begin: Callable[[asyncio.Task[Any]], object] = lambda _: None
) -> Sequence[asyncio.Task[Any]]:
    """Wait round by round. A round counts as long as it should last: while a process stands still (SIGSTOP, a machine
    that is put to sleep), its tasks do nothing, and nothing can be said of them.
    """
    pending = {task for task in tasks if not task.done()}
    while pending and seconds > 0:
        for task in pending:
            begin(task)
        longest = min(_ROUND, seconds)
        _, pending = await asyncio.wait(pending, timeout=longest)
        seconds -= longest
    return sorted(pending, key=lambda task: task.get_name())


async def in_turn(*steps: Coroutine[Any, Any, object]) -> None:
    """Take each of these steps, whatever becomes of those before; then raise the first error, or the cancellation."""
    errors: list[BaseException] = []
    for step in steps:
        try:
            await step
        except GeneratorExit:  # nothing can be awaited any more
            for each in steps:
                each.close()
            raise
        except BaseException as error:
            errors.append(error)
    if errors:
        raise next((each for each in errors if isinstance(each, asyncio.CancelledError)), errors[0])


async def in_time(closing: Awaitable[object], seconds: float) -> None:
    """Wait for a resource to close, no longer than this; errors meanwhile are ignored."""
    try:
        async with asyncio.timeout(seconds):
            await closing
    except Exception as error:
        raise_if_cancelled(error)
        log.debug("closing went wrong: %s", said(error))
