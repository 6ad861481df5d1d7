"""Short digests that are stored: the same in every process, on every machine."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Final

from durable.envelope import DUE, Envelope
from durable.messages.sealed import DIGEST_BYTES, digest_of

SPAN_BITS: Final = 6
"""Of the span at the end of the terms: how long the message may live."""
UNLIMITED: Final = (1 << SPAN_BITS) - 1

_KEY_BITS: Final = 20
"""Of the key, at the beginning of the digest of an encrypted message."""
_WHOLE: Final = (1 << 64) - 1

_LONGEST_SPAN: Final = 40  # 2^39 seconds are more than the calendar has
_OF_THE_WAY: Final = frozenset({"traceparent", "tracestate", "baggage", DUE})
_OF_BROKERS: Final = (
    "x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count", "x-received-from",
    "x-shovel", "x-stream-", "x-opt-",
)  # fmt: skip


def message_digest(message_type: str, body: bytes) -> int:
    """64 bits as Postgres's signed bigint: they tell two messages under one id from a duplicate.

    Of a readable body they are its BLAKE2b, with the last bit 0. Of an encrypted body they are those that it carries:
    a digest of the message inside, under a key. The ciphertext would not do. A message that is sent again under a new
    key, or that waits while `keys rotate` encrypts it anew, has another ciphertext, and is the same message. Nor would
    a digest without a key: a reader of the table could try out what is in a short message.

    Anybody can write a digest into bytes that only look encrypted. What a stranger sends is believed only when it was
    opened: durable.encryption.repeats.
    """
    carried = digest_of(body)
    return bytes_digest(message_type, body) if carried is None else carried


def bytes_digest(message_type: str, body: bytes) -> int:
    """The digest of a body as it is, encrypted or not; its last bit is 0."""
    digest = hashlib.blake2b(message_type.encode(errors="replace") + b"\0" + body, digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) & ~1


def sealed_digest(message_type: str, message: bytes, key: bytes) -> bytes:
    """The digest of a message that is encrypted: 20 bits of the key, 43 of the message under the key, and a 1."""
    said = message_type.encode(errors="replace") + b"\0" + message
    of_message = int.from_bytes(hashlib.blake2b(said, key=key, digest_size=8).digest(), "big") >> _KEY_BITS
    return ((key_mark(key) << 64 - _KEY_BITS) | of_message | 1).to_bytes(DIGEST_BYTES, "big")


def key_mark(key: bytes) -> int:
    """The 20 bits that stand for this key in the digests under it."""
    return int.from_bytes(hashlib.blake2b(key=key, digest_size=8).digest(), "big") >> 64 - _KEY_BITS


def mark_of(digest: int) -> int | None:
    """The 20 bits of the key that this digest is under; None when it is of a body as it is."""
    return (digest & _WHOLE) >> 64 - _KEY_BITS if digest & 1 else None


def terms_digest(envelope: Envelope) -> int:
    """The terms of a message besides its type and body, as Postgres's signed bigint; never 0, which means unknown.

    58 bits are a digest of its key, content type and headers, without those that change on the way. The rest is the
    span from its sent_at until its deadline (UNLIMITED: none). It is rounded to a power of two, because deadlines are
    counted anew at each arrival: `durable.messages.digest.conflicts`.
    """
    headers = sorted(each for each in envelope.headers.items() if not _changes_on_the_way(each[0]))
    parts = [envelope.partition_key or "", envelope.content_type, *(text for header in headers for text in header)]
    said = "\0".join([str(envelope.partition_key is not None), *parts]).encode(errors="replace")
    digest = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big", signed=True) >> SPAN_BITS
    lives = UNLIMITED if envelope.deliver_by is None else _span(envelope.sent_at, envelope.deliver_by)
    return ((digest | 1) << SPAN_BITS) | lives


def conflicts(known: int, terms: int) -> bool:
    """Tell whether a message on these terms is another than the one that is known under its id.

    The known one may live longer than is said now: then the message is in good hands. It is another one when the key,
    the content type or the headers differ, or when it may live for a shorter time by more than the rounding. Both
    spans begin where the senders say; so what became of the known one counts, too: `durable.messages.repeats`.
    """
    if known == 0 or terms == 0:
        return False
    return known >> SPAN_BITS != terms >> SPAN_BITS or (known & UNLIMITED) + 1 < terms & UNLIMITED


def _span(sent_at: datetime, moment: datetime) -> int:
    """0 for the past, 1 below a second, then one more for each power of two."""
    seconds = (moment - sent_at).total_seconds()
    return 0 if seconds <= 0 else min(_LONGEST_SPAN, int(seconds).bit_length() + 1)


def _changes_on_the_way(header: str) -> bool:
    return header in _OF_THE_WAY or header.startswith(_OF_BROKERS)


def fingerprint(*parts: str) -> str:
    """Return the digest by which dead letters are grouped."""
    return hashlib.blake2b("\0".join(parts).encode(errors="replace"), digest_size=8).hexdigest()
