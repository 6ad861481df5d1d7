"""Short digests that are stored: the same in every process, on every machine."""

from __future__ import annotations

import hashlib


def body_digest(body: bytes) -> int:
    """64 bits of BLAKE2b as Postgres's signed bigint: tells two messages under one id from a duplicate."""
    return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "big", signed=True)


def fingerprint(*parts: str) -> str:
    """What dead letters are grouped by."""
    return hashlib.blake2b("\0".join(parts).encode(errors="replace"), digest_size=8).hexdigest()
