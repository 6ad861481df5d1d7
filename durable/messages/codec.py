"""Message <-> bytes, by content type.

encoded   by the codec that the message's class names: @message(..., content_type=...), JSON unless it says so
decoded   by the codec of the content type that arrived, whatever the class names: the sender may be older or newer

application/json                durable.messages.codecs.json
application/msgpack             durable.messages.codecs.msgpack
application/cloudevents+json    durable.messages.codecs.cloudevents
any other                       yours, by register_codec()

Content types are compared in lower case and without parameters. What no codec understands, or its codec refuses, is
InvalidMessage: an error at send(), and a dead letter where it arrives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, Protocol

from durable.arguments import checked
from durable.envelope import JSON, Envelope, is_media_type, media_type
from durable.errors import InvalidMessage, InvalidSetting, text_of
from durable.messages import unknown_fields
from durable.messages.codecs.cloudevents import CloudEventsCodec
from durable.messages.codecs.json import JsonCodec
from durable.messages.codecs.msgpack import MsgpackCodec
from durable.messages.comparison import difference


class Codec(Protocol):
    """Codec of one content type: encodes and decodes bodies. An error raised by a method makes the message invalid."""

    @property
    def content_type(self) -> str:
        """Content type in lower case and without parameters, such as "application/vnd.acme.order+json"."""
        ...

    def encode(self, message: object, envelope: Envelope, /) -> bytes:
        """Return the body of this message. `envelope` has all but the body: id, source, type, times, headers.

        A message that is sent twice under one id must have the same bytes, or the receiver takes it for another
        message.
        """
        ...

    def decode(self, body: bytes, cls: type[Any], /) -> Any:
        """The message of this class in these bytes."""
        ...


_OWN: Sequence[Codec] = (JsonCodec(), MsgpackCodec(), CloudEventsCodec())
_OWN_KINDS = (JsonCodec, MsgpackCodec, CloudEventsCodec)
_codecs: dict[str, Codec] = {codec.content_type: codec for codec in _OWN}


@checked
def register_codec(codec: Codec) -> None:
    """Use this codec for its content type, in place of any other. Call it where your messages are declared.

    Raises InvalidSetting for an object that is no codec, or has no content type.
    """
    if not isinstance(codec.content_type, str) or not is_media_type(codec.content_type):
        raise InvalidSetting(
            f"register_codec: {codec.content_type!r} is no content type; write it like 'application/vnd.acme+json'"
        )
    _codecs[codec.content_type] = codec


def content_types() -> Collection[str]:
    """Content types that can be decoded here."""
    return _codecs.keys()


def check_class(cls: type[Any], content_type: str) -> None:
    """Build what decodes and encodes this class; raises InvalidSetting, and NameError while an annotation names a class
    that is yet to come. A codec of the application's own is asked if it has a `check(cls)`."""
    check = getattr(codec_for(content_type), "check", None)
    if check is None:
        return
    try:
        check(cls)
    except NameError:
        raise
    except Exception as error:  # of msgspec, of the codec, or of the class's own code
        raise InvalidSetting(f"{cls.__qualname__} cannot be a message in {content_type}: {text_of(error)}") from error


def codec_for(content_type: str) -> Codec:
    """Return the codec of a class; raises InvalidSetting, saying what to do, when there is none."""
    codec = _codec_of(content_type)
    if codec is None:
        raise InvalidSetting(
            f"no codec is registered for {content_type!r} (known: {_known()}); "
            "call durable.register_codec() where the message is declared"
        )
    return codec


def encode(message: object, envelope: Envelope) -> bytes:
    """The body of this message in the content type of its envelope, which has none yet.

    Raises InvalidMessage when the message cannot be represented faithfully, InvalidSetting when no codec is registered.
    """
    codec = codec_for(envelope.content_type)
    try:
        body = codec.encode(message, envelope)
    except InvalidMessage:
        raise
    except Exception as error:  # the class's own hooks are called, and codecs of the application
        raise InvalidMessage(f"{type(message).__qualname__} cannot be encoded: {text_of(error)}") from error
    if not isinstance(body, bytes):
        raise InvalidMessage(
            f"{type(codec).__qualname__}.encode() returned {type(body).__name__}, not bytes; correct the codec"
        )
    return body


def refuse_unfaithful(message: object, body: bytes, content_type: str) -> None:
    """Raise InvalidMessage when this body of the message would not be read as the message by its receiver.

    What a codec of the application's own makes of a message is only decoded.
    """
    try:
        read = decode(body, type(message), content_type)
    except InvalidMessage as error:
        raise InvalidMessage(
            f"{type(message).__qualname__} cannot be sent, as no receiver could read it: {error}"
        ) from error
    if not isinstance(_codec_of(content_type), _OWN_KINDS):
        return
    try:
        changed = difference(message, read, type(message).__name__)
    except Exception as error:  # of keys of the application's classes, or of parts within parts without end
        raise InvalidMessage(
            f"{type(message).__qualname__} cannot be sent, as it cannot be compared with what is read: {text_of(error)}"
        ) from error
    if changed is not None:
        raise InvalidMessage(f"{type(message).__qualname__} cannot be sent: {changed}")


def refuse_unknown_fields(body: bytes, cls: type[Any], content_type: str = JSON, *, before: bytes = b"") -> None:
    """Raise InvalidMessage for a body in JSON that has a field which its class does not know, or is none of its class.

    Unknown fields of the body that it had `before` may stay as they are. What a codec of the application's own makes of
    a body is only decoded.
    """
    message = decode(body, cls, content_type)
    kind = _codec_of(content_type)
    if isinstance(kind, JsonCodec):
        unknown_fields.refuse_unknown_fields(body, message, cls.__qualname__, before=before)
    elif isinstance(kind, CloudEventsCodec):
        with suppress(InvalidMessage):
            before = kind.data_of(before)
        unknown_fields.refuse_unknown_fields(kind.data_of(body), message, cls.__qualname__, before=before)


def decode(body: bytes, cls: type[Any], content_type: str = JSON) -> Any:
    """The message of this class in these bytes; raises InvalidMessage."""
    codec = _codec_of(content_type)
    if codec is None:
        raise InvalidMessage(f"content type {content_type!r} is not understood; known: {_known()}")
    try:
        message = codec.decode(body, cls)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the class's own validators, and extensions that panic, may raise anything
        raise InvalidMessage(f"the body is no {cls.__qualname__}: {text_of(error)}") from error
    if not isinstance(message, cls):
        raise InvalidMessage(
            f"{type(codec).__qualname__}.decode() returned {type(message).__name__}, not "
            f"{cls.__qualname__}; correct the codec"
        )
    return message


def _codec_of(content_type: str) -> Codec | None:
    return _codecs.get(content_type) or _codecs.get(media_type(content_type))


def _known() -> str:
    return ", ".join(_codecs)
