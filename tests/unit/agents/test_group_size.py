"""How many messages share a transaction when nothing is said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from durable.agents.group_size import MOST, GroupSize

BUDGET = 0.02
SHORT = 0.001


def practised(seconds: float = SHORT, messages: int = 16) -> GroupSize:
    size = GroupSize(BUDGET)
    for _ in range(messages):
        size.took(seconds)
    return size


def test_messages_are_alone_until_their_time_is_known() -> None:
    size = practised(messages=15)
    assert size.at_most(waiting=1_000, workers=1) == 1
    size.took(SHORT)
    assert size.at_most(waiting=1_000, workers=1) == 20


def test_group_fits_into_its_budget() -> None:
    assert practised(SHORT).at_most(1_000, 1) == 20
    assert practised(BUDGET / 2).at_most(1_000, 1) == 2
    assert practised(BUDGET * 2).at_most(1_000, 1) == 1
    assert practised(0.0).at_most(1_000, 1) == MOST


def test_waiting_messages_are_shared_by_all_workers() -> None:
    size = practised()
    assert [size.at_most(waiting, workers=8) for waiting in (1, 8, 9, 16, 17, 1_000)] == [1, 1, 2, 2, 3, 20]


def test_budget_of_nothing_leaves_every_message_alone() -> None:
    size = GroupSize(0)
    for _ in range(100):
        size.took(0.0)
    assert size.at_most(1_000, 1) == 1


def test_each_rollback_doubles_the_messages_run_alone() -> None:
    size = practised()

    def alone() -> int:
        count = 0
        while size.at_most(1_000, 1) == 1:
            size.took(SHORT)
            count += 1
        return count

    counts = []
    for _ in range(4):
        size.rolled_back()
        counts.append(alone())
    assert counts == [16, 32, 64, 128]
    for _ in range(4):
        size.committed()
    size.rolled_back()
    assert alone() == 16


def test_long_message_keeps_later_messages_alone() -> None:
    size = practised()
    size.took(BUDGET * 6)
    assert size.at_most(1_000, 1) == 1
    for _ in range(100):
        size.took(SHORT)
    assert size.at_most(1_000, 1) > 1


def test_handler_stays_alone_when_told_to() -> None:
    size = practised()
    size.stay_alone()
    for _ in range(100_000):
        size.took(0.0)
    size.committed()
    assert size.at_most(1_000, 1) == 1


@given(
    st.lists(st.one_of(st.floats(0, 10), st.sampled_from(["committed", "rolled_back"])), max_size=300),
    st.integers(1, 10_000),
    st.integers(1, 100),
)
def test_group_is_never_empty_nor_larger_than_a_share_of_the_queue(
    history: list[float | str], waiting: int, workers: int
) -> None:
    size = GroupSize(BUDGET)
    for event in history:
        if isinstance(event, str):
            getattr(size, event)()
        else:
            size.took(event)
    assert 1 <= size.at_most(waiting, workers) <= min(MOST, -(-waiting // workers))
