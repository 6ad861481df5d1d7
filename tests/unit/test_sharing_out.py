"""Parts of the tests, for machines side by side."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sharing_out import Part


@given(nodeid=st.text(), parts=st.integers(1, 20))
def test_test_is_in_exactly_one_part(nodeid: str, parts: int) -> None:
    owners = [number for number in range(1, parts + 1) if Part.parse(f"{number}/{parts}").includes(nodeid)]

    assert len(owners) == 1


@pytest.mark.parametrize("text", ["", "2", "0/4", "5/4", "1/0", "-1/4", "a/b", "1/2/3", "1/4 ", "1/99999"])
def test_text_naming_no_part_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is no part of the tests; 2/4 is the second of four"):
        Part.parse(text)
