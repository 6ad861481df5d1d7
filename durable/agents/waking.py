"""Wake-up of other nodes by NOTIFY: at once after a commit, and by one for all commits of the next moment.

    wake()         --> asked --> NOTIFY                    in the loop of the bus while it runs,
    wake_after()   --> until that COMMIT is over --> asked       or in a thread that stays for a moment

When many commits share a NOTIFY, more of them share the next: each costs this process, and every node that looks for
work because of it, some thousandth of a second.

They look for work without an owner. It is a hint, given off the way of writing: a NOTIFY in the application's
transaction would take a lock of the whole server at its commit. When it fails the nodes find the work by polling.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Connection, Engine

from durable.errors import InvalidSetting, StorageUnavailable
from durable.outbox.transactions import Ending
from durable.settings import Settings
from durable.storage import outbox
from durable.storage.connection_names import UNNAMED, ConnectionName
from durable.storage.database import AGENTS_LONGEST_IDLE, Database, sync_url
from durable.storage.engines import Limits, make_engine
from durable.storage.new_work import ANYWHERE, NOTHING, NewWork
from durable.storage.outages import translated
from durable.tasks.own_threads import in_own_thread
from durable.telemetry import log

_GATHERING: Final = 0.005  # seconds after a NOTIFY in which commits share the next
_LONGEST_GATHERING: Final = 0.02  # the same while there are many; half of it is the mean wait of their messages
_MANY: Final = 4  # commits that share a NOTIFY
_LONGEST: Final = 10.0  # seconds for a NOTIFY
_LONGEST_ALONE: Final = timedelta(seconds=3)
"""The same in a thread, which keeps its process alive: for the server, and GRACE more until the answer."""
_AT_ONCE: Final = 1.0  # seconds in which a server refuses, rather than says nothing
_LONGEST_COMMIT: Final = 60.0  # seconds until the COMMIT of a joined transaction is left to polling
_STAYING: Final = 0.5  # seconds without work after which the thread closes its connection
_LOOKING: Final = 0.1  # seconds between two looks whether the process ends
_NOT_WOKEN_ODDLY: Final = "other nodes were not woken, they find new work at their next poll"
_NOT_WOKEN: Final = f"{_NOT_WOKEN_ODDLY}: %s"


class Waker:
    """Wakes the nodes of other processes. wake() and wake_after() may be called from any thread."""

    def __init__(self, settings: Settings, name: ConnectionName = UNNAMED) -> None:
        self._settings = settings
        self._name = name
        self._lock = threading.Condition()
        self._asked = 0
        """So many commits want the nodes to look."""
        self._new = NOTHING
        """In these lanes."""
        self._gathering = _GATHERING
        self._endings: list[Ending] = []
        self._is_busy = False
        self.is_used = False
        """Has it woken nodes, or begun to?"""
        self._process = os.getpid()
        self._engine: Engine | None = None  # of the thread
        self._home: tuple[asyncio.AbstractEventLoop, Database] | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._told_at = -math.inf
        """When the last NOTIFY ended, on the monotonic clock."""

    def start(self, database: Database) -> None:
        """Work in this loop from now on, over these connections."""
        self._home = asyncio.get_running_loop(), database

    async def stop(self) -> None:
        """Send the last notifications, leave the loop, and close the connection."""
        self._home = None
        await asyncio.sleep(0)  # what was asked for from another thread begins now
        if self._task is not None:
            await self._task
        with self._lock:
            self._is_stopping = True
            self._lock.notify()
        if self._thread is not None:
            await in_own_thread(self._thread.join, _LONGEST)
        self._is_stopping = False

    def wake(self, new: NewWork = ANYWHERE) -> None:
        """Let the nodes claim this work, soon."""
        with self._lock:
            self._asked += 1
            self._new = self._new.and_of(new)
        self._work()

    def wake_after(self, ending: Ending) -> None:
        """Let the nodes look for work when this COMMIT is over."""
        with self._lock:
            self._endings.append(ending)
        self._work()

    def _work(self) -> None:
        with self._lock:
            if self._process != os.getpid():  # a fork has no thread of ours, and its parent uses our connections
                self._process, self._is_busy, self._engine = os.getpid(), False, None
            if self._is_busy:
                self._lock.notify()
                return
            self._is_busy = self.is_used = True
        home = self._home
        if home is not None:
            with suppress(RuntimeError):  # its loop was closed without stop()
                home[0].call_soon_threadsafe(self._work_in_loop, home[1])
                return
        try:
            # Not in the thread: a fork amid its imports would leave the child half a driver, and no way to load it.
            self._engine = self._engine or self._make_engine()
            if self._endings or threading.main_thread().is_alive():
                self._thread = _thread(self._work_alone, self._engine)
                self._thread.start()
            else:  # in atexit(), where no thread is begun or waited for any more
                self._work_alone(self._engine)
        except InvalidSetting:  # sessions of the application's engines, and no database of ours: only polling is left
            self._give_up()
        except Exception as error:  # at the end of the interpreter, or of the system's threads; the COMMIT goes on
            self._thread = None
            self._give_up()
            log.warning(_NOT_WOKEN, error)

    # ------------------------------------------------------------------ in a loop

    def _work_in_loop(self, database: Database) -> None:
        self._task = asyncio.create_task(self._run(database), name="wake nodes")

    async def _run(self, database: Database) -> None:
        try:
            while (new := await self._asked_for()) is not None:
                await self._tell(database, new)
        except BaseException:  # the loop ends
            self._give_up()
            raise

    async def _asked_for(self) -> NewWork | None:
        """Wait until the nodes are to be told, and of what; None when there is nothing left to wait for."""
        waited, pause = 0.0, self._until_next()
        while True:
            await asyncio.sleep(pause)
            waited, pause = waited + pause, _GATHERING
            with self._lock:
                self._take_over(waited)
                new = self._take_new()
                if new is not None or not self._endings:
                    self._is_busy = new is not None
                    return new

    async def _tell(self, database: Database, new: NewWork) -> None:
        try:
            async with asyncio.timeout(_LONGEST):
                await database.statement(outbox.wake_nodes, new)
        except (StorageUnavailable, TimeoutError) as error:
            log.warning(_NOT_WOKEN, error)
        except Exception:
            log.exception(_NOT_WOKEN_ODDLY)
        self._told_at = time.monotonic()

    # ------------------------------------------------------------------ in a thread

    def _make_engine(self) -> Engine:
        limits = Limits(min(self._settings.statement_timeout, _LONGEST_ALONE), AGENTS_LONGEST_IDLE)
        options: dict[str, Any] = {"name": self._name, "pool_size": 1, "isolation_level": "AUTOCOMMIT"}
        return make_engine(sync_url(self._settings), self._settings, limits.for_own_statements(), **options)

    def _work_alone(self, engine: Engine) -> None:
        try:
            connection: Connection | None = None
            while (new := self._asked_for_alone()) is not None:
                connection = self._tell_alone(engine, connection, new)
            if connection is not None:
                connection.close()
        finally:
            engine.dispose()

    def _asked_for_alone(self) -> NewWork | None:
        """Wait until the nodes are to be told, and of what; None after a while, and at the end of the bus or the
        process.
        """
        began = time.monotonic()
        while True:
            time.sleep(self._until_next() or (_GATHERING if self._endings else 0.0))
            waited = time.monotonic() - began
            with self._lock:
                self._take_over(waited)
                if (new := self._take_new()) is not None:
                    return new
                if not self._endings:
                    if waited > _STAYING or self._is_stopping or not threading.main_thread().is_alive():
                        self._is_busy = False
                        return None
                    self._lock.wait(_LOOKING)

    def _tell_alone(self, engine: Engine, connection: Connection | None, new: NewWork) -> Connection | None:
        """Return the connection, for the next time; None when it is of no use any more."""
        used, began = connection, time.monotonic()
        try:
            with translated():
                used = used or engine.connect()
                outbox.wake_nodes(used, self._settings.db_schema, new)
                return used
        except StorageUnavailable as error:
            log.log(logging.DEBUG if connection else logging.WARNING, _NOT_WOKEN, error)
        except Exception:
            log.exception(_NOT_WOKEN_ODDLY)
        finally:
            self._told_at = time.monotonic()
        if used is not None:
            used.close()
        if connection is not None and time.monotonic() - began < _AT_ONCE:  # its server was restarted since
            return self._tell_alone(engine, None, new)
        return None

    # ------------------------------------------------------------------ both

    def _until_next(self) -> float:
        return max(0.0, self._told_at + self._gathering - time.monotonic())

    def _take_new(self) -> NewWork | None:
        """Return what the nodes are to be told now, if anything, and note how soon again."""
        asked, self._asked = self._asked, 0
        if not asked:
            return None
        self._gathering = min(2 * self._gathering, _LONGEST_GATHERING) if asked >= _MANY else _GATHERING
        new, self._new = self._new, NOTHING
        return new

    def _give_up(self) -> None:
        with self._lock:
            self._asked, self._new, self._is_busy = 0, NOTHING, False
            self._endings.clear()

    def _take_over(self, waited: float) -> None:
        left = [ending for ending in self._endings if not ending.is_over and waited < _LONGEST_COMMIT]
        over = len(self._endings) - len(left)
        if over:
            self._asked, self._new = self._asked + over, ANYWHERE
        self._endings = left


def _thread(work: Callable[[Engine], None], engine: Engine) -> threading.Thread:
    """A thread that its process waits for, also when a daemon has committed."""
    return threading.Thread(target=work, args=(engine,), name="durable wakes nodes", daemon=False)
