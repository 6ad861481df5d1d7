"""Sets in defaults: of two that are equal, and whose items come in another order, all that is shown is equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any, Final, NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, RootModel, create_model
from pydantic.dataclasses import dataclass as model_dataclass

from durable.calls.payload import Payload, arguments_of, digest_of
from durable.messages.codecs.set_order import in_one_order, text_in_one_order
from durable.messages.schemas import schema_of

SAME_PLACE: Final = 2**16
"""Numbers that differ by it have one place in a small set: they come out in the order in which they went in."""


class Model(BaseModel, frozen=True):
    first: Any
    second: Any = Field(None, alias="secondPart")


class Whole(RootModel[Any], frozen=True):
    root: Any


@dataclass(frozen=True)
class Class:
    first: Any


@model_dataclass(frozen=True)
class ModelClass:
    first: Any = Field(alias="firstPart")


class Struct(msgspec.Struct, frozen=True, rename="camel"):
    first_part: Any


class Line(msgspec.Struct, frozen=True, array_like=True, tag="line"):
    first: Any


class Sparing(msgspec.Struct, frozen=True, omit_defaults=True):
    omitted: int = 0
    first: Any = None


class Pair(NamedTuple):
    first: Any
    second: Any


WRAPPERS: Final[Sequence[Callable[[Any], Any]]] = [
    lambda inner: (1, inner),
    lambda inner: {"a": inner, "b": 1},
    lambda inner: {2: inner, "b": 1},
    lambda inner: Model(first=1, secondPart=inner),
    lambda inner: Model(first=inner, secondPart=None),
    lambda inner: Whole(inner),
    lambda inner: Class(inner),
    lambda inner: ModelClass(firstPart=inner),
    lambda inner: Pair(1, inner),
]
STRUCTS: Final[Sequence[Callable[[Any], Any]]] = [
    lambda inner: Struct(inner),
    lambda inner: Line(inner),
    lambda inner: Sparing(first=inner),
]
ITEMS: Final = st.lists(st.integers(0, 3).map(lambda number: number * SAME_PLACE), min_size=2, unique=True)
KINDS: Final = st.sampled_from([set, frozenset])


@st.composite
def pairs(draw: st.DrawFn, wrappers: Sequence[Callable[[Any], Any]]) -> tuple[Any, Any]:
    """A value that holds a set, twice: its items went in in another order."""
    items, kind, nest = draw(ITEMS), draw(KINDS), draw(st.lists(st.sampled_from(wrappers), max_size=4))
    found = []
    for each in (kind(items), kind(reversed(items))):
        value = each
        for wrap in nest:
            value = wrap(value)
        found.append(value)
    return found[0], found[1]


def described(*kinds: Any) -> list[Any]:
    return [*map(schema_of, kinds), digest_of(*map(Payload, kinds))]


def of_arguments(default: Any) -> Any:
    parameters = [Parameter("a", Parameter.POSITIONAL_OR_KEYWORD, default=default)]
    return arguments_of(Signature(parameters), {"a": Any})


@given(pairs([*WRAPPERS, *STRUCTS]))
def test_sets_in_defaults_of_arguments_have_one_order(pair: tuple[Any, Any]) -> None:
    one, other = (described(of_arguments((each,))) for each in pair)
    assert one == other
    assert text_in_one_order(pair[0]) == text_in_one_order(pair[1])


@given(pairs(WRAPPERS))
def test_sets_in_defaults_of_models_have_one_order(pair: tuple[Any, Any]) -> None:
    one, other = (described(create_model("M", a=(Any, each))) for each in pair)
    assert one == other
    assert "default" in str(one)


def test_items_of_every_kind_have_an_order() -> None:
    items = [1, "a", None, 2.5, [1, "b"]]
    assert in_one_order({1, 2, 3, 4, 5}, items) == in_one_order({1, 2, 3, 4, 5}, items[::-1])


def test_text_of_a_value_is_its_repr() -> None:
    for value in (
        set(),
        frozenset(),
        {1},
        frozenset({1}),
        Class(2),
        Struct(3),
        [1, "a" * 500],
        {"a": None},
        Pair(1, 2),
    ):
        assert text_in_one_order(value) == repr(value)
