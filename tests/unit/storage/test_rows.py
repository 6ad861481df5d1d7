"""What is kept of an attempt that failed: enough to see why, and no more than fits."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.messages.registry import class_of
from durable.storage.rows import KEPT_ATTEMPTS, ONCE, Failure, Letter, Tried, both_ends, error_text

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def failure(error: Exception) -> Failure:
    try:
        raise error
    except Exception as raised:
        return Failure.from_error(raised, number=1, failed_at=NOW)


def test_attempt_records_number_time_error_and_traceback() -> None:
    kept = failure(LookupError("no such order"))
    assert (kept.number, kept.failed_at, kept.exception_type, kept.reason) == (1, NOW, "LookupError", "no such order")
    assert kept.traceback.startswith("Traceback")
    assert kept.traceback.endswith("LookupError: no such order\n")
    assert "raise error" in kept.traceback


def test_attempt_is_bounded_for_any_exception() -> None:
    kept = failure(ValueError("x" * 1_000_000))
    assert len(kept.reason) < 2_100
    assert len(kept.traceback) < 20_100
    assert "raise error" in kept.traceback, "where it began matters as much as what it came to"


def test_attempt_is_storable_for_any_exception() -> None:
    kept = failure(ValueError("a\0b\ud800"))
    assert (kept.reason, "\0" in kept.traceback) == ("a\N{REPLACEMENT CHARACTER}b?", False)


@pytest.mark.parametrize("raised", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_exception_with_a_failing_str_has_a_text(raised: type[BaseException]) -> None:
    class Speechless(Exception):
        def __str__(self) -> str:
            raise raised

        __repr__ = __str__

    kind, message, text = error_text(Speechless())
    assert kind.endswith("Speechless")
    assert "cannot be made" in message
    assert "Speechless" in text


def test_type_has_its_module_except_for_built_ins() -> None:
    assert error_text(KeyError("a"))[:2] == ("KeyError", "'a'")
    assert error_text(TimeoutError())[:2] == ("TimeoutError", "TimeoutError")


def test_newest_attempts_are_kept() -> None:
    failures = [Failure(number, NOW, "E", "r", "t") for number in range(1, 51)]
    assert Tried(1, failures).columns()["failed_number"] == list(range(51 - KEPT_ATTEMPTS, 51))
    assert all(values == [] for name, values in ONCE.columns().items() if name.startswith("failed"))


@given(st.text(), st.integers(2, 50))
def test_both_ends_of_a_text_are_kept(text: str, limit: int) -> None:
    kept = both_ends(text, limit)
    assert (kept == text) == (len(text) <= limit)
    half = limit // 2
    assert kept.startswith(text[:half])
    assert kept.endswith(text[-half:])
    assert len(kept) < limit + 60


def raised_below_durable(code: str, **names: Any) -> Exception:
    """What this code raises, as if a module of durable had run it and nobody had called that."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  any
        eval(code, {"__name__": "durable.agents.handling", **names})
    error = caught.value
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename != "<string>":
        error.__traceback__ = error.__traceback__.tb_next
    return error


def test_traceback_begins_at_the_first_frame_of_the_application() -> None:
    def handler() -> None:
        class_of("rows.unheard-of")

    lines = error_text(raised_below_durable("handler()", handler=handler))[2].splitlines()

    assert lines[0].startswith("Traceback")
    assert lines[1].endswith("in handler")
    assert any(line.endswith("in class_of") for line in lines), "and has all that follows"


def test_traceback_of_own_frames_only_is_whole() -> None:
    assert "<string>" in error_text(raised_below_durable("1 / 0"))[2]


def test_fingerprint_without_an_exception_has_the_kind_and_the_message_type() -> None:
    expired = Letter.because("expired before it was sent", "expired", "orders.placed").fingerprint
    assert Letter.because("in another way", "expired", "orders.placed").fingerprint == expired
    assert Letter.because("expired before it was sent", "expired", "orders.paid").fingerprint != expired
    assert Letter.because("expired before it was sent", "rejected", "orders.placed").fingerprint != expired
