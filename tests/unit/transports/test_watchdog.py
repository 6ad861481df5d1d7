"""Leases: who chooses what, and what a process that stood still may conclude."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.transports.watchdog import LONGEST_PAUSE, Bounds, Keeping, Watchdog

BOUNDS = Bounds(15.0, 120.0)


def waited(watchdog: Watchdog, now: float, until: float) -> tuple[Any, ...]:
    """Look as often as the watchdog wants, until a time. Returns whether the lease is over, and when that was seen."""
    while now < until:
        now += max(watchdog.pause(now), 0.001)
        if watchdog.has_elapsed(now):
            return True, now
    return False, now


@pytest.mark.parametrize(("lease", "refused"), [(14.9, True), (15.0, False), (120.0, False), (120.1, True)])
def test_lease_is_chosen_within_the_bounds(lease: float, refused: bool) -> None:
    watchdog = Watchdog(BOUNDS, 0.0)
    assert bool(watchdog.reset(lease, 0.0)) is refused
    assert watchdog.lease == (120.0 if refused else lease)


def test_refused_reset_changes_nothing() -> None:
    watchdog = Watchdog(BOUNDS, 0.0)
    watchdog.reset(20.0, 0.0)
    assert "out of bounds; choose 15 to 120 s" in watchdog.reset(121.0, 10.0)
    assert waited(watchdog, 10.0, 30.0) == (True, pytest.approx(20.0))


def test_first_lease_is_the_longest() -> None:
    assert waited(Watchdog(BOUNDS, 0.0), 0.0, 200.0) == (True, pytest.approx(120.0))


def test_reset_begins_a_lease() -> None:
    watchdog = Watchdog(BOUNDS, 0.0)
    for second in range(0, 100, 10):
        assert not watchdog.reset(15.0, float(second))
        assert waited(watchdog, float(second), second + 10.0)[0] is False
    assert waited(watchdog, 100.0, 200.0) == (True, pytest.approx(105.0, abs=0.01))


def test_lease_goes_on_when_its_server_stood_still() -> None:
    watchdog = Watchdog(BOUNDS, 0.0)
    watchdog.reset(15.0, 0.0)
    _, now = waited(watchdog, 0.0, 10.0)
    watchdog.pause(now)
    assert not watchdog.has_elapsed(now + 60)
    assert waited(watchdog, now + 60, now + 100) == (True, pytest.approx(now + 59 + 5, abs=1.1))


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.001, 500)), max_size=20))
def test_lease_never_ends_before_its_time(steps: list[tuple[float, float]]) -> None:
    watchdog, now, reset_at, lease = Watchdog(BOUNDS, 0.0), 0.0, 0.0, 120.0
    for step, wanted in steps:
        now += step
        if not watchdog.reset(wanted, now):
            reset_at, lease = now, wanted
        assert 0 <= watchdog.pause(now) <= LONGEST_PAUSE
        if watchdog.has_elapsed(now):
            assert now >= reset_at + lease
            return


@given(st.floats(0.1, 1_000), st.floats(0.1, 1_000), st.floats(0.1, 1_000))
def test_nearest_lease_is_never_refused(one: float, other: float, lease: float) -> None:
    bounds = Bounds(min(one, other), max(one, other))
    assert not bounds.refusal(bounds.nearest(lease))


def test_client_resets_three_times_within_its_lease() -> None:
    keeping, resets, now = Keeping(30.0, 0.0), 0, 0.0
    while now < 30.0:
        now += keeping.pause(now)
        assert not keeping.has_lapsed(now)
        keeping.reset(now)
        resets += 1
    assert resets == 3


def test_client_resets_nothing_after_standing_still() -> None:
    keeping = Keeping(30.0, 0.0)
    assert keeping.has_lapsed(30.0)
    assert not keeping.has_lapsed(29.9)
