"""A clock that stands still until a test advances it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from durable.arguments import length_of_time
from durable.duration import Duration


class ManualClock:
    """A `durable.clock.Clock`. It starts at `start`, an aware datetime (default: now)."""

    def __init__(self, start: datetime | None = None) -> None:
        if start is not None and start.tzinfo is None:
            raise ValueError("start: give an aware datetime, such as datetime(2024, 2, 29, tzinfo=UTC)")
        self._now = (start or datetime.now(UTC)).astimezone(UTC)
        self._monotonic = 0.0

    def now(self) -> datetime:
        """Return the time that this clock shows, in UTC."""
        return self._now

    def monotonic(self) -> float:
        """Return the seconds that have passed since the clock was made."""
        return self._monotonic

    def advance(self, by: Duration) -> datetime:
        """Let this much time pass (a timedelta, seconds, or text such as "8d"); returns the time it is then.

        Raises InvalidSetting for another value, ValueError for a time that is negative.
        """
        passed = length_of_time("advance", "by", by)
        if passed < timedelta(0):
            raise ValueError("advance: time does not go back")
        self._now += passed
        self._monotonic += passed.total_seconds()
        return self._now
