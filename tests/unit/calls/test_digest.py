"""Digests of methods: equal ones read each other's bytes as the same values, and names belong to them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum, Flag
from functools import reduce
from inspect import Parameter, Signature
from itertools import permutations
from operator import or_
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, defstruct, field
from pydantic import AnyHttpUrl, AnyUrl, AwareDatetime, Field, FiniteFloat, StringConstraints, create_model

from durable.calls.payload import Payload, arguments_of, digest_of
from durable.errors import InvalidMessage
from tests.support.travelling import ANY, DICT, KINDS


def digest(kind: Any) -> bytes:
    return digest_of(Payload(kind))


def digest_of_arguments(arguments: dict[str, Any]) -> bytes:
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in arguments]
    return digest(arguments_of(Signature(parameters), arguments))


def of_model(kind: Any) -> Any:
    return create_model("Model", a=(kind, ...))


def struct(*fields: Any, **options: Any) -> Any:
    return defstruct("Struct", list(fields), **options)


class Pair(NamedTuple):
    a: int
    b: int


class Exchanged(NamedTuple):
    b: int
    a: int


Exchanged.__name__ = "Pair"

Way: Any = Enum("Way", {"IN": "a", "OUT": "b"})
Exchanging: Any = Enum("Exchanging", {"IN": "b", "OUT": "a"})
Exchanging.__name__ = "Way"
Lower = Annotated[str, StringConstraints(to_lower=True)]
Stripped = Annotated[str, StringConstraints(strip_whitespace=True)]


def make() -> list[Any]:
    return ["all"]


def two_of_one_name(*inner: Any) -> Any:
    """A Struct of two models with one name, each of which has a model of another name within."""
    return struct(
        *((name, of_model(create_model("Line", a=(kind, ...)))) for name, kind in zip("xy", inner, strict=True))
    )


KEYS = [str, int, float, bool, bytes, date, datetime, time, UUID, Decimal, tuple[int, int], int | str, ANY]
TEXTS = [str, datetime, time, date, UUID, Decimal, bytes, Annotated[datetime, Meta(tz=False)]]

DIFFERENT: list[tuple[Any, Any]] = [
    *permutations(TEXTS, 2),
    *permutations([DICT[key, int] for key in KEYS], 2),
    *permutations([of_model(DICT[key, int]) for key in [str, int, date, tuple[int, int]]], 2),
    *permutations([of_model(kind) for kind in [str, Decimal, datetime, AwareDatetime, bytes]], 2),
    (of_model(float), of_model(FiniteFloat)),
    (of_model(Annotated[int, Field(alias="x")]), of_model(int)),
    (Annotated[bytes, Meta(min_length=1)], Annotated[bytes, Meta(min_length=2)]),
    (dict, dict[str, Any]),
    (Pair, Exchanged),
    (struct(("a", int), ("b", int), array_like=True), struct(("b", int), ("a", int), array_like=True)),
    (struct(("title", str)), struct(("description", str))),
    (struct(("a", int, 1)), struct(("a", int, 2))),
    (struct(("a", int)), struct(("a", int), ("examples", int, 0))),
    *permutations([Enum("Way", {"IN": 1, "OUT": 2}), Enum("Way", {"OUT": 1, "IN": 2})], 2),
    *permutations([Flag("Way", {"IN": 1, "OUT": 2}), Flag("Way", {"OUT": 1, "IN": 2})], 2),
    *((of_model(one), of_model(other)) for one, other in permutations([Way, Exchanging], 2)),
    *permutations([struct(("a", list, field(default_factory=made)), omit_defaults=True) for made in [list, make]], 2),
    *permutations([struct(("a", of_model(str)), ("b", of_model(kind))) for kind in [str, int]], 2),
    *permutations([two_of_one_name(str, int), two_of_one_name(bytes, int), two_of_one_name(int, int)], 2),
    *permutations([of_model(kind) for kind in [AnyUrl, AnyHttpUrl]], 2),
    *permutations([of_model(kind) for kind in [date | datetime, datetime | date]], 2),
    *permutations([struct(("a", tuple[int, ...], default)) for default in [(1, 2), (2, 1)]], 2),
    *permutations([of_model(kind) for kind in [str, Lower, Stripped]], 2),
    *permutations([Annotated[kind, Meta(extra_json_schema={"type": "string"})] for kind in [str, int]], 2),
]  # fmt: skip


ALIKE: list[tuple[Any, Any]] = [
    (struct(("a", int), ("b", str)), struct(("b", str), ("a", int))),
    (create_model("Model", a=(int, ...), b=(str, ...)), create_model("Model", b=(str, ...), a=(int, ...))),
    (int | str, str | int),
    (of_model(Literal["a", "b", 1]), of_model(Literal[1, "b", "a"])),
    (Literal["a", "b", 1], Literal[1, "b", "a"]),
    *((of_kind(one), of_kind(other)) for one, other in [
        (Enum("Way", {"IN": 1, "OUT": 2}), Enum("Way", {"OUT": 2, "IN": 1})),
        (Flag("Way", {"IN": 1, "OUT": 2}), Flag("Way", {"OUT": 2, "IN": 1})),
    ] for of_kind in [list.__class_getitem__, of_model]),
    *permutations([struct(("a", reduce(or_, order))) for order in permutations([
        int, None, list[int], struct(("x", int), tag="x"), struct(("x", int), tag="y"), date,
    ])][::150], 2),
]  # fmt: skip
"""They travel alike: the order in which they were declared is not seen."""


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_order_of_a_declaration_does_not_change_a_digest(one: Any, other: Any) -> None:
    assert digest(one) == digest(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_digest_tells_types_apart(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


def test_types_of_one_digest_read_the_values_of_each_other() -> None:
    alike: dict[bytes, list[tuple[Any, Any]]] = {}
    for kind, values in KINDS:
        alike.setdefault(digest(kind), []).append((kind, values))
    pairs = [pair for group in alike.values() for pair in permutations(group, 2)]
    faults = [fault for one, other in pairs for fault in unread(one, other)]
    assert not faults
    assert pairs


def unread(one: tuple[Any, Any], other: tuple[Any, Any]) -> Iterator[str]:
    written, read = Payload(one[0]), Payload(other[0])
    for value in one[1]:
        body = written.write(value)
        try:
            again = read.write(read.read(body))
        except InvalidMessage as error:
            yield f"{one[0]} -> {other[0]}: {error}"
            continue
        if repr(written.plain(written.read(again))) != repr(written.plain(value)):  # NaN is none of its equals
            yield f"{one[0]} -> {other[0]}: {value!r}"


@given(
    names=st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True),
    others=st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True),
    kind=st.sampled_from([int, str, list[str], Pair]),
)
def test_arguments_of_other_names_or_another_order_have_another_digest(
    names: list[str], others: list[str], kind: Any
) -> None:
    first, second = (digest_of_arguments(dict.fromkeys(each, kind)) for each in (names, others))
    assert (first == second) == (names == others)


@pytest.mark.parametrize("words", [{"title": "T"}, {"description": "D"}, {"examples": ["x"]}])
def test_words_do_not_change_a_digest(words: dict[str, Any]) -> None:
    told = Annotated[str, Meta(**words)]
    assert digest(told) == digest(str)
    assert digest_of_arguments({"a": told}) == digest_of_arguments({"a": str})
    assert digest(tuple[told, int]) == digest(tuple[str, int])
    assert digest(of_model(Annotated[str, Field(**words)])) == digest(of_model(str))


def test_names_of_classes_do_not_change_a_digest() -> None:
    def tree(name: str, inner: str) -> Any:
        leaf = defstruct(inner, [("a", int)])
        return defstruct(name, [("b", leaf), ("c", DICT[str, leaf]), ("d", create_model(f"{name}Model", e=(str, ...)))])

    assert digest(tree("Order", "Line")) == digest(tree("Purchase", "Item"))
    assert digest(tree("A", "Z")) == digest(tree("Z", "A"))
    assert digest(create_model("Order", a=(create_model("Line", b=(int, ...)), ...))) == digest(
        create_model("Purchase", a=(create_model("Item", b=(int, ...)), ...))
    )


def test_words_of_a_default_are_values() -> None:
    first, second = (create_model("Model", a=(dict[str, str], {"title": each})) for each in ("one", "two"))
    assert digest(first) != digest(second)


def test_digest_is_the_same_in_each_process() -> None:
    code = (
        "from typing import Literal; from pydantic import create_model; from msgspec import defstruct\n"
        "from durable.calls.payload import Payload, digest_of\n"
        "names = frozenset(['a', 'b', 'c', 'd', 'e'])\n"
        "model = create_model('M', a=(frozenset[str], names))\n"
        "struct = defstruct('S', [('b', Literal['x', 'y', 1, None]), ('a', frozenset[str], names)])\n"
        "print(digest_of(Payload(model), Payload(struct)).hex())"
    )
    found = set()
    for seed in ("1", "2", "3"):
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60, env=env)
        found.add(run.stdout)
    assert len(found) == 1
