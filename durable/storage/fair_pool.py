"""Pools in which the next connection is for whoever has waited longest.

In SQLAlchemy's own ones, whoever comes by may take a connection that was given back, and the one who was woken for it
waits again, behind all others. A worker that gives its connection back takes it again in the same moment: so units of
work waited for seconds while workers went on and on. Here a connection that is given back is handed over.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections import deque
from concurrent import futures
from contextlib import suppress
from typing import Generic, TypeVar

from sqlalchemy.pool import AsyncAdaptedQueuePool, ConnectionPoolEntry, QueuePool
from sqlalchemy.util import await_only
from sqlalchemy.util.queue import Empty, Full, QueueCommon

W = TypeVar("W", "asyncio.Future[ConnectionPoolEntry]", "futures.Future[ConnectionPoolEntry]")


class _Line(QueueCommon[ConnectionPoolEntry], Generic[W]):
    """Connections at rest, or those who wait for one: never both."""

    def __init__(self, maxsize: int = 0, use_lifo: bool = False) -> None:
        self.maxsize, self.use_lifo = maxsize, use_lifo
        self._lock = threading.RLock()  # the garbage collector gives back in any thread, and amid what is done here
        self._at_rest: deque[ConnectionPoolEntry] = deque()
        self._waiting: deque[W] = deque()

    def empty(self) -> bool:
        return not self._at_rest

    def full(self) -> bool:
        return 0 < self.maxsize <= len(self._at_rest)

    def qsize(self) -> int:
        return len(self._at_rest)

    def put_nowait(self, item: ConnectionPoolEntry) -> None:
        """Hand it to the first who waits, or keep it. Raises Full where nobody waits and there is no room."""
        with self._lock:
            while self._waiting:
                if self._is_handed_over(item, self._waiting.popleft()):
                    return
            if self.full():
                raise Full
            self._at_rest.append(item)

    def put(self, item: ConnectionPoolEntry, block: bool = True, timeout: float | None = None) -> None:
        self.put_nowait(item)  # the pool waits for no room

    def get_nowait(self) -> ConnectionPoolEntry:
        with self._lock:
            if not self._at_rest:
                raise Empty
            return self._at_rest.pop() if self.use_lifo else self._at_rest.popleft()

    def get(self, block: bool = True, timeout: float | None = None) -> ConnectionPoolEntry:
        """Take one, or wait for one in turn. Raises Empty after so many seconds, or at once without `block`."""
        try:
            return self.get_nowait()
        except Empty:
            if not block:
                raise
        return self._next(timeout)

    @abstractmethod
    def _next(self, seconds: float | None) -> ConnectionPoolEntry:
        """Wait for the next one that is given back."""

    @abstractmethod
    def _is_handed_over(self, item: ConnectionPoolEntry, waiting: W) -> bool:
        """Hand it over, unless nobody waits there any more."""

    def _stand(self, waiting: W) -> None:
        with self._lock:
            self._waiting.append(waiting)
            if self._at_rest:  # given back since
                self.put_nowait(self.get_nowait())

    def _leave(self, waiting: W) -> None:
        """Wait no more; what was handed over in the same moment is for the next one."""
        with self._lock, suppress(ValueError):
            self._waiting.remove(waiting)
        if waiting.done() and not waiting.cancelled():
            self.put_nowait(waiting.result())


class LoopLine(_Line["asyncio.Future[ConnectionPoolEntry]"]):
    """The line of tasks."""

    def _next(self, seconds: float | None) -> ConnectionPoolEntry:
        return await_only(self._in_turn(seconds))

    async def _in_turn(self, seconds: float | None) -> ConnectionPoolEntry:
        waiting: asyncio.Future[ConnectionPoolEntry] = asyncio.get_running_loop().create_future()
        self._stand(waiting)
        try:
            async with asyncio.timeout(seconds):
                return await waiting
        except BaseException as error:
            self._leave(waiting)
            if isinstance(error, TimeoutError):
                raise Empty from error
            raise

    def _is_handed_over(self, item: ConnectionPoolEntry, waiting: asyncio.Future[ConnectionPoolEntry]) -> bool:
        if waiting.done():
            return False
        loop = waiting.get_loop()
        if loop is asyncio._get_running_loop():
            waiting.set_result(item)
            return True
        try:
            loop.call_soon_threadsafe(self._hand_over_there, item, waiting)
        except RuntimeError:  # it was closed
            return False
        return True

    def _hand_over_there(self, item: ConnectionPoolEntry, waiting: asyncio.Future[ConnectionPoolEntry]) -> None:
        if waiting.done():
            self.put_nowait(item)
        else:
            waiting.set_result(item)


class ThreadLine(_Line["futures.Future[ConnectionPoolEntry]"]):
    """The line of threads."""

    def _next(self, seconds: float | None) -> ConnectionPoolEntry:
        waiting: futures.Future[ConnectionPoolEntry] = futures.Future()
        self._stand(waiting)
        try:
            return waiting.result(seconds)
        except BaseException as error:
            waiting.cancel()
            self._leave(waiting)
            if isinstance(error, TimeoutError):
                raise Empty from error
            raise

    def _is_handed_over(self, item: ConnectionPoolEntry, waiting: futures.Future[ConnectionPoolEntry]) -> bool:
        if not waiting.set_running_or_notify_cancel():
            return False
        waiting.set_result(item)
        return True


class FairAsyncPool(AsyncAdaptedQueuePool):
    """A pool of an async engine: its connections go to those who wait in the order of their coming."""

    _queue_class = LoopLine
    _sqla_logger_namespace = "sqlalchemy.pool.impl.AsyncAdaptedQueuePool"


class FairPool(QueuePool):
    """The same for an engine of threads."""

    _queue_class = ThreadLine
    _sqla_logger_namespace = "sqlalchemy.pool.impl.QueuePool"
