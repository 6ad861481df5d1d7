"""Where the looks for work begin, while handled rows lie in the way."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from durable.envelope import LeasedEnvelope
from durable.recovery.floors import SLOW, Floors, Looks
from tests.support.one_handler import envelope

LONG = 0.2
MOST = 3  # room for a claim


class Table:
    """The looks of a node with a handler of orders; `waiting` has the places of the unowned rows of each type."""

    def __init__(self, *handlers: str) -> None:
        self.seconds = 100.0
        self.looks = Looks(lambda: self.seconds)
        self.waiting: dict[str, list[int]] = {}
        self.handlers = ["orders", *handlers]
        self.room = MOST
        self.claimed: list[int] = []

    @property
    def types(self) -> Floors:
        return self.looks.types

    def look(self, seconds: float = LONG) -> bool:
        """Look, and claim once of each type that is found. Returns whether the look was a short one."""
        self.looks.begin()
        if self.looks.is_short:
            probed = self.types.lanes(self.handlers).items()
            found = [*self.types.owed, *(name for name, floor in probed if self._behind(name, floor))]
        else:
            found = [name for name in self.waiting if self._behind(name, 0)]
            self.looks.looked(seconds, [], found, [], self.handlers, goes_on=False)
        for name in found:
            if self.room and name in self.handlers:
                self.claim(name)
        return self.looks.is_short

    def claim(self, name: str) -> None:
        places = self._behind(name, self.types.of(name))[: self.room]
        self.waiting[name] = [place for place in self.waiting[name] if place not in places]
        self.claimed += places
        self.types.claimed(name, leases(*places), self.room)

    def _behind(self, name: str, floor: int) -> list[int]:
        return sorted(place for place in self.waiting.get(name, ()) if place >= floor)


def leases(*places: int) -> Sequence[LeasedEnvelope]:
    return [msgspec.structs.replace(LeasedEnvelope(envelope(1)), seq=place) for place in places]


@pytest.fixture
def table() -> Table:
    """A second after a claim of row 10, of which the look took long."""
    table = Table()
    table.waiting = {"orders": [10]}
    assert not table.look(0.5)
    table.seconds += 1.1
    assert table.claimed == [10]
    return table


def test_looks_are_full_when_they_take_little_time() -> None:
    table = Table()
    table.waiting = {"orders": [7, 8]}
    table.look(SLOW)
    table.seconds += 2
    assert not table.look(SLOW)
    assert table.types.of("orders") == 0


def test_slow_look_is_followed_by_short_ones_for_ten_times_as_long() -> None:
    table = Table()
    assert not table.look()
    table.seconds += 9.9 * LONG
    assert table.look()
    table.seconds += 0.2 * LONG
    assert not table.look()


def test_short_looks_end_after_five_seconds() -> None:
    table = Table()
    table.look(60.0)
    table.seconds += 4.9
    assert table.look()
    table.seconds += 0.2
    assert not table.look()


def test_full_look_is_due_when_short_ones_end() -> None:
    table = Table()
    table.look(0.3)
    assert table.looks.full_in() is None
    table.seconds += 1
    table.look()
    due = table.looks.full_in()
    assert due is not None
    assert due.total_seconds() == pytest.approx(2.0)


def test_pages_of_destinations_are_all_looked_for_in_full() -> None:
    """Short looks follow the last page, for ten times as long as all pages took."""
    seconds = 100.0
    looks = Looks(lambda: seconds)
    for page in range(3):
        looks.begin()
        assert not looks.is_short
        looks.looked(0.1, [f"tcp://{page}"], [], [], [], goes_on=page < 2)
        assert looks.destinations.owed[-1] == f"tcp://{page}"
    seconds += 2.9
    looks.begin()
    assert looks.is_short
    seconds += 0.2
    looks.begin()
    assert not looks.is_short


def test_claimed_destinations_of_a_page_are_not_owed_after_the_last_page() -> None:
    looks = Looks(lambda: 100.0)
    looks.begin()
    looks.looked(0.1, ["tcp://1"], [], [], [], goes_on=True)
    looks.destinations.claimed("tcp://1", leases(7), MOST)
    looks.begin()
    looks.looked(0.1, ["tcp://2"], [], [], [], goes_on=False)
    assert looks.destinations.owed == ["tcp://2"]


def test_claims_of_a_full_look_begin_at_the_beginning_and_go_on() -> None:
    table = Table()
    table.waiting = {"orders": [5, 6, 7, 8, 9]}
    table.look()
    assert table.types.of("orders") == 7
    table.claim("orders")
    assert table.claimed == [5, 6, 7, 8, 9]


def test_short_look_begins_at_the_claims_of_a_second_ago(table: Table) -> None:
    table.waiting = {"orders": [20]}
    assert table.look()
    table.seconds += 0.6
    assert table.look()
    assert table.types.lanes(["bills"]) == {"orders": 10, "bills": 0}
    table.seconds += 0.6
    assert table.types.of("orders") == 20


def test_row_below_the_floor_is_claimed_after_the_next_full_look(table: Table) -> None:
    table.waiting = {"orders": [4]}
    assert table.look()
    assert table.claimed == [10]
    table.seconds += 4
    assert not table.look()
    assert table.claimed == [10, 4]


def test_row_below_the_floor_waits_for_room_and_not_for_another_full_look(table: Table) -> None:
    table.seconds += 5
    table.waiting = {"orders": [4, 20]}
    table.room = 0
    assert not table.look(0.5)
    table.seconds += 0.001
    table.room = MOST
    assert table.look()
    assert table.claimed == [10, 4, 20]


def test_many_rows_below_the_floor_are_claimed_one_batch_after_another(table: Table) -> None:
    table.seconds += 5
    table.waiting = {"orders": [1, 2, 3, 4, 5, 6, 7, 8, 20]}
    assert not table.look(0.5)
    assert table.look()
    assert table.look()
    assert table.claimed == [10, 1, 2, 3, 4, 5, 6, 7, 8, 20]
    assert table.types.owed == []


def test_claim_of_rows_below_the_floor_leaves_the_floor_alone(table: Table) -> None:
    table.seconds += 5
    table.waiting = {"orders": [4]}
    table.look(0.5)
    table.seconds += 1.1
    assert table.look()
    assert table.types.of("orders") == 10


def test_owed_lanes_are_not_looked_for(table: Table) -> None:
    table.seconds += 5
    table.waiting = {"orders": [4]}
    table.room = 0
    table.look(0.5)
    assert table.types.owed == ["orders"]
    assert table.types.lanes(table.handlers) == {}


def test_types_without_a_handler_here_are_left_to_full_looks() -> None:
    table = Table()
    table.waiting = {"others": [7]}
    table.look()
    assert table.types.owed == []


def test_quiet_type_begins_behind_the_claims_of_others() -> None:
    """Without a claim of its own it would pass all that was handled before."""
    table = Table("bills")
    table.waiting = {"orders": [10]}
    table.look(0.1)
    table.seconds += 1.0
    table.look(0.1)
    assert table.types.lanes(["bills"])["bills"] == 0
    table.seconds += 0.99
    assert table.look()
    assert table.types.lanes(["bills"])["bills"] == 0, "a commit may be late"
    table.seconds += 0.02
    assert table.types.lanes(["bills"])["bills"] == 10


def test_lanes_without_rows_and_agents_are_forgotten() -> None:
    table = Table()
    table.look()
    for number in range(2_000):
        table.types.claimed(f"once {number}", leases(7), MOST)
    table.seconds += 10
    table.look()
    assert list(table.types.lanes([])) == ["orders"]


def test_lanes_claimed_last_come_first_in_a_short_look() -> None:
    table = Table()
    table.look()
    own = [f"tcp://{number}" for number in range(2_000)]
    table.types.claimed("tcp://1999", leases(7), MOST)
    lanes = table.types.lanes(own)
    assert next(iter(lanes)) == "tcp://1999"
    assert len(lanes) < 1_000


def test_full_look_is_next_when_rows_have_come_back(table: Table) -> None:
    table.looks.end()
    assert not table.look()


def test_places_are_kept_for_no_longer_than_they_are_needed() -> None:
    table = Table()
    for place in range(1_000):
        table.seconds += 0.01
        table.waiting = {"orders": [place]}
        table.looks.end()
        table.look()
    assert sum(map(len, table.types._claimed.values())) < 200
    table.seconds += 6
    assert not table.look(0.0)
    assert table.types.lanes([]) == {}
