"""Lengths of time as people write them: a timedelta, or seconds."""

from __future__ import annotations

from datetime import timedelta

Duration = timedelta | float


def duration(value: Duration) -> timedelta:
    return value if isinstance(value, timedelta) else timedelta(seconds=value)
