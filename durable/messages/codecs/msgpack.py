"""MessagePack: smaller than JSON, quicker, and with bytes as bytes. Through msgspec, and pydantic for its models.

What is not in the format travels as in JSON: Decimal, UUID and durations as text, sets as arrays, enums as their
values. A datetime with a zone is a timestamp, and comes out in UTC; NaN and infinities are numbers like any others.
Integers have 64 bits. https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from durable.arguments import checked
from durable.envelope import Envelope
from durable.messages.codecs.classes import Decode, decoder_for
from durable.messages.codecs.jsonable import jsonable
from durable.messages.codecs.set_order import in_one_order
from durable.messages.codecs.sets import holds_sets, refuse_sets_of_models
from durable.plain import plain

MSGPACK: Final = "application/msgpack"

_OWN: Final = (bytes, bytearray, memoryview, datetime, msgspec.Raw, msgspec.msgpack.Ext)
"""Types of the format itself, which JSON has not."""

_encode = msgspec.msgpack.Encoder(decimal_format="string", enc_hook=plain).encode
_encode_dumped = msgspec.msgpack.Encoder(decimal_format="string", enc_hook=jsonable).encode
_decode_dumped = msgspec.msgpack.Decoder().decode


class MsgpackCodec:
    """MessagePack codec. `content_type` may be one of your own, such as application/vnd.acme+msgpack."""

    @checked
    def __init__(self, content_type: str = MSGPACK) -> None:
        self.content_type = content_type
        self._decoders: dict[type[Any], Decode] = {}

    def encode(self, message: object, _: Envelope) -> bytes:
        """Return the MessagePack of a message."""
        return _model_body(message) if isinstance(message, BaseModel) else _body(message)

    def decode(self, body: bytes, cls: type[Any]) -> Any:
        """Return the message of this class in a body."""
        return (self._decoders.get(cls) or self.check(cls))(body)

    def check(self, cls: type[Any]) -> Decode:
        """The decoder of this class, which is kept; raises TypeError for a class that has none, and NameError."""
        decoder = self._decoders[cls] = decoder_for(cls, msgspec.msgpack.Decoder, _model_decoder)
        return decoder


def _body(message: object) -> bytes:
    if not holds_sets(type(message)):
        return _encode(message)
    return _encode(in_one_order(message, msgspec.to_builtins(message, enc_hook=plain, builtin_types=_OWN)))


def _model_body(message: BaseModel) -> bytes:
    made = message.model_dump(by_alias=True, round_trip=True, warnings=False)  # as in durable.messages.codecs.json
    return _encode_dumped(in_one_order(message, made) if holds_sets(type(message)) else made)


def _model_decoder(cls: type[BaseModel]) -> Callable[[bytes], BaseModel]:
    refuse_sets_of_models(cls)
    # A strict model takes text for a UUID from JSON only: to pydantic this is not what was parsed, but Python's own.
    return lambda body: cls.model_validate(_decode_dumped(body), strict=False, by_alias=True, by_name=True)
