"""Errors in groups within groups."""

from __future__ import annotations

import pytest

from durable.errors import leaves_of, told_by
from durable.storage.outages import causes_of


def nested(error: Exception, depth: int) -> Exception:
    for _ in range(depth):
        error = ExceptionGroup("group", [error])
    return error


@pytest.mark.parametrize("depth", [0, 1, 1_000, 5_000])
def test_errors_of_nested_groups_are_found_at_any_depth(depth: int) -> None:
    leaf = ValueError("leaf")
    error = nested(leaf, depth)
    assert list(leaves_of(error)) == [leaf]
    assert told_by(error) is leaf
    *_, last = causes_of(error)
    assert last is leaf


def test_errors_of_a_group_come_before_its_cause() -> None:
    first, second, cause = ValueError("first"), ValueError("second"), ValueError("cause")
    group = ExceptionGroup("group", [first, second])
    group.__cause__ = cause
    assert list(causes_of(group)) == [group, first, second, cause]
