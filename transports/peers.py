"""The rules of peers: whose secret or certificate is shown, who is at an address, and what each may send.

    peers = {"billing": {"secrets": {"2026-11": "..."}, "at": ["https://billing.example"], "types": ["billing.*"]}}

    to send     the secret of the peer at the longest address that the destination lies below; else the own one, of the
                entry with the name of this service; else `shared_secret`
    to receive  the peer whose secret was used, by its name and the id of the secret; or the peer with a name that the
                certificate has

`shared_secret` is the secret of everybody else. Who knows it is nobody in particular.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from msgspec.structs import replace

from durable.errors import InvalidSetting
from durable.setting_types import Peer
from durable.settings import Settings
from durable.transports.frames import Offer, Offers
from durable.transports.hosts import host_in
from durable.transports.uris import normal_escapes

_ANY: Final = "*"
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class Credentials(NamedTuple):
    """A secret to show at one address; `key` is its id, and `peer` the service there, if it is one of `peers`."""

    secret: str
    key: str = ""
    peer: str = ""


class Shown(NamedTuple):
    """A secret that was shown, and the name of the peer that it belongs to, if it is one's own."""

    secret: str
    peer: str | None


def check(settings: Settings) -> None:
    """Raise InvalidSetting for an address of no peer or of two, and for a secret or certificate of two peers, or of a
    peer and of everybody: it would be no identity.
    """
    _check_places(settings)
    known = {f"secret {each}": "" for each in shared(settings)}
    for name, peer in settings.peers.items():
        if not peer.secrets and not peer.certificates:
            raise InvalidSetting(f"peers: {name} has no secret and no certificate; give it one of them")
        for kind, shown in [("secret", each.get_secret_value()) for each in peer.secrets.values()] + [
            ("certificate", each) for each in peer.certificates
        ]:
            other = known.setdefault(f"{kind} {shown}", name)
            if not other:
                raise InvalidSetting(
                    f"peers: the secret of {name} is also shared_secret or previous_shared_secret, which everybody "
                    "shows; give the peer one of its own"
                )
            if other != name:
                raise InvalidSetting(f"peers: {other} and {name} have the same {kind}; give each one of its own")


def _check_places(settings: Settings) -> None:
    at: dict[str, str] = {}
    for name, peer in settings.peers.items():
        for uri in peer.at:
            if not (place := _place(uri)):
                raise InvalidSetting(f"peers: {name}: {uri} is no address; write it as in https://billing.example")
            if place.startswith("rabbitmq:"):
                _check_path(settings, name, uri)
            if (other := at.setdefault(place, name)) != name:
                raise InvalidSetting(
                    f"peers: {other} and {name} are both at {uri}; leave it in at of the one that receives there"
                )


def _check_path(settings: Settings, name: str, uri: str) -> None:
    """Raise InvalidSetting for an address of RabbitMQ that no message is addressed to, or that has messages of a topic:
    each of these has several receivers, and one signature.
    """
    path = _place(uri).partition("://")[2].split("/")[1:]
    topic = ["exchange", quote(settings.amqp_exchange, safe="")]
    if path[:1] == ["topic"] or path[:2] == topic[: len(path)]:
        raise InvalidSetting(
            f"peers: {name}: {uri} takes in a topic, which is no peer; write the queues of the peer in at, as in "
            "rabbitmq://default/queue/mail, and give a publisher and its subscribers the same entry with the "
            "publisher's name"
        )
    if path[0] not in ("queue", "exchange"):
        raise InvalidSetting(f"peers: {name}: {uri} leads nowhere; write it as in rabbitmq://default/queue/mail")


def credentials_for(settings: Settings, uri: str, service: str) -> Credentials | None:
    """Return the secret that this service shows at an address; None where it has none."""
    there = peer_at(settings, uri)
    for name in (there, service):
        if name in settings.peers and settings.peers[name].secrets:
            key, secret = next(iter(settings.peers[name].secrets.items()))
            return Credentials(secret.get_secret_value(), key, there)
    return None if settings.shared_secret is None else Credentials(settings.shared_secret.get_secret_value())


def peer_at(settings: Settings, uri: str) -> str:
    """Return the name of the peer at this address, or nothing."""
    if not settings.peers or not (place := _place(uri)):
        return ""
    found = [
        (len(at), name)
        for name, peer in settings.peers.items()
        for at in map(_place, peer.at)
        if at and f"{place}/".startswith(f"{at}/")
    ]
    return max(found)[1] if found else ""


def has_secrets(settings: Settings) -> bool:
    """Tell whether a peer must show a secret."""
    return bool(shared(settings)) or any(peer.secrets for peer in settings.peers.values())


def shared(settings: Settings) -> list[str]:
    """Return the secrets of nobody in particular."""
    known = (settings.shared_secret, settings.previous_shared_secret)
    return [secret.get_secret_value() for secret in known if secret is not None]


def signing(settings: Settings, name: str, key: str) -> list[Shown]:
    """Return the secrets that a statement may be signed with which says that it is of this peer, by this key. Without a
    key it is of nobody in particular.
    """
    if not key:
        return [Shown(secret, None) for secret in shared(settings)]
    secret = settings.peers[name].secrets.get(key) if name in settings.peers else None
    return [] if secret is None else [Shown(secret.get_secret_value(), name)]


def token(settings: Settings, shown: str) -> Shown | None:
    """Return the secret that a bearer token is, compared with all of them in constant time."""
    known = [Shown(secret, None) for secret in shared(settings)]
    known += [
        Shown(secret.get_secret_value(), name)
        for name, peer in settings.peers.items()
        for secret in peer.secrets.values()
    ]
    found = [each for each in known if hmac.compare_digest(_bytes(shown), _bytes(each.secret))]
    return found[0] if found else None


def lists_certificates(settings: Settings) -> bool:
    """Tell whether only the listed certificates are those of peers."""
    return any(peer.certificates for peer in settings.peers.values())


def certified(settings: Settings, names: Sequence[str]) -> str | None:
    """Return the peer whose certificate has these names; None for one that is not listed where others are.

    Where none is listed, the first name is the peer's.
    """
    if not lists_certificates(settings):
        return names[0] if names else None
    return next((name for name, peer in settings.peers.items() if set(peer.certificates) & set(names)), None)


def may_use(settings: Settings, peer: str | None, endpoint: str) -> bool:
    """Tell whether a peer may send to this endpoint."""
    known = _known(settings, peer)
    return known is None or known.endpoints is None or endpoint in known.endpoints


def may_send(settings: Settings, peer: str | None, message_type: str) -> bool:
    """Tell whether a peer may send messages of this type."""
    known = _known(settings, peer)
    return known is None or known.types is None or any(_fits(each, message_type) for each in known.types)


def may_offer(settings: Settings, peer: str | None, service: str) -> bool:
    """Tell whether a peer may announce that it offers this service. One that may send some types only is no provider,
    unless its offers say so.
    """
    known = _known(settings, peer)
    if known is None:
        return True
    if known.offers is None:
        return known.types is None
    return any(_fits(each, service) for each in known.offers)


def seen(settings: Settings, peer: str | None, offer: Offer) -> Offer | None:
    """Return what a peer is told of a service: the methods that it may call; None where it may call none."""
    known = _known(settings, peer)
    if known is None or known.types is None:
        return offer
    methods = [each for each in offer.signatures if may_send(settings, peer, f"{offer.service}.{each.method}")]
    if len(methods) == len(offer.signatures):
        return offer
    return replace(offer, signatures=methods, is_partial=True) if methods else None


def seen_of(settings: Settings, peer: str | None, offers: Offers) -> Offers:
    """Return what a peer is told of these services."""
    told = (seen(settings, peer, each) for each in offers.offers)
    return Offers([each for each in told if each is not None])


def is_ours(settings: Settings, destination: str, schemes: Collection[str], service: str) -> bool:
    """False for the address of a transport with other schemes than these, or of another service than this one."""
    scheme, separator, _ = destination.partition("://")
    return not separator or (scheme in schemes and peer_at(settings, destination) in ("", service))


def _known(settings: Settings, peer: str | None) -> Peer | None:
    return None if peer is None else settings.peers.get(peer)


def _fits(pattern: str, message_type: str) -> bool:
    return message_type.startswith(pattern[:-1]) if pattern.endswith(_ANY) else message_type == pattern


def _place(uri: str) -> str:
    """Return an address in its one spelling, without its options, the port always written; nothing for text that is
    none.
    """
    try:
        parts = urlsplit(uri)
        port = _DEFAULT_PORTS.get(parts.scheme, "") if parts.port is None else parts.port
    except ValueError:
        return ""
    if parts.scheme == "rabbitmq":
        host, path = _names(parts.netloc), _names(parts.path)
    else:
        host, path = host_in(parts), normal_escapes(parts.path)
    return f"{parts.scheme}://{host}:{port}{path.rstrip('/')}" if host else ""


def _names(text: str) -> str:
    """Return names between slashes as addresses of RabbitMQ are written."""
    return "/".join(quote(unquote(each), safe="") for each in text.split("/"))


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
