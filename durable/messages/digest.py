"""Short digests that are stored: the same in every process, on every machine."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Final

from durable.envelope import DUE, Envelope

SPAN_BITS: Final = 6
"""Of each of the two spans at the end of the terms: how long the message may live, and how long it is put off."""
UNLIMITED: Final = (1 << SPAN_BITS) - 1

_LONGEST_SPAN: Final = 40  # 2^39 seconds are more than the calendar has
_OF_THE_WAY: Final = frozenset({"traceparent", "tracestate", "baggage", DUE})
_OF_BROKERS: Final = (
    "x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count", "x-received-from",
    "x-shovel", "x-stream-", "x-opt-",
)  # fmt: skip


def message_digest(message_type: str, body: bytes) -> int:
    """64 bits of BLAKE2b as Postgres's signed bigint: tells two messages under one id from a duplicate."""
    digest = hashlib.blake2b(message_type.encode(errors="replace") + b"\0" + body, digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def terms_digest(envelope: Envelope) -> int:
    """The terms of a message besides its type and body, as Postgres's signed bigint; never 0, which means unknown.

    52 bits are a digest of its key, content type and headers, without those that change on the way. The rest are two
    spans from its sent_at: until its deadline (UNLIMITED: none), and until it is due (0: at once). A span is rounded to
    a power of two, because deadlines are counted anew at each arrival: `durable.messages.digest.conflicts`.
    """
    headers = sorted(each for each in envelope.headers.items() if not _changes_on_the_way(each[0]))
    parts = [envelope.partition_key or "", envelope.content_type, *(text for header in headers for text in header)]
    said = "\0".join([str(envelope.partition_key is not None), *parts]).encode(errors="replace")
    digest = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big", signed=True) >> (2 * SPAN_BITS)
    lives = UNLIMITED if envelope.deliver_by is None else _span(envelope.sent_at, envelope.deliver_by)
    waits = 0 if envelope.execution_time is None else _span(envelope.sent_at, envelope.execution_time)
    return ((digest | 1) << 2 * SPAN_BITS) | (lives << SPAN_BITS) | waits


def conflicts(known: int, terms: int, age_seconds: float) -> bool:
    """Tell whether a message on these terms is another than the one that is known for so long under its id.

    The known one may live longer, or be due sooner, than is said now: then the message is in good hands. It is another
    one when the key, the content type or the headers differ, when it expires sooner by more than the rounding, or when
    it is put off beyond the time that is said now.
    """
    if known == 0 or terms == 0:
        return False
    lived, lives = known >> SPAN_BITS & UNLIMITED, terms >> SPAN_BITS & UNLIMITED
    waited, waits = known & UNLIMITED, terms & UNLIMITED
    is_later = 2.0 ** (waited - 2) > age_seconds + 2.0 ** (waits - 1)
    return known >> 2 * SPAN_BITS != terms >> 2 * SPAN_BITS or lived + 1 < lives or (waited > 1 and is_later)


def _span(sent_at: datetime, moment: datetime) -> int:
    """0 for the past, 1 below a second, then one more for each power of two."""
    seconds = (moment - sent_at).total_seconds()
    return 0 if seconds <= 0 else min(_LONGEST_SPAN, int(seconds).bit_length() + 1)


def _changes_on_the_way(header: str) -> bool:
    return header in _OF_THE_WAY or header.startswith(_OF_BROKERS)


def fingerprint(*parts: str) -> str:
    """Return the digest by which dead letters are grouped."""
    return hashlib.blake2b("\0".join(parts).encode(errors="replace"), digest_size=8).hexdigest()
