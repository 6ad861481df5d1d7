"""The pace of a connection: how many frames at a time, and how much its peer may ask for."""

from __future__ import annotations

import pytest

from durable.errors import ProtocolViolation
from durable.transports.tcp.pace import MOST_FRAMES, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    return Pace(clock)


def test_turn_is_over_after_some_frames(pace: Pace) -> None:
    for _ in range(3):
        pace.begin()
        assert [pace.is_over() for _ in range(MOST_FRAMES + 1)] == [False] * MOST_FRAMES + [True]


def test_turn_is_over_after_some_milliseconds(pace: Pace, clock: Clock) -> None:
    pace.begin()
    assert not pace.is_over()
    clock.now += 0.01
    assert pace.is_over()
    pace.begin()
    assert not pace.is_over()


def test_questions_at_the_usual_rate_are_answered_for_ever(pace: Pace, clock: Clock) -> None:
    for _ in range(1_000):
        pace.ask(announces=True)
        pace.ask()
        clock.now += 0.25


@pytest.mark.parametrize(("announces", "most"), [(False, 200), (True, 20)])
def test_questions_beyond_the_rate_are_a_violation(pace: Pace, clock: Clock, announces: bool, most: int) -> None:
    for _ in range(most):
        pace.ask(announces=announces)
    with pytest.raises(ProtocolViolation, match="too many questions"):
        pace.ask(announces=announces)
    clock.now += 1
    for _ in range(most // 4):
        pace.ask(announces=announces)
    with pytest.raises(ProtocolViolation, match="too many questions"):
        pace.ask(announces=announces)


def test_calls_of_nothing_beyond_the_rate_are_a_violation(pace: Pace, clock: Clock) -> None:
    for _ in range(10_000):
        pace.miss()
    with pytest.raises(ProtocolViolation, match="too many calls: their services"):
        pace.miss()
    clock.now += 0.125
    for _ in range(125):
        pace.miss()
    with pytest.raises(ProtocolViolation, match="too many calls: their services"):
        pace.miss()
