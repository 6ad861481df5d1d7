"""Options as users write them: past times, future times, durations, and names with values."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated
from uuid import UUID

import typer

from durable.arguments import refuse_empty_period
from durable.duration import duration
from durable.errors import InvalidSetting, WiringError
from durable.messages.validation import EARLIEST, LATEST

ListSize = Annotated[
    int, typer.Option("--limit", min=1, max=1_000_000, metavar="N", help="largest number of rows of a list")
]
_LONGEST = timedelta(days=36_500)


def parse_time(text: str, now: datetime, *, option: str) -> datetime:
    """Read an aware time: `1h30m` or `1h30m ago`, or ISO 8601 with a zone. Raises WiringError."""
    ago = _span(text.strip().removesuffix(" ago"))
    return _moment(text, ago, now, -1, option=option, such_as="90s, 30m, 1h30m or 7d (ago)")


def parse_period(since: str | None, until: str | None) -> tuple[datetime | None, datetime | None]:
    """Read --since and --until as parse_time() does. Raises WiringError, also when nothing is between them."""
    now = datetime.now(UTC)
    given = {"--since": since, "--until": until}
    first, last = (None if text is None else parse_time(text, now, option=option) for option, text in given.items())
    refuse_empty_period(first, last, dashes="--")
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
    """Read a length of time with its units, such as `1h30m`. Raises InvalidSetting."""
    span = _span(text.strip())
    if span is None or span > _LONGEST:
        raise InvalidSetting(f"{option}: {text!r} is no duration; write 90s, 30m, 1h30m or 7d")
    return span


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
    """Read an aware time: `1h30m` or `in 1h30m`, or ISO 8601 with a zone. Raises WiringError."""
    ahead = _span(text.strip().removeprefix("in "))
    return _moment(text, ahead, now, 1, option=option, such_as="90s, 30m, 1h30m or 7d (from now)")


def parse_due_time(text: str, now: datetime, *, option: str) -> datetime:
    """Read a coming time that a message may have. Raises WiringError."""
    moment = parse_coming_time(text, now, option=option)
    if not EARLIEST <= moment <= LATEST:
        raise WiringError(f"{option}: {text!r} lies outside the calendar; give such as 2030-12-31T23:59Z")
    return moment


def _span(text: str) -> timedelta | None:
    """Read a length of time with its units, such as 1h30m; None for any other text."""
    try:
        return duration(text) if text[-1:].isalpha() else None
    except ValueError:
        return None


def _moment(text: str, span: timedelta | None, now: datetime, direction: int, *, option: str, such_as: str) -> datetime:
    try:
        if span is not None:
            return now + direction * span
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise WiringError(f"{option}: {text!r} is not a time; write {such_as}, or 2030-12-31T23:59Z")
