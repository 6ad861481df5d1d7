"""Threads that sync handlers have not left in time: nothing can end them, so the process knows and tells of them.

    attempt overruns its timeout --> its thread is stuck, another one takes its place     told by `health` at once
    as many as the concurrency   --> the handler begins nothing more in this process      its node stands
    the handler returns          --> its thread is no longer stuck

Stuck threads belong to the process and outlive their node, so the bound holds however often the process joins again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from itertools import chain
from typing import Any, NamedTuple
from uuid import UUID

from durable.grammar import several

_NAMED = 5  # messages in a line


class StuckThread(NamedTuple):
    """A thread whose attempt has timed out; `since` is when."""

    messages: Sequence[UUID]
    since: datetime
    monotonic: float


class StuckThreads:
    """The stuck threads of one process, by their handler's message type. Safe between threads."""

    def __init__(self) -> None:
        self._of: dict[str, dict[Future[Any], StuckThread]] = {}

    def add(
        self, message_type: str, job: Future[Any], messages: Sequence[UUID], when_freed: Callable[[], None]
    ) -> None:
        """Count this thread until its job ends; then call `when_freed`, in that thread."""
        stuck = self._of.setdefault(message_type, {})
        stuck[job] = StuckThread(messages, datetime.now(UTC), time.monotonic())

        def free(job: Future[Any]) -> None:
            stuck.pop(job, None)
            when_freed()

        job.add_done_callback(free)

    def of(self, message_type: str) -> list[StuckThread]:
        return list(self._of.get(message_type, {}).values())

    def jobs(self, message_type: str) -> list[Future[Any]]:
        return list(self._of.get(message_type, {}))

    def problems(self) -> list[str]:
        """Return the problems for the health check."""
        return [
            f"handler {message_type}: {several(len(stuck), 'threads', 'are')} stuck in messages {_named(stuck)}, since "
            f"{min(each.since for each in stuck):%Y-%m-%d %H:%M:%S} UTC: find out what this handler waits for, and "
            "give it a time limit; only the end of the process frees such a thread"
            for message_type in sorted(self._of)
            if (stuck := self.of(message_type))
        ]


def _named(stuck: Sequence[StuckThread]) -> str:
    messages = list(chain.from_iterable(each.messages for each in stuck))
    more = f" and {len(messages) - _NAMED} more" if len(messages) > _NAMED else ""
    return ", ".join(map(str, messages[:_NAMED])) + more
