"""Days of UTC as the statements take them: history is kept by day."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta

from durable.storage.sql.times import FIRST, LAST


def midnight(day: date) -> datetime:
    """Return the time when a UTC day begins."""
    return datetime.combine(day, time.min, UTC)


def beginning(day: date | None) -> datetime | None:
    """The begin of a day; None for the first day of all, which has the earlier times, too."""
    return None if day is None or day <= FIRST.date() else midnight(day)


def end(day: date | None) -> datetime | None:
    """The end of the day before; None behind the last day of all, which has the later times, too."""
    return None if day is None or day > LAST.date() else midnight(day)


def within_reach(moment: datetime) -> datetime:
    """Return the nearest time with which one may reckon: no stored time lies beyond it."""
    return min(max(moment, FIRST), LAST + timedelta(microseconds=1))
