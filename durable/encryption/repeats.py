"""The digests of arrivals: what only looks encrypted takes no id from a message.

    readable body                   a digest of its bytes
    encrypted body that opens       the digest that it carries, which is authenticated with it
    encrypted body that does not    a digest of its bytes: the one that it carries may be anybody's

A repeat has the digest of the message that is known: of its bytes, of the body inside, or under a key of the ring. So a
message is compared with itself before it was encrypted, after, and under an earlier key. What cannot be compared is
another message.
"""

from __future__ import annotations

from datetime import datetime

from durable.encryption.ring import KeyRing
from durable.envelope import Envelope
from durable.errors import DurableError
from durable.messages.digest import bytes_digest, conflicts, message_digest, terms_digest
from durable.messages.repeats import Known, would_be_lost
from durable.messages.sealed import is_sealed


def arrival_digest(ring: KeyRing, envelope: Envelope) -> int:
    """The digest that is kept with the id of an arrival."""
    if not is_sealed(envelope.body) or _message(ring, envelope) is not None:
        return message_digest(envelope.message_type, envelope.body)
    return bytes_digest(envelope.message_type, envelope.body)


def is_another(ring: KeyRing, known: Known, envelope: Envelope, now: datetime) -> bool:
    """Tell whether an arrival is no duplicate of the message that is known under its id: it has another body or other
    terms, or would be lost as one.
    """
    return (
        not _is_same_body(ring, known.digest, envelope)
        or conflicts(known.terms, terms_digest(envelope))
        or would_be_lost(known, envelope, now)
    )


def known_arrival(ring: KeyRing, envelope: Envelope, now: datetime) -> Known:
    """Return the facts of an arrival that is to be stored, or that waits since."""
    return Known.of(
        arrival_digest(ring, envelope),
        terms_digest(envelope),
        now,
        due_at=envelope.execution_time,
        expired=None,
        deliver_by=envelope.deliver_by,
    )


def _is_same_body(ring: KeyRing, known: int, envelope: Envelope) -> bool:
    kind, body = envelope.message_type, envelope.body
    if known in (message_digest(kind, body), bytes_digest(kind, body)):
        return True
    message = _message(ring, envelope)
    if message is None:
        return False
    return known == bytes_digest(kind, message) or ring.has_digest(known, kind, message)


def _message(ring: KeyRing, envelope: Envelope) -> bytes | None:
    """The readable body; None when the ring cannot open it."""
    try:
        return ring.opened(envelope).body
    except DurableError:  # a key is missing, the body is forged, or the source has never given keys
        return None
