"""Values of subclasses of the classes that messages are made of, as applications get them from other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any, Final

import numpy
import pandas
from sqlalchemy.sql.elements import quoted_name


class Text(str): ...


class Word(StrEnum):
    ACME = "acme"


class OldWord(str, Enum):  # noqa: UP042  as code from before StrEnum has it
    ACME = "acme"


class Number(int): ...


class Raw(bytes): ...


class Moment(datetime): ...


class Day(date): ...


class Hour(time): ...


class Span(timedelta):
    """As pendulum's: `days` and `seconds` of a negative one are counted from zero."""

    @property
    def days(self) -> int:
        return int(self.total_seconds() / 86_400)

    @property
    def seconds(self) -> int:
        return int(self.total_seconds() - 86_400 * self.days)


class Amount(Decimal): ...


TEXTS: Final[Mapping[str, str]] = {
    "str": Text("acme"),
    "StrEnum": Word.ACME,
    "Enum": OldWord.ACME,
    "SQLAlchemy": quoted_name("acme", quote=True),
}


def moments(at: datetime) -> dict[str, datetime]:
    """The same moment, as several libraries have it."""
    local = at.astimezone(UTC)
    own = Moment(
        local.year, local.month, local.day, local.hour, local.minute, local.second, local.microsecond, tzinfo=UTC
    )
    of_pandas: Any = pandas.Timestamp(at)  # to a type checker it may be NaT
    return {"datetime": own, "pandas": of_pandas}


VALUES: Final[Mapping[str, tuple[type, Any]]] = {
    **{name: (str, value) for name, value in TEXTS.items() if not isinstance(value, Enum)},
    "int": (int, Number(17)),
    "float": (float, numpy.float64(0.1)),
    "bytes": (bytes, Raw(b"\x00\xff")),
    "datetime": (datetime, Moment(2024, 2, 29, 12, 0, 0, 7, tzinfo=UTC)),
    "pandas": (datetime, pandas.Timestamp(2024, 2, 29, 12, tz="Europe/Vienna")),
    "date": (date, Day(2024, 2, 29)),
    "timedelta": (timedelta, pandas.Timedelta(days=-1, microseconds=7)),
    "pendulum's timedelta": (timedelta, Span(days=-3, seconds=7)),
    "time": (time, Hour(12, 30, 0, 7, tzinfo=UTC, fold=1)),
    "Decimal": (Decimal, Amount("1.10")),
}
"""Each with the class that a field of it is annotated with."""
