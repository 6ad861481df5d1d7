"""How fast a run goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.dead_letters.bulk import BATCH_SIZE, Pace


def test_batches_are_full_and_without_pauses_without_a_rate() -> None:
    assert (Pace().batch_size, Pace().pause(1_000_000, 0.0)) == (BATCH_SIZE, 0.0)


@pytest.mark.parametrize(("rate", "size"), [(0.1, 1), (1, 1), (4, 1), (5, 2), (40, 10), (400, 100), (10_000, 100)])
def test_a_rate_is_kept_in_small_steps(rate: float, size: int) -> None:
    assert Pace(rate).batch_size == size


def test_pace_waits_until_the_batch_is_due() -> None:
    assert Pace(10).pause(5, 0.2) == pytest.approx(0.3)
    assert Pace(10).pause(5, 0.9) == 0.0, "time that was lost is made up for"


@given(st.floats(0.01, 1e6), st.integers(1, 1_000), st.floats(0, 100))
def test_pace_never_exceeds_its_rate(rate: float, batches: int, each: float) -> None:
    pace, now, done = Pace(rate), 0.0, 0
    for _ in range(min(batches, 50)):
        now += each
        done += pace.batch_size
        now += pace.pause(done, now)
        assert done <= rate * now * (1 + 1e-9) + 1e-6
