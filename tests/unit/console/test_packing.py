"""Selections as forms carry them."""

from __future__ import annotations

from dataclasses import fields

import pytest

from durable.console.packing import packed, unpacked
from durable.messages.validation import MAX_TEXT_BYTES
from durable.storage.dead_letters import Selection

TEXTS = {each.name for each in fields(Selection)} - {"letters", "ids", "since", "until", "up_to", "resolved"}


@pytest.mark.parametrize("char", ["a", '"', "\u202e", "\u0416", "\U0001f600"])
def test_selection_by_the_longest_filters_comes_back(char: str) -> None:
    text = char * (MAX_TEXT_BYTES // len(char.encode()))
    selection = Selection(**dict.fromkeys(TEXTS, text), up_to=17)  # type: ignore[arg-type]
    assert unpacked(packed(selection)) == selection
