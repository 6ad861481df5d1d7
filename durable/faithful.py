"""Does a receiver read what was sent? Where it would not, the first difference, by its path.

Instances of dataclasses, attrs classes and Structs may hold values that their annotations do not allow. Some would not
be decoded; others would arrive as another value, such as an instance of a subclass as one of the class.

Lists and tuples are taken for each other, as their encodings are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from durable.codecs.classes import field_names
from durable.kinds import shown


def difference(sent: Any, read: Any, path: str) -> str | None:
    """What would arrive otherwise than it was sent; None when nothing would."""
    if _is_equal(sent, read):
        return None
    if isinstance(sent, Mapping) and isinstance(read, Mapping) and sent.keys() == read.keys():
        return _first((sent[key], read[key], f"{path}[{key!r}]") for key in sent)
    if _is_sequence(sent) and _is_sequence(read) and len(sent) == len(read):
        return _first((*both, f"{path}[{index}]") for index, both in enumerate(zip(sent, read, strict=True)))
    if type(sent) is type(read):
        names = field_names(type(sent))
        if names:
            return _first((getattr(sent, name, None), getattr(read, name, None), f"{path}.{name}") for name in names)
        compares: object = type(sent).__eq__
        if compares is object.__eq__:
            return None  # it says nothing of itself
    return f"{path} would arrive as {shown(read)}, not as {shown(sent)}"


def _first(parts: Iterable[tuple[Any, Any, str]]) -> str | None:
    return next((found for part in parts if (found := difference(*part))), None)


def _is_equal(sent: Any, read: Any) -> bool:
    try:
        if sent == read:
            return True
    except Exception:  # the application's own comparison, or one of values that cannot be compared
        return False
    if isinstance(sent, datetime) and isinstance(read, datetime) and sent.tzinfo and read.tzinfo:
        return sent.astimezone(UTC) == read.astimezone(UTC)  # in a repeated hour zones never compare as equal: PEP 495
    return isinstance(sent, float) and isinstance(read, float) and math.isnan(sent) and math.isnan(read)


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
