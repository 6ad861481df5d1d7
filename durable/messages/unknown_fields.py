"""Fields in JSON that a message has not taken: what somebody writes by hand is read strictly.

A decoder passes over a field that its class does not know, because its sender may be newer. In JSON that is written for
this very class it is a misspelling, or a wish that would be lost. The JSON is compared with the message that was
decoded from it, part by part, so that each part is judged by the class that it has become:

    object, instance      the names by which the class decodes its fields; those of a model that takes others, too
    array, instance       as many items as the class has fields
    object, Mapping       the keys that it has
    array, list or tuple  item by item
    array, set            each item by the one that it fits best
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec
from pydantic import AliasChoices, AliasPath, BaseModel, RootModel

from durable.errors import InvalidMessage
from durable.grammar import several, suggestion
from durable.messages.codecs.classes import field_names

_ANY_ITEM: Final = "[]"
_Place = tuple[str | int, ...]


class _Unknown(NamedTuple):
    """A field, or an item of an array, that was passed over; and the names that would not have been."""

    place: _Place
    name: str | int
    value: Any
    known: Sequence[str]


def refuse_unknown_fields(given: bytes, message: object, name: str, *, before: bytes = b"") -> None:
    """Raise InvalidMessage when the message called `name`, which was decoded from this JSON, lacks a field of it.

    What stands in the same place of the JSON `before` may stay as it is.
    """
    try:
        kept = _values(before)
        for unknown in _unknown(msgspec.json.decode(given), message, ()):
            if unknown.value not in kept[_whichever((*unknown.place, unknown.name))]:
                raise InvalidMessage(_told(unknown, name))
    except RecursionError as error:
        raise InvalidMessage(f"{name}: too many parts within parts to be compared with its class") from error


def _told(unknown: _Unknown, name: str) -> str:
    path = name + "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in unknown.place)
    if isinstance(unknown.name, int):
        return f"{path}: too many items; give {several(len(unknown.known), 'items')}"
    fault = f"{path}: unknown field {unknown.name!r}"
    return fault + (suggestion(unknown.name, unknown.known) or f"; {_choice(unknown.known)}")


def _choice(known: Sequence[str]) -> str:
    return f"leave it out, or use one of: {', '.join(known)}" if known else "leave it out"


def _unknown(given: Any, part: Any, place: _Place) -> Iterator[_Unknown]:
    if isinstance(part, RootModel):
        yield from _unknown(given, part.root, place)
    elif isinstance(given, dict) and (names := _names(type(part))):
        yield from _of_instance(given, part, names, place)
    elif isinstance(given, list) and (fields := field_names(type(part))):
        yield from _of_items(given, part, fields, place)
    elif isinstance(given, dict) and isinstance(part, Mapping):
        yield from _of_mapping(given, part, place)
    elif isinstance(given, list) and isinstance(part, Set):
        for index, item in enumerate(given):
            readings = [[*_unknown(item, each, (*place, index))] for each in part]
            yield from min(readings, key=len, default=[])
    elif isinstance(given, list) and isinstance(part, Sequence):
        for index, (item, each) in enumerate(zip(given, part, strict=False)):  # a NamedTuple may add defaults
            yield from _unknown(item, each, (*place, index))


def _of_instance(
    given: dict[str, Any], part: Any, names: Mapping[str, str | None], place: _Place
) -> Iterator[_Unknown]:
    more = (part.model_extra or {}) if isinstance(part, BaseModel) else {}
    for name, value in given.items():
        if name in names:
            attribute = names[name]
            if attribute is not None:
                yield from _unknown(value, getattr(part, attribute, None), (*place, name))
        elif name not in more:
            yield _Unknown(place, name, value, list(names))


def _of_items(given: list[Any], part: Any, fields: Sequence[str], place: _Place) -> Iterator[_Unknown]:
    """The items of a Struct that is an array: its tag, if it has one, and its fields."""
    first = [None] if _tag_field(type(part)) else []
    known = [*first, *fields]
    for index, (item, field) in enumerate(zip(given, known, strict=False)):
        if field is not None:
            yield from _unknown(item, getattr(part, field, None), (*place, index))
    if len(given) > len(known):
        yield _Unknown(place, len(known), given[len(known)], [str(each) for each in known])


def _of_mapping(given: dict[str, Any], part: Mapping[Any, Any], place: _Place) -> Iterator[_Unknown]:
    if len(given) != len(part):
        known = [str(key) for key in part]
        yield from (_Unknown(place, name, value, known) for name, value in given.items() if name not in known)
    named = given.keys() <= part.keys()
    for (name, value), each in zip(given.items(), part.values(), strict=False):
        if named or len(given) == len(part):  # keys that are no texts come in the same order
            yield from _unknown(value, part[name] if named else each, (*place, name))


def _names(cls: type[Any]) -> Mapping[str, str | None]:
    """The names by which this class decodes its fields, and the attributes that hold these; None: not all of it."""
    if models := getattr(cls, "__pydantic_fields__", None):
        return {name: attribute for field, about in models.items() for name, attribute in _aliases(field, about)}
    encoded = getattr(cls, "__struct_encode_fields__", None) or field_names(cls)
    names: dict[str, str | None] = dict(zip(encoded, field_names(cls), strict=True))
    return names | dict.fromkeys(filter(None, [_tag_field(cls)]))


def _tag_field(cls: type[Any]) -> str | None:
    config = getattr(cls, "__struct_config__", None)
    return None if config is None else config.tag_field


def _aliases(field: str, about: Any) -> Iterator[tuple[str, str | None]]:
    yield field, field
    validated = about.validation_alias
    choices: Iterable[Any] = validated.choices if isinstance(validated, AliasChoices) else (about.alias, validated)
    for choice in choices:
        if isinstance(choice, str):
            yield choice, field
        elif isinstance(choice, AliasPath):
            yield str(choice.path[0]), None


def _values(document: bytes) -> Mapping[_Place, list[Any]]:
    """The values in each place of this JSON, of all items of an array together; none for what is no JSON."""
    found: dict[_Place, list[Any]] = defaultdict(list)
    with suppress(ValueError):  # msgspec's errors are ValueErrors, too
        _collect(msgspec.json.decode(document), (), found)
    return found


def _collect(value: Any, place: _Place, found: dict[_Place, list[Any]]) -> None:
    found[place].append(value)
    if isinstance(value, dict):
        for name, each in value.items():
            _collect(each, (*place, name), found)
    elif isinstance(value, list):
        for each in value:
            _collect(each, (*place, _ANY_ITEM), found)


def _whichever(place: _Place) -> _Place:
    return tuple(_ANY_ITEM if isinstance(each, int) else each for each in place)
