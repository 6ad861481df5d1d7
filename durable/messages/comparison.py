"""Comparison of a message with its decoded form: the first difference, by its path.

Messages may hold values that their annotations do not allow, and fields that their class does not write out. Some would
not be decoded; others would arrive as another value: an instance of a subclass as one of the class, or a default.

Instances are compared field by field and never by their own `==`, which may leave fields out. Values are compared by
`==`, and besides:

    Lists, tuples and the like   are taken for each other, as their encodings are the same
    numbers                      that are equal are taken for each other, but True and False are no numbers
    a moment with a zone         is the moment, whatever its zone; without one it is another value
    a time of day with a zone    has its zone's offset, and arrives with the same
    NaN                          arrives as NaN
    a set                        has a type that says so: only then have its items one order in each process
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final, NamedTuple, TypeGuard
from uuid import UUID

from pydantic import BaseModel

from durable.kinds import shown
from durable.messages.codecs.classes import field_names
from durable.messages.codecs.sets import holds_sets, plain_fields, with_serializers

# Of these, what is equal and of one type is the same; Decimals may refuse to be compared.
_QUICK: Final = frozenset((str, int, bool, type(None), float, UUID, bytes, date, datetime, timedelta))
_PLAIN: Final = _QUICK | {Decimal, time}
_MISSING: Final = object()
_OF_NO_SET: Final = object()
"""Stands for the type of a set that says nothing of sets."""


class _Difference(NamedTuple):
    path: str
    sent: Any
    read: Any


def difference(sent: Any, read: Any, path: str) -> str | None:
    """Return what would arrive otherwise than it was sent; None for no difference."""
    found = _compared(sent, read, holds_sets(type(sent)))
    if found is None:
        return None
    path += found.path
    if found.read is _OF_NO_SET:
        return (
            f"{path} holds a set, which its type does not say: the items would have another order in each process; "
            "declare it as a set or frozenset"
        )
    if hasattr(found.sent, "get_secret_value"):
        return f"{path} is a secret, which pydantic writes as stars; send text, or give the field a serializer"
    expected, arriving = shown(found.sent), shown(found.read)
    if expected == arriving:
        return (
            f"{path} would arrive as another value that is written {arriving} too; give its class an `==`, or a codec"
        )
    return f"{path} would arrive as {arriving}, not as {expected}"


def _compared(sent: Any, read: Any, may_hold_sets: bool) -> _Difference | None:
    kind = type(sent)
    if kind is type(read):
        if kind in _PLAIN:
            return None if _is_equal(sent, read) else _Difference("", sent, read)
        names = field_names(kind)
        if names:
            return _of_instances(sent, read, names, may_hold_sets)
    elif field_names(kind) or field_names(type(read)):
        return _Difference("", sent, read)
    if isinstance(sent, Mapping) and isinstance(read, Mapping):
        return _of_mappings(sent, read, may_hold_sets)
    if _is_sequence(sent) and _is_sequence(read):
        return _of_sequences(sent, read, may_hold_sets)
    if isinstance(sent, Set) and isinstance(read, Set):
        return _of_sets(sent, read, may_hold_sets)
    return None if _is_equal(sent, read) else _Difference("", sent, read)


def _of_instances(sent: Any, read: Any, names: Iterable[str], may_hold_sets: bool) -> _Difference | None:
    without = plain_fields(type(sent)) if may_hold_sets else ()
    for name in names:
        part, arriving = getattr(sent, name, _MISSING), getattr(read, name, _MISSING)
        if type(part) is type(arriving) and type(part) in _QUICK and part == arriving:
            continue  # as most are: without another call, the price of a message is half
        found = _compared(part, arriving, may_hold_sets and name not in without)
        if found is not None and found.read is _OF_NO_SET and name in with_serializers(type(sent)):
            found = _compared(part, arriving, True)
        if found is not None:
            return found._replace(path=f".{name}{found.path}")
    if isinstance(sent, BaseModel) and (sent.model_extra or read.model_extra):
        found = _compared(sent.model_extra, read.model_extra, may_hold_sets)
        return found and found._replace(path=f".model_extra{found.path}")
    return None


def _of_mappings(sent: Mapping[Any, Any], read: Mapping[Any, Any], may_hold_sets: bool) -> _Difference | None:
    if sent.keys() != read.keys():
        return _Difference("", sent, read)
    for key, part in sent.items():
        if type(key) is not str and not may_hold_sets and _is_with_set(key):
            return _Difference("", sent, _OF_NO_SET)
        arriving = read[key]
        if type(part) is type(arriving) and type(part) in _QUICK and part == arriving:
            continue
        found = _compared(part, arriving, may_hold_sets)
        if found is not None:
            return found._replace(path=f"[{key!r}]{found.path}")
    return None


def _of_sequences(sent: Sequence[Any], read: Sequence[Any], may_hold_sets: bool) -> _Difference | None:
    if len(sent) != len(read) or (hasattr(sent, "_fields") and type(sent) is not type(read)):  # a NamedTuple has names
        return _Difference("", sent, read)
    for index, (part, arriving) in enumerate(zip(sent, read, strict=True)):
        found = _compared(part, arriving, may_hold_sets)
        if found is not None:
            return found._replace(path=f"[{index}]{found.path}")
    return None


def _of_sets(sent: Set[Any], read: Set[Any], may_hold_sets: bool) -> _Difference | None:
    if not may_hold_sets:
        return _Difference("", sent, _OF_NO_SET)
    arriving = {each: each for each in read}
    for each in sent:
        if each not in arriving or _compared(each, arriving[each], may_hold_sets) is not None:
            return _Difference("", sent, read)
    return None if len(sent) == len(arriving) else _Difference("", sent, read)


def _is_with_set(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else [getattr(key, name, None) for name in field_names(type(key))]
    return isinstance(key, Set) or any(map(_is_with_set, parts))


def _is_equal(sent: Any, read: Any) -> bool:
    """True for equal values without fields or parts."""
    if sent is read:
        return True
    if isinstance(sent, Decimal) and isinstance(read, Decimal):
        # NaN equals nothing, and one that signals refuses to be compared.
        return str(sent) == str(read) if sent.is_nan() or read.is_nan() else sent == read
    if isinstance(sent, bool) or isinstance(read, bool):
        return type(sent) is type(read) and sent == read
    if isinstance(sent, time) and isinstance(read, time) and not _has_same_zone(sent, read):
        return False
    try:
        if sent == read:
            return True
    except Exception:  # the application's own comparison, or one of values that cannot be compared
        return False
    if isinstance(sent, datetime) and isinstance(read, datetime) and sent.tzinfo and read.tzinfo:
        return sent.astimezone(UTC) == read.astimezone(UTC)  # in a repeated hour zones never compare as equal: PEP 495
    if isinstance(sent, float) and isinstance(read, float) and math.isnan(sent):
        return math.isnan(read)
    return type(sent) is type(read) and _says_nothing_of_itself(sent) and not _parts_differ(sent, read)


def _has_same_zone(sent: time, read: time) -> bool:
    # A zone that changes in the course of the year has no offset at a time of day, which then equals one without zone.
    return (sent.tzinfo is None) is (read.tzinfo is None) and sent.utcoffset() == read.utcoffset()


def _says_nothing_of_itself(value: object) -> bool:
    compares: object = type(value).__eq__
    return compares is object.__eq__ and not isinstance(value, Enum)


def _parts_differ(sent: object, read: object) -> bool:
    return _compared(getattr(sent, "__dict__", {}), getattr(read, "__dict__", {}), True) is not None


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
