"""Sums by which an audit finds the ids that do not balance, without Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.pipeline import ledger

SENT, RECEIVED, LOCAL, ODD = ledger._SENT, ledger._RECEIVED, ledger._LOCAL, ledger._ODD

Row = tuple[tuple[int, int], int]
"""An id, in two halves, and what it adds to the sum."""


def colliding(first: int) -> tuple[int, int]:
    """An id whose number is that of all the others of this kind."""
    mix = int(ledger._MIX)
    return first, 77 ^ first * mix & (1 << 64) - 1


def uneven(rows: Sequence[Row], times: Sequence[int] | None = None) -> set[tuple[int, int]]:
    ids = np.array([each for each, _ in rows], np.uint64).reshape(-1, 2)
    weights, moments = [weight for _, weight in rows], times or [0] * len(rows)
    found = ledger._uneven(ids, np.array(weights, np.int64), np.array(moments, np.int64))
    return {(int(first), int(second)) for first, second in found}


def innocent(weights: Counter[int]) -> bool:
    return weights in (Counter([SENT, RECEIVED]), Counter([LOCAL]))


APART = st.tuples(st.integers(0, 3), st.integers(0, 3))
ALIKE = st.integers(0, 4).map(colliding)
WEIGHTS = st.sampled_from([SENT, RECEIVED, LOCAL, ODD])


@given(st.lists(st.tuples(APART | ALIKE, WEIGHTS), max_size=24))
def test_uneven_ids_are_found_when_they_share_numbers(rows: list[Row]) -> None:
    of: dict[tuple[int, int], Counter[int]] = {}
    for each, weight in rows:
        of.setdefault(each, Counter())[weight] += 1
    shared = Counter(first * int(ledger._MIX) & (1 << 64) - 1 ^ second for first, second in of)
    alone = {each for each in of if shared[each[0] * int(ledger._MIX) & (1 << 64) - 1 ^ each[1]] == 1}
    assert uneven(rows) == {each for each, weights in of.items() if each not in alone or not innocent(weights)}


def test_uneven_ids_include_both_of_a_pair_with_one_number() -> None:
    assert uneven([(colliding(1), SENT), (colliding(2), RECEIVED)]) == {colliding(1), colliding(2)}


def test_uneven_ids_include_one_with_a_sum_of_odd_rows_like_an_innocent_one() -> None:
    rows = [((1, 2), SENT), ((1, 2), RECEIVED), *[((1, 2), ODD)] * (1 << 14)]
    assert uneven(rows) == {(1, 2)}


@pytest.mark.parametrize(("later", "found"), [(1_000_000, set()), (1_000_001, {(1, 2)})])
def test_uneven_ids_include_one_of_two_times(later: int, found: set[tuple[int, int]]) -> None:
    """A second is what transports may round away."""
    assert uneven([((1, 2), SENT), ((3, 4), LOCAL), ((1, 2), RECEIVED)], [7, 10**9, 7 + later]) == found
