"""A sync session whose work is done in threads, one step at a time, and waited for in the loop.

    loop      between steps -- await --> between steps -- await --> closed
    threads                   [ step ]                  [ step ]

Each step runs in any of the threads, with the context variables of who waits for it. It cannot be stopped: when nobody
waits for it any more, the session is closed, and so rolled back, as soon as it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

from sqlalchemy.orm import Session

from durable.outbox.unit_of_work import close_sync

P = ParamSpec("P")
T = TypeVar("T")

_LAST = "durable.step"


class Threads(ThreadPoolExecutor):
    """Threads that the loop can wait for: one that hangs delays no other."""

    def __init__(self, max_workers: int, *, name: str) -> None:
        super().__init__(max_workers, thread_name_prefix=name)
        self._jobs: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        job = super().submit(fn, *args, **kwargs)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    async def finish(self) -> None:
        """Wait until the threads are idle; their results are dropped."""
        await asyncio.gather(*map(asyncio.wrap_future, list(self._jobs)), return_exceptions=True)


async def run_in_thread(
    threads: ThreadPoolExecutor, session: Session, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run the next step of this session in a thread, and wait for its result."""
    context = copy_context()
    future = threads.submit(lambda: context.run(function, *args, **kwargs))
    session.info[_LAST] = future
    return await asyncio.wrap_future(future)


def last_step(session: Session) -> Future[Any] | None:
    """The step of this session that was begun last."""
    step: Future[Any] | None = session.info.get(_LAST)
    return step


@asynccontextmanager
async def closing_in_thread(
    threads: ThreadPoolExecutor, session: Session, is_ended: Callable[[], bool]
) -> AsyncIterator[Session]:
    """Close this session in a thread, after the last of its steps. That is waited for, so that the next attempt meets
    none of its locks, unless the attempt `is_ended`: a cancellation of another kind is the handler's own.
    """
    try:
        yield session
    finally:
        closed = asyncio.wrap_future(_close_after_last_step(threads, session))
        while not (closed.done() or is_ended()):
            with suppress(asyncio.CancelledError):
                await asyncio.wait([closed])
        if closed.done():
            closed.result()


def _close_after_last_step(threads: ThreadPoolExecutor, session: Session) -> Future[None]:
    last = last_step(session)
    if last is None or last.done():
        return threads.submit(close_sync, session)
    closed = Future[None]()

    def close(_: Future[Any]) -> None:
        try:
            close_sync(session)
        except BaseException as error:
            closed.set_exception(error)
        else:
            closed.set_result(None)

    last.add_done_callback(close)
    return closed
