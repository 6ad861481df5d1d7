"""Where the looks for work begin, while handled rows lie in the way."""

from __future__ import annotations

import msgspec

from durable.envelope import LeasedEnvelope
from durable.recovery.floors import SLOW, Floors
from tests.support.one_handler import envelope

LONG = 0.2


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def begin(floors: Floors) -> bool:
    floors.begin()
    return floors.is_short


def begun(seconds: float = LONG) -> tuple[Floors, Clock]:
    """Floors after a full look at one lane, which has taken so long."""
    clock = Clock()
    floors = Floors(clock)
    assert not begin(floors)
    floors.looked(seconds, ["orders"])
    return floors, clock


def claim(floors: Floors, *places: int, lane: str = "orders") -> None:
    floors.claimed(lane, [msgspec.structs.replace(LeasedEnvelope(envelope(1)), seq=place) for place in places])


def test_looks_are_full_when_they_take_little_time() -> None:
    floors, clock = begun(SLOW)
    claim(floors, 7, 8)
    clock.seconds += 2
    assert not begin(floors)
    assert floors.of("orders") == 0


def test_slow_look_is_followed_by_short_ones_for_ten_times_as_long() -> None:
    floors, clock = begun()
    clock.seconds += 9.9 * LONG
    assert begin(floors)
    clock.seconds += 0.2 * LONG
    assert not begin(floors)


def test_short_looks_end_after_five_seconds() -> None:
    floors, clock = begun(60.0)
    clock.seconds += 4.9
    assert begin(floors)
    clock.seconds += 0.2
    assert not begin(floors)


def test_claims_of_a_full_look_begin_at_the_beginning_and_go_on() -> None:
    floors, _ = begun()
    assert floors.of("orders") == 0
    claim(floors, 7, 9)
    assert floors.of("orders") == 9
    assert floors.of("others") == 0


def test_short_look_begins_where_claims_were_a_second_ago() -> None:
    floors, clock = begun()
    claim(floors, 7, 9)
    clock.seconds += 0.6
    assert begin(floors)
    assert floors.lanes([]) == {"orders": 0}
    claim(floors, 20)
    clock.seconds += 0.6
    assert begin(floors)
    assert floors.lanes(["bills"]) == {"orders": 9, "bills": 0}
    assert floors.of("orders") == 9


def test_full_look_begins_at_the_beginning_behind_short_ones() -> None:
    floors, clock = begun()
    claim(floors, 7, 9)
    clock.seconds += 10.1 * LONG
    assert not begin(floors)
    floors.looked(LONG, ["orders"])
    assert floors.of("orders") == 0


def test_lanes_without_rows_and_agents_are_forgotten() -> None:
    floors, _ = begun()
    for number in range(2_000):
        claim(floors, 7, lane=f"once {number}")
    floors.looked(LONG, ["orders"])
    assert floors.lanes([]) == {"orders": 0}


def test_lanes_of_agents_come_first_in_a_short_look() -> None:
    floors, _ = begun()
    for number in range(2_000):
        claim(floors, 7, lane=f"once {number}")
    assert "bills" in floors.lanes(["bills"])


def test_full_look_is_next_when_rows_have_come_back() -> None:
    floors, _ = begun()
    floors.end()
    assert not begin(floors)


def test_places_are_kept_for_no_longer_than_they_are_needed() -> None:
    floors, clock = begun()
    for place in range(1_000):
        clock.seconds += 0.001
        claim(floors, place)
    floors.begin()
    floors.looked(0.0, [])
    assert floors.lanes([]) == {}
