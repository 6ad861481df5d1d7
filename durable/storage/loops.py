"""The event loop to which the pooled connections of an async engine belong: no other one may use them.

A connection that is used in another loop is never done with it: its transaction stays open, and what the next unit of
work does there is rolled back with it, although its commit returns.
"""

from __future__ import annotations

import asyncio
import threading

from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import NullPool

from durable.errors import WiringError


def another_loop() -> WiringError:
    """The error for code in an event loop to which the bus does not belong."""
    return WiringError(
        "the bus belongs to another event loop, in which it runs or was used first: use it there, as by"
        " asyncio.run_coroutine_threadsafe(), or make another Bus for this one"
    )


class HomeLoop:
    """Event loop of one engine: that of its first use, until it is closed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._entering = threading.Lock()  # loops of several threads may come at once

    @property
    def is_here(self) -> bool:
        """True where the engine may be used: in its loop, and anywhere while it has none."""
        return self._loop in (None, asyncio._get_running_loop())

    def enter(self, engine: AsyncEngine) -> None:
        """Note the running loop at the first use. Connections of a loop that was closed are forgotten: nobody can say
        goodbye to their servers.

        Raises WiringError in a second loop, while the first is open.
        """
        running = asyncio._get_running_loop()
        if running is None or running is self._loop or isinstance(engine.pool, NullPool):
            return
        with self._entering:
            if self._loop is not None:
                if not self._loop.is_closed():
                    raise another_loop()
                engine.sync_engine.dispose(close=False)
            self._loop = running

    async def close(self, engine: AsyncEngine) -> None:
        """Close the connections of an engine, which may be used in any loop then."""
        if self.is_here:
            await engine.dispose()
        else:
            engine.sync_engine.dispose(close=False)
        self._loop = None
