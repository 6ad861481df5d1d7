"""Times of options: spans with their units, before or after now, and ISO 8601."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from durable.cli.arguments import parse_coming_time, parse_span, parse_time
from durable.cli.send import message_options
from durable.errors import InvalidSetting, WiringError

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SPANS = {
    "1h30m": timedelta(minutes=90),
    "1h 30min": timedelta(minutes=90),
    "2h": timedelta(hours=2),
    "1.5h": timedelta(minutes=90),
    "7 d": timedelta(days=7),
    "2w": timedelta(days=14),
}


@pytest.mark.parametrize(("text", "span"), SPANS.items())
def test_span_is_read_alike_by_every_option(text: str, span: timedelta) -> None:
    for ahead in (text, f"in {text}"):
        assert parse_coming_time(ahead, NOW, option="--at") == NOW + span
    for ago in (text, f"{text} ago"):
        assert parse_time(ago, NOW, option="--since") == NOW - span
    assert parse_span(text, option="--grace") == span


@pytest.mark.parametrize("text", ["", "in", "soon", "60", "in 60", "-2h", "1h30", "2h ago", "2030-12-31T23:59"])
def test_other_text_is_no_coming_time(text: str) -> None:
    with pytest.raises(WiringError, match=f"^--at: {re.escape(repr(text))} is not a time; write 90s"):
        parse_coming_time(text, NOW, option="--at")


@pytest.mark.parametrize("option", ["at", "deliver_by"])
@pytest.mark.parametrize("text", ["9999-12-31T23:59:59Z", "9999-12-31T12:00+00:00", "0001-01-01T00:00Z"])
def test_time_outside_the_calendar_is_refused_by_its_option(option: str, text: str) -> None:
    named = f"--{option.replace('_', '-')}"
    with pytest.raises(WiringError, match=f"^{named}: {re.escape(repr(text))} lies outside the calendar"):
        message_options(**{option: text})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "60", "soon", "-1h", "101000d"])
def test_other_text_is_no_span(text: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^--grace: {re.escape(repr(text))} is no duration"):
        parse_span(text, option="--grace")
