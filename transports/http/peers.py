"""The rules of peers: whose secret a request shows, who is at an address, and what each may send.

    peers = {"billing": {"secrets": {"2026-11": "..."}, "at": ["https://billing.example"], "types": ["billing.*"]}}

    to send     the peer at the longest address that the destination lies below; its first secret signs
    to receive  the peer whose secret a request was signed with, by its name and the id of the secret; or whose token
                it shows

`http_secret` is the secret of everybody else. Who knows it is nobody in particular.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Final, NamedTuple

from durable.errors import InvalidSetting
from durable.settings import Peer, Settings
from durable.transports.http import address as http_address
from durable.transports.http.address import SCHEMES, HttpAddress

_ANY: Final = "*"


class Credentials(NamedTuple):
    """A secret for requests to one address; `key` is its id, and `peer` the service there, if it is one of `peers`."""

    secret: str
    key: str = ""
    peer: str = ""


class Shown(NamedTuple):
    """A secret that a request has shown, and the name of the peer that it belongs to, if it is one's own."""

    secret: str
    peer: str | None


def check(peers: Mapping[str, Peer]) -> None:
    """Raise InvalidSetting for an address that is none, and for one secret of two peers: it would be no identity."""
    known: dict[str, str] = {}
    for name, peer in peers.items():
        for uri in peer.at:
            _parsed(name, uri)
        for secret in peer.secrets.values():
            other = known.setdefault(secret.get_secret_value(), name)
            if other != name:
                raise InvalidSetting(f"peers: {other} and {name} have the same secret; give each one of its own")


def credentials_for(settings: Settings, address: HttpAddress) -> Credentials | None:
    """Return the secret for this address; None where it has none."""
    if name := peer_at(settings, address):
        key, secret = next(iter(settings.peers[name].secrets.items()))
        return Credentials(secret.get_secret_value(), key, name)
    return None if settings.http_secret is None else Credentials(settings.http_secret.get_secret_value())


def peer_at(settings: Settings, address: HttpAddress) -> str:
    """Return the name of the peer at this address, or nothing."""
    found = [
        (len(at.path), name)
        for name, peer in settings.peers.items()
        for at in (_parsed(name, uri) for uri in peer.at)
        if at.origin == address.origin and f"{address.path}/".startswith(f"{at.path}/")
    ]
    return max(found)[1] if found else ""


def has_secrets(settings: Settings) -> bool:
    """Tell whether requests must show a secret."""
    return bool(settings.peers) or bool(_shared(settings))


def signing(settings: Settings, name: str, key: str) -> list[Shown]:
    """Return the secrets that a request may be signed with which says that it is of this peer, by this key. Without a
    key it is of nobody in particular.
    """
    if not key:
        return [Shown(secret, None) for secret in _shared(settings)]
    secret = settings.peers[name].secrets.get(key) if name in settings.peers else None
    return [] if secret is None else [Shown(secret.get_secret_value(), name)]


def token(settings: Settings, shown: str) -> Shown | None:
    """Return the secret that a bearer token is, compared with all of them in constant time."""
    known = [Shown(secret, None) for secret in _shared(settings)]
    known += [
        Shown(secret.get_secret_value(), name)
        for name, peer in settings.peers.items()
        for secret in peer.secrets.values()
    ]
    found = [each for each in known if hmac.compare_digest(_bytes(shown), _bytes(each.secret))]
    return found[0] if found else None


def may_use(settings: Settings, peer: str | None, endpoint: str) -> bool:
    """Tell whether a peer may send to this endpoint."""
    endpoints = None if peer is None else settings.peers[peer].endpoints
    return endpoints is None or endpoint in endpoints


def may_send(settings: Settings, peer: str | None, message_type: str) -> bool:
    """Tell whether a peer may send messages of this type."""
    types = None if peer is None else settings.peers[peer].types
    return types is None or any(_fits(each, message_type) for each in types)


def is_ours(settings: Settings, destination: str) -> bool:
    """False for the address of another transport, or of another service."""
    scheme, separator, _ = destination.partition("://")
    if separator and scheme not in SCHEMES:
        return False
    try:
        return not (separator and peer_at(settings, http_address.parse(destination)))
    except InvalidSetting:
        return True


def _fits(pattern: str, message_type: str) -> bool:
    return message_type.startswith(pattern[:-1]) if pattern.endswith(_ANY) else message_type == pattern


def _parsed(name: str, uri: str) -> HttpAddress:
    try:
        return http_address.parse(uri)
    except InvalidSetting as error:
        raise InvalidSetting(f"peers: {name}: {error}") from None


def _shared(settings: Settings) -> list[str]:
    known = (settings.http_secret, settings.http_previous_secret)
    return [secret.get_secret_value() for secret in known if secret is not None]


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
