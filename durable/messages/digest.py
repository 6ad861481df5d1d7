"""Short digests that are stored: the same in every process, on every machine."""

from __future__ import annotations

import hashlib


def message_digest(message_type: str, body: bytes) -> int:
    """64 bits of BLAKE2b as Postgres's signed bigint: tells two messages under one id from a duplicate."""
    digest = hashlib.blake2b(message_type.encode(errors="replace") + b"\0" + body, digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def fingerprint(*parts: str) -> str:
    """Return the digest by which dead letters are grouped."""
    return hashlib.blake2b("\0".join(parts).encode(errors="replace"), digest_size=8).hexdigest()
