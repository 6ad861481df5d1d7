"""Judgements of a long run: growth is told from noise, from another process, and from what a thing has at rest."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.soak.gauges import Gauge, Reading
from tests.soak.page import page
from tests.soak.run import Outcome


def noise(at: int, up_to: float) -> float:
    """The same noise of a reading in every order of the tests."""
    return random.Random(at).uniform(-up_to, up_to)


def gauge(value: Callable[[int], float], count: int = 90, *, life: Callable[[int], int] = lambda _: 1) -> Gauge:
    return Gauge("memory", "MiB", 8, [Reading(10.0 * at, value(at), life(at)) for at in range(count)])


FLAT: dict[str, Callable[[int], float]] = {
    "level": lambda _: 100,
    "noise": lambda at: 100 + noise(at, 20),
    "warm-up": lambda at: min(100, 10 * at),
    "sawtooth": lambda at: 100 + at % 10,
    "spikes": lambda at: 1_000 if at % 13 == 0 else 100,
    "little": lambda at: 1 + at / 20,
}
GROWING: dict[str, Callable[[int], float]] = {
    "line": lambda at: 20 + at,
    "late": lambda at: 50 if at < 55 else 50 + 3 * (at - 55),
    "leak of a process": lambda at: 110 + 0.8 * at,
    "noisy line": lambda at: 20 + at + noise(at, 10),
}


@pytest.mark.parametrize("shape", FLAT)
def test_flat_gauge_is_not_told_to_grow(shape: str) -> None:
    assert not gauge(FLAT[shape]).grows()


@pytest.mark.parametrize("shape", GROWING)
def test_growing_gauge_is_found(shape: str) -> None:
    found = gauge(GROWING[shape])
    assert found.grows()
    assert not Outcome(1, 900, gauges=[found]).is_right
    assert "grows" in page(Outcome(1, 900, gauges=[found]))


def test_processes_are_judged_one_by_one() -> None:
    """The second begins small, and the first was growing for less time."""
    assert not gauge(lambda at: 20 + at if at < 20 else 40, life=lambda at: int(at >= 20)).grows()
    assert gauge(lambda at: 40 if at < 20 else at, life=lambda at: int(at >= 20)).grows()


def test_few_readings_say_nothing() -> None:
    assert not gauge(lambda at: 100 * at, count=11).grows()
