"""Authentication by a shared secret: a signature of the request, or the secret itself.

    Authorization: Durable-HMAC-SHA256 timestamp=1767225600, nonce=K7gN..., signature=9f86d081...
    Authorization: Bearer SECRET

The signature is the HMAC-SHA-256, in hexadecimal, of these lines joined by line feeds:

    Durable-HMAC-SHA256
    the method
    the path and query, byte for byte as the client wrote them in the request line
    the timestamp, in seconds since 1970
    the nonce
    the SHA-256 of the body, in hexadecimal
    name:value of each header that says something of a message, sorted, the names in lower case:
        Idempotency-Key, Durable-..., ce-...

The host is not signed, so that proxies may change it; a proxy that changes the path breaks the signature. A request
that somebody records and repeats within the five minutes brings what is known already: its envelopes are duplicates.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

SCHEME: Final = "Durable-HMAC-SHA256"
CHALLENGE: Final = f'{SCHEME}, Bearer realm="durable"'
"""The value of WWW-Authenticate."""

Headers = Iterable[tuple[bytes, bytes]]

_PARAMETERS: Final = re.compile(r"timestamp=([0-9]{1,15}), ?nonce=([A-Za-z0-9_-]{16,100}), ?signature=([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Bearer:
    """The secret itself: can be judged before the body is read."""

    token: str

    def matches(self, secrets: Iterable[str]) -> bool:
        return _equals_one(self.token, list(secrets))


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature: can be judged when the body has been read."""

    timestamp: int
    nonce: str
    digest: str

    def is_timely(self, now: float, skew_seconds: float) -> bool:
        """Tell whether the signature was made at most so long before or after `now`."""
        return abs(now - self.timestamp) <= skew_seconds

    def matches(self, secrets: Iterable[str], method: str, target: bytes, body: bytes, headers: Headers = ()) -> bool:
        lines = _lines(method, target, body, self.timestamp, self.nonce, headers)
        return _equals_one(self.digest, [_digest(secret, lines) for secret in secrets])


def parse(header: str) -> Bearer | Signature | None:
    """The credentials in the value of Authorization; None when they are of neither kind."""
    scheme, _, parameters = header.partition(" ")
    if scheme.lower() == "bearer":
        return Bearer(parameters.strip())
    found = _PARAMETERS.fullmatch(parameters.strip()) if scheme.lower() == SCHEME.lower() else None
    return Signature(int(found[1]), found[2], found[3]) if found else None


def bearer(secret: str) -> str:
    """The value of Authorization that shows the secret itself."""
    return f"Bearer {secret}"


def signature(
    secret: str, method: str, target: bytes, body: bytes, *, timestamp: int, nonce: str, headers: Headers = ()
) -> str:
    """The value of Authorization that signs this request; of its headers, those that say something of a message."""
    digest = _digest(secret, _lines(method, target, body, timestamp, nonce, headers))
    return f"{SCHEME} timestamp={timestamp}, nonce={nonce}, signature={digest}"


def _lines(method: str, target: bytes, body: bytes, timestamp: int, nonce: str, headers: Headers) -> bytes:
    hashed = sha256(body).hexdigest()
    lines = [SCHEME.encode(), method.encode(), target, b"%d" % timestamp, nonce.encode(), hashed.encode()]
    return b"\n".join([*lines, *sorted(_of_message(headers))])


def _of_message(headers: Headers) -> Iterator[bytes]:
    for name, value in headers:
        if name.lower() == b"idempotency-key" or name.lower().startswith((b"durable-", b"ce-")):
            yield name.lower() + b":" + value.strip()


def _digest(secret: str, lines: bytes) -> str:
    return hmac.new(_bytes(secret), lines, sha256).hexdigest()


def _equals_one(shown: str, expected: list[str]) -> bool:
    """Compared in constant time, and with all of them: how long it takes tells nothing about any."""
    found = [hmac.compare_digest(_bytes(shown), _bytes(one)) for one in expected]
    return any(found)


def _bytes(text: str) -> bytes:
    """Encode any text of headers and of the environment."""
    return text.encode(errors="surrogatepass")
