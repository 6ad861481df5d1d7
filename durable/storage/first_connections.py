"""The first connection of an engine that several event loops use, each with connections of its own.

    no connection yet   one loop opens its connections; the others wait until it has one, or for a bounded time
    from then on        nobody waits

SQLAlchemy asks the first connection for the server's properties, under a lock that belongs to one event loop: others
that come meanwhile would be refused, or wait for ever.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.engine import Dialect
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.util import await_only

_PAUSE: Final = 0.01  # seconds
_LONGEST: Final = 5.0  # seconds for the connection of another loop, which may fail


class FirstConnection:
    """Listens to one engine's events."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._is_open = False
        self._opener: asyncio.AbstractEventLoop | None = None
        self._until = -math.inf
        self._deciding = threading.Lock()
        event.listen(engine.sync_engine, "do_connect", self._wait, insert=True)
        event.listen(engine.sync_engine, "checkout", self._opened)

    def _wait(self, _: Dialect, __: ConnectionPoolEntry, ___: tuple[Any, ...], ____: dict[str, Any]) -> None:
        while not self._may_open():
            await_only(asyncio.sleep(_PAUSE))

    def _may_open(self) -> bool:
        if self._is_open:
            return True
        running, now = asyncio.get_running_loop(), time.monotonic()
        with self._deciding:
            if self._opener is not running and now < self._until:
                return False
            self._opener, self._until = running, now + _LONGEST
            return True

    def _opened(self, _: DBAPIConnection, __: ConnectionPoolEntry, ___: object) -> None:
        """SQLAlchemy has let go of its lock."""
        self._is_open, self._opener = True, None
