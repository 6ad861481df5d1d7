"""Messages that hold sets, with the items in one order: their bodies are the same in each process.

A message that is sent again under its id or business key, by another process, is known by the digest of its body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Final

import msgspec.inspect as kinds
from msgspec.inspect import FrozenSetType, SetType
from pydantic import BaseModel, TypeAdapter

from durable.messages.codecs.classes import field_names, kinds_of_fields, kinds_within

_Schema = Mapping[str, Any]
_SETS: Final = {"set", "frozenset"}
_WITH_FIELDS: Final = {"model", "dataclass", "typed-dict"}
_MAY_HOLD_SETS: Final = _SETS | _WITH_FIELDS | {"definition-ref"}
_PLAIN: Final = frozenset({
    "model-field", "default", "nullable", "union", "list", "tuple", "dict", "literal", "none", "bool", "int",
    "float", "decimal", "str", "bytes", "date", "time", "datetime", "timedelta", "uuid",
})  # fmt: skip
"""Types of pydantic's schemas whose values hold no sets, and no values of any other class."""
_PLAIN_KINDS: Final = frozenset({
    kinds.UnionType, kinds.ListType, kinds.TupleType, kinds.VarTupleType, kinds.DictType, kinds.LiteralType,
    kinds.EnumType, kinds.NoneType, kinds.BoolType, kinds.IntType, kinds.FloatType, kinds.DecimalType, kinds.StrType,
    kinds.BytesType, kinds.DateType, kinds.TimeType, kinds.DateTimeType, kinds.TimeDeltaType, kinds.UUIDType,
})  # fmt: skip
"""The same of msgspec."""

_plain_fields: dict[type[Any], frozenset[str]] = {}
_with_sets: dict[type[Any], bool] = {}
_in_own_order: dict[type[Any], frozenset[str]] = {}
_with_serializers: dict[type[Any], frozenset[str]] = {}
_aliases: dict[type[Any], Mapping[str, str]] = {}


def holds_sets(cls: type[Any]) -> bool:
    """Tell whether a field of a class, or of one within it, is declared as a set."""
    found = _with_sets.get(cls)
    if found is None:
        found = _with_sets[cls] = _is_with_sets(cls)
    return found


def in_own_order(cls: type[Any]) -> frozenset[str]:
    """Return the fields of a model whose sets a serializer of the application writes, in an order of its own."""
    found = _in_own_order.get(cls)
    if found is None:
        found = _in_own_order[cls] = _find_in_own_order(cls) if issubclass(cls, BaseModel) else frozenset()
    return found


def with_serializers(cls: type[Any]) -> frozenset[str]:
    """Return the fields of a model whose values a serializer of the application writes, whatever their types."""
    found = _with_serializers.get(cls)
    if found is None:
        found = _with_serializers[cls] = _find_with_serializers(cls) if issubclass(cls, BaseModel) else frozenset()
    return found


def plain_fields(cls: type[Any]) -> frozenset[str]:
    """Return the fields of a model, Struct, dataclass or attrs class that hold no sets, by their declared types."""
    found = _plain_fields.get(cls)
    if found is None:
        found = _plain_fields[cls] = frozenset(_find_plain_fields(cls))
    return found


def is_plain(cls: type[Any]) -> bool:
    """Tell whether all fields of a class are plain_fields(), and it has no others."""
    plain = plain_fields(cls)
    return bool(plain) and len(plain) == len(field_names(cls)) and not in_own_order(cls) and not _takes_extra(cls)


def aliases(cls: type[Any]) -> Mapping[str, str]:
    """Return the names under which pydantic writes the fields of a model or dataclass, where they are not their own."""
    found = _aliases.get(cls)
    if found is None:
        found = _aliases[cls] = _find_aliases(cls) if issubclass(cls, BaseModel) or is_dataclass(cls) else {}
    return found


def _is_with_sets(cls: type[Any]) -> bool:
    if issubclass(cls, BaseModel):
        return not _SETS.isdisjoint(_types(cls.__pydantic_core_schema__))
    return not kinds_within(cls).isdisjoint((SetType, FrozenSetType))


def _find_plain_fields(cls: type[Any]) -> Iterator[str]:
    if issubclass(cls, BaseModel):
        model = _model_of(cls)
        fields = {} if model is None else _fields(model)
        yield from (name for name, field in fields.items() if all(map(_is_plain, _nodes(field))))
    elif field_names(cls):
        yield from (name for name, within in kinds_of_fields(cls).items() if _PLAIN_KINDS.issuperset(within))


def _is_plain(part: _Schema) -> bool:
    return part["type"] in _PLAIN and "serialization" not in part


def _takes_extra(cls: type[Any]) -> bool:
    return issubclass(cls, BaseModel) and cls.model_config.get("extra") == "allow"


def _find_in_own_order(cls: type[BaseModel]) -> frozenset[str]:
    model = _model_of(cls)
    if model is None or _is_written_by_the_application(model):
        return frozenset(cls.model_fields)
    fields = _fields(model).items()
    return frozenset(name for name, field in fields if any(map(_is_written_by_the_application, _parts(field))))


def _find_with_serializers(cls: type[BaseModel]) -> frozenset[str]:
    model = _model_of(cls)
    if model is None or _has_serializer(model):
        return frozenset(cls.model_fields)
    return frozenset(name for name, field in _fields(model).items() if any(map(_has_serializer, _layers(field))))


def _find_aliases(cls: type[Any]) -> Mapping[str, str]:
    if issubclass(cls, BaseModel):
        named = [(name, field.serialization_alias or field.alias) for name, field in cls.model_fields.items()]
    else:
        of_dataclass = next(part for part in _nodes(TypeAdapter(cls).core_schema) if part.get("cls") is cls)
        fields = next(part["fields"] for part in _nodes(of_dataclass) if part["type"] == "dataclass-args")
        named = [(field["name"], field.get("serialization_alias")) for field in fields]
    return {name: alias for name, alias in named if alias}


def refuse_sets_of_models(cls: type[BaseModel]) -> None:
    """Raise TypeError for a model with a set of models: as Python's own values they are dicts, which no set holds."""
    schema = cls.__pydantic_core_schema__
    named = {part["ref"]: part for part in _nodes(schema) if "ref" in part}
    for model in filter(_is_model, _nodes(schema)):
        for name, field in _fields(model).items():
            sets = [part for part in _parts(field) if part["type"] in _SETS]
            items = [item for each in sets for item in _nodes(each.get("items_schema"))]
            items += [named.get(item.get("schema_ref"), item) for item in items]
            if any(item["type"] in _WITH_FIELDS and "serialization" not in item for item in items):
                raise TypeError(
                    f"{model['cls'].__qualname__}.{name} is a set of models, which MessagePack cannot carry; "
                    "make it a list or a tuple"
                )


def _model_of(cls: type[BaseModel]) -> _Schema | None:
    parts = _nodes(cls.__pydantic_core_schema__)
    return next((part for part in parts if _is_model(part) and part.get("cls") is cls), None)


def _fields(model: _Schema) -> _Schema:
    if model.get("root_model"):
        return {"root": model["schema"]}
    fields: _Schema = next(part["fields"] for part in _nodes(model["schema"]) if part["type"] == "model-fields")
    return fields


def _is_written_by_the_application(part: _Schema) -> bool:
    return _has_serializer(part) and not _MAY_HOLD_SETS.isdisjoint(_types(part))


def _has_serializer(part: _Schema) -> bool:
    writer = part.get("serialization", {})
    if not writer.get("type", "").startswith("function-"):
        return False
    return not str(getattr(writer["function"], "__module__", "")).startswith("pydantic.")


def _is_model(part: _Schema) -> bool:
    is_model: bool = part["type"] == "model"
    return is_model


def _types(schema: object) -> set[str]:
    return {part["type"] for part in _nodes(schema)}


def _parts(schema: object) -> Iterator[_Schema]:
    """The parts of a schema of pydantic down to models, which have fields of their own."""
    yield from _nodes(schema, _is_model)


def _layers(schema: _Schema) -> Iterator[_Schema]:
    """The schema of a value, with those around it: defaults, validators and the like."""
    part: _Schema | None = schema
    while part is not None and not _is_model(part):
        yield part
        part = part.get("schema")


def _nodes(schema: object, is_leaf: Callable[[_Schema], bool] = lambda _: False) -> Iterator[_Schema]:
    """All parts of a schema of pydantic that have a type, from the outside in, but none below a leaf."""
    if isinstance(schema, Mapping):
        typed = isinstance(schema.get("type"), str)
        if typed:
            yield schema
        if not (typed and is_leaf(schema)):
            for each in schema.values():
                yield from _nodes(each, is_leaf)
    elif isinstance(schema, list | tuple):
        for each in schema:
            yield from _nodes(each, is_leaf)
