"""The form of an encrypted body, and what can be told of it without its key.

    magic   digest   nonce   key id          destination     ciphertext and tag
    8       8        12      1 + so many     2 + so many     the rest                 bytes; lengths are big-endian

The body is the only part of an envelope that changes: its content type, headers and names stay readable. It carries the
id of its key, so that a body can be opened wherever it lies, and the destination that it was sealed for, which the
inbox of a receiver does not keep. All of these are authenticated with the ciphertext (durable.encryption.cipher).

`digest` stands for the message that is inside (durable.messages.digest). A body that is encrypted anew has another
nonce and another ciphertext, and keeps its digest.
"""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

MAGIC: Final = b"\x89sealed1"  # no text begins with it, and no array, object or number of msgpack that a codec writes
TAG_BYTES: Final = 16
NONCE_BYTES: Final = 12
DIGEST_BYTES: Final = 8
LONGEST_KEY_ID: Final = 100
KEY_ID: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{LONGEST_KEY_ID}}}")
KEY_ID_AT: Final = len(MAGIC) + DIGEST_BYTES + NONCE_BYTES
"""Position of the length of the key id, from 0."""

_DESTINATION_LENGTH: Final = struct.Struct("!H")


class Sealed(NamedTuple):
    """An encrypted body in its parts."""

    digest: bytes
    nonce: bytes
    key_id: str
    destination: str
    ciphertext: bytes


def is_sealed(body: bytes) -> bool:
    """True for an encrypted body."""
    return body.startswith(MAGIC)


def joined(sealed: Sealed) -> bytes:
    """The parts as one body."""
    key_id, destination = sealed.key_id.encode(), sealed.destination.encode()
    return b"".join(
        (
            *(MAGIC, sealed.digest, sealed.nonce, len(key_id).to_bytes(1, "big"), key_id),
            *(_DESTINATION_LENGTH.pack(len(destination)), destination, sealed.ciphertext),
        )
    )


def parted(body: bytes) -> Sealed | None:
    """The parts of an encrypted body; None when it is broken off, or no encrypted body at all.

    SQL finds the same key ids (durable.storage.sql.columns).
    """
    if not body.startswith(MAGIC) or len(body) <= KEY_ID_AT:
        return None
    nonce_at = len(MAGIC) + DIGEST_BYTES
    ends = KEY_ID_AT + 1 + body[KEY_ID_AT]
    starts = ends + _DESTINATION_LENGTH.size
    if len(body) < starts:
        return None
    after = starts + _DESTINATION_LENGTH.unpack_from(body, ends)[0]
    if len(body) < after + TAG_BYTES:
        return None
    try:
        key_id, destination = body[KEY_ID_AT + 1 : ends].decode(), body[starts:after].decode()
    except UnicodeDecodeError:
        return None
    if not KEY_ID.fullmatch(key_id):
        return None
    return Sealed(body[len(MAGIC) : nonce_at], body[nonce_at:KEY_ID_AT], key_id, destination, body[after:])


def digest_of(body: bytes) -> int | None:
    """The digest that an encrypted body carries, as Postgres's signed bigint; None for any other body."""
    if not body.startswith(MAGIC) or len(body) < len(MAGIC) + DIGEST_BYTES:
        return None
    return int.from_bytes(body[len(MAGIC) : len(MAGIC) + DIGEST_BYTES], "big", signed=True)


def message_bytes(body: bytes) -> int:
    """The length of the message in a body, in bytes: limits are those of the message, encrypted or not."""
    if not body.startswith(MAGIC):
        return len(body)
    sealed = parted(body)
    return len(body) if sealed is None else len(sealed.ciphertext) - TAG_BYTES
