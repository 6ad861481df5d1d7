"""Values of subclasses as those of the classes themselves."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.plain import plain, plain_text, plain_time
from tests.support.subclasses import TEXTS, VALUES, Moment


@pytest.mark.parametrize(("cls", "value"), VALUES.values(), ids=list(VALUES))
def test_plain_value_is_equal_and_of_the_class_itself(cls: type, value: Any) -> None:
    assert plain(value) == value
    assert type(plain(value)) is cls


@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
def test_plain_text_is_the_same_text(text: str) -> None:
    assert plain_text(text) == text
    assert type(plain_text(text)) is str


@pytest.mark.parametrize("value", [None, 17, b"acme"])
def test_plain_text_keeps_values_of_other_kinds(value: Any) -> None:
    assert plain_text(value) is value


def test_value_of_another_class_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="objects of type object is unsupported"):
        plain(object())


@given(moment=st.datetimes(timezones=st.timezones()), fold=st.integers(0, 1))
def test_plain_time_keeps_every_part(moment: datetime, fold: int) -> None:
    own = Moment.combine(moment.date(), moment.timetz()).replace(fold=fold)
    assert type(own) is Moment

    assert type(plain_time(own)) is datetime
    assert plain_time(own).isoformat() == own.isoformat()
    assert plain_time(own).fold == fold
    assert plain_time(moment) is moment


def test_time_is_plain_while_a_library_stops_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("durable.plain.datetime", Moment)
    stopped = Moment(2024, 2, 29, 12, tzinfo=UTC)

    assert msgspec.json.encode(plain_time(stopped)) == b'"2024-02-29T12:00:00Z"'
    assert msgspec.json.encode([stopped], enc_hook=plain) == b'["2024-02-29T12:00:00Z"]'
