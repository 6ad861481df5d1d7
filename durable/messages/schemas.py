"""JSON schemas of the types of messages, arguments and results.

They say more than those of msgspec: that a text is a time, and which keys a dict has. So two of them can be compared.

A class that is *read* may lack its fields with defaults. A class that is *written* by durable has them all: only a
Struct with omit_defaults, a TypedDict and fields that are UNSET leave something out.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec.inspect as kinds
from msgspec import NODEFAULT, Struct, to_builtins
from pydantic import BaseModel

from durable.messages.codecs.jsonable import jsonable
from durable.messages.codecs.set_order import in_one_order
from durable.messages.model_schemas import ModelSchemas, flags, member_names

Json = dict[str, Any]

SPARING: Final = "x-omit-default"
"""Set where a field is left out when it has its default."""
REFERENCE: Final = "#/$defs/"

_LIMITS: Final = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
    "pattern": "pattern",
}
_TEXTS: Final[Mapping[type, Json]] = {
    kinds.DateType: {"format": "date"},
    kinds.TimeDeltaType: {"format": "duration"},
    kinds.UUIDType: {"format": "uuid"},
    kinds.DecimalType: {"format": "decimal"},
    kinds.BytesType: {"contentEncoding": "base64"},
    kinds.ByteArrayType: {"contentEncoding": "base64"},
    kinds.MemoryViewType: {"contentEncoding": "base64"},
}
_PLAIN: Final[Mapping[type, Json]] = {
    kinds.AnyType: {},
    kinds.RawType: {},
    kinds.NoneType: {"type": "null"},
    kinds.BoolType: {"type": "boolean"},
    kinds.IntType: {"type": "integer"},
    kinds.FloatType: {"type": "number"},
}


def schema_of(kind: Any, *, written: bool = False) -> Json:
    """Return the schema of a type, with those that it refers to in `$defs`. Raises TypeError for one without any."""
    maker = _Maker(written)
    schema = maker.make(kinds.type_info(kind))
    return {**schema, "$defs": maker.named} if maker.named else schema


def models_of(kind: Any) -> list[type[BaseModel]]:
    """Return the pydantic models that occur in a type; those within a model are left to pydantic."""
    maker = _Maker(written=False)
    maker.make(kinds.type_info(kind))
    return maker.models


def placed(schema: Json, name: str, prefix: str, schemas: dict[str, Json]) -> Json:
    """Return the schema for a document that keeps all schemas in one place, under names that begin with `prefix`.

    Those that it refers to are added to `schemas`, under names that begin with `name`, so that no two are in each
    other's way.
    """
    for inner, part in schema.get("$defs", {}).items():
        schemas[f"{name}-{inner}"] = _moved(part, f"{prefix}{name}-")
    moved: Json = _moved({key: part for key, part in schema.items() if key != "$defs"}, f"{prefix}{name}-")
    return moved


def _moved(schema: Any, to: str) -> Any:
    match schema:
        case dict():
            return {
                key: to + each.removeprefix(REFERENCE) if key == "$ref" and isinstance(each, str) else _moved(each, to)
                for key, each in schema.items()
            }
        case list():
            return [_moved(each, to) for each in schema]
        case _:
            return schema


class _Maker:
    def __init__(self, written: bool) -> None:
        self.named: dict[str, Json] = {}
        self.models: list[type[BaseModel]] = []
        self._names: dict[Any, str] = {}
        self._written = written

    def make(self, kind: kinds.Type) -> Json:
        if (plain := _PLAIN.get(type(kind))) is not None:
            return {**plain, **_limits(kind)}
        if (text := _TEXTS.get(type(kind))) is not None:
            return {"type": "string", **text, **_lengths(kind, "Length")}
        match kind:
            case kinds.Metadata():
                return {**(kind.extra_json_schema or {}), **self.make(kind.type)}
            case kinds.StrType():
                return {"type": "string", **_limits(kind), **_lengths(kind, "Length")}
            case kinds.DateTimeType() | kinds.TimeType():
                zone = {} if kind.tz is None else {"x-timezone": kind.tz}
                return {
                    "type": "string",
                    "format": "date-time" if isinstance(kind, kinds.DateTimeType) else "time",
                } | zone
            case kinds.LiteralType():
                return {"enum": sorted(kind.values, key=lambda each: (str(type(each)), each))}
            case kinds.UnionType():
                return {"anyOf": [self.make(each) for each in sorted(kind.types, key=_place)]}
            case kinds.TupleType():
                return _array(
                    [_unnamed(self.make(each)) for each in kind.item_types], len(kind.item_types), is_open=False
                )
            case kinds.SetType() | kinds.FrozenSetType():
                return self._items(kind) | {"uniqueItems": True}
            case kinds.CollectionType():
                return self._items(kind)
            case kinds.DictType():
                return self._dict(kind)
            case kinds.EnumType() if issubclass(kind.cls, enum.Flag):
                return self._named(kind.cls, lambda: flags(kind.cls))
            case kinds.EnumType():
                values = [to_builtins(each) for each in kind.cls]
                return self._named(kind.cls, lambda: {"enum": values, **member_names(kind.cls)})
            case kinds.StructType() | kinds.DataclassType() | kinds.TypedDictType() | kinds.NamedTupleType():
                return self._named(kind.cls, lambda: self._fields(kind))
            case kinds.CustomType() if isinstance(kind.cls, type) and issubclass(kind.cls, BaseModel):
                return self._named(kind.cls, lambda: self._model(kind.cls))
            case _:
                raise TypeError(f"{kind!r} has no schema")

    def _named(self, cls: Any, make: Any) -> Json:
        """Refer to the schema of a class, which is made once."""
        if cls not in self._names:
            self._names[cls] = name = self._free(re.sub(r"[^A-Za-z0-9_-]+", "_", getattr(cls, "__name__", str(cls))))
            self.named[name] = {}
            self.named[name] = {"title": getattr(cls, "__name__", str(cls)), **make()}
        return {"$ref": REFERENCE + self._names[cls]}

    def _free(self, name: str) -> str:
        count = 1
        while (free := name if count == 1 else f"{name}-{count}") in self.named:
            count += 1
        return free

    def _items(self, kind: kinds.CollectionType) -> Json:
        items = self.make(kind.item_type)
        return {"type": "array", **({"items": items} if items else {}), **_lengths(kind, "Items")}

    def _dict(self, kind: kinds.DictType) -> Json:
        keys, values = self.make(kind.key_type), self.make(kind.value_type)
        names = {} if keys == {"type": "string"} else {"x-keys": keys}
        return {"type": "object", "additionalProperties": values or True, **names, **_lengths(kind, "Properties")}

    def _fields(self, kind: Any) -> Json:
        fields: Iterable[kinds.Field] = kind.fields
        sparing = {SPARING: True} if _is_sparing(kind) else {}
        made = {
            each.encode_name: {**self.make(each.type), **(_default(each) | sparing if _is_optional(each) else {})}
            for each in fields
        }
        required = [each.encode_name for each in fields if each.required or self._is_written(kind, each)]
        if isinstance(kind, kinds.NamedTupleType) or getattr(kind, "array_like", False):
            items = [{**schema, "title": name} for name, schema in made.items()]
            tags = [{"enum": [tag]}] if (tag := getattr(kind, "tag", None)) is not None else []
            is_open = not getattr(kind, "forbid_unknown_fields", True)
            return _array([*tags, *items], len(tags) + len(required), is_open=is_open)
        if getattr(kind, "tag_field", None) is not None:
            made = {kind.tag_field: {"enum": [kind.tag]}, **made}
            required = [kind.tag_field, *required]
        closed = {"additionalProperties": False} if getattr(kind, "forbid_unknown_fields", False) else {}
        return {"type": "object", "properties": made, "required": required, **closed}

    def _is_written(self, kind: Any, field: kinds.Field) -> bool:
        """True for a field with a default that is written nevertheless."""
        if not self._written or isinstance(kind, kinds.TypedDictType):
            return False
        return _is_optional(field) and not _is_sparing(kind)

    def _model(self, cls: type[BaseModel]) -> Json:
        self.models.append(cls)
        mode: Literal["serialization", "validation"] = "serialization" if self._written else "validation"
        prefix = f"{self._names[cls]}-"
        template = f"{REFERENCE}{prefix}{{model}}"
        schema = cls.model_json_schema(mode=mode, ref_template=template, schema_generator=ModelSchemas)
        inner = schema.pop("$defs", {})
        self.named.update({prefix + name: self._complete(part) for name, part in inner.items()})
        return self._complete(schema)

    def _complete(self, schema: Json) -> Json:
        """A model is written with all of its fields."""
        return schema | {"required": list(schema["properties"])} if self._written and "properties" in schema else schema


def _place(kind: kinds.Type) -> tuple[bool, str, str, str]:
    """The place in a union, whose order decides nothing: msgspec tells its types apart by what arrives."""
    values = type(next(iter(kind.cls)).value).__name__ if isinstance(kind, kinds.EnumType) else ""
    return isinstance(kind, kinds.NoneType), type(kind).__name__, str(getattr(kind, "tag", "")), values


def _is_optional(field: kinds.Field) -> bool:
    """True for a field with a default; one that is UNSET has none."""
    return field.default is not NODEFAULT or field.default_factory is not NODEFAULT


def _is_sparing(kind: Any) -> bool:
    """True for a class that leaves out what has its default."""
    cls = getattr(kind.cls, "__origin__", kind.cls)
    return issubclass(cls, Struct) and cls.__struct_config__.omit_defaults


def _unnamed(schema: Json) -> Json:
    """Leave out the title of an item of a tuple, which has no name: there it is a word."""
    return {key: part for key, part in schema.items() if key != "title"}


def _array(items: list[Json], needed: int, *, is_open: bool) -> Json:
    ends = {} if is_open else {"items": False, "maxItems": len(items)}
    return {"type": "array", "prefixItems": items, "minItems": needed, **ends}


def _limits(kind: kinds.Type) -> Json:
    found = {name: getattr(kind, attribute, None) for attribute, name in _LIMITS.items()}
    return {name: value for name, value in found.items() if value is not None}


def _lengths(kind: kinds.Type, of: str) -> Json:
    found = {"min" + of: getattr(kind, "min_length", None), "max" + of: getattr(kind, "max_length", None)}
    return {name: value for name, value in found.items() if value is not None}


def _default(field: kinds.Field) -> Json:
    """The value of a field that is missing. A function of the application may make another each time."""
    default = field.default
    if field.default_factory in (list, dict, set):
        default = field.default_factory()
    if default is NODEFAULT:
        return {}
    try:
        return {"default": in_one_order(default, to_builtins(default, enc_hook=jsonable, str_keys=True))}
    except Exception:  # a default that has no encoding is none that can be shown
        return {}
