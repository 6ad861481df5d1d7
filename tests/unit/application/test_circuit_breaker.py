"""When failures stop a handler: so many of so many, within a window that slides."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.application.circuit_breaker import CircuitBreaker, FailureWindow
from durable.errors import InvalidSetting


def test_window_opens_at_the_rate_and_not_before() -> None:
    window = FailureWindow(CircuitBreaker(failure_rate=0.15, at_least=10))
    window.handled(18, now=0)
    assert window.failed(now=1) is None
    assert window.failed(now=2) is None
    assert window.failed(now=3) is None
    assert window.failed(now=4) == "4 of 22 messages failed within 60 s"


def test_breaker_needs_a_minimum_of_messages() -> None:
    window = FailureWindow(CircuitBreaker(at_least=10))
    assert [window.failed(now=0) is not None for _ in range(10)] == [False] * 9 + [True]


def test_failures_older_than_the_window_do_not_count() -> None:
    window = FailureWindow(CircuitBreaker(failure_rate=0.5, at_least=4, window=timedelta(seconds=10)))
    assert [window.failed(now=0) for _ in range(3)] == [None] * 3
    assert window.failed(now=11) is None
    assert [window.failed(now=12) is not None for _ in range(3)] == [False, False, True]


def test_cleared_window_starts_from_zero() -> None:
    window = FailureWindow(CircuitBreaker(failure_rate=0.5, at_least=2))
    window.failed(now=0)
    window.clear()
    assert window.failed(now=1) is None


def test_counts_of_other_nodes_are_added() -> None:
    window = FailureWindow(CircuitBreaker(failure_rate=0.5, at_least=10))
    window.failed(now=0)
    assert window.counts(now=1) == (1, 1)
    assert window.heard(8, 8, now=1) is None
    assert window.failed(now=2) == "10 of 10 messages failed within 60 s"
    assert window.heard(18, 8, now=3) == "10 of 20 messages failed within 60 s"
    assert window.heard(19, 8, now=3) is None
    assert window.counts(now=62) == (0, 0)
    assert window.heard(10, 0, now=62) is None
    window.heard(9, 9, now=63)
    window.clear()
    assert window.failed(now=64) is None


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=200))
def test_window_counts_like_a_list_within_one_slot(steps: list[tuple[float, bool]]) -> None:
    breaker = CircuitBreaker(failure_rate=0.5, at_least=5, window=20)
    window, seen, now = FailureWindow(breaker), list[tuple[float, bool]](), 0.0
    for pause, fails in steps:
        now += pause
        seen.append((now, fails))
        opens = False
        if fails:
            opens = window.failed(now) is not None
        else:
            window.handled(1, now)
        # What began in one twentieth of the window is forgotten together, a second early at most.
        oldest = [at for at, _ in seen if now - 20 < at <= now - 19] + [now - 19]
        assert opens in {fails and _is_too_much([failed for at, failed in seen if at >= cut]) for cut in oldest}


def _is_too_much(recent: list[bool]) -> bool:
    return len(recent) >= 5 and sum(recent) >= 0.5 * len(recent)


@pytest.mark.parametrize(
    "wrong",
    [{"failure_rate": 0}, {"failure_rate": 1.5}, {"at_least": 0}, {"window": 0}, {"open_for": -1}, {"longest": 0}],
)
def test_invalid_circuit_breaker_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(wrong))):
        CircuitBreaker(**wrong)  # type: ignore[arg-type]
