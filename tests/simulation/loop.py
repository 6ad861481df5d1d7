"""A virtual event loop: time passes only when nothing is left to do, and then jumps to the next timer.

    ready --run--> ready, timers            a callback belongs to the process in whose context it was made
      ^                |
      |   nothing is ready: the clock jumps
      +----------------+

A process that is frozen keeps its callbacks until it resumes; those of a dead one are dropped. So a process stops at
any await, as by SIGSTOP and SIGKILL, and nothing of it is told.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

T = TypeVar("T")

_CLOSE_TRIES: Final = 20


class State(Enum):
    RUNNING = "running"
    FROZEN = "frozen"
    DEAD = "dead"


class Scheduled:
    """What of a process is asked by the loop: whether its callbacks run."""

    def __init__(self) -> None:
        self.state = State.RUNNING
        self.kept: list[asyncio.Handle] = []
        """The callbacks that came while it was frozen."""
        self.steps_left: int | None = None
        """Steps until `struck` is called; None: never."""
        self.struck: Callable[[], None] = lambda: None


CURRENT: ContextVar[Scheduled | None] = ContextVar("process of the simulation", default=None)


class _Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address."""

    numbers = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = next(self.numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self.number


class _Future(asyncio.Future[Any]):
    """A future whose place in a set does not depend on its address."""

    numbers = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = next(self.numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self.number


if TYPE_CHECKING:
    _Loop = asyncio.BaseEventLoop  # has the methods that are not needed here
else:
    _Loop = asyncio.AbstractEventLoop


class VirtualLoop(_Loop):
    """Event loop without a selector, threads or a clock of its own."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._number = itertools.count()
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._task_factory: Callable[..., Any] = self._make_task
        self._is_closed = False
        self.failures: list[str] = []
        """Exceptions that no task has taken."""
        self.steps = 0
        self.watched: Callable[[asyncio.Handle], None] | None = None
        _Task.numbers, _Future.numbers = itertools.count(), itertools.count()

    def __enter__(self) -> Self:
        asyncio._set_running_loop(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        asyncio._set_running_loop(None)

    # ------------------------------------------------------------------ what asyncio asks of a loop

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._is_closed

    def is_closed(self) -> bool:
        return self._is_closed

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self._task_factory(self, coro, name=name, context=context)
        return task

    def _make_task(self, _: object, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = _Task(coro, loop=self, **options)
        self._tasks[task.number] = task
        task.add_done_callback(self._forget)
        return task

    def get_task_factory(self) -> Any:
        return self._task_factory

    def set_task_factory(self, factory: Any) -> None:
        self._task_factory = factory

    def _forget(self, task: asyncio.Task[Any]) -> None:
        assert isinstance(task, _Task)
        self._tasks.pop(task.number, None)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._is_closed:
            self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self._is_closed:
            heapq.heappush(self._timers, (when, next(self._number), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # it is passed over when its time comes

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_closed:
            self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    # ------------------------------------------------------------------ running

    def run(self, until: Callable[[], bool], *, limit: float) -> None:
        """Run until this is true, nothing is left, or the time is `limit`."""
        ready, timers = self._ready, self._timers
        while not until():
            if not ready and not self._jump(limit):
                return
            while timers and timers[0][0] <= self._now:
                self._due(heapq.heappop(timers)[2])
            for _ in range(len(ready)):
                self._step(ready.popleft())

    def _jump(self, limit: float) -> bool:
        """Move the clock to the next timer; False when there is none before the limit."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers or self._timers[0][0] > limit:
            self._now = max(self._now, limit)
            return False
        self._now = max(self._now, self._timers[0][0])
        return True

    def _due(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            self._ready.append(handle)

    def _step(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        process: Scheduled | None = handle._context.get(CURRENT)  # type: ignore[attr-defined]
        if process is not None and not self._may_run(process, handle):
            return
        self.steps += 1
        if self.watched is not None:
            self.watched(handle)
        handle._run()

    def _may_run(self, process: Scheduled, handle: asyncio.Handle) -> bool:
        if process.steps_left is not None:
            process.steps_left -= 1
            if process.steps_left < 0:
                process.steps_left = None
                process.struck()
        if process.state is State.FROZEN:
            process.kept.append(handle)
        return process.state is State.RUNNING

    def resume(self, process: Scheduled) -> None:
        """Let a frozen process go on: what came meanwhile comes at once."""
        process.state = State.RUNNING
        self._ready.extend(process.kept)
        process.kept = []

    def start(self, work: Coroutine[Any, Any, T], context: Context, name: str) -> asyncio.Task[T]:
        """Run this in the context of a process."""
        return context.run(self.create_task, work, name=name)

    def close(self) -> None:
        """End the coroutines that are left, whose processes are dead or are no more needed."""
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()
        for task in list(self._tasks.values()):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _end(task)
        self._tasks.clear()


def _end(task: asyncio.Task[Any]) -> None:
    """Close a coroutine; one that awaits in its `finally` is asked again."""
    work = task.get_coro()
    for _ in range(_CLOSE_TRIES):
        with suppress(BaseException):
            work.close()
        if getattr(work, "cr_frame", None) is None:
            return
