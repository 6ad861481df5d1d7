"""Contents of a NOTIFY."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.storage.new_work import ANYWHERE, MOST, NOTHING, NewWork

NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)
LANES = st.frozensets(NAMES, max_size=5)
UNFIT = ["", "\0", "a\n", "\n", "\x7f", "\ud800", "a\udfffb", "x" * 1_001]


@given(LANES, LANES)
def test_lanes_are_read_as_they_were_told(message_types: frozenset[str], destinations: frozenset[str]) -> None:
    new = NewWork(message_types, destinations)
    assert NewWork.of(new.payload()) == new


@pytest.mark.parametrize("name", ["orders.placed", "\N{GRINNING FACE}", "p" * 60])
def test_payload_of_too_many_lanes_tells_none_of_them(name: str) -> None:
    told = [NewWork(frozenset(f"{name}{number}" for number in range(count))).payload() for count in range(2_000)]
    assert max(len(payload.encode()) for payload in told) < 8_000
    assert (told[1] != "", told[-1]) == (True, "")


@pytest.mark.parametrize(
    "payload",
    [
        "", "the last", "[]", "{}", "null", "7", '{"types": []}', '{"types": null, "destinations": []}',
        '{"types": 7, "destinations": []}', '{"types": [["a"]], "destinations": []}',
        "[" * 5_000,
    ],
)  # fmt: skip
def test_payload_of_another_kind_is_work_anywhere(payload: str) -> None:
    assert NewWork.of(payload) == ANYWHERE


@pytest.mark.parametrize("odd", [[7], [None], ["a", 7], *([name] for name in UNFIT), ["a", "\0"]])
def test_payload_of_lanes_without_names_is_work_anywhere(odd: list[object]) -> None:
    assert NewWork.of(json.dumps({"types": odd, "destinations": []})) == ANYWHERE
    assert NewWork.of(json.dumps({"types": [], "destinations": odd})) == ANYWHERE


@given(NAMES, st.integers(MOST - 5, MOST + 5))
def test_lanes_are_told_read_and_added_up_to_a_number(name: str, count: int) -> None:
    lanes = frozenset(f"{number}{name}" for number in range(count))
    kept = count <= MOST
    for new in (NewWork(lanes), NewWork(destinations=lanes)):
        told = json.dumps({"types": sorted(new.message_types), "destinations": sorted(new.destinations)})
        assert NewWork.of(told) == (new if kept else ANYWHERE)
        assert NewWork.of(new.payload()) == (new if kept else ANYWHERE)
    added = NOTHING
    for lane in lanes:
        added = added.and_of(NewWork(destinations=frozenset([lane])))
    assert added == (NewWork(destinations=lanes) if kept else ANYWHERE)


def test_work_anywhere_stays_so_with_lanes_added() -> None:
    lanes = NewWork(frozenset(["a"]), frozenset(["b"]))
    assert NOTHING.and_of(lanes) == lanes.and_of(lanes) == lanes
    assert lanes.and_of(ANYWHERE) == ANYWHERE.and_of(lanes) == ANYWHERE
