"""The entry of an attempt: whoever is not waited for any more does not begin."""

from __future__ import annotations

import pytest

from durable.agents.attempts import Entry
from durable.agents.runner import NoRoom


def test_attempt_given_up_is_not_entered() -> None:
    entered: list[str] = []
    entry = Entry(lambda: entered.append("entered"))
    assert entry.give_up()
    with pytest.raises(NoRoom):
        entry.enter()
    assert entered == []


def test_entered_attempt_counts_after_giving_up() -> None:
    entry = Entry(lambda: None)
    entry.enter()
    assert not entry.give_up()
