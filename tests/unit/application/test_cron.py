"""When schedules run: time zones, the days on which clocks change, and what was misfire."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import islice, pairwise, takewhile
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.application.cron import MISFIRE_GRACE, MOST_AT_ONCE, Cron, DueOccurrences, Misfire, Pause, due_occurrences
from durable.errors import InvalidSetting

VIENNA = "Europe/Vienna"


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def following(cron: Cron, start: str, count: int) -> list[str]:
    """The next occurrences, as day and time in UTC."""
    found, moment = [], utc(start)
    for _ in range(count):
        moment = cron.after(moment)
        found.append(f"{moment:%d %H:%M}")
    return found


class TestOccurrences:
    def test_a_schedule_keeps_its_hour_over_a_summer_and_a_winter(self) -> None:
        cron = Cron("0 3 * * *", VIENNA)
        assert cron.after(utc("2025-01-10")) == utc("2025-01-10T02:00")
        assert cron.after(utc("2025-07-10")) == utc("2025-07-10T01:00")

    def test_second_named_in_a_skipped_or_repeated_hour_runs_once(self) -> None:
        cron = Cron("*/30 30 2 * * *", VIENNA)
        assert following(cron, "2025-03-30", 2) == ["30 01:00", "31 00:30"]
        assert following(cron, "2025-10-26", 3) == ["26 00:30", "26 00:30", "27 01:30"]

    def test_hour_skipped_in_spring_runs_once_at_its_end(self) -> None:
        # At 02:00 (01:00 UTC) the clocks go to 03:00.
        assert following(Cron("30 2 * * *", VIENNA), "2025-03-29", 3) == ["29 01:30", "30 01:00", "31 00:30"]
        assert following(Cron("0,30 2 * * *", VIENNA), "2025-03-30", 2) == ["30 01:00", "31 00:00"]

    @pytest.mark.parametrize("expression", ["30 2 * * *", "0 30 2 * * *"])
    def test_hour_repeated_in_autumn_runs_only_the_first_time(self, expression: str) -> None:
        # At 03:00 (01:00 UTC) the clocks go to 02:00.
        assert following(Cron(expression, VIENNA), "2025-10-25", 3) == ["25 00:30", "26 00:30", "27 01:30"]

    def test_a_look_within_the_repeated_hour_finds_nothing_again(self) -> None:
        cron = Cron("30 2 * * *", VIENNA)
        assert cron.after(utc("2025-10-26T01:10")) == utc("2025-10-27T01:30")
        assert next(cron.back_from(utc("2025-10-26T01:10"))) == utc("2025-10-26T00:30")

    def test_hourly_schedule_follows_elapsed_time(self) -> None:
        cron = Cron("0 * * * *", VIENNA)
        assert following(cron, "2025-03-30T00:30", 3) == ["30 01:00", "30 02:00", "30 03:00"]
        assert following(cron, "2025-10-25T23:30", 3) == ["26 00:00", "26 01:00", "26 02:00"]

    def test_seconds_are_a_sixth_field(self) -> None:
        assert Cron("*/20 * * * * *").after(utc("2025-01-01T00:00:21")) == utc("2025-01-01T00:00:40")

    @given(
        st.sampled_from(["*/7 * * * *", "30 2 * * *", "0 0 1 * *", "15 1-3 * * *", "0 12 * * MON-FRI", "0 */5 * * *"]),
        st.sampled_from(["UTC", VIENNA, "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"]),
        st.datetimes(datetime(2024, 1, 1), datetime(2026, 1, 1)),
    )
    def test_forwards_and_backwards_find_the_same(self, expression: str, tz: str, start: datetime) -> None:
        cron, moment = Cron(expression, tz), start.replace(tzinfo=UTC)
        first = cron.after(moment)
        second = cron.after(first)
        assert moment < first < second
        assert list(islice(cron.back_from(second), 2)) == [second, first]
        assert next(cron.back_from(second - timedelta(microseconds=1))) == first

    def test_repeated_half_hour_omits_no_occurrence(self) -> None:
        # At 02:00 (15:00 UTC) the clocks go to 01:30.
        cron = Cron("5 */2 * * *", "Australia/Lord_Howe")
        assert following(cron, "2025-04-05T12:00", 3) == ["05 13:05", "05 15:35", "05 17:35"]
        assert list(islice(cron.back_from(utc("2025-04-05T18:00")), 3)) == [
            utc("2025-04-05T17:35"),
            utc("2025-04-05T15:35"),
            utc("2025-04-05T13:05"),
        ]


# ---------------------------------------------------------------- against a clock that is looked at every minute

MINUTES = {
    "0": {0},
    "5": {5},
    "15,45": {15, 45},
    "20-40": set(range(20, 41)),
    "*": set(range(60)),
    "*/7": set(range(0, 60, 7)),
}
HOURS = {
    "0": {0},
    "2": {2},
    "1-3": {1, 2, 3},
    "0,23": {0, 23},
    "*": set(range(24)),
    "*/2": set(range(0, 24, 2)),
}
MINUTE = timedelta(minutes=1)
ZONES = sorted(available_timezones() - {"localtime"})


@cache
def changes(tz: str) -> list[datetime]:
    """Noons after which the clocks of a zone are changed, within a day; and one after which they are not."""
    zone = ZoneInfo(tz)
    noons = [utc("2007-01-01T12:00") + timedelta(days=day) for day in range(20 * 365)]
    offsets = [noon.astimezone(zone).utcoffset() for noon in noons]
    return [noons[0], *(noon for noon, (one, next_) in zip(noons, pairwise(offsets), strict=False) if one != next_)]


def shown(minute: str, hour: str, tz: str, since: datetime, until: datetime) -> list[datetime]:
    """The occurrences in this time, by looking at the clock of the zone at each minute of it and of a day around."""
    zone, days = ZoneInfo(tz), timedelta(days=1)
    moments = [since - days + count * MINUTE for count in range((until - since + 2 * days) // MINUTE + 1)]
    walls = [moment.astimezone(zone).replace(tzinfo=None) for moment in moments]
    named = {wall for wall in walls if wall.minute in MINUTES[minute] and wall.hour in HOURS[hour]}
    if "*" in minute[:1] + hour[:1]:
        found = [moment for moment, wall in zip(moments, walls, strict=True) if wall in named]
    else:
        found = []
        furthest = walls[0]
        for moment, wall in zip(moments, walls, strict=True):
            if wall > furthest or moment == moments[0]:
                passed = [furthest + count * MINUTE for count in range(1, (wall - furthest) // MINUTE + 1)]
                if any(each.minute in MINUTES[minute] and each.hour in HOURS[hour] for each in passed):
                    found.append(moment)
                furthest = wall
    return [moment for moment in found if since < moment <= until]


@given(
    st.data(),
    st.sampled_from(sorted(MINUTES)),
    st.sampled_from(sorted(HOURS)),
    st.sampled_from(["Australia/Lord_Howe", VIENNA]) | st.sampled_from(ZONES),
    st.sampled_from(["", "0 "]),
)
def test_occurrences_equal_those_on_a_clock_of_the_zone(
    data: st.DataObject, minute: str, hour: str, tz: str, seconds: str
) -> None:
    noon = data.draw(st.sampled_from(changes(tz)))
    since, until = noon - timedelta(hours=12), noon + timedelta(hours=36)
    expected = shown(minute, hour, tz, since, until)
    cron = Cron(f"{seconds}{minute} {hour} * * *", tz)
    found = list(takewhile(lambda at: at <= until, occurrences(cron, since)))
    assert found == expected
    assert list(takewhile(lambda at: at > since, cron.back_from(until))) == expected[::-1]


def occurrences(cron: Cron, since: datetime) -> Iterator[datetime]:
    while True:
        since = cron.after(since)
        yield since


class TestBadInput:
    @pytest.mark.parametrize(
        ("expression", "told"),
        [
            ("* * *", "wrong number of fields"),
            ("61 * * * *", "bad minute"),
            ("every day", "wrong number of fields"),
            ("0 0 30 2 *", "bad day-of-month"),
            ("0 0 * * 8", "bad day-of-week"),
            ("", "wrong number of fields"),
            (None, "not understood"),
        ],
    )
    def test_bad_expression_is_refused_with_its_fault(self, expression: str, told: str) -> None:
        with pytest.raises(InvalidSetting, match=rf"^cron {expression!r}: {told}; write minute".replace("*", r"\*")):
            Cron(expression)

    @pytest.mark.parametrize("tz", ["Europe/Wien", "Europe", "", "../etc", None])
    def test_a_bad_time_zone_is_refused(self, tz: str) -> None:
        with pytest.raises(InvalidSetting, match="there is no such time zone"):
            Cron("* * * * *", tz)

    def test_the_nearest_time_zone_is_suggested(self) -> None:
        with pytest.raises(InvalidSetting, match="did you mean 'Europe/Vienna'"):
            Cron("* * * * *", "europe/vienna")


HOURLY = Cron("0 * * * *")
NOON = utc("2025-01-01T12:00")
HOUR = timedelta(hours=1)


class TestDueOccurrences:
    def test_punctual_occurrence_runs_and_the_next_is_due(self) -> None:
        for misfire in ("once", "all", "skip"):
            found = due_occurrences(HOURLY, misfire, occurrence=NOON, due=NOON, now=NOON + timedelta(seconds=1))
            assert found == DueOccurrences([NOON], NOON + HOUR)

    @pytest.mark.parametrize(
        ("misfire", "run"),
        [("once", [NOON + 3 * HOUR]), ("all", [NOON + n * HOUR for n in range(4)]), ("skip", [])],
    )
    def test_missed_occurrences_run_as_declared(self, misfire: Misfire, run: list[datetime]) -> None:
        found = due_occurrences(HOURLY, misfire, occurrence=NOON, due=NOON, now=NOON + 3 * HOUR + 2 * MISFIRE_GRACE)
        assert found == DueOccurrences(run, NOON + 4 * HOUR)

    @pytest.mark.parametrize(
        ("misfire", "run"),
        [("once", [NOON, NOON + 3 * HOUR]), ("all", [NOON + n * HOUR for n in range(4)]), ("skip", [NOON + 3 * HOUR])],
    )
    def test_occurrence_with_a_failure_runs_beside_the_newest(self, misfire: Misfire, run: list[datetime]) -> None:
        now = NOON + 3 * HOUR
        found = due_occurrences(HOURLY, misfire, occurrence=NOON, due=NOON + HOUR, now=now, has_failed=True)
        assert found == DueOccurrences(run, NOON + 4 * HOUR)
        alone = due_occurrences(HOURLY, misfire, occurrence=NOON, due=NOON, now=NOON, has_failed=True)
        assert alone == DueOccurrences([NOON], NOON + HOUR)

    def test_slightly_late_occurrence_is_not_missed(self) -> None:
        assert due_occurrences(HOURLY, "skip", occurrence=NOON, due=NOON, now=NOON + MISFIRE_GRACE).run == [NOON]

    def test_newest_of_very_many_missed_occurrences_run(self) -> None:
        now = NOON + timedelta(days=365)
        run = due_occurrences(HOURLY, "all", occurrence=NOON, due=NOON, now=now).run
        assert (len(run), run[-1]) == (MOST_AT_ONCE, now)
        assert list(run) == sorted(run)

    def test_new_schedule_has_missed_no_occurrence(self) -> None:
        begun = NOON + timedelta(minutes=10)
        assert due_occurrences(HOURLY, "all", occurrence=None, due=begun, now=begun) == DueOccurrences([], NOON + HOUR)

    def test_occurrence_during_the_declaration_of_a_new_schedule_counts(self) -> None:
        assert due_occurrences(HOURLY, "once", occurrence=None, due=NOON - HOUR / 2, now=NOON).run == [NOON]

    @pytest.mark.parametrize(
        ("misfire", "run"),
        [("once", [NOON + HOUR]), ("all", [NOON, NOON + HOUR]), ("skip", [])],
    )
    def test_occurrences_due_in_a_pause_are_passed_over_and_earlier_ones_are_missed(
        self, misfire: Misfire, run: list[datetime]
    ) -> None:
        pause = Pause(NOON + 2 * HOUR, NOON + 5 * HOUR)
        now = NOON + 4.5 * HOUR
        found = due_occurrences(HOURLY, misfire, occurrence=NOON, due=NOON, now=now, pause=pause)
        assert found == DueOccurrences(run, NOON + 5 * HOUR)

    @pytest.mark.parametrize("microseconds", [0, 1, 300_000, 999_999, 1_000_000])
    def test_occurrence_just_before_a_pause_is_missed(self, microseconds: int) -> None:
        occurrence = NOON + 2 * HOUR
        pause = Pause(occurrence + timedelta(microseconds=microseconds), NOON + 5 * HOUR)
        found = due_occurrences(HOURLY, "all", occurrence=NOON, due=NOON, now=NOON + 4.5 * HOUR, pause=pause)
        assert (occurrence in found.run) == (microseconds > 0)

    def test_occurrences_after_a_pause_run(self) -> None:
        pause = Pause(NOON - HOUR, NOON + 2 * HOUR)
        found = due_occurrences(HOURLY, "all", occurrence=NOON, due=NOON, now=NOON + 3 * HOUR, pause=pause)
        assert found == DueOccurrences([NOON + 2 * HOUR, NOON + 3 * HOUR], NOON + 4 * HOUR)

    def test_occurrence_moved_out_of_a_pause_runs(self) -> None:
        pause, due = Pause(NOON - HOUR, NOON + HOUR), NOON + 2 * HOUR
        assert due_occurrences(HOURLY, "all", occurrence=NOON, due=due, now=due, pause=pause).run == [
            NOON,
            NOON + HOUR,
            NOON + 2 * HOUR,
        ]

    def test_year_of_seconds_in_a_pause_is_skipped_without_iterating(self) -> None:
        pause = Pause(NOON + 2 * MINUTE, NOON + timedelta(days=365))
        every_second = Cron("* * * * * *")
        found = due_occurrences(every_second, "once", occurrence=NOON, due=NOON, now=pause.until - HOUR, pause=pause)
        assert found.run == [pause.since - timedelta(seconds=1)]

    def test_occurrence_moved_ahead_runs_once(self) -> None:
        now = NOON - timedelta(minutes=20)
        assert due_occurrences(HOURLY, "once", occurrence=NOON, due=now, now=now) == DueOccurrences([NOON], NOON + HOUR)

    def test_postponed_occurrence_is_not_missed(self) -> None:
        due = NOON + timedelta(minutes=30)
        assert due_occurrences(HOURLY, "skip", occurrence=NOON, due=due, now=due).run == [NOON]
