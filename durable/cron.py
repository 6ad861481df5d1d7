"""When a recurring schedule runs: cron expressions in a time zone, and what a late look at one comes to.

    occurrence   a time that the expression names; it is what makes a run a run, and never changes
    due          when that occurrence is to run: at its time, unless somebody has moved it

A look at a schedule that is due finds the occurrence that was waited for, and those that have passed since. `missed`
says which of them run, and the next one is waited for. (cronsim reads the expressions as Debian's cron does: what
names an hour and a minute runs once on a day when the clocks change, at the end of the gap if it falls into it; what
runs every hour or every few minutes goes by the time that has passed.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice, takewhile
from typing import Final, Literal
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from durable.errors import InvalidSetting
from durable.settings import suggestion

Missed = Literal["once", "all", "skip"]

MOST_AT_ONCE: Final = 100
"""Missed occurrences that run, the last ones, when all of them are to."""
MISSED_AFTER: Final = timedelta(minutes=1)
"""An occurrence that is late by more was missed."""

_ANY_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)
_REPEATED_HOURS: Final = timedelta(hours=2)  # no zone has ever put its clocks back by more


@dataclass(frozen=True, slots=True)
class Cron:
    """An expression of five fields (or six, the first for seconds) and the name of a time zone.

    Raises InvalidSetting when one of them is none, or the expression names no time at all.
    """

    expression: str
    tz: str = "UTC"

    def __post_init__(self) -> None:
        _zone(self.tz)
        try:
            self.after(_ANY_TIME)
        except (CronSimError, AttributeError, AssertionError, ValueError) as error:
            told = str(error) if isinstance(error, CronSimError) else "not understood"
            raise InvalidSetting(
                f"cron {self.expression!r}: {told[:1].lower()}{told[1:]}; write minute, hour, day of the month, month "
                "and day of the week, such as '0 3 * * *' or '*/5 8-17 * * MON-FRI'"
            ) from error

    def after(self, moment: datetime) -> datetime:
        """The first occurrence after this moment."""
        # In an hour that comes twice the iterator goes by the clock on the wall, and may begin an hour early.
        later = (at for at in self._from(moment) if at > moment)
        found = next(later, None)
        if found is None:
            raise InvalidSetting(f"cron {self.expression!r}: no day has ever this date")
        return found

    def back_from(self, moment: datetime) -> Iterator[datetime]:
        """The occurrences up to and including this moment, the last first."""
        start = moment.astimezone(_zone(self.tz))
        ahead = _REPEATED_HOURS if start.fold else timedelta(microseconds=1)
        return (at for at in self._from(moment + ahead, reverse=True) if at <= moment)

    def _from(self, moment: datetime, *, reverse: bool = False) -> Iterator[datetime]:
        for at in CronSim(self.expression, moment.astimezone(_zone(self.tz)), reverse=reverse):
            yield at.astimezone(UTC)


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at a due schedule comes to: the occurrences that run now, in order, and the one to wait for."""

    run: Sequence[datetime]
    next: datetime


def look(cron: Cron, missed: Missed, *, occurrence: datetime | None, due: datetime, now: datetime) -> Look:
    """`occurrence` is the one that was waited for until `due`; None: occurrences count from `due` on."""
    since = occurrence or due
    passed = list(islice(takewhile(lambda at: at > since, cron.back_from(now)), MOST_AT_ONCE))
    if occurrence is not None:
        passed.append(occurrence)
    following = cron.after(max(now, since))
    match missed:
        case "once":
            return Look(passed[:1], following)
        case "all":
            return Look(passed[:MOST_AT_ONCE][::-1], following)
        case "skip":
            return Look([at for at in passed[:1] if now - max(at, due) <= MISSED_AFTER], following)


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC  # which cronsim need not convert
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, TypeError, OSError) as error:
        known = available_timezones()
        near = suggestion(name, known) if isinstance(name, str) else ""
        todo = "use a name of the IANA database, such as 'Europe/Vienna'"
        raise InvalidSetting(
            f"tz {name!r}: there is no such time zone{near}; {todo if known else 'run: pip install tzdata'}"
        ) from error
