"""How the blocks of many leaves are shared out among tasks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from durable.storage.slices import Survey, by_transactions, of_survey

surveys = st.lists(st.tuples(st.integers(0, 1_000), st.integers(0, 300)), max_size=8).map(
    lambda extents: [
        Survey(f"day_{number}", 1, first, first + extra, number) for number, (first, extra) in enumerate(extents)
    ]
)


@given(surveys, st.integers(1, 20))
def test_each_block_is_read_by_one_task_and_tasks_are_of_one_size(found: list[Survey], count: int) -> None:
    shares = of_survey("durable", found, 1, 9, count)

    read = [
        (part.relation, part.file, block)
        for share in shares
        for part in share
        if part.blocks
        for block in range(*part.blocks)
    ]
    assert read == [
        (f'"durable"."{each.leaf}"', each.file, block)
        for each in found
        for block in range(each.first_block, each.last_block + 1)
    ]
    sizes = [sum(end - first for part in share if part.blocks for first, end in [part.blocks]) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert len(shares) == max(min(count, len(read)), 1)


@given(st.integers(0, 10_000), st.integers(1, 10_000), st.integers(1, 20))
def test_each_transaction_is_read_by_one_task(low: int, transactions: int, count: int) -> None:
    shares = by_transactions("durable", "envelope_history", low, low + transactions, count)
    ranges = [part.xids for share in shares for part in share if part.xids]
    assert [xid for first, end in ranges for xid in range(first, end)] == list(range(low, low + transactions))
    assert len(shares) == min(count, transactions)
