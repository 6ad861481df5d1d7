"""Proofs, in HELLO, that both ends of a connection know the same secret. The secret itself is never sent.

    client    HELLO      key, client's nonce
    server    CHALLENGE  its name, server's nonce, HMAC("server", transcript)
    client    PROOF      HMAC("client", transcript)
    server    WELCOME

The transcript holds everything that both ends have said by then, and the certificate of the server where there is one:
a proof that was recorded, reflected, or relayed to another server does not fit. The key is derived from the secret, so
that two secrets can be valid while one is replaced by the other.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

import msgspec

from durable.errors import ConnectionFailed
from durable.transports.frames import Challenge, Hello, Proof

NONCE_BYTES: Final = 32

_CONTEXT: Final = b"durable HELLO 1"
_KEY_CHARACTERS: Final = 16


@dataclass(frozen=True, slots=True)
class Secrets:
    """The secret that this service shows, and those that it accepts, by key."""

    shown: bytes | None = field(default=None, repr=False)
    accepted: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, shown: str | None, others: Iterable[str] = ()) -> Secrets:
        """Return the secrets of a service: the one that it shows, and others that it accepts besides."""
        secrets = [text.encode(errors="surrogatepass") for text in ([shown] if shown is not None else []) + [*others]]
        accepted = {key_of(secret): secret for secret in secrets}
        return cls(secrets[0] if shown is not None else None, accepted)


def key_of(secret: bytes) -> str:
    """Return the name of a secret, from which the secret cannot be computed."""
    return hmac.new(secret, _CONTEXT + b" key", sha256).hexdigest()[:_KEY_CHARACTERS]


@dataclass(frozen=True, slots=True)
class ClientProof:
    """The client's part. `is_needed`: a server that proves nothing is refused, since nothing else shows who it is."""

    secret: bytes = field(repr=False)
    nonce: bytes
    binding: bytes = b""
    is_needed: bool = True

    @property
    def key(self) -> str:
        return key_of(self.secret)

    def answer(self, hello: Hello, challenge: Challenge) -> Proof:
        """Return the client's proof. Raises ConnectionFailed when the server's own does not fit."""
        expected = _mac(self.secret, b"server", hello, challenge, self.binding)
        if not hmac.compare_digest(expected, challenge.proof):
            raise ConnectionFailed("the peer does not know the secret; whatever it answers is not believed")
        return Proof(_mac(self.secret, b"client", hello, challenge, self.binding))


@dataclass(frozen=True, slots=True)
class ServerProof:
    """The server's part."""

    accepted: Mapping[str, bytes] = field(repr=False)
    nonce: bytes
    binding: bytes = b""

    def challenge(self, hello: Hello, service: str, node: int) -> Challenge | None:
        """Return the challenge to this client; None when its secret is not known here."""
        secret = self.accepted.get(hello.key)
        if secret is None or len(hello.nonce) != NONCE_BYTES:
            return None
        bare = Challenge(service, node, self.nonce)
        return Challenge(service, node, self.nonce, _mac(secret, b"server", hello, bare, self.binding))

    def is_proven(self, hello: Hello, challenge: Challenge, proof: Proof) -> bool:
        expected = _mac(self.accepted[hello.key], b"client", hello, challenge, self.binding)
        return hmac.compare_digest(expected, proof.proof)


def _mac(secret: bytes, role: bytes, hello: Hello, challenge: Challenge, binding: bytes) -> bytes:
    said = [role, hello, challenge.service, challenge.node, challenge.nonce, binding]
    return hmac.new(secret, _CONTEXT + msgspec.msgpack.encode(said), sha256).digest()
