"""Pools in which the next connection is for whoever has waited longest.

In SQLAlchemy's own ones, whoever comes by may take a connection that was given back, and the one who was woken for it
waits again, behind all others. A worker that gives its connection back takes it again in the same moment: so units of
work waited for seconds while workers went on and on. Here a connection that is given back is handed over.

The line holds entries of the pool, open or not. Each way in which room comes back is an entry for the line:

    a connection is given back       its entry
    an opening failed, or ended      its entry, which is not open: whoever gets it opens it
    an entry is closed for good      another one that is not open, where somebody waits
    the pool was replaced            the entry of each connection that comes back, which is closed first

The garbage collector gives connections back in any thread, amid anything. So there is no lock here that it could wait
for: the operations of a deque are atomic, and each change is followed by a look whether an entry and a waiter are left.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections import deque
from contextlib import suppress
from typing import Any, Generic, Literal, TypeVar

from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import AsyncAdaptedQueuePool, ConnectionPoolEntry, QueuePool
from sqlalchemy.pool.base import _ConnectionRecord
from sqlalchemy.util import await_only
from sqlalchemy.util.queue import Empty, Full, QueueCommon

W = TypeVar("W")


class _Line(QueueCommon[ConnectionPoolEntry], Generic[W]):
    """Entries at rest, or those who wait for one: never both for long."""

    def __init__(self, maxsize: int = 0, use_lifo: bool = False) -> None:
        self.maxsize, self.use_lifo = maxsize, use_lifo
        self._at_rest: deque[ConnectionPoolEntry] = deque()
        self._waiting: deque[W] = deque()

    def empty(self) -> bool:
        return not self._at_rest

    def full(self) -> bool:
        return 0 < self.maxsize <= len(self._at_rest)

    def qsize(self) -> int:
        return len(self._at_rest)

    def is_short(self) -> bool:
        """Tell whether somebody waits and no entry is at rest."""
        return bool(self._waiting) and not self._at_rest

    def put_nowait(self, item: ConnectionPoolEntry) -> None:
        """Hand it to the first who waits, or keep it. Raises Full where nobody waits and there is no room."""
        if self.full() and not self._waiting:
            raise Full
        self._give(item)

    def put(self, item: ConnectionPoolEntry, block: bool = True, timeout: float | None = None) -> None:
        self.put_nowait(item)  # the pool waits for no room

    def get_nowait(self) -> ConnectionPoolEntry:
        """Take one that is at rest. Raises Empty where there is none, or others wait."""
        if self._waiting:
            raise Empty
        return self._pop()

    def stand(self) -> W:
        """Begin to wait, behind all others."""
        waiting = self._come()
        self._waiting.append(waiting)
        self._serve()
        return waiting

    @abstractmethod
    def wait(self, waiting: W, seconds: float | None) -> ConnectionPoolEntry:
        """Wait for the turn. Raises Empty after so many seconds."""

    @abstractmethod
    def _come(self) -> W:
        """Make a place to wait at."""

    @abstractmethod
    def _is_handed_over(self, item: ConnectionPoolEntry, waiting: W) -> bool:
        """Hand it over, unless nobody waits there any more."""

    def _give(self, item: ConnectionPoolEntry) -> None:
        self._at_rest.append(item)
        self._serve()

    def _serve(self) -> None:
        """Hand over for as long as there are both. Others may do so meanwhile."""
        while self._waiting and self._at_rest:
            with suppress(Empty):
                item = self._pop()
                waiting = self._first()
                if waiting is None or not self._is_handed_over(item, waiting):
                    self._at_rest.append(item)

    def _first(self) -> W | None:
        with suppress(IndexError):
            return self._waiting.popleft()
        return None

    def _pop(self) -> ConnectionPoolEntry:
        try:
            return self._at_rest.pop() if self.use_lifo else self._at_rest.popleft()
        except IndexError:
            raise Empty from None

    def _leave(self, waiting: W) -> None:
        """Wait no more."""
        with suppress(ValueError):
            self._waiting.remove(waiting)


class LoopLine(_Line["asyncio.Future[ConnectionPoolEntry]"]):
    """The line of tasks."""

    def wait(self, waiting: asyncio.Future[ConnectionPoolEntry], seconds: float | None) -> ConnectionPoolEntry:
        return await_only(self._in_turn(waiting, seconds))

    async def _in_turn(
        self, waiting: asyncio.Future[ConnectionPoolEntry], seconds: float | None
    ) -> ConnectionPoolEntry:
        try:
            async with asyncio.timeout(seconds):
                return await waiting
        except BaseException as error:
            self._leave(waiting)
            if waiting.done() and not waiting.cancelled():  # handed over in the same moment: for the next one
                self._give(waiting.result())
            if isinstance(error, TimeoutError):
                raise Empty from error
            raise

    def _come(self) -> asyncio.Future[ConnectionPoolEntry]:
        return asyncio.get_running_loop().create_future()

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
            self._give(item)
        else:
            waiting.set_result(item)


class _Waiting:
    """A thread that waits, with a lock that is released when an entry was handed over."""

    def __init__(self) -> None:
        self.has_left = False
        self.served = threading.Lock()
        self.served.acquire()
        self._handed: deque[ConnectionPoolEntry] = deque()

    def hand(self, item: ConnectionPoolEntry) -> None:
        self._handed.append(item)
        self.served.release()

    def take(self) -> ConnectionPoolEntry | None:
        """Return what was handed over, once: to the thread, or to the giver when it has left meanwhile."""
        with suppress(IndexError):
            return self._handed.pop()
        return None


class ThreadLine(_Line[_Waiting]):
    """The line of threads."""

    def wait(self, waiting: _Waiting, seconds: float | None) -> ConnectionPoolEntry:
        try:
            waiting.served.acquire(timeout=-1 if seconds is None else seconds)
            if (item := waiting.take()) is None:
                raise Empty
            return item
        except BaseException:  # also that of a signal
            waiting.has_left = True
            self._leave(waiting)
            if (item := waiting.take()) is not None:
                self._give(item)
            raise

    def _come(self) -> _Waiting:
        return _Waiting()

    def _is_handed_over(self, item: ConnectionPoolEntry, waiting: _Waiting) -> bool:
        waiting.hand(item)
        return not waiting.has_left or waiting.take() is None


class _FairPool(QueuePool):
    """A pool with such a line."""

    _pool: Any
    _is_replaced = False

    def _create_connection(self) -> ConnectionPoolEntry:
        """Make an entry that is opened by whoever takes it, and comes back to the line when that fails."""
        return _ConnectionRecord(self, connect=False)

    def _do_get(self) -> ConnectionPoolEntry:
        line: _Line[Any] = self._pool
        with suppress(Empty):
            return line.get_nowait()
        waiting = line.stand()
        self._use_room()
        try:
            return line.wait(waiting, self._timeout)
        except Empty:
            raise PoolTimeoutError(
                f"QueuePool limit of size {self.size()} overflow {self.overflow()} reached, "
                f"connection timed out, timeout {self._timeout:0.2f}",
                code="3o7r",
            ) from None

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        try:
            if self._is_replaced:  # at rest, the connection would be open for as long as the garbage collector lets it
                record.invalidate()
        finally:
            super()._do_return_conn(record)

    def _dec_overflow(self) -> Literal[True]:
        super()._dec_overflow()
        self._use_room()
        return True

    def _use_room(self) -> None:
        while self._pool.is_short() and self._inc_overflow():
            self._pool.put_nowait(self._create_connection())

    def recreate(self) -> QueuePool:
        self._is_replaced = True
        return super().recreate()

    def dispose(self) -> None:
        """Close the connections at rest, and each other one when it comes back. It is counted until then."""
        self._is_replaced = True
        with suppress(Empty):
            while True:
                self._close(self._pool.get_nowait())
        self.logger.info("Pool disposed. %s", self.status())

    def _close(self, entry: ConnectionPoolEntry) -> None:
        try:
            entry.close()
        finally:
            self._dec_overflow()


class FairAsyncPool(_FairPool, AsyncAdaptedQueuePool):
    """A pool of an async engine: its connections go to those who wait in the order of their coming."""

    _queue_class = LoopLine
    _sqla_logger_namespace = "sqlalchemy.pool.impl.AsyncAdaptedQueuePool"


class FairPool(_FairPool):
    """The same for an engine of threads."""

    _queue_class = ThreadLine
    _sqla_logger_namespace = "sqlalchemy.pool.impl.QueuePool"
