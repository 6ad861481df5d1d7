"""What commands over many rows share: arguments that several of them take, and times as people write them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from durable.duration import duration
from durable.errors import InvalidSetting, WiringError

_LONGEST = timedelta(days=36_500)
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}


def with_arguments_of(choose: Callable[..., object], command: Callable[..., None]) -> Callable[..., None]:
    """Give a command with a parameter `chosen` the arguments of `choose` instead, and it what `choose` returns."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "chosen"]
    common = list(inspect.signature(choose, eval_str=True).parameters.values())
    names = {parameter.name for parameter in common}

    def run(**given: Any) -> None:
        chosen = choose(**{name: value for name, value in given.items() if name in names})
        command(chosen=chosen, **{name: value for name, value in given.items() if name not in names})

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    keywords = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in (*common, *own)]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def parse_time(text: str, now: datetime, *, option: str) -> datetime:
    """An aware time, from `2h` or `2h ago`, or ISO 8601 with a zone. Raises WiringError."""
    ago = re.fullmatch(r"([0-9]{1,9}) ?(s|m|min|h|d)( ago)?", text.strip())
    return _moment(text, ago, now, -1, option=option, such_as="90s, 30m, 2h or 7d for that long ago")


def parse_duration(text: str, *, option: str) -> timedelta:
    """A time above 0 and below a hundred years, as durable.duration reads it. Raises InvalidSetting."""
    try:
        span = duration(text)
    except ValueError as error:
        raise InvalidSetting(f"{option}: {error}") from None
    if not timedelta(0) < span < _LONGEST:
        raise InvalidSetting(f"{option}: {text} is no time; give one above 0, such as 60 or 1h30m")
    return span


def parse_coming_time(text: str, now: datetime, *, option: str) -> datetime:
    """An aware time, from `2h` or `in 2h`, or ISO 8601 with a zone. Raises WiringError."""
    ahead = re.fullmatch(r"(?:in )?([0-9]{1,9}) ?(s|m|min|h|d)", text.strip())
    return _moment(text, ahead, now, 1, option=option, such_as="90s, 30m, 2h or 7d for that long from now")


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
    raise WiringError(f"{option}: {text!r} is no time; write {such_as}, or 2030-12-31T23:59Z")
