"""Directories in parts: whatever they hold, they come out as they went in, and within their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.errors import ProtocolViolation
from durable.transports.directories import MOST_PART_BYTES, Assembly, parts_of
from durable.transports.frames import MAX_LISTINGS, Directory, Frame
from durable.transports.wire import encode
from tests.support.hubs import listing

LIMIT = 1_000


@given(st.lists(st.integers(1, 1_200), max_size=30))
def test_parts_fit_and_come_out_whole(sizes: list[int]) -> None:
    listings = [listing("s" * size) for size in sizes]
    assembly, whole = Assembly(1 << 20), None
    parts = parts_of(listings, LIMIT)
    for part in parts:
        assert whole is None
        data = encode(Frame(part), LIMIT)
        whole = assembly.add(part, len(data))
    fitting = [each for each in listings if len(encode(Frame(Directory([each])))) <= LIMIT - 64]
    assert whole is not None
    assert [each for each in listings if each in whole] == whole
    assert len(whole) + parts[-1].left_out == len(listings)
    assert all(each in whole for each in fitting)


def test_small_directory_is_one_frame() -> None:
    assert len(parts_of([listing(f"s{number}") for number in range(1_000)], 4 << 20)) == 1
    assert parts_of([], 4 << 20) == [Directory([])]


def test_part_has_a_limit_of_its_own() -> None:
    parts = parts_of([listing("s" * 190 + str(number)) for number in range(9_000)], 1 << 30)
    assert max(len(encode(Frame(part))) for part in parts) <= MOST_PART_BYTES


def test_listings_beyond_the_limit_are_counted() -> None:
    parts = parts_of([listing("s")] * (MAX_LISTINGS + 7), 1 << 30)
    assert sum(len(part.listings) for part in parts) == MAX_LISTINGS
    assert parts[-1].left_out == 7


def test_assembly_holds_no_more_than_its_bytes() -> None:
    assembly = Assembly(1_000)
    part = Directory([listing("s")], more=True)
    assembly.add(part, 900)
    with pytest.raises(ProtocolViolation, match="more than 1,000 bytes"):
        assembly.add(part, 200)


def test_assembly_holds_no_more_than_its_listings() -> None:
    assembly = Assembly(1 << 40)
    part = Directory([listing("s")] * MAX_LISTINGS, more=True)
    assembly.add(part, 1)
    with pytest.raises(ProtocolViolation, match="more than 10,000 listings"):
        assembly.add(part, 1)
