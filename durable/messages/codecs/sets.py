"""Messages that hold sets, with the items in one order: their bodies are the same in each process.

A message that is sent again under its id or business key, by another process, is known by the digest of its body.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.inspect import FrozenSetType, RawType, SetType
from pydantic import BaseModel

from durable.messages.codecs.classes import kinds_within

_found: dict[type[Any], bool] = {}


def holds_sets(cls: type[Any]) -> bool:
    """Tell whether a field of a class, or of one within it, is declared as a set. A model with a serializer of its own
    counts as one without sets: what that writes, in whatever order, stays as it is.
    """
    found = _found.get(cls)
    if found is None:
        found = _found[cls] = _is_found(cls)
    return found


def _is_found(cls: type[Any]) -> bool:
    if issubclass(cls, BaseModel):
        within = [*_kinds(cls.__pydantic_core_schema__)]
        return not {"set", "frozenset"}.isdisjoint(within) and not any(kind.startswith("function-") for kind in within)
    kinds = kinds_within(cls)
    return not kinds.isdisjoint((SetType, FrozenSetType)) and RawType not in kinds  # which is bytes to msgspec alone


def _kinds(schema: object, name: str = "") -> Iterator[str]:
    """The types in a schema of pydantic; of functions those of serializers alone."""
    match schema:
        case dict():
            kind = schema.get("type")
            if isinstance(kind, str) and (name == "serialization" or not kind.startswith("function-")):
                yield kind
            for key, each in schema.items():
                yield from _kinds(each, key)
        case list() | tuple():
            for each in schema:
                yield from _kinds(each)
        case _:
            pass
