"""Repeated keys are found wherever they stand; what only looks like one is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.messages.unique_keys import refuse_repeated_keys

KEYS = st.sampled_from(["a", "b", ":", '"', "\\", '":', "a b", "\u00e4", "", "{", ","])
TREES = st.recursive(
    st.none() | st.integers() | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(KEYS, inner), max_size=3).map(tuple),
    max_leaves=12,
)


def written(tree: Any, separator: str) -> str:
    """JSON, of objects that are tuples of pairs and may repeat a key."""
    match tree:
        case tuple():
            members = (f"{json.dumps(key)}{separator}{written(value, separator)}" for key, value in tree)
            return "{" + ",".join(members) + "}"
        case list():
            return "[" + ",".join(written(each, separator) for each in tree) + "]"
        case _:
            return json.dumps(tree)


def repeats_a_key(tree: Any) -> bool:
    match tree:
        case tuple():
            return len({key for key, _ in tree}) < len(tree) or any(repeats_a_key(value) for _, value in tree)
        case list():
            return any(map(repeats_a_key, tree))
        case _:
            return False


@given(TREES, st.sampled_from([":", " : ", "\n:"]))
def test_repeated_key_is_found_just_where_there_is_one(tree: Any, separator: str) -> None:
    body = written(tree, separator).encode()
    if repeats_a_key(tree):
        with pytest.raises(ValueError, match="stands twice"):
            refuse_repeated_keys(body)
    else:
        refuse_repeated_keys(body)


@pytest.mark.parametrize("body", [b"17", b'"a"', b"[]", b"{}", b"1" * 5_000, b'[{"a":1},{"a":1}]', b'{"a":{"a":1}}'])
def test_body_without_a_repeated_key_is_taken(body: bytes) -> None:
    refuse_repeated_keys(body)
