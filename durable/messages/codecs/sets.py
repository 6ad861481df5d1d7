"""Messages that hold sets, with the items in one order: their bodies are the same in each process.

A message that is sent again under its id or business key, by another process, is known by the digest of its body.
"""

from __future__ import annotations

from typing import Any

from msgspec.inspect import FrozenSetType, RawType, SetType
from pydantic import BaseModel

from durable.messages.codecs.classes import kinds_within

_found: dict[type[Any], bool] = {}


def holds_sets(cls: type[Any]) -> bool:
    """Tell whether a field of a class, or of one within it, is declared as a set."""
    found = _found.get(cls)
    if found is None:
        found = _found[cls] = _is_found(cls)
    return found


def _is_found(cls: type[Any]) -> bool:
    if issubclass(cls, BaseModel):
        return _is_in_schema(cls.__pydantic_core_schema__)
    kinds = kinds_within(cls)
    return not kinds.isdisjoint((SetType, FrozenSetType)) and RawType not in kinds  # which is bytes to msgspec alone


def _is_in_schema(schema: object) -> bool:
    match schema:
        case {"type": "set" | "frozenset"}:
            return True
        case dict():
            return any(map(_is_in_schema, schema.values()))
        case list() | tuple():
            return any(map(_is_in_schema, schema))
        case _:
            return False
