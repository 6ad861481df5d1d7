"""Pages of lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from durable.listed import Listed


@given(rows=st.lists(st.integers(), max_size=30), size=st.integers(1, 12))
def test_pages_have_every_row_once(rows: list[int], size: int) -> None:
    pages = [Listed.of(rows, size, number) for number in range(1, len(rows) // size + 2)]

    assert [row for page in pages for row in page.rows] == rows
    assert all(len(page.rows) <= size and page.left == len(rows) - len(page.rows) for page in pages)
