"""Demands of each end of a connection on the other: TLS, a certificate, a proof of the secret.

tcp:// to another machine     TLS; the listener asks for a certificate (tls_ca), or for a proof of the secret
tcp:// on this machine        the same where the service has a certificate; otherwise a proof, if it has a secret
unix://                       the kernel vouches for the user: neither
"""

from __future__ import annotations

import secrets as random
from dataclasses import dataclass

from durable.errors import InvalidSetting
from durable.settings import Settings
from durable.transports.tcp.address import Address
from durable.transports.tcp.credentials import Users
from durable.transports.tcp.proofs import NONCE_BYTES, ClientProof, Secrets, ServerProof
from durable.transports.tcp.stream import FrameStream
from durable.transports.tcp.unix import UnixAddress
from durable.transports.tls import MISSING_CERTIFICATE, Context, Tls


@dataclass(frozen=True, slots=True)
class Entrance:
    """Demands of one address. `tls` is None where connections are not encrypted."""

    tls: Tls | None
    secrets: Secrets
    names: frozenset[str] = frozenset()
    users: Users | None = None

    def for_listener(self) -> tuple[Context | None, ServerProof | None]:
        """Return the demands on the next accepted connection."""
        context = self.tls.for_listeners() if self.tls is not None else None
        if not self.secrets.accepted or (context is not None and context.asks_certificates):
            return context, None
        binding = context.binding if context is not None else b""
        return context, ServerProof(self.secrets.accepted, random.token_bytes(NONCE_BYTES), binding)

    def for_sender(self) -> Context | None:
        return self.tls.for_senders() if self.tls is not None else None

    def proof_of_sender(self, binding: bytes) -> ClientProof | None:
        """Return the proof to offer. `binding` is the digest of the listener's certificate, when one was checked."""
        if self.secrets.shown is None:
            return None
        nonce = random.token_bytes(NONCE_BYTES)
        return ClientProof(self.secrets.shown, nonce, binding, is_needed=not binding)

    def refusal_of_user(self, stream: FrameStream) -> str:
        """Return the reason to refuse the user at the other end; empty where it may be there."""
        return self.users.refusal(stream.socket) if self.users is not None else ""

    def refusal(self, names: list[str]) -> str:
        """Return the reason to refuse a client with this checked certificate; empty when it may connect."""
        if not self.names or self.names & set(names):
            return ""
        return f"its certificate is for {', '.join(names) or 'nobody'}, none of tcp_peers"


class Entrances:
    """Demands of every address of a process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tls = Tls(settings)
        self._names = frozenset(settings.tcp_peers)
        self._secrets = _secrets(settings)

    def of_sender(self, address: Address) -> Entrance:
        """Return the demands of a sender. Raises InvalidSetting when the address must not be sent to."""
        if isinstance(address, UnixAddress):
            return Entrance(None, Secrets(), users=Users.of(self._settings))
        entrance = Entrance(self._tls if self._is_encrypted(address) else None, self._secrets)
        entrance.for_sender()
        return entrance

    def of_listener(self, address: Address) -> Entrance:
        """Return the demands of a listener. Raises InvalidSetting when the address must not be listened on."""
        if isinstance(address, UnixAddress):
            return Entrance(None, Secrets(), users=Users.of(self._settings))
        address.check_bindable()
        encrypted = self._is_encrypted(address)
        if encrypted and not self._tls.has_certificate:
            raise InvalidSetting(f"tls_certificate: {address} {MISSING_CERTIFICATE}, or listen on 127.0.0.1")
        if not (address.is_local or self._tls.is_mutual or self._secrets.accepted):
            raise InvalidSetting(
                f"tls_ca: {address} can be reached from other machines, so peers must show who they are; set tls_ca to"
                " the authorities that sign their certificates"
            )
        if self._names and not (encrypted and self._tls.is_mutual):
            raise InvalidSetting(f"tcp_peers: {address} demands no certificates; set tls_certificate and tls_ca")
        entrance = Entrance(self._tls if encrypted else None, self._secrets, self._names)
        entrance.for_listener()
        return entrance

    def _is_encrypted(self, address: Address) -> bool:
        assert not isinstance(address, UnixAddress)
        if address.tls is False and not address.is_local:
            raise InvalidSetting(
                f"{address}: {address.host} is another machine, so the connection must be encrypted; leave out tls=0"
            )
        if address.tls is not None:
            return address.tls
        return not address.is_local or self._tls.has_certificate


def _secrets(settings: Settings) -> Secrets:
    shown, former = settings.http_secret, settings.http_previous_secret
    others = [former.get_secret_value()] if former is not None else []
    return Secrets.of(shown.get_secret_value() if shown is not None else None, others)
