"""A process that starts while its database is away: it waits, for a bounded time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final

from durable.errors import StorageUnavailable
from durable.telemetry import log

_PAUSE: Final = 0.25
_REFUSED: Final = ("28", "3D")  # SQLSTATE classes: authorization, no such database; waiting changes neither


async def once_it_answers(work: Callable[[], Awaitable[object]], *, within: timedelta) -> None:
    """Run a function as soon as the database answers; raises the last StorageUnavailable when the time is over."""
    deadline = time.monotonic() + within.total_seconds()
    has_told = False
    while True:
        try:
            await work()
            return
        except StorageUnavailable as error:
            if _is_refused(error) or time.monotonic() >= deadline:
                raise
            if not has_told:
                has_told = True
                log.warning("waiting for the database, at most %g s (start_timeout): %s", within.total_seconds(), error)
        await asyncio.sleep(_PAUSE * random.uniform(0.5, 1.5))


def _is_refused(error: BaseException | None) -> bool:
    """True when the server has answered that it refuses this user, or has no such database."""
    while error is not None:
        state = getattr(error, "sqlstate", None) or getattr(getattr(error, "orig", None), "sqlstate", None)
        if isinstance(state, str) and state.startswith(_REFUSED):
            return True
        error = error.__cause__
    return False
