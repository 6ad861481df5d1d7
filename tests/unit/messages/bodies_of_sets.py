"""Messages that hold sets in each place of a class, and digests of their bodies in this process.

Each line of stdin holds cases as JSON, and each line of stdout the digests of their bodies, with REFUSED in place of
one that send() refuses.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from itertools import product, starmap
from operator import getitem
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from pydantic import AfterValidator, Json, PlainSerializer, create_model
from pydantic.dataclasses import dataclass as of_pydantic
from typing_extensions import TypedDict

from durable.envelope import JSON
from durable.errors import InvalidMessage
from durable.messages import codec
from durable.messages.codecs.msgpack import MSGPACK
from durable.outbox.envelope_factory import NO_ENVELOPE

REFUSED: Final = "refused"
KINDS: Final[Mapping[str, Any]] = {"set": set, "frozenset": frozenset}
OWNERS: Final = (
    "dataclass",
    "struct",
    "typed dict in a dataclass",
    "named tuple in a struct",
    "model",
    "typed dict in a model",
    "named tuple in a model",
    "dataclass in a model",
    "dataclass of pydantic in a model",
)
PLACES: Final = (
    "declared",
    "json",
    "json in json",
    "made",
    "made and written",
    "written",
    "raw",
    "key",
    "part of a key",
)
_RAW: Final = {JSON: msgspec.Raw(b'{"a":1.10}'), MSGPACK: msgspec.Raw(b"\x01")}
_typed_dict: Any = TypedDict
_named_tuple: Any = NamedTuple


class Shape(NamedTuple):
    owner: str
    place: str
    kind: str
    content_type: str
    is_beside_another: bool
    around: tuple[str, ...] = ()
    """Containers around the set, from the inside out."""


class Case(NamedTuple):
    shape: Shape
    items: Sequence[str]


_Around = Callable[[Any], Any]
_of: Callable[[Any, Any], Any] = getitem
_CONTAINERS: Final[Mapping[str, tuple[_Around, _Around]]] = {
    "list": (lambda kind: _of(list, kind), lambda value: [value]),
    "dict": (lambda kind: _of(dict, (str, kind)), lambda value: {"a": value}),
    "tuple": (lambda kind: _of(tuple, (int, kind)), lambda value: (1, value)),
    "optional": (lambda kind: kind | None, lambda value: value),
}
CONTAINERS: Final = tuple(_CONTAINERS)


def shapes() -> Iterator[Shape]:
    """Each shape that can be declared, with no containers."""
    every = starmap(Shape, product(OWNERS, PLACES, KINDS, (JSON, MSGPACK), (False, True)))
    return filter(_is_declarable, every)


def _is_declarable(shape: Shape) -> bool:
    match shape.place:
        case "json" | "json in json" | "made and written" | "written":
            return _is_validated(shape)
        case "made":
            return _is_validated(shape) or shape.owner in ("dataclass", "struct")
        case "raw":
            return not _is_validated(shape) and not shape.owner.startswith("typed dict")  # msgspec reads no Raw there
        case "key" | "part of a key":
            return shape.kind == "frozenset" and shape.content_type == MSGPACK
        case _:
            return True


def _is_validated(shape: Shape) -> bool:
    return shape.owner.endswith("model")


def body_of(case: Case) -> str:
    """Return the digest of a message's body, or REFUSED."""
    content_type = case.shape.content_type
    message = _message(case)
    try:
        body = codec.encode(message, msgspec.structs.replace(NO_ENVELOPE, content_type=content_type))
        codec.refuse_unfaithful(message, body, content_type)
    except InvalidMessage:
        return REFUSED
    return sha256(body).hexdigest()


def _message(case: Case) -> Any:
    shape = case.shape
    values = {"value": _value(case)}
    if shape.is_beside_another:
        values["more"] = frozenset(case.items)
    if shape.place == "raw":
        values["raw"] = _RAW[shape.content_type]
    owner, holder = _classes(shape)
    if _is_validated(shape):
        return holder.model_validate({"part": values} if holder is not owner else values)
    made = owner(**values)
    return made if holder is owner else holder(made)


def _value(case: Case) -> Any:
    shape = case.shape
    match shape.place:
        case "key":
            value: Any = {frozenset(case.items): 1}
        case "part of a key":
            value = {(1, frozenset(case.items)): 1}
        case "declared" | "raw":
            value = KINDS[shape.kind](case.items)
        case _:
            value = list(case.items)
    for container in shape.around:
        value = _CONTAINERS[container][1](value)
    for _ in range(_texts(shape)):
        value = json.dumps(value)
    return value


@cache
def _classes(shape: Shape) -> tuple[Any, Any]:
    """Return the class with the set, and the class of the message."""
    fields = {"value": _annotation(shape)}
    if shape.is_beside_another:
        fields["more"] = frozenset[str]
    if shape.place == "raw":
        fields["raw"] = msgspec.Raw
    hooks = {"__post_init__": _hook(KINDS[shape.kind])} if shape.place == "made" and not _is_validated(shape) else {}
    owner = _owner(shape.owner, fields, hooks)
    if shape.owner.endswith("in a model"):
        return owner, create_model("Holder", part=(owner, ...))
    if shape.owner.endswith("in a dataclass"):
        return owner, dataclasses.make_dataclass("Holder", [("part", owner)])
    if shape.owner.endswith("in a struct"):
        return owner, msgspec.defstruct("Holder", [("part", owner)])
    return owner, owner


def _owner(name: str, fields: Mapping[str, Any], hooks: dict[str, Any]) -> Any:
    match name.partition(" in a ")[0]:
        case "dataclass":
            return dataclasses.make_dataclass("Owner", fields.items(), namespace=hooks)
        case "dataclass of pydantic":
            return of_pydantic(dataclasses.make_dataclass("Owner", fields.items()))
        case "struct":
            return msgspec.defstruct("Owner", fields.items(), namespace=hooks)
        case "typed dict":
            return _typed_dict("Owner", dict(fields))
        case "named tuple":
            return _named_tuple("Owner", fields.items())
        case _:
            of_model: dict[str, Any] = {field: (kind, ...) for field, kind in fields.items()}
            return create_model("Owner", **of_model)


def _annotation(shape: Shape) -> Any:
    kind = KINDS[shape.kind]
    match shape.place:
        case "key":
            annotation: Any = dict[frozenset[str], int]
        case "part of a key":
            annotation = dict[tuple[int, frozenset[str]], int]
        case "made" if not _is_validated(shape):
            annotation = list[str]
        case "made":
            annotation = Annotated[list[str], AfterValidator(kind)]
        case "made and written":
            annotation = Annotated[list[str], AfterValidator(kind), PlainSerializer(sorted)]
        case "written":
            annotation = Annotated[kind[str], PlainSerializer(sorted)]
        case _:
            annotation = kind[str]
    for container in shape.around:
        annotation = _CONTAINERS[container][0](annotation)
    for _ in range(_texts(shape)):
        annotation = _of(Json, annotation)
    return annotation


def _texts(shape: Shape) -> int:
    return shape.place.split().count("json")


def _hook(kind: Any) -> Callable[[Any], None]:
    def made(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: made(each) for key, each in value.items()}
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return kind(value)
        return type(value)(map(made, value)) if isinstance(value, list | tuple) else value

    def after_init(self: Any) -> None:
        self.value = made(self.value)

    return after_init


def main() -> None:
    for line in sys.stdin:
        cases = msgspec.json.decode(line, type=list[Case])
        print(json.dumps([*map(body_of, cases)]), flush=True)


if __name__ == "__main__":
    main()
