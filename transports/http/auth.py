"""Authentication by a shared secret: a signature of the request and of its answer, or the secret itself.

    Authorization: Durable-HMAC-SHA256 timestamp=1767225600, nonce=K7gN..., body=e3b0c442..., signature=9f86d081...
    Authorization: Bearer SECRET

`body` is the SHA-256 of the body, in hexadecimal. The signature is the HMAC-SHA-256, in hexadecimal, of these lines
joined by line feeds:

    Durable-HMAC-SHA256
    the method
    the path and query, byte for byte as the client wrote them in the request line
    the timestamp, in seconds since 1970
    the nonce
    the Content-Length, or nothing for a body in chunks
    the SHA-256 of the body, in hexadecimal
    name:value of each header that says something of a message, sorted, the names in lower case:
        Idempotency-Key, Durable-..., ce-...

So a request is judged before its body is read, and the body by its digest. The host is not signed, so that proxies may
change it; a proxy that changes the path breaks the signature. A request that somebody records and repeats within the
five minutes brings what is known already: its envelopes are duplicates.

The answer to a signed request is signed in turn, whatever it says, so that nobody else can answer for a peer:

    Authentication-Info: signature=5feceb66...

It is the HMAC of these lines with the same secret:

    Durable-HMAC-SHA256 answer
    the signature of the request
    the status
    the SHA-256 of the body of the answer, in hexadecimal
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
"""What WWW-Authenticate says."""
ANSWERED: Final = "Authentication-Info"
"""The header that holds the signature of an answer."""

Headers = Iterable[tuple[bytes, bytes]]

_PARAMETERS: Final = re.compile(
    r"timestamp=([0-9]{1,15}), ?nonce=([A-Za-z0-9_-]{16,100}), ?body=([0-9a-f]{64}), ?signature=([0-9a-f]{64})"
)


@dataclass(frozen=True, slots=True)
class Bearer:
    """The secret itself."""

    token: str

    def matches(self, secrets: Iterable[str]) -> bool:
        return _equal_one(self.token, list(secrets)) is not None


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature of a request, and the digest of the body that it was made for."""

    timestamp: int
    nonce: str
    body: str
    digest: str

    def __str__(self) -> str:
        """The value of Authorization."""
        return f"{SCHEME} timestamp={self.timestamp}, nonce={self.nonce}, body={self.body}, signature={self.digest}"

    def is_timely(self, now: float, skew_seconds: float) -> bool:
        """Tell whether the signature was made at most so long before or after `now`."""
        return abs(now - self.timestamp) <= skew_seconds

    def secret_of(
        self, secrets: Iterable[str], method: str, target: bytes, length: int | None, headers: Headers = ()
    ) -> str | None:
        """Return the secret that this request was signed with; None when it was none of these, or another request."""
        known = list(secrets)
        lines = _lines(method, target, length, self.body, self.timestamp, self.nonce, headers)
        found = _equal_one(self.digest, [_digest(secret, lines) for secret in known])
        return None if found is None else known[found]

    def is_for(self, body: bytes) -> bool:
        """Tell whether the request was signed for this body."""
        return hmac.compare_digest(self.body, sha256(body).hexdigest())


def parse(header: str) -> Bearer | Signature | None:
    """The credentials in the value of Authorization; None when they are of neither kind."""
    scheme, _, parameters = header.partition(" ")
    if scheme.lower() == "bearer":
        return Bearer(parameters.strip())
    found = _PARAMETERS.fullmatch(parameters.strip()) if scheme.lower() == SCHEME.lower() else None
    return Signature(int(found[1]), found[2], found[3], found[4]) if found else None


def bearer(secret: str) -> str:
    """The value of Authorization that shows the secret itself."""
    return f"Bearer {secret}"


def sign(
    secret: str, method: str, target: bytes, body: bytes, *, timestamp: int, nonce: str, headers: Headers = ()
) -> Signature:
    """Sign this request; of its headers, those that say something of a message."""
    hashed = sha256(body).hexdigest()
    lines = _lines(method, target, len(body), hashed, timestamp, nonce, headers)
    return Signature(timestamp, nonce, hashed, _digest(secret, lines))


def sign_answer(secret: str, signature: Signature, status: int, body: bytes) -> str:
    """Return the value of Authentication-Info for the answer to this request."""
    lines = [f"{SCHEME} answer", signature.digest, str(status), sha256(body).hexdigest()]
    return f"signature={_digest(secret, chr(10).join(lines).encode())}"


def is_answer_of(shown: str, secret: str, signature: Signature, status: int, body: bytes) -> bool:
    """Tell whether a value of Authentication-Info was made with the secret, for this answer to this request."""
    return _equal_one(shown, [sign_answer(secret, signature, status, body)]) is not None


def _lines(
    method: str, target: bytes, length: int | None, body: str, timestamp: int, nonce: str, headers: Headers
) -> bytes:
    size = "" if length is None else str(length)
    lines = [SCHEME, method, str(timestamp), nonce, size, body]
    signed = [line.encode() for line in lines]
    signed.insert(2, target)
    return b"\n".join([*signed, *sorted(_of_message(headers))])


def _of_message(headers: Headers) -> Iterator[bytes]:
    for name, value in headers:
        if name.lower() == b"idempotency-key" or name.lower().startswith((b"durable-", b"ce-")):
            yield name.lower() + b":" + value.strip()


def _digest(secret: str, lines: bytes) -> str:
    return hmac.new(_bytes(secret), lines, sha256).hexdigest()


def _equal_one(shown: str, expected: list[str]) -> int | None:
    """The position of the one that is equal. Compared in constant time, and with all of them: how long it takes tells
    nothing about any."""
    found = [hmac.compare_digest(_bytes(shown), _bytes(one)) for one in expected]
    return found.index(True) if any(found) else None


def _bytes(text: str) -> bytes:
    """Encode any text of headers and of the environment."""
    return text.encode(errors="surrogatepass")
