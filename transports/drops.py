"""Log of dropped connections: one line at once, then at most one line a second with a count.

A flood of strangers must not become a flood of lines.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from durable.grammar import several
from durable.telemetry import log

_SECONDS: Final = 1.0


class Drops:
    """Counter and log of the connections that one listener has dropped. `listener` is its name in the log."""

    def __init__(self, listener: str, counts: Counter[str]) -> None:
        self._listener = listener
        self._counts = counts
        self._untold = 0
        self._last: tuple[str, object] = ("", "")
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, peer: str, reason: object) -> None:
        """Count a dropped connection, and log it now or with the others of this second."""
        self._counts["dropped"] += 1
        if self._timer is not None:
            self._untold += 1
            self._last = (peer, reason)
            return
        log.warning("listener %s dropped the connection of %s: %s", self._listener, peer, reason)
        self._wait()

    def close(self) -> None:
        """Log the drops that were not logged yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._log_untold()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_SECONDS, self._next)

    def _next(self) -> None:
        self._timer = None
        if self._untold:
            self._log_untold()
            self._wait()

    def _log_untold(self) -> None:
        if self._untold:
            log.warning(
                "listener %s dropped %s; the last, of %s: %s",
                self._listener,
                several(self._untold, "more connections"),
                *self._last,
            )
            self._untold = 0
