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
from contextlib import asynccontextmanager
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
async def closing_in_thread(threads: ThreadPoolExecutor, session: Session) -> AsyncIterator[Session]:
    """Close this session in a thread, after the last of its steps."""
    try:
        yield session
    except asyncio.CancelledError:
        last = last_step(session)
        if last is None or last.done():
            threads.submit(close_sync, session)
        else:
            last.add_done_callback(lambda _: close_sync(session))
        raise
    except BaseException:
        await run_in_thread(threads, session, close_sync, session)  # the next attempt meets none of its locks
        raise
    await run_in_thread(threads, session, close_sync, session)
