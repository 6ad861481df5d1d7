"""What cannot be stored is found before it spoils its batch."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from uuid import uuid4

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.envelope import Envelope, new_id, unix_ms
from durable.messages.validation import (
    EARLIEST,
    LATEST,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_TEXT_BYTES,
    find_error,
    too_old,
)

SOUND = Envelope(
    id=new_id(),
    message_type="orders.placed",
    destination="tcp://billing:1",
    source="orders",
    correlation_id=new_id(),
    body=b"{}",
    sent_at=datetime(2024, 2, 29, tzinfo=UTC),
    partition_key="order-1",
    headers={"tenant": "blue"},
    deliver_by=datetime(2024, 3, 1, tzinfo=UTC),
    execution_time=datetime(2024, 3, 1, tzinfo=UTC),
)
UNSAFE = [*map(chr, range(32)), "\x7f", "\ud800", "\udbff", "\udc00", "\udfff"]
TEXTS = ["message_type", "source", "destination", "content_type", "partition_key"]

any_text = st.text(st.characters(exclude_categories=()), max_size=50)


def flaw_with(**changes: object) -> str | None:
    return find_error(msgspec.structs.replace(SOUND, **changes), max_message_bytes=100)


def test_a_sound_envelope_has_no_flaw() -> None:
    assert find_error(SOUND, max_message_bytes=2) is None


def test_body_over_the_limit_is_a_flaw_naming_both_sizes() -> None:
    reason = flaw_with(body=b"x" * 101)
    assert reason == "the body has 101 bytes, more than max_message_bytes (100)"
    assert flaw_with(body=b"x" * 100) is None


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("character", UNSAFE, ids=ascii)
def test_unsafe_character_is_a_flaw_in_every_text(name: str, character: str) -> None:
    assert flaw_with(**{name: f"a{character}b"}) == f"{name} has a control character or a lone surrogate"


@pytest.mark.parametrize("character", UNSAFE, ids=ascii)
def test_unsafe_character_in_a_header_is_a_flaw(character: str) -> None:
    assert "has a control character" in str(flaw_with(headers={"name": f"a{character}"}))
    assert "has a control character" in str(flaw_with(headers={f"a{character}": "value"}))


@pytest.mark.parametrize("name", TEXTS[:4])
def test_an_envelope_without_one_of_its_names_is_flawed(name: str) -> None:
    assert flaw_with(**{name: ""}) == f"{name} is empty"


# One, two, three and four bytes in UTF-8.
ALPHABETS = ["x", "\N{CYRILLIC SMALL LETTER ZHE}", "\N{CJK UNIFIED IDEOGRAPH-4E2D}", "\N{GRINNING FACE}"]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("letter", ALPHABETS, ids=ascii)
def test_text_is_bounded_in_bytes_of_any_alphabet(name: str, letter: str) -> None:
    longest = letter * (MAX_TEXT_BYTES // len(letter.encode()))
    assert flaw_with(**{name: longest}) is None
    assert flaw_with(**{name: longest + letter}) == f"{name} is longer than {MAX_TEXT_BYTES} bytes in UTF-8"


@pytest.mark.parametrize("letter", ALPHABETS, ids=ascii)
def test_headers_are_bounded_in_bytes_of_any_alphabet(letter: str) -> None:
    longest = letter * ((MAX_HEADER_BYTES - 1) // len(letter.encode()))
    assert flaw_with(headers={"a": longest}) is None
    assert flaw_with(headers={"a": longest + letter}) == "the headers have more than max_header_bytes (8192)"


def test_headers_are_bounded_in_number_and_size() -> None:
    assert flaw_with(headers={str(number): "" for number in range(MAX_HEADERS)}) is None
    many = {str(number): "" for number in range(1_000)}
    assert flaw_with(headers=many) == "1,000 headers, more than max_headers (100)"
    assert flaw_with(headers={"a": "x" * (MAX_HEADER_BYTES - 1)}) is None
    assert "max_header_bytes (8192)" in str(flaw_with(headers={"a": "x" * MAX_HEADER_BYTES}))


@pytest.mark.parametrize("value", [float("nan"), 1, None, b"bytes", ["list"]])
def test_header_other_than_text_is_a_flaw(value: object) -> None:
    assert flaw_with(headers={"a": value}) == "header 'a' is not text"
    if not isinstance(value, list):
        assert flaw_with(headers={value: "a"}) == f"header {value!r} is not text"


@pytest.mark.parametrize("name", ["sent_at", "deliver_by", "execution_time"])
def test_a_time_without_a_zone_is_a_flaw(name: str) -> None:
    assert flaw_with(**{name: datetime(2024, 2, 29)}) == f"{name} has no time zone"


@pytest.mark.parametrize("name", ["sent_at", "deliver_by", "execution_time"])
@pytest.mark.parametrize(
    "moment",
    [
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
        datetime.min.replace(tzinfo=UTC),
        datetime(1, 1, 1, 23, 59, 59, tzinfo=UTC),
        datetime(9999, 12, 31, tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))),
    ],
)
def test_time_outside_the_calendar_of_some_zone_is_a_flaw(name: str, moment: datetime) -> None:
    assert flaw_with(**{name: moment}) == f"{name} lies outside the calendar"


@pytest.mark.parametrize("moment", [EARLIEST, datetime(1970, 1, 1, tzinfo=UTC), LATEST])
def test_earliest_and_latest_times_are_sound_in_every_zone(moment: datetime) -> None:
    assert flaw_with(sent_at=moment, deliver_by=moment, execution_time=moment) is None
    for hours in (-23, 23):
        moment.astimezone(timezone(timedelta(hours=hours)))


@given(any_text)
def test_flawless_text_can_be_stored(text: str) -> None:
    for reason in (flaw_with(partition_key=text), flaw_with(headers={"a": text}), flaw_with(headers={text: "a"})):
        if reason is None:
            assert "\0" not in text.encode().decode()
            assert "\r" not in text
            assert "\n" not in text


@given(st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=50))
def test_safe_text_is_sound(text: str) -> None:
    assert flaw_with(partition_key=text, headers={"a": text}) is None


WINDOW = timedelta(days=7)
MADE = datetime.fromtimestamp((unix_ms(SOUND.id) or 0) / 1000, UTC)


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        (timedelta(0), False),
        (WINDOW, False),
        (WINDOW + timedelta(milliseconds=1), True),
        (timedelta(days=365), True),
        (timedelta(days=-1), False),  # of a sender whose clock is fast
    ],
)
def test_an_envelope_is_too_old_when_its_id_may_have_been_forgotten(age: timedelta, expected: bool) -> None:
    assert too_old(SOUND, MADE + age, WINDOW) is expected


def test_envelope_without_a_time_in_its_id_is_dated_by_sent_at() -> None:
    envelope = msgspec.structs.replace(SOUND, id=uuid4(), sent_at=MADE)
    assert not too_old(envelope, MADE + WINDOW, WINDOW)
    assert too_old(envelope, MADE + WINDOW + timedelta(seconds=1), WINDOW)
