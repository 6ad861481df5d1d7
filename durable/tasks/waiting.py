"""Waiting for an event, and no longer than for a time."""

from __future__ import annotations

import asyncio


async def is_set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until this event is set, for so many seconds at most (None: without a limit). Returns whether it is."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
    return event.is_set()
