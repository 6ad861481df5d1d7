"""Authentication by a shared secret: a signature of the request and of its answer, or the secret itself.

    Authorization: Durable-HMAC-SHA256 to=billing, at=http://127.0.0.1:8002, from=orders, key=2026-11,
        timestamp=1767225600, nonce=K7gN..., body=e3b0c442..., signature=9f86d081...
    Authorization: Bearer SECRET

`to` is the name of the service that is asked, and `at` the origin that its client has connected to, so that nobody
can repeat the request elsewhere, or pass it on from a port that he has taken. `from` and `key` name the sender and the
id of its secret, where it has one of its own; they are left out where all know one. `body` is the SHA-256 of the body,
in hexadecimal. The signature is the HMAC-SHA-256, in hexadecimal, of these lines joined by line feeds:

    Durable-HMAC-SHA256
    the method
    the path and query, byte for byte as the client wrote them in the request line
    to
    at
    from, or nothing
    key, or nothing
    the timestamp, in seconds since 1970
    the nonce
    the Content-Length, or nothing for a body in chunks
    the SHA-256 of the body, in hexadecimal
    name:value of each header that says something of a message, sorted, the names in lower case:
        Idempotency-Key, Durable-..., ce-...

So a request is judged before its body is read, and the body by its digest. The header Host is not signed, so that
proxies may change it, and `at` is judged where nothing else proves the address (durable.transports.http.local); a
proxy that changes the path breaks the signature. A request that somebody records and repeats within the five minutes
brings what is known already: its envelopes are duplicates, and whoever repeats it proves nothing.

The answer to a signed request is signed in turn, whatever it says, so that nobody else can answer for a peer:

    Authentication-Info: service=billing, signature=5feceb66...

It is the HMAC of these lines with the same secret:

    Durable-HMAC-SHA256 answer
    the signature of the request
    the name of the service that answers
    the status
    the SHA-256 of the body of the answer, in hexadecimal
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Final

SCHEME: Final = "Durable-HMAC-SHA256"
CHALLENGE: Final = f'{SCHEME}, Bearer realm="durable"'
"""The value of WWW-Authenticate."""
ANSWERED: Final = "Authentication-Info"
"""The header that holds the signature of an answer."""

Headers = Iterable[tuple[bytes, bytes]]

_NAME: Final = "[A-Za-z0-9._-]"
_ORIGIN: Final = r"https?://[A-Za-z0-9._:\[\]-]{1,300}"
_ANSWER: Final = re.compile(rf"service=({_NAME}{{1,200}}), ?signature=([0-9a-f]{{64}})")
_PARAMETERS: Final = re.compile(
    rf"to=({_NAME}{{0,200}}), ?at=({_ORIGIN}), ?(?:from=({_NAME}{{1,200}}), ?key=({_NAME}{{1,100}}), ?)?"
    r"timestamp=([0-9]{1,15}), ?nonce=([A-Za-z0-9_-]{16,100}), ?body=([0-9a-f]{64}), ?signature=([0-9a-f]{64})"
)


@dataclass(frozen=True, slots=True)
class Bearer:
    """The secret itself."""

    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature of a request, and the digest of the body that it was made for. `to` is empty where the sender asks
    who is there; `sender` and `key` are where the secret is not its own.
    """

    to: str
    at: str
    sender: str
    key: str
    timestamp: int
    nonce: str
    body: str
    digest: str

    def __str__(self) -> str:
        """The value of Authorization."""
        whose = f"from={self.sender}, key={self.key}, " if self.key else ""
        when = f"timestamp={self.timestamp}, nonce={self.nonce}"
        return f"{SCHEME} to={self.to}, at={self.at}, {whose}{when}, body={self.body}, signature={self.digest}"

    def is_timely(self, now: float, skew_seconds: float) -> bool:
        """Tell whether the signature was made at most so long before or after `now`."""
        return abs(now - self.timestamp) <= skew_seconds

    def secret_of(
        self, secrets: Iterable[str], method: str, target: bytes, length: int | None, headers: Headers = ()
    ) -> str | None:
        """Return the secret that this request was signed with; None when it was none of these, or another request."""
        known = list(secrets)
        lines = _lines(self, method, target, length, headers)
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
    if not found:
        return None
    to, at, sender, key, timestamp, nonce, body, digest = found.groups(default="")
    return Signature(to, at, sender, key, int(timestamp), nonce, body, digest)


def bearer(secret: str) -> str:
    """The value of Authorization that shows the secret itself."""
    return f"Bearer {secret}"


def sign(secret: str, said: Signature, method: str, target: bytes, length: int, headers: Headers = ()) -> Signature:
    """Sign a request of this length; of its headers, those that say something of a message."""
    return replace(said, digest=_digest(secret, _lines(said, method, target, length, headers)))


def unsigned(
    body: bytes, *, to: str, at: str, timestamp: int, nonce: str, sender: str = "", key: str = ""
) -> Signature:
    """Return what a signature says, before it is one. `sender` is said only together with the key of its secret."""
    return Signature(to, at, sender if key else "", key, timestamp, nonce, sha256(body).hexdigest(), "")


def sign_answer(secret: str, signature: Signature, service: str, status: int, body: bytes) -> str:
    """Return the value of Authentication-Info for the answer of this service to this request."""
    lines = [f"{SCHEME} answer", signature.digest, service, str(status), sha256(body).hexdigest()]
    return f"service={service}, signature={_digest(secret, chr(10).join(lines).encode())}"


def answering(shown: str, secret: str, signature: Signature, status: int, body: bytes) -> str:
    """Return the name of the service that answers; nothing if Authentication-Info was not made with the secret, or for
    another answer.
    """
    found = _ANSWER.fullmatch(shown)
    if found is None or _equal_one(shown, [sign_answer(secret, signature, found[1], status, body)]) is None:
        return ""
    return found[1]


def _lines(said: Signature, method: str, target: bytes, length: int | None, headers: Headers) -> bytes:
    size = "" if length is None else str(length)
    before = [SCHEME.encode(), method.encode(), target]
    lines = [said.to, said.at, said.sender, said.key, str(said.timestamp), said.nonce, size, said.body]
    return b"\n".join([*before, *(line.encode() for line in lines), *sorted(_of_message(headers))])


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
