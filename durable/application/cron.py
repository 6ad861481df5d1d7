"""Cron expressions in a time zone: when a schedule runs, and which late occurrences still run.

    occurrence   a time that the expression names; it is what makes a run a run, and never changes
    due          when that occurrence is to run: at its time, unless somebody has moved it

due_occurrences() finds the occurrence that a schedule waited for, and those that passed since. `misfire` says which of
them run, and the schedule waits for the next one. Expressions mean what they mean to Debian's cron.
An expression that names hours and minutes runs once for each on a day when the clocks change, at the end of the gap if
the time falls into the gap; an expression of every hour or every few minutes runs whenever the clock shows such a time.
cronsim reads the expressions, for a clock without a zone; changes of the clocks are handled here, because a change may
be of half an hour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice, takewhile
from typing import Final, Literal, NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from durable.errors import InvalidSetting
from durable.grammar import suggestion

Misfire = Literal["once", "all", "skip"]

MOST_AT_ONCE: Final = 100
"""Misfire occurrences that run, the last ones, when all of them are to."""
MISFIRE_GRACE: Final = timedelta(minutes=1)
"""An occurrence that is late by more was misfire."""

_ANY_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)
_NO_TIME: Final = timedelta(0)
_SECOND: Final = timedelta(seconds=1)
_MOMENT: Final = timedelta(microseconds=1)
_DAY: Final = timedelta(days=1)
_STEP: Final = timedelta(hours=12)  # no zone changes its clocks and changes them back within so little


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
        zone = _zone(self.tz)
        found = self._fixed_after(moment, zone) if self._is_fixed else self._elapsed_after(moment, zone)
        if found is None:
            raise InvalidSetting(f"cron {self.expression!r}: no day has ever this date")
        return found

    def back_from(self, moment: datetime) -> Iterator[datetime]:
        """The occurrences up to and including this moment, the last first."""
        zone = _zone(self.tz)
        return self._fixed_until(moment, zone) if self._is_fixed else self._elapsed_until(moment, zone)

    @property
    def _is_fixed(self) -> bool:
        """True for an expression that names hours and minutes, not every or every few: each runs once on any day."""
        fields = self.expression.split()
        return len(fields) in (5, 6) and not any(each.startswith("*") for each in fields[-5:-3])

    def _on_the_wall(self, wall: datetime, *, reverse: bool = False) -> Iterator[datetime]:
        """Iterate the occurrences after this time, or before it, on a clock without a zone."""
        return CronSim(self.expression, wall, reverse=reverse)

    def _fixed_after(self, moment: datetime, zone: tzinfo) -> datetime | None:
        walls = self._on_the_wall(_wall(moment, zone))
        return next((at for wall in walls if (at := _first_shown(wall, zone)) > moment), None)

    def _fixed_until(self, moment: datetime, zone: tzinfo) -> Iterator[datetime]:
        # In an hour that comes again, all of the first one has passed.
        repeated = _offset(moment - _DAY, zone) - _offset(moment, zone) if moment.astimezone(zone).fold else _NO_TIME
        found = None
        for wall in self._on_the_wall(_wall(moment, zone) + repeated + _SECOND, reverse=True):
            at = _first_shown(wall, zone)
            if at <= moment and at != found:  # all that falls into a gap runs at its end, once
                found = at
                yield at

    def _elapsed_after(self, moment: datetime, zone: tzinfo) -> datetime | None:
        since, seen = moment, _NO_TIME
        while True:
            wall = next(self._on_the_wall(_wall(since, zone) - seen), None)
            if wall is None:
                return None
            at = (wall - _offset(since, zone)).replace(tzinfo=UTC)
            changed = _first_change(since, at, zone)
            if changed is None:
                return at
            since, seen = changed, _SECOND  # what the clock shows just then counts

    def _elapsed_until(self, moment: datetime, zone: tzinfo) -> Iterator[datetime]:
        until = moment
        while True:
            wall = next(self._on_the_wall(_wall(until, zone) + _SECOND, reverse=True), None)
            if wall is None:
                return
            at = (wall - _offset(until, zone)).replace(tzinfo=UTC)
            changed = _last_change(at, until, zone)
            if changed is None:
                yield at
            until = (at if changed is None else changed) - _SECOND


@dataclass(frozen=True, slots=True)
class DueOccurrences:
    """Occurrences of a due schedule that run now, in order, and the one to wait for."""

    run: Sequence[datetime]
    next: datetime


class Pause(NamedTuple):
    """Pause of a schedule. Occurrences due in it are passed over."""

    since: datetime
    until: datetime

    def covers(self, moment: datetime) -> bool:
        return self.since <= moment < self.until


def due_occurrences(
    cron: Cron,
    misfire: Misfire,
    *,
    occurrence: datetime | None,
    due: datetime,
    now: datetime,
    has_failed: bool = False,
    pause: Pause | None = None,
) -> DueOccurrences:
    """`occurrence` is the one that was waited for until `due`; None: occurrences count from `due` on. If it has
    failed before, then it was due before the pause, and it runs besides what `misfire` chooses.
    """
    since = occurrence or due
    passed = list(islice(_passed(cron, since, now, pause), MOST_AT_ONCE))
    if occurrence is not None and (has_failed or not (pause and pause.covers(due))):
        passed.append(occurrence)
    following = cron.after(max(now, since))
    newest = [passed[-1], passed[0]] if has_failed and len(passed) > 1 else passed[:1]
    match misfire:
        case "once":
            return DueOccurrences(newest, following)
        case "all":
            return DueOccurrences(passed[:MOST_AT_ONCE][::-1], following)
        case "skip":
            return DueOccurrences([at for at in newest if now - max(at, due) <= MISFIRE_GRACE], following)


def _passed(cron: Cron, since: datetime, now: datetime, pause: Pause | None) -> Iterator[datetime]:
    """The occurrences after `since`, the last first, without those of the pause: which may be a year of seconds."""
    if pause is None:
        yield from takewhile(lambda at: at > since, cron.back_from(now))
        return
    yield from takewhile(lambda at: at > since and at >= pause.until, cron.back_from(now))
    yield from takewhile(lambda at: at > since, cron.back_from(min(pause.since - _MOMENT, now)))


def _offset(moment: datetime, zone: tzinfo) -> timedelta:
    return moment.astimezone(zone).utcoffset() or _NO_TIME


def _wall(moment: datetime, zone: tzinfo) -> datetime:
    """Return the time on the wall of a zone, to the second."""
    return moment.astimezone(zone).replace(tzinfo=None, microsecond=0)


def _first_shown(wall: datetime, zone: tzinfo) -> datetime:
    """Return when a clock of the zone first shows this time, or skips it."""
    local = wall.replace(tzinfo=zone)
    at = local.astimezone(UTC)
    if _wall(at, zone) == wall:
        return at
    return _first_change(local.replace(fold=1).astimezone(UTC), at, zone) or at


def _first_change(after: datetime, until: datetime, zone: tzinfo) -> datetime | None:
    """Return the first change of the zone's clocks in this time; its end counts."""
    while after < until:
        ahead = min(after + _STEP, until)
        if _offset(ahead, zone) != _offset(after, zone):
            return _change(after, ahead, zone)
        after = ahead
    return None


def _last_change(after: datetime, until: datetime, zone: tzinfo) -> datetime | None:
    while after < until:
        back = max(until - _STEP, after)
        if _offset(back, zone) != _offset(until, zone):
            return _change(back, until, zone)
        until = back
    return None


def _change(before: datetime, after: datetime, zone: tzinfo) -> datetime:
    """The second from which on a clock there shows what it shows `after`, and not what it shows `before`."""
    since = _offset(before, zone)
    low, high = int(before.timestamp()), math.ceil(after.timestamp())
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(datetime.fromtimestamp(middle, UTC), zone) == since:
            low = middle
        else:
            high = middle
    return datetime.fromtimestamp(high, UTC)


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
