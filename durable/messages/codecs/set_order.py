"""The items of sets in one order: that of a set differs from process to process."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from functools import partial
from reprlib import Repr
from typing import Any, Final

import msgspec
from pydantic import BaseModel, RootModel
from pydantic_core import from_json, to_json

from durable.messages.codecs.classes import field_names
from durable.messages.codecs.jsonable import jsonable
from durable.messages.codecs.sets import aliases, in_own_order, is_plain, plain_fields

_NUMBERS: Final = frozenset({int, float, bool, type(None)})
_SCALARS: Final = _NUMBERS | {str, bytes}
_OPENS: Final = frozenset('[{"')
_AS_MADE: Final = object()
"""Stands for a value that holds no sets."""


def in_one_order(value: object, made: Any, *, by_alias: bool = False) -> Any:
    """Return what was made of a value for JSON or MessagePack, with the items of each set in it in one order.

    What has other items than the value, and a list that a serializer of the application makes, stays as it was made.
    `by_alias`: pydantic has made it, and not msgspec, which writes the fields of a dataclass by their own names.
    """
    if value is _AS_MADE:
        return made
    if (own := in_own_order(type(value))) and len(own) == len(field_names(type(value))):
        return in_one_order(_written(value), made, by_alias=True)
    if isinstance(value, RootModel):
        return in_one_order(value.root, made, by_alias=True)
    if _has_no_sets(type(value), by_alias):
        return made
    by_alias = by_alias or isinstance(value, BaseModel)
    ordered = partial(in_one_order, by_alias=by_alias)
    if isinstance(made, dict):
        parts, keys = _named(value, made, by_alias), _keys(value, made)
        return {keys.get(name, name): ordered(parts.get(name), each) for name, each in made.items()}
    if isinstance(made, Set):
        return sorted((ordered(each, each) for each in made), key=_text)
    if isinstance(made, str) and made[:1] in _OPENS and not isinstance(value, str):
        return _text_of_json(value, made)
    if not isinstance(made, list | tuple | deque):
        return made
    if isinstance(value, Set) and len(value) == len(made):
        return sorted(map(ordered, value, made), key=_text)
    if _NUMBERS.issuperset(map(type, made)):  # of which there may be many
        return made
    items = _items(value, made)
    if all(_has_no_sets(cls, by_alias) for cls in set(map(type, items))):  # of which there may be as many
        return made
    return [*map(ordered, items, made)]


def text_in_one_order(value: object) -> str:
    """Return the repr of a value, with the items of each set in it in one order."""
    return _Text().repr(value)


class _Text(Repr):
    def __init__(self) -> None:
        super().__init__()
        limits = [name for name in vars(self) if name.startswith("max")]
        vars(self).update(dict.fromkeys(limits, 1_000))  # beyond what a signature shows

    def repr_set(self, x: Set[Any], level: int) -> str:
        items = ", ".join(sorted(self.repr1(each, level - 1) for each in x))
        return f"{{{items}}}" if items else "set()"

    def repr_frozenset(self, x: Set[Any], level: int) -> str:
        return f"frozenset({self.repr_set(x, level) if x else ''})"

    def repr_instance(self, x: object, level: int) -> str:
        cls = type(x)
        names = field_names(cls) or getattr(cls, "_fields", ())  # of a NamedTuple
        if not names:
            return repr(x)
        parts = ", ".join(f"{name}={self.repr1(getattr(x, name, None), level - 1)}" for name in names)
        return f"{cls.__name__}({parts})"


def _named(value: object, made: Mapping[str, Any], by_alias: bool) -> Mapping[str, Any]:
    """Return the parts of a value by the names that they have in its JSON."""
    if isinstance(value, Mapping):
        return dict(zip(made, value.values(), strict=True)) if len(value) == len(made) else {}
    cls = type(value)
    names = field_names(cls)
    written = dict(zip(names, getattr(cls, "__struct_encode_fields__", names), strict=True))
    if by_alias:
        written |= aliases(cls)
    parts = {written[name]: getattr(value, name, None) for name in names}
    if _is_known(cls, by_alias):
        parts |= dict.fromkeys((written[name] for name in plain_fields(cls)), _AS_MADE)
    if in_own_order(cls):
        parts |= _written(value)
    return {**(getattr(value, "__pydantic_extra__", None) or {}), **parts}


def _written(model: Any) -> Any:
    """Return what serializers of the application make of their fields in Python: a list of theirs is none of a set."""
    try:
        return model.model_dump(by_alias=True, warnings=False, include=set(in_own_order(type(model))))
    except TypeError as error:
        raise TypeError(
            f"{type(model).__qualname__} has a serializer and a set of models, whose order is not known ({error}); "
            "make the set a list or a tuple"
        ) from error


def _keys(value: object, made: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the keys of MessagePack that may hold sets, each with the key to be written for it."""
    if _SCALARS.issuperset(map(type, made)):
        return {}
    keys = value if isinstance(value, Mapping) and len(value) == len(made) else made
    return {key: _hashable(in_one_order(own, key)) for own, key in zip(keys, made, strict=True)}


def _hashable(key: Any) -> Any:
    return tuple(map(_hashable, key)) if isinstance(key, list | tuple) else key


def _text_of_json(value: object, made: str) -> str:
    """Return the text of a field of pydantic's Json; another text stays as it was made."""
    try:
        parsed = from_json(made)
    except ValueError:
        return made
    ordered = in_one_order(value, parsed, by_alias=True)
    return made if ordered == parsed else to_json(ordered).decode()


def _has_no_sets(cls: type[Any], by_alias: bool) -> bool:
    return _is_known(cls, by_alias) and is_plain(cls)


def _is_known(cls: type[Any], by_alias: bool) -> bool:
    """Tell whether the declared types say what is written: pydantic may write a dataclass by what else is declared."""
    return not by_alias or issubclass(cls, BaseModel)


def _items(value: object, made: Sequence[Any]) -> Sequence[Any]:
    if isinstance(value, Sequence) and len(value) == len(made):
        return value
    items = [getattr(value, name, None) for name in field_names(type(value))]  # of a Struct, behind its tag
    return [*[None] * (len(made) - len(items)), *items]


_text = msgspec.json.Encoder(enc_hook=jsonable).encode
