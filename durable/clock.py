"""Time, as something that can be given: the wall clock for what is written down, the monotonic one for waiting.

The database's clock decides in SQL which rows are due, expired or stale; these clocks serve messages and timeouts.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """The time now, aware, in UTC."""
        ...

    def monotonic(self) -> float:
        """Return the seconds of a clock that never goes back."""
        ...


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()
