"""Signatures of AMQP messages: who has sent a message, whoever may publish to the queue.

    durable-signature: SERVICE KEY DIGEST

DIGEST is the HMAC-SHA-256, in hexadecimal, with the secret that the service shows at the destination
(durable.transports.peers), of all that durable reads of the message: its properties, its headers but those of the
broker, and its body. KEY is `*` for a shared secret. `app_id` is what a publisher says of itself, and proves nothing.

    no secret is known here     nothing is demanded, and nobody has a name
    signed                      the peer with this secret; none if the signature does not fit
    unsigned                    refused, unless the address says ?unsigned=yes: then a message without a name

The destination is signed, and must be the way that the message has come: the queue, or the exchange and the routing
key that the broker tells. So a recorded message that is published again is a duplicate, or a dead letter where it does
not belong; later, it is older than duplicates are remembered.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from pamqp.commands import Basic

from durable.envelope import Envelope
from durable.errors import InvalidMessage, InvalidSetting
from durable.settings import Settings
from durable.transports import peers
from durable.transports.rabbitmq.address import ExchangeAddress, QueueAddress, parse
from durable.transports.rabbitmq.message import OF_THE_BROKER

SIGNATURE: Final = "durable-signature"

_CONTEXT: Final = "durable AMQP 1"
_SHARED: Final = "*"  # no id of a secret


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs what a service sends to one address."""

    service: str
    credentials: peers.Credentials

    def sign(self, about: Basic.Properties, body: bytes) -> None:
        """Add the signature to the headers. Raises ValueError or TypeError for what msgpack cannot carry."""
        key = self.credentials.key or _SHARED
        digest = _digest(self.credentials.secret, self.service, key, about, body)
        assert about.headers is not None
        about.headers[SIGNATURE] = f"{self.service} {key} {digest}"


@dataclass(frozen=True, slots=True)
class Verifier:
    """Finds out who has signed. `takes_unsigned`: programs that know no secret may publish to the queue."""

    settings: Settings
    takes_unsigned: bool = False

    def peer(self, about: Basic.Properties, body: bytes) -> str | None:
        """Return the name that the message proves, or None. Raises InvalidMessage when it should, and does not."""
        if not peers.has_secrets(self.settings):
            return None
        shown = (about.headers or {}).get(SIGNATURE)
        if shown is None and self.takes_unsigned:
            return None
        if not isinstance(shown, str):
            raise InvalidMessage(
                "the message is not signed, so its sender is unknown: set peers or shared_secret on both ends, or write"
                " ?unsigned=yes for a queue of programs that cannot sign"
            )
        for known in self._signers(shown):
            service, key, digest = shown.rsplit(" ", 2)
            if hmac.compare_digest(_ascii(digest), _ascii(_try_digest(known.secret, service, key, about, body))):
                return known.peer
        raise InvalidMessage(
            "the signature does not fit: another secret, an unknown name, or the message was changed on the way"
        )

    def check_way(self, envelope: Envelope, about: Basic.Properties, delivery: Basic.Deliver, queue: str) -> None:
        """Raise InvalidMessage for an envelope that is signed for another way than it has come."""
        is_signed = peers.has_secrets(self.settings) and SIGNATURE in (about.headers or {})
        if is_signed and not _leads(envelope, delivery, queue):
            raise InvalidMessage(
                f"the message is signed for {envelope.destination}, and came through {queue}: a copy, or moved by a"
                " broker; let its sender send it here"
            )

    def _signers(self, shown: str) -> list[peers.Shown]:
        parts = shown.rsplit(" ", 2)
        if len(parts) != 3:
            return []
        service, key, _ = parts
        return peers.signing(self.settings, service, "" if key == _SHARED else key)


def _leads(envelope: Envelope, delivery: Basic.Deliver, queue: str) -> bool:
    """Tell whether the destination is the way of a delivery. Each service has names of its own for the brokers."""
    try:
        match parse(envelope.destination):
            case QueueAddress(queue=name):
                return name == queue
            case ExchangeAddress(exchange=exchange, routing_key=key):
                return (exchange, key) == (delivery.exchange, delivery.routing_key)
            case _:
                return False
    except InvalidSetting:
        return False


def _digest(secret: str, service: str, key: str, about: Basic.Properties, body: bytes) -> str:
    named = (about.message_id, about.message_type, about.correlation_id, about.app_id, about.content_type)
    said = (_CONTEXT, service, key, named, _of_message(about.headers or {}), len(body))
    head = msgspec.msgpack.encode(said)
    return hmac.digest(secret.encode(errors="surrogatepass"), head + body, "sha256").hex()


def _try_digest(secret: str, service: str, key: str, about: Basic.Properties, body: bytes) -> str:
    """Return the digest of what has arrived; nothing for values that durable never sends."""
    try:
        return _digest(secret, service, key, about, body)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return ""


def _of_message(headers: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the headers that its sender has written, without the signature."""
    return sorted(
        (name, value) for name, value in headers.items() if name != SIGNATURE and not name.startswith(OF_THE_BROKER)
    )


def _ascii(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
