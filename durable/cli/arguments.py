"""Options as users write them: past times, future times, durations, and names with values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated
from uuid import UUID

import typer

from durable.arguments import refuse_empty_period
from durable.duration import duration
from durable.errors import InvalidSetting, WiringError

ListSize = Annotated[
    int, typer.Option("--limit", min=1, max=1_000_000, metavar="N", help="largest number of rows of a list")
]
_LONGEST = timedelta(days=36_500)
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}


def parse_time(text: str, now: datetime, *, option: str) -> datetime:
    """Read an aware time: `2h` or `2h ago`, or ISO 8601 with a zone. Raises WiringError."""
    ago = re.fullmatch(r"([0-9]{1,9}) ?(s|m|min|h|d)( ago)?", text.strip())
    return _moment(text, ago, now, -1, option=option, such_as="90s, 30m, 2h or 7d (ago)")


def parse_period(since: str | None, until: str | None) -> tuple[datetime | None, datetime | None]:
    """Read --since and --until as parse_time() does. Raises WiringError, also when nothing is between them."""
    now = datetime.now(UTC)
    given = {"--since": since, "--until": until}
    first, last = (None if text is None else parse_time(text, now, option=option) for option, text in given.items())
    refuse_empty_period(first, last)
    return first, last


def parse_duration(text: str, *, option: str) -> timedelta:
    """Read a duration above 0 and below a hundred years, as durable.duration does. Raises InvalidSetting."""
    try:
        span = duration(text)
    except ValueError as error:
        raise InvalidSetting(f"{option}: {error}") from None
    if not timedelta(0) < span < _LONGEST:
        raise InvalidSetting(f"{option}: {text} is not a duration above 0; write one such as 60 or 1h30m")
    return span


def parse_span(text: str, *, option: str) -> timedelta:
    """Read a number with one unit, such as `10m`. Raises InvalidSetting."""
    match = re.fullmatch(r"([0-9]{1,9}) ?(s|m|min|h|d)", text.strip())
    if match is None or (seconds := int(match[1]) * _UNITS[match[2]]) > _LONGEST.total_seconds():
        raise InvalidSetting(f"{option}: {text!r} is no duration; write 90s, 30m, 2h or 7d")
    return timedelta(seconds=seconds)


def parse_days(given: float, *, option: str) -> timedelta:
    """Read a number of days above 0. Raises InvalidSetting."""
    if not 0 < given <= _LONGEST.days:
        raise InvalidSetting(f"{option}: {given:g} is no number of days; write such as 30")
    return timedelta(days=given)


def parse_id(text: str) -> UUID:
    """Read the id of a message. Raises InvalidSetting."""
    try:
        return UUID(text)
    except ValueError:
        raise InvalidSetting(f"--id: {text!r} is no UUID of a message") from None


def parse_pairs(texts: Sequence[str], *, option: str, such_as: str) -> dict[str, str]:
    """Read NAME=VALUE of an option that may be repeated, with each name once. Raises InvalidSetting."""
    found: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise InvalidSetting(f"{option}: give {such_as}, not {text!r}")
        if name in found:
            raise InvalidSetting(f"{option}: {name!r} is given twice; give it once")
        found[name] = value
    return found


def parse_coming_time(text: str, now: datetime, *, option: str) -> datetime:
    """Read an aware time: `2h` or `in 2h`, or ISO 8601 with a zone. Raises WiringError."""
    ahead = re.fullmatch(r"(?:in )?([0-9]{1,9}) ?(s|m|min|h|d)", text.strip())
    return _moment(text, ahead, now, 1, option=option, such_as="90s, 30m, 2h or 7d (from now)")


def _moment(
    text: str, span: re.Match[str] | None, now: datetime, direction: int, *, option: str, such_as: str
) -> datetime:
    try:
        if span is not None:
            return now + direction * timedelta(seconds=int(span[1]) * _UNITS[span[2]])
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise WiringError(f"{option}: {text!r} is not a time; write {such_as}, or 2030-12-31T23:59Z")
