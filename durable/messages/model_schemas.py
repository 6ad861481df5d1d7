"""JSON schemas of pydantic models, in the words of durable.messages.schemas.

pydantic leaves out what decides whether a value is read: keys that are no text, time zones, NaN and infinities,
and that a text is a number.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Any, Final

from pydantic import AliasChoices, BaseModel, PlainSerializer, WrapSerializer
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from durable.messages.codecs.set_order import in_one_order

Json = dict[str, Any]

_DECIMALS: Final = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
    "max_digits": "x-max-digits",
    "decimal_places": "x-decimal-places",
}
MEMBER_NAMES: Final = "x-enum-varnames"
"""The names of the values of an `enum`, as generators of code for OpenAPI know them."""
_CHANGES: Final = ("strip_whitespace", "to_lower", "to_upper")
_ZONES: Final = {"aware": True, "naive": False}


def flags(cls: type[enum.Enum]) -> Json:
    """Return the schema of flags, whose sums are values too."""
    boundary = getattr(cls, "_boundary_", enum.STRICT)
    members = sorted(cls, key=lambda each: each.value)
    values = [each.value for each in members]
    return {"type": "integer", "x-flags": values, "x-boundary": boundary.value, **member_names(members)}


def member_names(members: Iterable[enum.Enum]) -> Json:
    """Return the names of an enum's values, in their order: a member travels as its value, and stands for its name."""
    return {MEMBER_NAMES: [each.name for each in members]}


class ModelSchemas(GenerateJsonSchema):
    """Schemas of a model and of those within it."""

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> Json:
        limits = {name: schema[key] for key, name in _DECIMALS.items() if schema.get(key) is not None}  # type: ignore[literal-required]
        limits = {name: value if name.startswith("x-") else float(value) for name, value in limits.items()}
        finite = {} if schema.get("allow_inf_nan") else {"x-finite": True}
        text = {"type": "string", "format": "decimal", **limits, **finite}
        return text if self.mode == "serialization" else {"anyOf": [{"type": "number", **limits, **finite}, text]}

    def float_schema(self, schema: core_schema.FloatSchema) -> Json:
        allowed = schema.get("allow_inf_nan")
        is_finite = allowed is False or (allowed is None and self._config.config_dict.get("allow_inf_nan") is False)
        return super().float_schema(schema) | ({"x-finite": True} if is_finite else {})

    def dict_schema(self, schema: core_schema.DictSchema) -> Json:
        made = super().dict_schema(schema)
        keys = self.generate_inner(schema["keys_schema"]).copy() if "keys_schema" in schema else {}
        keys.pop("title", None)
        made.pop("propertyNames", None)
        made.pop("patternProperties", None)
        made.setdefault("additionalProperties", True)
        if "values_schema" in schema:
            made["additionalProperties"] = self.generate_inner(schema["values_schema"]) or True
        return made if keys == {"type": "string"} else made | {"x-keys": keys}

    def date_schema(self, schema: core_schema.DateSchema) -> Json:
        return super().date_schema(schema) | _moment(schema)

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> Json:
        return super().datetime_schema(schema) | _moment(schema)

    def time_schema(self, schema: core_schema.TimeSchema) -> Json:
        return super().time_schema(schema) | _moment(schema)

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> Json:
        return super().timedelta_schema(schema) | _moment(schema)

    def enum_schema(self, schema: core_schema.EnumSchema) -> Json:
        cls = schema["cls"]
        return flags(cls) if issubclass(cls, enum.Flag) else super().enum_schema(schema) | member_names(cls)

    def url_schema(self, schema: core_schema.UrlSchema) -> Json:
        return super().url_schema(schema) | _schemes(schema)

    def multi_host_url_schema(self, schema: core_schema.MultiHostUrlSchema) -> Json:
        return super().multi_host_url_schema(schema) | _schemes(schema)

    def str_schema(self, schema: core_schema.StringSchema) -> Json:
        config = self._config.config_dict
        changes = [
            name
            for name in _CHANGES
            if (schema.get(name) if schema.get(name) is not None else config.get(f"str_{name}"))
        ]
        return super().str_schema(schema) | ({"x-changes": changes} if changes else {})

    def model_fields_schema(self, schema: core_schema.ModelFieldsSchema) -> Json:
        """Computed fields are not written."""
        return super().model_fields_schema({**schema, "computed_fields": []})

    def encode_default(self, dft: Any) -> Any:
        return in_one_order(dft, super().encode_default(dft), by_alias=True)


class _Models(ModelSchemas):
    """The models that occur, and the fields that are written as stars."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.models: dict[type[BaseModel], set[str]] = {}
        self.enums: set[type[enum.Enum]] = set()

    def enum_schema(self, schema: core_schema.EnumSchema) -> Json:
        self.enums.add(schema["cls"])
        return super().enum_schema(schema)

    def model_schema(self, schema: core_schema.ModelSchema) -> Json:
        made = super().model_schema(schema)
        model: type[BaseModel] = schema["cls"]
        found = self.resolve_ref_schema(made)
        parts = {name: found.get("properties", {}).get(_written(name, field)) for name, field in _fields(model)}
        if "properties" not in found:
            parts = dict.fromkeys(parts, found)  # the root of a RootModel
        secret = {
            name for name, field in _fields(model) if _has_stars(parts[name]) and not _is_told(model, name, field)
        }
        self.models[model] = secret
        return made


def lost(model: type[BaseModel]) -> Iterator[str]:
    """Tell which fields of a model, and of those within it, would not come out as they went in."""
    maker = _Models()
    maker.generate(model.__pydantic_core_schema__, mode="serialization")
    for cls in maker.enums:
        if odd := [member for member in cls if not isinstance(member.value, str | int | float)]:
            yield f"{odd[0]} is no text and no number, and would not be read back; give the enum other values"
    for each, secret in maker.models.items():
        if parameters := each.__pydantic_generic_metadata__["parameters"]:
            yield f"{each.__qualname__} is generic, and {parameters[0]} may be any type; say of what, such as [int]"
        for name, field in _fields(each):
            path = f"{each.__qualname__}.{name}"
            if field.exclude or getattr(field, "exclude_if", None) is not None:
                yield f"{path} has exclude=True, and would be left out; take it out of the class"
            elif _written(name, field) not in _read(name, field):
                yield f"{path} is written as {_written(name, field)!r}, and read by another alias; give it one alias"
            elif name in secret:
                yield f"{path} is a secret, and would arrive as stars; send a reference to it, or give it a serializer"


def _fields(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return list(model.model_fields.items())


def _written(name: str, field: FieldInfo) -> str:
    return field.serialization_alias or field.alias or name


def _is_told(model: type[BaseModel], name: str, field: FieldInfo) -> bool:
    """True for a field with a serializer of its own."""
    decorators = model.__pydantic_decorators__
    named = {each for found in decorators.field_serializers.values() for each in found.info.fields}
    is_annotated = any(isinstance(each, PlainSerializer | WrapSerializer) for each in field.metadata)
    return is_annotated or bool(decorators.model_serializers) or not named.isdisjoint((name, "*"))


def _read(name: str, field: FieldInfo) -> set[str]:
    """Return the names by which a field is read: its own, and its aliases of one step."""
    alias = field.validation_alias if field.validation_alias is not None else field.alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
    return {name, *(each for each in choices if isinstance(each, str))}


def _has_stars(schema: Any) -> bool:
    match schema:
        case {"format": "password", "writeOnly": True}:
            return True
        case dict():
            return any(_has_stars(each) for key, each in schema.items() if key not in ("default", "examples"))
        case list():
            return any(_has_stars(each) for each in schema)
        case _:
            return False


def _schemes(schema: Any) -> Json:
    """Return which schemes an address may have."""
    allowed = schema.get("allowed_schemes")
    return {} if allowed is None else {"x-schemes": sorted(allowed)}


def _moment(schema: Any) -> Json:
    """Return the bounds of a time, which both ends must have alike."""
    zone = _ZONES.get(schema.get("tz_constraint"))
    bounds = {key: str(schema[key]) for key in ("ge", "gt", "le", "lt", "now_op") if schema.get(key) is not None}
    found = {} if zone is None else {"x-timezone": zone}
    return found | ({"x-bounds": bounds} if bounds else {})
