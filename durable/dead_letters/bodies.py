"""Bodies of dead letters for operators: shown as text, as JSON for every codec, and edited in the form shown.

JSON of any kind, text   unchanged                           edited unchanged
a codec's bytes          JSON of the message they hold,      JSON, which the codec encodes as the message's class
                         or of the values in msgpack
other bytes              text if they are text, else base64  unchanged
encrypted bytes          the id of their key; opened where   any of these, which is encrypted
                         the operator asks for it
"""

from __future__ import annotations

import base64
from typing import Any, Final

import msgspec

from durable import strict_json
from durable.application.application import Application
from durable.encryption.ring import KeyRing
from durable.envelope import JSON, Envelope, media_type
from durable.errors import DurableError, InvalidMessage, InvalidSetting, UnknownMessageType, text_of
from durable.messages import codec, upcasting
from durable.messages.codecs.json import JsonCodec
from durable.messages.codecs.msgpack import MSGPACK
from durable.messages.registry import class_of
from durable.messages.sealed import is_sealed, parted
from durable.outbox.envelope_factory import NO_ENVELOPE, blank
from durable.storage.dead_letters import DeadLetter

_TEXT: Final = ("/json", "+json", "/xml", "+xml")
_json = JsonCodec()


def row(name: str, body: bytes, content_type: str | None, message_type: str | None) -> dict[str, Any]:
    """Write a body as text, and in base64 where that text is not the body itself; of an encrypted one its key."""
    if is_sealed(body):
        sealed = parted(body)
        return {name: None, f"{name}_key": sealed.key_id if sealed is not None else ""}
    text = _text(body, content_type or JSON, message_type)
    if text is not None and text.encode(errors="surrogatepass") == body:
        return {name: text}
    return {name: text, f"{name}_base64": base64.b64encode(body).decode()}


def opened(letter: DeadLetter, ring: KeyRing) -> DeadLetter:
    """The letter with readable bodies. Raises MissingKey, Forged, and InvalidSetting without any key."""
    if not ring.is_configured:
        raise InvalidSetting(
            "--decrypt: no key is given; give encryption_keys or encryption_key_file, or APP:BUS with Bus.keys_from()"
        )
    envelope = _about(letter)
    if envelope is None:
        return letter
    again = letter.edited_body
    if again is not None:
        again = ring.opened(msgspec.structs.replace(envelope, body=again)).body
    return msgspec.structs.replace(letter, body=ring.opened(envelope).body, edited_body=again)


def sealed_as(letter: DeadLetter, body: bytes, ring: KeyRing) -> bytes:
    """Encrypt a new body of a letter, if the old one is encrypted, or its class is by now. Raises InvalidSetting."""
    envelope = _about(letter)
    if envelope is None or not (is_sealed(letter.body) or ring.must_seal(envelope.message_type)):
        return body
    before = parted(letter.body)
    return ring.seal(envelope, body, before.destination if before is not None else envelope.destination)


def _about(letter: DeadLetter) -> Envelope | None:
    """Return as much of the envelope of a letter as its body is sealed with; None for what is no envelope."""
    about = letter.summary
    if about.id is None or about.message_type is None:
        return None
    return msgspec.structs.replace(
        NO_ENVELOPE,
        id=about.id,
        message_type=about.message_type,
        destination=about.address,
        body=letter.body,
        headers=letter.headers,
    )


def edited(letter: DeadLetter, body: bytes, application: Application | None) -> bytes:
    """Encode an edited body. Raises WiringError, and InvalidMessage for a body that its handler could not decode, or
    that has a field which its class does not know; those of the body before may stay.
    """
    content_type = letter.content_type or JSON
    if application is None:
        if body != letter.body:
            refuse_untyped(body, content_type)
        return body
    message_type = letter.summary.message_type
    lease = letter.lease()
    if message_type is None or lease is None:
        return body
    if not _is_text(content_type):
        cls = class_of(message_type)
        shown = _text(_readable(lease.envelope, application.ring), content_type, message_type) or ""
        codec.refuse_unknown_fields(body, cls, before=shown.encode())
        body = codec.encode(codec.decode(body, cls), msgspec.structs.replace(lease.envelope, body=b""))
    _refuse_unfit(lease.envelope, body, application)
    return body


def refuse_untyped(body: bytes, content_type: str) -> None:
    """Raise InvalidMessage for a body that is no JSON, and InvalidSetting for one that only its class can encode."""
    if not _is_text(content_type):
        raise InvalidSetting(f"APP:BUS: not given, and the body is {content_type}; name the bus that encodes it")
    if media_type(content_type).endswith(("/json", "+json")):
        try:
            strict_json.read(msgspec.json.decode, body)
        except (ValueError, RecursionError) as error:
            raise InvalidMessage(f"the body is no JSON: {text_of(error)}") from error


def _refuse_unfit(before: Envelope, body: bytes, application: Application) -> None:
    handler = application.by_type().get(before.message_type)
    cls = handler.cls if handler is not None else class_of(before.message_type)
    upcasting.decode(msgspec.structs.replace(before, body=body), cls)
    sent_as = upcasting.sent_class(before.message_type, cls)
    codec.refuse_unknown_fields(body, sent_as, before.content_type, before=_readable(before, application.ring))


def _readable(envelope: Envelope, ring: KeyRing) -> bytes:
    """The body of an envelope; nothing where it cannot be opened."""
    try:
        return ring.opened(envelope).body
    except DurableError:
        return b""


def _text(body: bytes, content_type: str, message_type: str | None) -> str | None:
    try:
        if _is_text(content_type):
            return body.decode()
        return _as_json(body, content_type, message_type).decode()
    except (InvalidMessage, UnknownMessageType, ValueError, RecursionError, TypeError, OverflowError):
        return None


def _as_json(body: bytes, content_type: str, message_type: str | None) -> bytes:
    try:
        message = codec.decode(body, class_of(message_type or ""), content_type)
    except (InvalidMessage, UnknownMessageType):
        if media_type(content_type) != MSGPACK:
            raise
        return msgspec.json.encode(msgspec.msgpack.decode(body))
    return _json.encode(message, blank(message))


def _is_text(content_type: str) -> bool:
    """Tell whether a body is text; so may be a content type without a codec, which cannot be encoded here."""
    kind = media_type(content_type)
    return kind.startswith("text/") or kind.endswith(_TEXT) or kind not in codec.content_types()
