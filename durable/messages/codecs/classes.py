"""Classes that msgspec can encode and decode, found out from their annotations before the first message.

Refused is what msgspec would refuse message by message: a class of one's own within a message, which it takes for bytes
that nobody can read, and an attrs class with a private field, which it leaves out. Two dataclasses in one union, and
the like, are refused when the decoder is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_args

import msgspec.inspect
from msgspec.inspect import (
    CustomType,
    DataclassType,
    EnumType,
    Field,
    NamedTupleType,
    StructType,
    Type,
    TypedDictType,
)
from pydantic import BaseModel

_MESSAGES = (StructType, DataclassType, NamedTupleType, EnumType)
_WITH_FIELDS = (StructType, DataclassType, NamedTupleType, TypedDictType)

Decode = Callable[[bytes], Any]

_field_names: dict[type[Any], tuple[str, ...]] = {}


def refuse_uncodable(cls: type[Any]) -> None:
    """Raise TypeError for a class that is no kind of message, or has a field that cannot be encoded."""
    kind = msgspec.inspect.type_info(cls)
    if not isinstance(kind, _MESSAGES):
        raise TypeError(
            "it is no msgspec Struct, dataclass, attrs class or pydantic model; put @message above @dataclass"
        )
    _refuse_parts(kind, cls.__qualname__, ())


def refuse_uncodable_parts(cls: Any, *known: type) -> None:
    """Raise TypeError for a type with a part that cannot be encoded; subclasses of `known` can."""
    _refuse_parts(msgspec.inspect.type_info(cls), getattr(cls, "__qualname__", str(cls)), known)


def kinds_within(cls: type[Any]) -> set[type[Type]]:
    """Return the kinds of types that occur in a class."""
    return {type(kind) for _, kind in _within(msgspec.inspect.type_info(cls), "", set())}


def kinds_of_fields(cls: type[Any]) -> Mapping[str, set[type[Type]]]:
    """Return the kinds of types that occur in each field of a class, by its name in Python; none where nobody knows."""
    try:
        kind: Any = msgspec.inspect.type_info(cls)
    except Exception:  # as a class that pydantic alone writes
        return {}
    fields = kind.fields if isinstance(kind, _WITH_FIELDS) else ()
    return {field.name: {type(part) for _, part in _within(field.type, "", set())} for field in fields}


def type_variables(annotation: Any) -> Iterator[TypeVar]:
    """The type variables in an annotation: nothing has been put for them, and a decoder takes them for anything."""
    if isinstance(annotation, TypeVar):
        yield annotation
    for part in get_args(annotation):
        yield from type_variables(part)


def _refuse_open(cls: Any, path: str) -> None:
    """msgspec would take the open parts of a generic class for anything, and a Decimal in them for a text."""
    if parameters := getattr(cls, "__parameters__", ()):
        name = getattr(cls, "__name__", str(cls))
        raise TypeError(f"{path}: {name} is generic: say of what, such as {name}[int]; {parameters[0]} may be any type")


def _refuse_parts(kind: Type, name: str, known: tuple[type, ...]) -> None:
    for path, each in _within(kind, name, set()):
        if isinstance(each, _WITH_FIELDS):
            _refuse_open(each.cls, path)
        if isinstance(each, CustomType) and not (isinstance(each.cls, type) and issubclass(each.cls, known)):
            raise TypeError(f"{path} is of class {getattr(each.cls, '__qualname__', each.cls)}, which has no encoding")
        if isinstance(each, DataclassType):
            _refuse_private(each.cls, path)


def decoder_for(
    cls: type[Any], of_class: Callable[[Any], Any], of_model: Callable[[type[BaseModel]], Decode]
) -> Decode:
    """Return a decoder from msgspec's `of_class`, or of a pydantic model. Raises TypeError for a class that has none,
    and NameError.
    """
    if issubclass(cls, BaseModel):
        if parameters := cls.__pydantic_generic_metadata__["parameters"]:
            raise TypeError(f"it is generic, and {parameters[0]} may be any type; say of what, such as [int]")
        return of_model(cls)
    refuse_uncodable(cls)
    decode: Decode = of_class(cls).decode
    return decode


def field_names(cls: type[Any]) -> tuple[str, ...]:
    """The fields of a model, Struct, dataclass or attrs class; none of any other."""
    names = _field_names.get(cls)
    if names is None:
        names = _field_names[cls] = _find_field_names(cls)
    return names


def _find_field_names(cls: type[Any]) -> tuple[str, ...]:
    if issubclass(cls, BaseModel):
        return tuple(cls.model_fields)
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return tuple(
        getattr(field, "name", field)
        for attribute in ("__struct_fields__", "__attrs_attrs__")
        for field in getattr(cls, attribute, ())
    )


def _refuse_private(cls: type[Any], path: str) -> None:
    """msgspec leaves the private fields of attrs classes out, without which a receiver cannot make an instance."""
    for field in getattr(cls, "__attrs_attrs__", ()):
        if field.init and field.name.startswith("_"):
            raise TypeError(
                f"{path}.{field.name} is a private field of an attrs class, which has no encoding; "
                f"name it {field.name.lstrip('_')!r}, or give it init=False"
            )


def _within(kind: Any, path: str, seen: set[Any]) -> Iterator[tuple[str, Type]]:
    """Every type that occurs in a type, with the path to the field that it occurs in."""
    yield path, kind
    if isinstance(kind, _WITH_FIELDS):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
    for name in kind.__struct_fields__:
        value = getattr(kind, name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Field):
                yield from _within(part.type, f"{path}.{part.name}", seen)
            elif isinstance(part, Type):
                yield from _within(part, path, seen)
