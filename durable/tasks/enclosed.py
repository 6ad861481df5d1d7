"""Code of the application that cannot end the event loop: asyncio re-raises SystemExit and KeyboardInterrupt of a task
out of its loop, and all that runs there would end.

    async with TaskGroup() as tasks:            the task is made in a step of enclosed code, so it is enclosed, too,
        tasks.create_task(main())               and so are its tasks
        main: sys.exit(2)                       the task ends with BrokeOff, caused by SystemExit

The loop has another factory of tasks only while a step of enclosed code runs. Enclosed are no callbacks of the loop:
one that raises SystemExit ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

from durable.errors import BrokeOff, said

T_co = TypeVar("T_co", covariant=True)


class Enclosed(Coroutine[Any, Any, T_co]):
    """A coroutine that raises BrokeOff instead of SystemExit and KeyboardInterrupt, as do the tasks that it makes."""

    def __init__(self, work: Awaitable[T_co]) -> None:
        self._work = work
        self._steps: Any = work if isinstance(work, Coroutine) else work.__await__()

    def send(self, value: Any) -> Any:
        return self._step(self._steps.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._steps.throw, *error)

    def close(self) -> None:
        self._steps.close()

    def __await__(self) -> Generator[Any, Any, T_co]:
        steps: Any = self
        return steps  # type: ignore[no-any-return]

    def __iter__(self) -> Enclosed[T_co]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def __getattr__(self, name: str) -> Any:
        """Look like the coroutine, for those who name it or ask for its frame."""
        return getattr(self._work, name)

    @staticmethod
    def _step(step: Callable[..., Any], *given: Any) -> Any:
        loop = asyncio._get_running_loop()
        before: Any = loop.get_task_factory() if loop is not None else None
        try:
            if loop is None or isinstance(before, _Enclosing):
                return step(*given)
            enclosing: Any = _Enclosing(before or _make_task)
            loop.set_task_factory(enclosing)
            try:
                return step(*given)
            finally:
                if loop.get_task_factory() is enclosing:
                    loop.set_task_factory(before)
        except (SystemExit, KeyboardInterrupt) as error:
            raise BrokeOff(f"task broken off: {said(error)}") from error


class _Enclosing:
    """The factory of the tasks of enclosed code."""

    def __init__(self, make: Callable[..., asyncio.Future[Any]]) -> None:
        self._make = make

    def __call__(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], /, **options: Any
    ) -> asyncio.Future[Any]:
        return self._make(loop, Enclosed(work) if isinstance(work, Coroutine) else work, **options)


def _make_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], /, **options: Any
) -> asyncio.Future[Any]:
    return asyncio.Task(work, loop=loop, **options)
