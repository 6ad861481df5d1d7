"""How many shared transactions a handler has open at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.agents.at_once import AtOnce

WORKERS = 8
NOTHING_GAINED = {1: 2_000.0, 2: 2_000.0, 4: 2_000.0, 8: 2_000.0}
LOOP_IS_FULL = {1: 1_500.0, 2: 2_000.0, 4: 1_200.0, 8: 600.0}
DATABASE_IS_SLOW = {1: 100.0, 2: 200.0, 4: 400.0, 8: 800.0}
ONE_IS_BEST = {1: 2_000.0, 2: 1_000.0, 4: 500.0, 8: 250.0}


def spent(at_once: AtOnce, rates: Mapping[int, float], seconds: float) -> Counter[int]:
    """Handle groups of ten at these rates for so long; how many there were with each number."""
    groups, now = Counter[int](), 0.0
    while now < seconds:
        groups[at_once.count] += 1
        now += 10 / rates[at_once.count]
        at_once.handled(10, now)
    return groups


@pytest.mark.parametrize(
    ("rates", "best"), [(LOOP_IS_FULL, 2), (DATABASE_IS_SLOW, 8), (ONE_IS_BEST, 1), (NOTHING_GAINED, 1)]
)
def test_number_with_the_highest_rate_is_found_and_kept(rates: Mapping[int, float], best: int) -> None:
    at_once = AtOnce(WORKERS)
    spent(at_once, rates, seconds=30)
    groups = spent(at_once, rates, seconds=120)
    assert groups[best] > 0.8 * groups.total()


def test_number_changes_with_its_handler() -> None:
    at_once = AtOnce(WORKERS)
    spent(at_once, DATABASE_IS_SLOW, seconds=60)
    spent(at_once, ONE_IS_BEST, seconds=120)
    assert spent(at_once, ONE_IS_BEST, seconds=60).most_common(1)[0][0] == 1


def test_time_without_waiting_messages_is_not_measured() -> None:
    at_once = AtOnce(WORKERS)
    now = 0.0
    for _ in range(1_000):
        now += 10
        at_once.handled(1, now)
        at_once.rest()
    assert at_once.count == AtOnce(WORKERS).count


@given(st.integers(1, 100), st.lists(st.tuples(st.integers(1, 100), st.floats(0, 1)), max_size=200))
def test_number_is_one_of_the_workers(workers: int, groups: list[tuple[int, float]]) -> None:
    at_once, now = AtOnce(workers), 0.0
    for messages, seconds in groups:
        now += seconds
        at_once.handled(messages, now)
        assert 1 <= at_once.count <= workers
