"""The words and times that a command is given: what they mean, and what is none."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from durable.cli.arguments import parse_time
from durable.cli.dead_letters.selection import parse_words
from durable.errors import WiringError
from durable.storage.dead_letters import Selection

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
ID = UUID("01900000-0000-7000-8000-000000000000")


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ([], (None, [], [])),
        (["app:bus"], ("app:bus", [], [])),
        (["app:bus", "7", str(ID), "8"], ("app:bus", [7, 8], [ID])),
        (["7"], (None, [7], [])),
        ([ID.hex], (None, [], [ID])),
        (["9" * 32], (None, [], [UUID("9" * 32)])),
        (["9223372036854775807"], (None, [2**63 - 1], [])),
    ],
)
def test_words_are_a_bus_then_letters_by_number_or_id(words: list[str], meaning: object) -> None:
    assert parse_words(words) == meaning


@pytest.mark.parametrize("words", [["seven"], ["7", "app:bus"], ["-7"], ["0"], ["7.0"], [""], ["9223372036854775808"]])
def test_word_without_a_meaning_is_refused_by_name(words: list[str]) -> None:
    with pytest.raises(WiringError, match=rf"^LETTER: '?{re.escape(words[-1])}'? is n"):
        parse_words(words)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90s", NOW - timedelta(seconds=90)),
        ("30m", NOW - timedelta(minutes=30)),
        ("2h ago", NOW - timedelta(hours=2)),
        ("7 d", NOW - timedelta(days=7)),
        ("2029-12-31T23:59:00Z", datetime(2029, 12, 31, 23, 59, tzinfo=UTC)),
        ("2029-12-31T23:59:00+02:00", datetime(2029, 12, 31, 21, 59, tzinfo=UTC)),
    ],
)
def test_time_is_read_as_an_age_or_with_a_zone(text: str, moment: datetime) -> None:
    assert parse_time(text, NOW, option="--since") == moment


@pytest.mark.parametrize(
    "text",
    ["", "yesterday", "2029-12-31", "2029-12-31T23:59:00", "-2h", "2h later", "999999999d", "0001-01-01T00:00+23:00"],
)
def test_malformed_time_is_refused(text: str) -> None:
    with pytest.raises(WiringError, match=f"^--since: {re.escape(repr(text))} is not a time"):
        parse_time(text, NOW, option="--since")


def test_selection_is_not_narrowed_by_the_resolved_state() -> None:
    assert not Selection().is_narrowed
    assert not Selection(resolved=None).is_narrowed
    assert Selection(side="incoming").is_narrowed
    assert Selection(letters=[]).is_narrowed


def test_selection_is_not_narrowed_by_an_empty_text() -> None:
    assert not Selection(text="").is_narrowed
    assert Selection(text="refused").is_narrowed
    assert Selection(text="", side="incoming").is_narrowed
