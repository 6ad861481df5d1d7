"""Repeated keys and halves of characters are found wherever they stand; what only looks like one is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from durable import strict_json
from durable.calls.payload import read_json
from durable.description import document
from durable.encryption import keys
from durable.errors import InvalidMessage, InvalidSetting
from durable.messages import codec
from durable.messages.cloudevents import from_structured
from durable.settings import load_settings

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
            strict_json.read(msgspec.json.decode, body)
    else:
        strict_json.read(msgspec.json.decode, body)


@pytest.mark.parametrize("body", [b"17", b'"a"', b"[]", b"{}", b"1" * 5_000, b'[{"a":1},{"a":1}]', b'{"a":{"a":1}}'])
def test_body_without_a_repeated_key_is_taken(body: bytes) -> None:
    strict_json.read(msgspec.json.Decoder(msgspec.Raw).decode, body)


HALVES = [
    "\\ud800",
    "\\uDFFF",
    "\\udc00\\ud800",
    "\\ud83d\\u0041",
    "\\ud83d\\n",
    "\\\\\\ud83d",
    "\\ud83d\\ude00\\ude00",
]
WHOLE = ["\\ud83d\\ude00", "\\\\ud800", "\\u0041", "\\uE000", "\\\\\\ud83d\\ude00"]
PLACES = ['"{}"', '["a", "b{}c"]', '{{"a": "{}"}}', '{{"{}": 1}}', '{{"a": {{"b": ["{}"]}}}}']


class Noted(msgspec.Struct):
    note: str


class Modelled(BaseModel):
    note: str


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("half", HALVES)
def test_half_of_a_character_is_told(half: str, place: str) -> None:
    with pytest.raises(ValueError, match=r"^\\u[dD]\w{3} at byte \d+ is a lone surrogate"):
        strict_json.read(msgspec.json.decode, place.format(half).encode())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("whole", WHOLE)
def test_whole_character_is_read_as_by_other_parsers(whole: str, place: str) -> None:
    text = place.format(whole)
    assert strict_json.read(msgspec.json.decode, text.encode()) == json.loads(text)


ODD = {b'{"note": "\\ud800"}': "is a lone surrogate", b'{"note": "a", "note": "b"}': "'note' stands twice"}
READERS: dict[str, Callable[[bytes], object]] = {
    "a message": partial(codec.decode, cls=Noted),
    "a model": partial(codec.decode, cls=Modelled),
    "arguments of a call": lambda body: read_json(body, Noted),
    "a CloudEvent": from_structured,
    "a description": lambda body: document.read(body, "described.json"),
    "a file of keys": lambda body: keys.of_text(body, "encryption_key_file"),
    "names": lambda body: load_settings(encryption_tenants=body.decode()),
    "secrets": lambda body: load_settings(encryption_keys=body.decode()),
    "peers": lambda body: load_settings(peers=body.decode()),
    "words": lambda body: load_settings(answer_to=f"[{body.decode()}]"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("body", "fault"), ODD.items(), ids=["half", "twice"])
def test_reader_of_json_refuses_odd_text(reader: str, body: bytes, fault: str) -> None:
    with pytest.raises((InvalidMessage, InvalidSetting), match=fault):
        READERS[reader](body)
