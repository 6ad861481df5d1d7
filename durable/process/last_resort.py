"""End of a process that cannot go on, with one line of log and its own exit code.

    70  an agent did not end when it was cancelled, or the bus did not stop in time
    75  the process was no node for longer than `membership_timeout`, or its event loop stood still for so long

A process that belongs to an application is told of it instead: see the setting `on_stuck`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from durable.telemetry import log

EXIT_STUCK: Final = 70
EXIT_NO_MEMBER: Final = 75
_LOGGING_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.2
_LONGEST_LOOK: Final = 1.0  # seconds; a look that comes later comes after a standstill


def end_process(code: int, message: str, *args: object) -> None:
    """Write one line and end the process at once: nothing is waited for, and rows that it owns go to other nodes.

    The line is written by a thread of its own: who stands may hold the lock of a log's handler.
    """
    writing = threading.Thread(target=_write_last_line, args=(message, *args), daemon=True)
    writing.start()
    writing.join(_LOGGING_SECONDS)
    os._exit(code)


def _write_last_line(message: str, *args: object) -> None:
    log.critical(message, *args)
    for handler in (*log.handlers, *logging.getLogger().handlers):
        handler.flush()


class Watchdog:
    """A thread that bites when it has heard nothing for too long: then the event loop cannot speak for itself.

    The time is counted look by look: while the whole process stood still, nobody could have been heard.
    """

    def __init__(self, limit: float, reason: str, bite: Callable[[str], None]) -> None:
        self._limit = limit
        self._reason = reason
        self._bite = bite
        self._silence = 0.0  # seconds
        self.is_bound = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Begin to listen; does no harm when repeated."""
        if self._thread is None:
            self._silence = 0.0
            self._thread = threading.Thread(target=self._run, name="durable watchdog", daemon=True)
            self._thread.start()

    def hear(self) -> None:
        """Note that the process is healthy."""
        if not self.is_bound:
            self._silence = 0.0

    def bind(self, seconds: float, reason: str) -> None:
        """End the process in so many seconds unless end() is called; only the first call counts."""
        if not self.is_bound:
            self._silence, self._limit, self._reason, self.is_bound = 0.0, seconds, reason, True
            self.watch()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(min(_LOOK_SECONDS, self._limit)):
            before, looked = looked, time.monotonic()
            self._silence += min(looked - before, _LONGEST_LOOK)
            if self._silence > self._limit:
                self._bite(self._reason)
                self._silence = 0.0  # where it is only reported: once in each limit
