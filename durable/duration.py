"""Lengths of time as people write them: a timedelta, seconds, or text such as "10s", "5m", "1h30m" or "500ms"."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Final

Duration = Annotated[timedelta | float | str, "a length of time"]

SUCH_AS: Final = "seconds, a timedelta, or text such as '500ms', '10s', '5m', '1h30m' or '7d'"

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


def _seconds(text: str) -> float:
    if _NUMBER.fullmatch(text):
        return float(text)
    parts = list(_PART.finditer(text))
    if not parts or "".join(part[0] for part in parts) != text:
        raise ValueError
    return sum(float(part[1]) * _UNITS[part[2]] for part in parts)
