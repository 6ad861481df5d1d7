"""Values of subclasses as those of the classes themselves: pandas' and pendulum's times, NumPy's floats, SQLAlchemy's
names.

Databases' drivers take either, msgspec takes only the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

# The classes are bound here: libraries that stop the clock for a test put subclasses under their names in all modules.


def _moment(value: datetime, made: type[datetime] = datetime) -> datetime:
    if value != value:
        raise ValueError(f"{value} is no time")  # pandas' NaT, which is a datetime by its class
    of_day = value.hour, value.minute, value.second, value.microsecond
    return made(value.year, value.month, value.day, *of_day, tzinfo=value.tzinfo, fold=value.fold)


def _day(value: date, made: type[date] = date) -> date:
    return made(value.year, value.month, value.day)


def _time_of_day(value: time, made: type[time] = time) -> time:
    return made(value.hour, value.minute, value.second, value.microsecond, tzinfo=value.tzinfo, fold=value.fold)


def _time_span(value: timedelta, made: type[timedelta] = timedelta) -> timedelta:
    """Read what timedelta has: the `days` and `seconds` of pendulum's negative spans are others."""
    return made(*(part.__get__(value) for part in (timedelta.days, timedelta.seconds, timedelta.microseconds)))


_AS_ITS_OWN: Mapping[type, Callable[[Any], object]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: bytes.__bytes__,
    datetime: _moment,
    date: _day,
    time: _time_of_day,
    timedelta: _time_span,
    Decimal: Decimal,
}
_TIME: Final = (datetime,)


def plain(value: object) -> object:
    """The same value without its subclass, as `enc_hook` of msgspec; raises NotImplementedError for any other."""
    for cls in type(value).__mro__:
        if cls in _AS_ITS_OWN:
            return _AS_ITS_OWN[cls](value)
    raise NotImplementedError(f"Encoding objects of type {type(value).__qualname__} is unsupported")


def plain_text(text: str) -> str:
    """The same text; what is none, and is refused where it is read, is left as it is."""
    return str.__str__(text) if type(text) is not str and isinstance(text, str) else text


def plain_time(moment: datetime) -> datetime:
    """The same time to the microsecond."""
    return moment if type(moment) is _TIME[0] else _moment(moment)
