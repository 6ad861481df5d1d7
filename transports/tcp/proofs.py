"""Proofs, in HELLO, that both ends of a connection know the same secret. The secret itself is never sent.

    client    HELLO      key, client's nonce
    server    CHALLENGE  its name, server's nonce, HMAC("server", transcript)
    client    PROOF      HMAC("client", transcript)
    server    WELCOME

The transcript holds everything that both ends have said by then, and a binding, so that a proof that was recorded,
reflected, or relayed to another server does not fit:

    with TLS       the certificate of the server
    without TLS    the addresses of both ends, as each end sees them itself: a relay has two connections, with other
                   addresses. An honest proxy, a forwarded port and NAT are relays, too: they need TLS

The key is the id of the client's own secret, or derived from the shared one, so that two secrets can be valid while one
is replaced by the other.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

from durable.errors import ConnectionFailed
from durable.outcomes import printable
from durable.transports.frames import Challenge, Hello, Proof

NONCE_BYTES: Final = 32

_CONTEXT: Final = b"durable HELLO 1"
_KEY_CHARACTERS: Final = 16

_RELAYED: Final = "or something between the two (a proxy, a forwarded port, NAT) changes its address; use TLS there"
NO_PROOF: Final = f"no proof of the secret: the peer found that this end knows another one, {_RELAYED}"
WRONG_PROOF: Final = f"wrong proof of the secret: the peer does not know it, {_RELAYED}"


def binding_of(client: Any, server: Any) -> bytes:
    """Return the binding of a connection without TLS, given the socket's addresses of its two ends."""
    return f"from {_plain(client)} to {_plain(server)}".encode()


def _plain(address: Any) -> str:
    """Return one text for an address, whether its socket is of IPv4 or of IPv6 that takes IPv4, too."""
    if not isinstance(address, tuple):
        return str(address)
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    return f"{getattr(ip, 'ipv4_mapped', None) or ip} port {address[1]}"


def shared_key(secret: bytes) -> str:
    """Return the key of a secret that is nobody's own, from which the secret cannot be computed. No peer's key has a
    colon.
    """
    return "shared:" + hmac.new(secret, _CONTEXT + b" key", sha256).hexdigest()[:_KEY_CHARACTERS]


@dataclass(frozen=True, slots=True)
class ClientProof:
    """The client's part. `peer` is the name of the server, where it is known. `is_needed`: there is no TLS, so that
    nothing else shows who the server is; one that proves nothing is refused.
    """

    secret: bytes = field(repr=False)
    key: str
    nonce: bytes
    binding: bytes = b""
    peer: str = ""
    is_needed: bool = True

    def answer(self, hello: Hello, challenge: Challenge) -> Proof:
        """Return the client's proof. Raises ConnectionFailed when the server's own does not fit."""
        expected = _mac(self.secret, b"server", hello, challenge, self.binding)
        if not hmac.compare_digest(expected, challenge.proof):
            relayed = f", {_RELAYED}" if self.is_needed else ""
            raise ConnectionFailed(f"wrong secret: the peer does not know the secret{relayed}")
        if self.peer not in ("", challenge.service):
            raise ConnectionFailed(
                f"peer {printable(challenge.service)} answers in the place of {self.peer}; correct its address in peers"
            )
        return Proof(_mac(self.secret, b"client", hello, challenge, self.binding))


class Known(NamedTuple):
    """A secret that a client may prove, and the name of the peer that it belongs to, if it is one's own."""

    secret: bytes
    peer: str | None


@dataclass(frozen=True, slots=True)
class ServerProof:
    """The server's part. `find` returns the secret that belongs to the service and the key of a HELLO."""

    find: Callable[[Hello], Known | None] = field(repr=False)
    nonce: bytes
    binding: bytes = b""

    def challenge(self, hello: Hello, service: str, node: int) -> Challenge | None:
        """Return the challenge to this client; None when its secret is not known here."""
        known = self.find(hello)
        if known is None or len(hello.nonce) != NONCE_BYTES:
            return None
        bare = Challenge(service, node, self.nonce)
        return Challenge(service, node, self.nonce, _mac(known.secret, b"server", hello, bare, self.binding))

    def proven(self, hello: Hello, challenge: Challenge, proof: Proof) -> Known | None:
        """Return the secret that the client has proved; None for a wrong proof."""
        known = self.find(hello)
        if known is None:
            return None
        expected = _mac(known.secret, b"client", hello, challenge, self.binding)
        return known if hmac.compare_digest(expected, proof.proof) else None


def _mac(secret: bytes, role: bytes, hello: Hello, challenge: Challenge, binding: bytes) -> bytes:
    said = [role, hello, challenge.service, challenge.node, challenge.nonce, binding]
    return hmac.new(secret, _CONTEXT + msgspec.msgpack.encode(said), sha256).digest()
