"""Bounded memory, and when a batch is due."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from durable.agents.buffer import Buffer, is_due


class Item(NamedTuple):
    name: int
    weight_bytes: int = 1


def items(*weights: int) -> list[Item]:
    return [Item(name, weight) for name, weight in enumerate(weights)]


def filled(*weights: int, max_count: int = 100, max_bytes: int = 1000) -> Buffer[Item]:
    buffer: Buffer[Item] = Buffer(max_count, max_bytes)
    given = items(*weights)
    assert buffer.reserve(given)
    buffer.put(given)
    return buffer


def test_room_is_reserved_for_all_or_for_none() -> None:
    buffer: Buffer[Item] = Buffer(max_count=3, max_bytes=100)
    assert buffer.reserve(items(1, 1))
    assert not buffer.reserve(items(1, 1))
    assert (buffer.room, buffer.used_count) == (1, 2)
    assert buffer.reserve(items(1))
    assert buffer.room == 0


def test_room_is_bounded_in_bytes_as_well() -> None:
    buffer: Buffer[Item] = Buffer(max_count=100, max_bytes=10)
    assert buffer.reserve(items(10))
    assert not buffer.reserve(items(1))
    assert (buffer.room, buffer.used_bytes) == (0, 10)


def test_room_stays_taken_until_the_item_is_done() -> None:
    buffer = filled(5, 5, max_count=2)
    batch = buffer.take(2, 100)
    assert not buffer.reserve(items(1))
    buffer.done(batch)
    assert (buffer.used_count, buffer.used_bytes, buffer.room) == (0, 0, 2)


@pytest.mark.parametrize(
    ("max_count", "waiting", "out", "room"),
    [
        (2_000, 1_950, 0, 0),  # items wait, and few may come
        (2_000, 1_900, 0, 100),
        (2_000, 0, 1_950, 50),  # nothing waits: workers may be idle
        (2_000, 0, 0, 100),
        (10, 6, 0, 0),
        (10, 5, 0, 5),
        (10, 0, 9, 1),
        (1, 1, 0, 0),
        (1, 0, 0, 1),
        (2, 1, 0, 1),
    ],
)
def test_claim_waits_for_room_for_a_batch_while_items_wait_here(
    max_count: int, waiting: int, out: int, room: int
) -> None:
    buffer = filled(*[1] * (waiting + out), max_count=max_count, max_bytes=10_000)
    assert len(buffer.take(out, 10_000)) == out
    assert buffer.room_for_claim(100) == room


def test_unchecked_reservation_may_exceed_the_bytes_and_then_leaves_no_room() -> None:
    buffer: Buffer[Item] = Buffer(max_count=10, max_bytes=10)
    buffer.reserve_unchecked(items(8, 8))
    assert (buffer.used_count, buffer.used_bytes, buffer.room) == (2, 16, 0)


def test_buffer_closes_only_when_empty_and_then_reserves_nothing() -> None:
    buffer: Buffer[Item] = Buffer(10, 100)
    item = Item(1)
    assert buffer.reserve([item])
    assert not buffer.close()
    buffer.done([item])
    assert buffer.close()
    assert not buffer.reserve([item])
    assert buffer.room == 0


def test_a_batch_is_cut_at_its_size_and_at_its_bytes() -> None:
    buffer = filled(4, 4, 4, 4)
    assert [item.name for item in buffer.take(3, 100)] == [0, 1, 2]
    buffer = filled(4, 4, 4, 4)
    assert [item.name for item in buffer.take(100, 11)] == [0, 1]
    assert [item.name for item in buffer.take(100, 11)] == [2, 3]


def test_item_larger_than_a_batch_goes_alone() -> None:
    buffer = filled(50, 1)
    assert [item.name for item in buffer.take(10, 10)] == [0]
    assert [item.name for item in buffer.take(10, 10)] == [1]


def test_items_put_back_come_first_in_their_order() -> None:
    buffer = filled(1, 1, 1, 1)
    buffer.put_back(buffer.take(2, 100))
    assert [item.name for item in buffer.waiting()] == [0, 1, 2, 3]
    assert len(buffer) == 4


def test_threads_reserving_at_once_never_exceed_the_bound() -> None:
    buffer: Buffer[Item] = Buffer(max_count=500, max_bytes=10_000)
    with ThreadPoolExecutor(4) as threads:
        granted = list(threads.map(lambda _: buffer.reserve(items(1)), range(2_000)))
    assert (granted.count(True), buffer.used_count) == (500, 500)


@pytest.mark.parametrize(
    ("waiting", "in_flight", "expected"),
    [
        pytest.param(0, 0, False, id="nothing waits"),
        pytest.param(1, 0, True, id="quiet: at once"),
        pytest.param(1, 1, False, id="busy: gather"),
        pytest.param(9, 1, False, id="busy, nearly full: gather"),
        pytest.param(10, 1, True, id="a full batch and a free slot"),
        pytest.param(10, 3, True, id="the last slot"),
        pytest.param(10, 4, False, id="no slot"),
        pytest.param(100, 5, False, id="no slot, however much waits"),
    ],
)
def test_batch_is_due_when_full_or_when_none_is_in_flight(waiting: int, in_flight: int, expected: bool) -> None:
    buffer = filled(*[1] * waiting)
    assert is_due(buffer, in_flight, batch_size=10, batch_bytes=1000, batches_in_flight=4) is expected


def test_a_batch_is_full_by_its_bytes_too() -> None:
    buffer = filled(60, 60)
    assert is_due(buffer, 1, batch_size=10, batch_bytes=120, batches_in_flight=4)
    assert not is_due(buffer, 1, batch_size=10, batch_bytes=121, batches_in_flight=4)


def test_taken_items_do_not_count_as_waiting_and_items_put_back_do() -> None:
    buffer = filled(60, 60)
    taken = buffer.take(1, 1000)
    assert not buffer.full_batch_waits(10, 61)
    assert buffer.full_batch_waits(10, 60)
    buffer.put_back(taken)
    assert buffer.full_batch_waits(10, 120)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 8), st.integers(1, 60))
def test_batches_hold_everything_once_in_order_and_within_the_limits(
    weights: list[int], batch_size: int, batch_bytes: int
) -> None:
    buffer = filled(*weights, max_bytes=10_000)
    batches = []
    while batch := buffer.take(batch_size, batch_bytes):
        batches.append(batch)
    assert [item for batch in batches for item in batch] == items(*weights)
    assert all(len(batch) <= batch_size for batch in batches)
    assert all(len(batch) == 1 or sum(i.weight_bytes for i in batch) <= batch_bytes for batch in batches)
    # No batch is smaller than it must be: the next item would not have fitted.
    for batch, following in pairwise(batches):
        weight = sum(item.weight_bytes for item in batch) + following[0].weight_bytes
        assert len(batch) == batch_size or weight > batch_bytes


class Buffers(RuleBasedStateMachine):
    """A buffer against lists that do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: Buffer[Item] = Buffer(max_count=8, max_bytes=40)
        self.reserved: list[Item] = []
        self.waiting: deque[Item] = deque()
        self.taken: list[Item] = []
        self.next_name = 0

    def new(self, weights: list[int]) -> list[Item]:
        made = [Item(self.next_name + number, weight) for number, weight in enumerate(weights)]
        self.next_name += len(made)
        return made

    @rule(weights=st.lists(st.integers(1, 15), min_size=1, max_size=4))
    def reserve(self, weights: list[int]) -> None:
        wanted = self.new(weights)
        held = [*self.reserved, *self.waiting, *self.taken, *wanted]
        fits = len(held) <= 8 and sum(item.weight_bytes for item in held) <= 40
        assert self.buffer.reserve(wanted) is fits
        if fits:
            self.reserved += wanted

    @precondition(lambda self: self.reserved)
    @rule(commits=st.booleans())
    def commit_or_abandon(self, commits: bool) -> None:
        if commits:
            self.buffer.put(self.reserved)
            self.waiting.extend(self.reserved)
        else:
            self.buffer.done(self.reserved)
        self.reserved = []

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        batch = self.buffer.take(count, 1000)
        assert batch == [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        self.taken += batch

    @precondition(lambda self: self.taken)
    @rule(succeeds=st.booleans())
    def settle(self, succeeds: bool) -> None:
        if succeeds:
            self.buffer.done(self.taken)
        else:
            self.buffer.put_back(self.taken)
            self.waiting.extendleft(reversed(self.taken))
        self.taken = []

    @invariant()
    def counts_are_those_of_what_is_held(self) -> None:
        held = [*self.reserved, *self.waiting, *self.taken]
        assert self.buffer.used_count == len(held)
        assert self.buffer.used_bytes == sum(item.weight_bytes for item in held)
        assert self.buffer.waiting() == list(self.waiting)


TestBuffers = Buffers.TestCase
