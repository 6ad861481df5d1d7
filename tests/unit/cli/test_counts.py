"""Counts with their nouns, and titles of columns."""

from __future__ import annotations

import re
from typing import Any

import pytest

from durable.cli.dead_letters import views as letters
from durable.cli.output import counted
from durable.cli.scheduled import views as scheduled
from durable.dead_letters.bulk import Run
from tests.support.pages import ROOT

REHEARSED: dict[str, Any] = {"outcome": "succeeds", "error": None, "letter_id": 1, "sends": [], "does": []}


@pytest.mark.parametrize(
    ("count", "text"), [(0, "no letter"), (1, "1 letter"), (2, "2 letters"), (1000, "1,000 letters")]
)
def test_count_has_the_number_of_its_noun(count: int, text: str) -> None:
    assert counted(count, "letter") == text


@pytest.mark.parametrize(("total", "text"), [(0, "replayed no letter"), (1, "replayed 1 of 1 letter")])
def test_run_is_told_in_the_number_of_its_letters(total: int, text: str) -> None:
    run = Run(done=total, total=total)
    assert letters.told(run, "replayed") == [text]
    assert scheduled.told(run, "replayed", 0) == [text.replace("letter", "message")]


def test_rehearsal_is_told_in_the_number_of_its_letters() -> None:
    assert letters.rehearsal([])[0] == "rehearsed no letter"
    assert letters.rehearsal([REHEARSED])[0] == "rehearsed 1 letter and rolled back: 1 would succeed"


def test_titles_of_columns_are_in_lower_case() -> None:
    found = [
        f"{path.name}: {title}"
        for path in (ROOT / "durable" / "cli").rglob("*.py")
        for title in re.findall(r'"([A-Z][A-Z /0-9]{2,})":', path.read_text())
    ]
    assert not found
