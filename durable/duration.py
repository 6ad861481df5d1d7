"""Lengths of time as people write them: a timedelta, seconds, or text such as "10s", "5m", "1h30m" or "500ms"."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

Duration = Annotated[timedelta | float | str, "a length of time"]

SUCH_AS: Final = "seconds, a timedelta, or text such as '500ms', '10s', '5m', '1h30m' or '7d'"

# A day off the end of the calendar: whoever reads a time may turn it into any zone.
LATEST: Final = datetime.max.replace(tzinfo=UTC) - timedelta(days=1)

_UNITS: Final = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_PART: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?(ms|s|min|m|h|d|w)(?![a-z]) ?")
_NUMBER: Final = re.compile(r"-?[0-9]{1,12}(\.[0-9]{1,9})?")


def duration(value: Duration) -> timedelta:
    """The length of time; raises ValueError for a value that is none, or is longer than a timedelta can be."""
    if isinstance(value, timedelta):
        return value
    try:
        if isinstance(value, str):
            return timedelta(seconds=_seconds(value.strip()))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return timedelta(seconds=value)
    except OverflowError:
        pass
    except ValueError:  # of NaN, and of text
        pass
    raise ValueError(f"{value!r} is no length of time; give {SUCH_AS}")


def time_from_now(value: Duration) -> timedelta:
    """duration() of what is waited for; raises ValueError also for a time that is negative or has no end."""
    span = duration(value)
    if span < timedelta(0):
        raise ValueError(f"{value!r} is negative; give 0 or more")
    if span > within_calendar(span):
        raise ValueError(f"{value!r} from now lies outside the calendar")
    return span


def within_calendar(span: timedelta, now: datetime | None = None) -> timedelta:
    """Cut a length of time so that it ends in a year that every reader of a time knows."""
    return min(span, LATEST - (now or datetime.now(UTC)))


def _seconds(text: str) -> float:
    if _NUMBER.fullmatch(text):
        return float(text)
    parts = list(_PART.finditer(text))
    if not parts or "".join(part[0] for part in parts) != text:
        raise ValueError
    return sum(float(part[1]) * _UNITS[part[2]] for part in parts)
