"""Bodies of messages that hold sets, in processes with other hashes: they are equal, or send() refuses them in each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, PlainSerializer

from durable.envelope import JSON, Envelope
from durable.errors import InvalidMessage
from durable.messages import codec
from durable.messages.codecs.json import JsonCodec
from durable.messages.codecs.msgpack import MSGPACK, MsgpackCodec
from durable.outbox.envelope_factory import NO_ENVELOPE
from tests.unit.messages.bodies_of_sets import CONTAINERS, REFUSED, Case, shapes

SEEDS: Final = ("1", "2", "3")
ALWAYS_SENT: Final = {"declared", "json", "json in json", "written", "raw", "key", "part of a key"}
SHAPES: Final = tuple(shapes())
Bodies = Callable[[Sequence[Case]], Sequence[Sequence[str]]]
ANY_ENVELOPE: Final[Any] = Envelope


@pytest.fixture(scope="module")
def bodies() -> Iterator[Bodies]:
    """Return what makes the bodies of cases, once in each process."""
    with ExitStack() as stack:
        processes = [stack.enter_context(_process(seed)) for seed in SEEDS]

        def made(cases: Sequence[Case]) -> Sequence[Sequence[str]]:
            for process in processes:
                process.stdin.write(msgspec.json.encode(cases) + b"\n")
                process.stdin.flush()
            found = [msgspec.json.decode(process.stdout.readline(), type=list[str]) for process in processes]
            return [*zip(*found, strict=True)]

        yield made
        for process in processes:
            process.kill()


def _process(seed: str) -> Any:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.unit.messages.bodies_of_sets"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


ITEMS: Final = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=12, unique=True)
AROUND: Final = st.lists(st.sampled_from(CONTAINERS), max_size=3).map(tuple)


CASES: Final = st.builds(
    lambda shape, around, items: Case(shape._replace(around=around), items), st.sampled_from(SHAPES), AROUND, ITEMS
)


@given(st.lists(CASES, min_size=30, max_size=40))
@settings(max_examples=6, deadline=None)
def test_bodies_are_equal_in_each_process_or_refused(bodies: Bodies, cases: list[Case]) -> None:
    for case, found in zip(cases, bodies(cases), strict=True):
        assert len(set(found)) == 1, case
        assert found[0] != REFUSED or case.shape.place not in ALWAYS_SENT, case


def test_bodies_of_many_items_are_equal_in_each_process_or_refused(bodies: Bodies) -> None:
    items = [f"item {number}" for number in range(12)]
    cases = [Case(shape._replace(around=around), items) for shape in SHAPES for around in ((), ("list", "dict"))]
    for case, found in zip(cases, bodies(cases), strict=True):
        assert len(set(found)) == 1, case
        assert found[0] != REFUSED or case.shape.place not in ALWAYS_SENT, case


# ---------------------------------------------------------------- refusals


@dataclass
class Tagged:
    tags: list[str]

    def __post_init__(self) -> None:
        self.tags = frozenset(self.tags)  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]


class Row(msgspec.Struct):
    tags: Sequence[str]

    def __post_init__(self) -> None:
        self.tags = set(self.tags)  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]


class Rows(msgspec.Struct):
    rows: dict[str, Row]
    names: set[str]


class Model(BaseModel):
    tags: Annotated[list[str], AfterValidator(frozenset)]


class Keyed(BaseModel):
    by_tags: dict[Annotated[tuple[str, ...], AfterValidator(frozenset)], int]


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (Tagged(["a"]), "Tagged.tags"),
        (Rows({"x": Row(["a"])}, {"a"}), "Rows.rows['x'].tags"),
        (Model(tags=["a"]), "Model.tags"),
        (Keyed(by_tags={("a",): 1}), "Keyed.by_tags"),
    ],
    ids=["dataclass", "beside a set", "model", "key"],
)
def test_set_is_refused_by_its_path_in_a_field_of_another_type(message: Any, path: str) -> None:
    body = MsgpackCodec().encode(message, ANY_ENVELOPE)
    with pytest.raises(InvalidMessage) as refused:
        codec.refuse_unfaithful(message, body, MSGPACK)
    assert str(refused.value) == (
        f"{type(message).__name__} cannot be sent: {path} holds a set, which its type does not say: the items would "
        "have another order in each process; declare it as a set or frozenset"
    )


class Sorted(BaseModel):
    tags: Annotated[list[str], AfterValidator(frozenset), PlainSerializer(sorted)]
    price: int = 1


def test_set_of_a_serializer_is_sent_in_a_field_of_another_type() -> None:
    message = Sorted(tags=["b", "a"])
    body = JsonCodec().encode(message, ANY_ENVELOPE)
    codec.refuse_unfaithful(message, body, JSON)
    assert body == b'{"tags":["a","b"],"price":1}'


class Line(BaseModel, frozen=True):
    sku: str


class Written(BaseModel):
    value: tuple[Annotated[set[str], PlainSerializer(sorted)], frozenset[Line]]
    number: int = 1


def test_set_of_models_is_refused_in_json_beside_the_list_of_a_serializer() -> None:
    message = Written(value=({"a"}, frozenset({Line(sku="a")})))
    with pytest.raises(InvalidMessage, match=r"Written has a serializer and a set of models, .*make the set a list"):
        codec.encode(message, NO_ENVELOPE)
