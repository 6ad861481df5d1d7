"""JSON: through msgspec, pydantic models through pydantic. The default, and what every language reads.

Encoding is strict about what another language could not read (NaN and infinities), decoding about what could
exhaust this process (nesting, enormous integers), and about what parsers take for different things.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic_core import to_json

from durable import strict_json
from durable.arguments import checked
from durable.envelope import JSON, Envelope
from durable.errors import InvalidMessage
from durable.messages.codecs.classes import Decode, decoder_for, field_names
from durable.messages.codecs.set_order import in_one_order
from durable.messages.codecs.sets import holds_sets
from durable.plain import plain

_encoder = msgspec.json.Encoder(decimal_format="string", enc_hook=plain)
_to_builtins = partial(msgspec.to_builtins, enc_hook=plain, str_keys=True, builtin_types=(msgspec.Raw,))
_parse = msgspec.json.Decoder(msgspec.Raw).decode

# NaN and infinity become null, unless a pydantic model is configured to write them out.
_MARKS_OF_NOT_FINITE = (b"null", b"NaN", b"Infinity")


class JsonCodec:
    """JSON codec. `content_type` may be one of your own: `register_codec(JsonCodec("application/vnd.acme+json"))`."""

    @checked
    def __init__(self, content_type: str = JSON) -> None:
        self.content_type = content_type
        self._decoders: dict[type[Any], Decode] = {}

    def encode(self, message: object, _: Envelope) -> bytes:
        """Return the JSON of a message."""
        body = _model_body(message) if isinstance(message, BaseModel) else _body(message)
        if any(mark in body for mark in _MARKS_OF_NOT_FINITE):
            _refuse_not_finite(message, type(message).__qualname__)
        return body

    def decode(self, body: bytes, cls: type[Any]) -> Any:
        """Return the message of this class in a body."""
        return strict_json.read(self._decoders.get(cls) or self.check(cls), body)

    def check(self, cls: type[Any]) -> Decode:
        """The decoder of this class, which is kept; raises TypeError for a class that has none, and NameError."""
        decoder = self._decoders[cls] = decoder_for(cls, msgspec.json.Decoder, _model_decoder)
        return decoder


def _body(message: object) -> bytes:
    if not holds_sets(type(message)):
        return _encoder.encode(message)
    return _encoder.encode(in_one_order(message, _to_builtins(message)))


def _model_body(message: BaseModel) -> bytes:
    # Names as the model's aliases say, and what validates again: text of Json fields, no computed fields. Values that
    # do not fit are found when the body is compared with the message; a warning would only say so twice.
    if not holds_sets(type(message)):
        return message.model_dump_json(by_alias=True, round_trip=True, warnings=False).encode()
    return to_json(
        in_one_order(message, message.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False))
    )


def _model_decoder(cls: type[BaseModel]) -> Callable[[bytes], BaseModel]:
    def decode_model(body: bytes) -> BaseModel:
        _parse(body)  # pydantic alone would take NaN and infinities, which are no JSON
        return cls.model_validate_json(body, by_alias=True, by_name=True)  # a validation_alias is no name to send

    return decode_model


def _refuse_not_finite(value: object, path: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidMessage(f"{path} is {value}, which JSON cannot represent; send a finite number")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_not_finite(item, f"{path}[{key!r}]")
    elif isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes | bytearray):
        for index, item in enumerate(value):
            _refuse_not_finite(item, f"{path}[{index}]")
    else:
        for name in field_names(type(value)):
            _refuse_not_finite(getattr(value, name, None), f"{path}.{name}")
