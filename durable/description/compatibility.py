"""Rule: does everything that one schema lets its writer write fit what another lets its reader read?

    misfits(written, read)    nothing: each value of `written` is one of `read`
                              else: where it is not, and why

What changed at the reader is judged with its old schema as `written`, what changed at the writer with its new one:

    received    misfits(written=old, read=new)        sent    misfits(written=new, read=old)

The rule is strict: what it cannot prove does not fit. A field that a reader does not know is ignored by it, unless it
refuses unknown fields. Validators of the classes are code, and are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import zip_longest
from math import inf
from typing import Any, Final, NamedTuple

from durable.grammar import with_article
from durable.messages.model_schemas import MEMBER_NAMES
from durable.messages.schemas import REFERENCE, SPARING, Json

_WORDS: Final = {"title", "description", "default", "examples", "deprecated", "$defs", "discriminator", SPARING}
_SHAPES: Final = {
    *("type", "enum", "const", "anyOf", "oneOf", "$ref", "properties", "required", "additionalProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minProperties", "maxProperties", "x-keys"),
    *("x-flags", MEMBER_NAMES),
}
_MOST_REFERENCES: Final = 100  # from one to the next
_NOTHING: Final[Json] = {"not": {}}
_LEAST: Final = {"minimum": -inf, "exclusiveMinimum": -inf, "minLength": 0, "minProperties": 0}
_MOST: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxProperties")
_NAMES: Final = {"string": "text", "object": "an object", "array": "a list", "null": "null", "integer": "an integer"}


class Fault(Enum):
    """Kind of a misfit."""

    MISSING = "may be missing"
    TYPE = "of another type"
    VALUE = "a value that is not known"
    FIELD = "a field that is refused"
    LIMIT = "beyond a limit"
    NAME = "of another name"


class Misfit(NamedTuple):
    """A place where something may be written that is not read."""

    path: str
    fault: Fault
    text: str


def misfits(written: Json, read: Json) -> list[Misfit]:
    """Return where a value of `written` may be none of `read`; nothing when all of them are."""
    return list(dict.fromkeys(_Comparison(written, read).compare(written, read, "")))


class _Comparison:
    def __init__(self, written: Json, read: Json) -> None:
        self._written = written.get("$defs", {})
        self._read = read.get("$defs", {})
        self._assumed: set[tuple[str, str]] = set()
        """Pairs of references that are being compared: a recursive class fits where its parts do."""

    def compare(self, written: Any, read: Any, path: str) -> Iterator[Misfit]:
        if isinstance(written, dict) and isinstance(read, dict) and "$ref" in written and "$ref" in read:
            pair = written["$ref"], read["$ref"]
            if pair in self._assumed:
                return
            self._assumed.add(pair)
        written, read = _followed(written, self._written), _followed(read, self._read)
        if written is False or read is True or (isinstance(read, dict) and not read.keys() - _WORDS):
            return
        if written is True or read is False:
            yield Misfit(path, Fault.TYPE, "anything may be written" if written is True else "nothing is read")
            return
        choices, known = _branches(written), _branches(read)
        if len(known) > 1:
            choices = [part for each in choices for part in _parts(each)]
        if len(choices) == len(known) == 1:
            yield from self._single(choices[0], known[0], path)
            return
        for choice in choices:
            yield from self._one_of(choice, known, path)

    def _one_of(self, written: Json, read: list[Json], path: str) -> Iterator[Misfit]:
        """A branch of what is written must fit one of what is read; else tell how it misses the nearest."""
        found: list[list[Misfit]] = []
        for branch in read:
            assumed = set(self._assumed)
            found.append(list(self.compare(written, branch, path)))
            if not found[-1]:
                return
            self._assumed = assumed
        yield from min(found, key=lambda each: (any(one.path == path for one in each), len(each)))

    def _single(self, written: Json, read: Json, path: str) -> Iterator[Misfit]:
        if "anyOf" in written or "oneOf" in written or "$ref" in written:
            yield from self.compare(written, read, path)
            return
        if "$ref" in read:
            yield from self.compare(written, read, path)
            return
        yield from _exchanged(written, read, path)
        if (values := _values(written)) is not None:
            yield from (
                Misfit(path, Fault.VALUE, f"{value!r} is not known where it is read")
                for value in values
                if not _accepts(read, value)
            )
            return
        if (known := _values(read)) is not None:
            yield Misfit(path, Fault.TYPE, f"{_type(written)} may be written, and only {known!r} is read")
            return
        if not _fits_type(written.get("type"), read.get("type")):
            yield Misfit(path, Fault.TYPE, f"{_type(written)} may be written, and {_type(read)} is read")
            return
        yield from _limits(written, read, path)
        if read.get("type") == "object":
            yield from self._object(written, read, path)
        if read.get("type") == "array":
            yield from self._array(written, read, path)

    def _object(self, written: Json, read: Json, path: str) -> Iterator[Misfit]:
        fields, known = written.get("properties", {}), read.get("properties", {})
        always, others = set(written.get("required", ())), _others(written)
        for name in read.get("required", ()):
            if name not in always:
                yield Misfit(_field(path, name), Fault.MISSING, "is required, and may be missing")
        for name, schema in known.items():
            if (given := fields.get(name, others)) is not False:
                yield from self.compare(given, schema, _field(path, name))
                if name not in always:
                    yield from _defaults(given, schema, _field(path, name))
        yield from self.compare(_keys(written, written=True), _keys(read, written=False), f"{path}{{key}}")
        rest = read.get("additionalProperties", True)
        for name in sorted(fields.keys() - known.keys()):
            yield from self._unknown(fields[name], rest, _field(path, name))
        if others is not False:
            yield from self._unknown(others, rest, f"{path}{{}}")

    def _unknown(self, written: Any, rest: Any, path: str) -> Iterator[Misfit]:
        if rest is False:
            yield Misfit(path, Fault.FIELD, "is refused, as fields are that are not known")
        else:
            yield from self.compare(written, rest, path)

    def _array(self, written: Json, read: Json, path: str) -> Iterator[Misfit]:
        first, known = written.get("prefixItems", []), read.get("prefixItems", [])
        rest, others = _rest(written), read.get("items", True)
        least, most = written.get("minItems", 0), written.get("maxItems", inf if rest is not False else len(first))
        for index in range(least, min(read.get("minItems", 0), len(known))):
            yield Misfit(_item(path, index, known[index]), Fault.MISSING, "is required, and may be missing")
        if max(read.get("minItems", 0), len(known)) == read.get("minItems") > max(least, len(known)):
            yield Misfit(path, Fault.LIMIT, _limit("minItems", written, read))
        if (allowed := read.get("maxItems", inf)) < most:
            extra = first[int(allowed)] if allowed < len(first) else None
            where, fault = (path, Fault.LIMIT) if extra is None else (_item(path, int(allowed), extra), Fault.FIELD)
            yield Misfit(where, fault, _limit("maxItems", written, read))
        for index in range(max(len(first), len(known))):
            given = first[index] if index < len(first) else rest
            wanted = known[index] if index < len(known) else others
            if given is not False and index < min(most, allowed):
                yield from _names(given, wanted, path)
                yield from self.compare(given, wanted, _item(path, index, wanted, given))
        if rest is not False and max(len(first), len(known)) < min(most, allowed):
            yield from self.compare(rest, others, f"{path}[]")


def _followed(schema: Any, named: Json) -> Any:
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = named.get(schema["$ref"].removeprefix(REFERENCE), _NOTHING)
    return _NOTHING  # it refers to itself


def _branches(schema: Json) -> list[Json]:
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return list(schema[union])
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": each} for each in schema["type"]]
    return [schema]


def _parts(schema: Json) -> list[Json]:
    """Each value by itself: they may be read by different branches."""
    values, names = _values(schema), schema.get(MEMBER_NAMES, ())
    if values is None:
        return [schema]
    return [{"enum": [each], MEMBER_NAMES: [name]} for each, name in zip_longest(values, names)]


def _keys(schema: Json, *, written: bool) -> Json:
    """The schema of the keys of an object: of a class that is written, its names."""
    if written and schema.get("properties") and "additionalProperties" not in schema:
        return {"enum": sorted(schema["properties"])}
    keys: Json = schema.get("x-keys", {"type": "string"})
    return keys


def _values(schema: Json) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def _accepts(read: Json, value: Any) -> bool:
    """Tell whether a value that is always the same is read."""
    if (known := _values(read)) is not None:
        return any(type(each) is type(value) and each == value for each in known)
    if read.keys() - _WORDS - {"type"}:
        return False
    return _fits_type(_type_of(value), read.get("type"))


def _type_of(value: Any) -> str:
    names: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return names.get(type(value), "object")


def _fits_type(written: Any, read: Any) -> bool:
    return read is None or written == read or (written == "integer" and read == "number")


def _limits(written: Json, read: Json, path: str) -> Iterator[Misfit]:
    for name, nothing in _LEAST.items():
        if name in read and written.get(name, nothing) < read[name]:
            yield Misfit(path, Fault.LIMIT, _limit(name, written, read))
    for name in _MOST:
        if name in read and written.get(name, inf) > read[name]:
            yield Misfit(path, Fault.LIMIT, _limit(name, written, read))
    if "x-flags" in read and not set(written.get("x-flags", [inf])) <= set(read["x-flags"]):
        yield Misfit(path, Fault.VALUE, _limit("x-flags", written, read))
    for name in sorted((read.keys() | written.keys()) - _SHAPES - _WORDS):
        # What a text means changes its encoding in MessagePack: there it must be the same.
        is_encoding = name in ("format", "contentEncoding")
        if name == "x-finite" and written.get("type") == "integer":
            continue
        is_same = read.get(name) == written.get(name) and "$ref" not in str(read.get(name))
        if not is_same and (name in read or is_encoding):
            yield Misfit(path, Fault.TYPE if is_encoding else Fault.LIMIT, _limit(name, written, read))


def _names(written: Any, read: Any, path: str) -> Iterator[Misfit]:
    """The items of a class travel without their names, so one that was exchanged would be read as another."""
    there, here = (each.get("title") if isinstance(each, dict) else None for each in (written, read))
    if there is not None and here is not None and there != here:
        text = f"is called {there!r} where it is written, and {here!r} where it is read"
        yield Misfit(_field(path, here), Fault.NAME, text)


def _exchanged(written: Json, read: Json, path: str) -> Iterator[Misfit]:
    """The members of an enum travel as their values: one whose name has another value there stands for another."""
    here = dict(_members(read))
    for name, value in _members(written):
        if name in here and here[name] != value:
            yield Misfit(
                path, Fault.NAME, f"{name} is {value!r} where it is written, and {here[name]!r} where it is read"
            )


def _members(schema: Json) -> list[tuple[str, Any]]:
    return list(zip(schema.get(MEMBER_NAMES, ()), schema.get("x-flags", _values(schema) or ()), strict=False))


def _defaults(written: Any, read: Any, path: str) -> Iterator[Misfit]:
    """A field that is left out when it has its default must have the same where it is read."""
    if not isinstance(written, dict) or SPARING not in written or "default" not in written:
        return
    there, here = written["default"], read.get("default", _NOTHING) if isinstance(read, dict) else _NOTHING
    if type(there) is not type(here) or there != here:
        known = "another value" if here is _NOTHING else repr(here)
        yield Misfit(path, Fault.VALUE, f"is left out when it is {there!r}, and read as {known} then")


def _limit(name: str, written: Json, read: Json) -> str:
    there, here = written.get(name, "not set"), read.get(name, "not set")
    return f"{name} is {there} where it is written, and {here} where it is read"


def _others(written: Json) -> Any:
    """The schema of fields that are not named: a class writes none, a dict any."""
    given = written.get("additionalProperties", "properties" not in written)
    return True if given == {} else given


def _rest(written: Json) -> Any:
    """The schema of items behind the named ones: a class writes none."""
    return written.get("items", "prefixItems" not in written)


def _type(schema: Json) -> str:
    name = schema.get("type")
    if name is None:
        return "anything"
    form = f" ({schema['format']})" if "format" in schema else ""
    return _NAMES.get(name, with_article(name)) + form


def _field(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _item(path: str, index: int, *schemas: Any) -> str:
    """Name an argument by its name, and an item of a tuple by its place."""
    names = [each["title"] for each in schemas if isinstance(each, dict) and "title" in each]
    return _field(path, names[0]) if names else f"{path}[{index}]"
