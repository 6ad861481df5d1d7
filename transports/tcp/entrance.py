"""Demands of each end of a connection on the other: TLS, a certificate, a proof of the secret.

tcp:// to another machine     TLS; the listener asks for a certificate (tls_ca), or for a proof of the secret
tcp:// on this machine        the same where the service has a certificate; otherwise a proof, if it has a secret
unix://                       the kernel vouches for the user: neither
"""

from __future__ import annotations

import secrets as random
from collections.abc import Callable
from dataclasses import dataclass

from durable.errors import ConnectionFailed, InvalidSetting
from durable.settings import Settings
from durable.transports import peers
from durable.transports.frames import Hello
from durable.transports.tcp.address import Address
from durable.transports.tcp.credentials import Users
from durable.transports.tcp.proofs import NONCE_BYTES, ClientProof, Known, ServerProof, binding_of, shared_key
from durable.transports.tcp.stream import FrameStream
from durable.transports.tcp.unix import UnixAddress
from durable.transports.tls import MISSING_CERTIFICATE, Context, Tls


@dataclass(frozen=True, slots=True)
class Entrance:
    """Demands of one address. `tls` is None where connections are not encrypted; `users` where the kernel does not
    vouch for them.
    """

    settings: Settings
    tls: Tls | None = None
    users: Users | None = None
    shown: peers.Credentials | None = None

    def for_listener(self) -> Context | None:
        """Return the TLS of the next accepted connection."""
        return self.tls.for_listeners() if self.tls is not None else None

    def for_sender(self) -> Context | None:
        return self.tls.for_senders() if self.tls is not None else None

    def proof_of_listener(self, stream: FrameStream, context: Context | None) -> ServerProof | None:
        """Return the proof to demand on an accepted connection."""
        is_known_otherwise = self.users is not None or (context is not None and context.asks_certificates)
        if is_known_otherwise or not peers.has_secrets(self.settings):
            return None
        here, there = stream.ends
        binding = context.binding if context is not None else binding_of(client=there, server=here)
        return ServerProof(self._secret_of, random.token_bytes(NONCE_BYTES), binding)

    def proof_of_sender(self, stream: FrameStream) -> ClientProof | None:
        """Return the proof to offer on an opened connection, whose certificate was checked if there is TLS."""
        if self.shown is None:
            return None
        secret, key, peer = _bytes(self.shown.secret), self.shown.key, self.shown.peer
        nonce = random.token_bytes(NONCE_BYTES)
        here, there = stream.ends
        binding = stream.certificate or binding_of(client=here, server=there)
        return ClientProof(secret, key or shared_key(secret), nonce, binding, peer, is_needed=not stream.certificate)

    def refusal_of_user(self, stream: FrameStream) -> str:
        """Return the reason to refuse the user at the other end; empty where it may be there."""
        return self.users.refusal(stream.socket) if self.users is not None else ""

    def certified(self, names: list[str]) -> str | None:
        """Return the name of the client with this checked certificate; None where it has none. Raises ConnectionFailed
        when it may not connect.
        """
        if self.tls is None or not self.tls.is_mutual:
            return None
        name = peers.certified(self.settings, names)
        if name is None and peers.lists_certificates(self.settings):
            raise ConnectionFailed(
                f"certificate is for {', '.join(names) or 'nobody'}, none of peers; add the name to its certificates"
            )
        return name

    def _secret_of(self, hello: Hello) -> Known | None:
        """Return the secret that this client says it knows."""
        for secret in map(_bytes, peers.shared(self.settings)):
            if hello.key == shared_key(secret):
                return Known(secret, None)
        own = peers.signing(self.settings, hello.service, hello.key) if hello.key else []
        return Known(_bytes(own[0].secret), own[0].peer) if own else None


class Entrances:
    """Demands of every address of a process."""

    def __init__(self, settings: Settings, service: str) -> None:
        self._settings = settings
        self._service = service
        self._tls = Tls(settings)
        peers.check(settings)

    def of_sender(self, address: Address) -> Entrance:
        """Return the demands of a sender. Raises InvalidSetting when the address must not be sent to."""
        if isinstance(address, UnixAddress):
            return Entrance(self._settings, users=Users.of(self._settings))
        shown = peers.credentials_for(self._settings, str(address), self._service)
        entrance = Entrance(self._settings, self._tls if self._is_encrypted(address) else None, shown=shown)
        entrance.for_sender()
        return entrance

    def of_listener(self, address: Address) -> Entrance:
        """Return the demands of a listener. Raises InvalidSetting when the address must not be listened on."""
        if isinstance(address, UnixAddress):
            return Entrance(self._settings, users=Users.of(self._settings))
        address.check_bindable()
        encrypted = self._is_encrypted(address)
        if encrypted and not self._tls.has_certificate:
            raise InvalidSetting(f"tls_certificate: {address} {MISSING_CERTIFICATE}, or listen on 127.0.0.1")
        has_secrets = peers.has_secrets(self._settings)
        if not (address.is_local or self._tls.is_mutual or has_secrets):
            raise InvalidSetting(
                f"tls_ca: {address} can be reached from other machines, so peers must show who they are; set tls_ca to"
                " the authorities that sign their certificates"
            )
        demands_certificates = encrypted and self._tls.is_mutual
        if peers.lists_certificates(self._settings) and not (demands_certificates or has_secrets):
            raise InvalidSetting(f"peers: {address} demands no certificates; set tls_certificate and tls_ca")
        entrance = Entrance(self._settings, self._tls if encrypted else None)
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


def _bytes(secret: str) -> bytes:
    return secret.encode(errors="surrogatepass")


class Admission:
    """Demands on one accepted connection, before anything is read, and its place among the known peers after them."""

    def __init__(self, entrance: Entrance, context: Context | None, prove: Callable[[], bool]) -> None:
        self._entrance = entrance
        self._context = context
        self.prove = prove

    async def admit(self, stream: FrameStream) -> str | None:
        """Return the name of the client by its certificate, if it had to show one. Raises ConnectionFailed."""
        if refusal := self._entrance.refusal_of_user(stream):
            raise ConnectionFailed(refusal)
        if self._context is None:
            stream.resume()
            return None
        await stream.secure(self._context)
        return self._entrance.certified(stream.names)
