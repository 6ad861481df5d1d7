"""Arguments and results as bytes, in MessagePack.

Whatever a message may hold may be an argument or a result: msgspec Structs, dataclasses, attrs classes, pydantic
models, and the values that they are made of. Arguments travel as an array, in their order.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel

from durable import strict_json
from durable.errors import InvalidMessage, text_of
from durable.messages.codecs.classes import refuse_uncodable_parts
from durable.messages.codecs.jsonable import jsonable
from durable.messages.codecs.sets import refuse_sets_of_models
from durable.messages.model_schemas import MEMBER_NAMES, lost
from durable.messages.schemas import REFERENCE, Json, models_of, schema_of

T = TypeVar("T")

_DIGEST_BYTES: Final = 16
_WORDS: Final = ("title", "description", "examples", "deprecated")  # of a schema, that do not change what travels
_VALUES: Final = ("default", "enum", "const")


def _plain(value: object) -> object:
    """Return what msgspec can encode, of a pydantic model or of a value in it."""
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, round_trip=True, warnings=False)
    return jsonable(value)


def _made(cls: type[Any], value: object) -> object:
    if not issubclass(cls, BaseModel):
        raise NotImplementedError(cls.__qualname__)
    return cls.model_validate(value, strict=False, by_alias=True, by_name=True)


_encode = msgspec.msgpack.Encoder(decimal_format="string", enc_hook=_plain).encode


class Payload:
    """Bytes of values of one type. Raises TypeError for a type that has no encoding, or would lose something."""

    def __init__(self, kind: Any) -> None:
        refuse_uncodable_parts(kind, BaseModel)
        for model in models_of(kind):
            refuse_sets_of_models(model)
            for fault in lost(model):
                raise TypeError(fault)
        self.kind = kind
        self._decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(kind, dec_hook=_made).decode

    def write(self, value: object) -> bytes:
        """Encode a value, which its reader compares with the type. Raises InvalidMessage when it has no encoding."""
        return self.attempt("cannot be encoded", _encode, value)

    def read(self, body: bytes) -> Any:
        """Decode a value. Raises InvalidMessage for bytes that are none of this type."""
        return self.attempt("do not fit", self._decode, body)

    def plain(self, value: object) -> Any:
        """Return a value as JSON has it: dicts, lists, texts, numbers."""
        return msgspec.to_builtins(value, enc_hook=_plain)

    @staticmethod
    def attempt(fault: str, function: Callable[[Any], T], value: Any) -> T:
        try:
            return function(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # validators of the class may raise anything
            raise InvalidMessage(f"{fault}: {text_of(error)}") from error


def read_json(body: bytes, cls: type[T]) -> T:
    """Decode a value of this class from JSON, in which no key stands twice. Raises InvalidMessage."""
    decode = msgspec.json.Decoder(cls, dec_hook=_made).decode
    return Payload.attempt("do not fit", partial(strict_json.read, decode), body)


def arguments_of(
    signature: inspect.Signature, hints: Mapping[str, Any], *, by_name: bool = False
) -> type[msgspec.Struct]:
    """Return the class of the arguments of a method, with a field for each. Raises TypeError where there is none.

    They travel in their order, unless they are wanted `by_name`.
    """
    fields: list[Any] = []
    for parameter in signature.parameters.values():
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, hints[parameter.name], *default))
    return msgspec.defstruct(
        "Arguments", fields, array_like=not by_name, forbid_unknown_fields=True, kw_only=_has_names(signature)
    )


def refuse_defaults(signature: inspect.Signature, hints: Mapping[str, Any]) -> None:
    """Raise TypeError for a default that a call could not carry, or could change."""
    for name, parameter in signature.parameters.items():
        if (value := parameter.default) is parameter.empty:
            continue
        if isinstance(value, list | dict | set | bytearray) and value:
            raise TypeError(
                f"{name}: the default {value!r} could be changed by a call; "
                "give None, or a tuple, and say so in the annotation"
            )
        payload = Payload(hints[name])
        try:
            payload.read(payload.write(value))
        except InvalidMessage as error:
            why = text_of(error.__cause__ or error)
            raise TypeError(f"{name}: the default {value!r} does not fit its annotation: {why}") from error


def binder(cls: type[msgspec.Struct], signature: inspect.Signature) -> Callable[..., msgspec.Struct]:
    """Return a function that makes the arguments from those of a call. It raises TypeError as the method would."""
    if not _has_names(signature):
        return cls
    return lambda *args, **named: cls(**signature.bind(*args, **named).arguments)


def digest_of(*payloads: Payload) -> bytes:
    """Return the digest of the schemas, as they are read and as they are written."""
    schemas = [
        _Travelling(schema_of(payload.kind, written=written)).whole()
        for payload in payloads
        for written in (False, True)
    ]
    return hashlib.sha256(msgspec.json.encode(schemas, order="deterministic")).digest()[:_DIGEST_BYTES]


def _has_names(signature: inspect.Signature) -> bool:
    return any(parameter.kind is parameter.KEYWORD_ONLY for parameter in signature.parameters.values())


class _Travelling:
    """A schema without what does not travel: words, and the names of classes, which are numbered as they occur."""

    def __init__(self, schema: Json) -> None:
        self._schema = schema
        self._classes: dict[str, int] = {}

    def whole(self) -> list[Any]:
        """Return the schema, and then those of its classes in the order of their numbers."""
        named = self._schema.get("$defs", {})
        found = [self._part({key: part for key, part in self._schema.items() if key != "$defs"})]
        while len(found) <= len(self._classes):
            found.append(self._part(named[list(self._classes)[len(found) - 1]]))
        return found

    def _part(self, schema: Any, *, is_item: bool = False) -> Any:
        match schema:
            case dict():
                schema = _settled(schema)
                return {
                    key: self._keyword(key, schema[key])
                    for key in sorted(schema)
                    if key not in _WORDS or (key == "title" and is_item)  # the name by which an item is known
                }
            case list():
                return [self._part(each) for each in schema]
            case str() if schema.startswith(REFERENCE):
                return self._classes.setdefault(schema.removeprefix(REFERENCE), len(self._classes))
            case _:
                return schema

    def _keyword(self, key: str, value: Any) -> Any:
        if key in _VALUES:
            return value
        if key == "required":
            return sorted(value)
        if key == "properties":
            return {name: self._part(value[name]) for name in sorted(value)}
        if key == "prefixItems":
            return [self._part(each, is_item=True) for each in value]
        return self._part(value)


def _settled(schema: Json) -> Json:
    """Return a schema without the order in which its values were declared."""
    values = schema.get("enum")
    if values is None:
        return schema
    names = schema.get(MEMBER_NAMES, [""] * len(values))
    pairs = sorted(zip(values, names, strict=True), key=lambda each: msgspec.json.encode(each[0]))
    sorted_names = {MEMBER_NAMES: [name for _, name in pairs]} if MEMBER_NAMES in schema else {}
    return schema | {"enum": [value for value, _ in pairs]} | sorted_names
