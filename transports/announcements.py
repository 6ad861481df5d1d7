"""The rules of announcements: which services a connected peer may announce, under which name and at which addresses.

    name       the proven one; a peer that has proved none has the name of its HELLO, unless that is the name of this
               service or of one of `peers`, also in capitals; it is printable text
    services   those in `offers` of the peer; without, any, unless the peer has `types`
    addresses  below `at` of the peer, where it has one; or else where the connection comes from

Other addresses are left out; an announcement is refused as a whole when a service has none left, or for another fault.
Callers here have not chosen the peer: an address that it could choose freely would make them connect to anything.
"""

from __future__ import annotations

import ipaddress
import posixpath
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from msgspec.structs import replace

from durable.errors import InvalidMessage, InvalidSetting
from durable.redaction import shown
from durable.schemes import normal_scheme
from durable.settings import Settings
from durable.transports import peers
from durable.transports.frames import Listing
from durable.transports.hosts import is_host, is_whole
from durable.transports.uris import normal_escapes

UNIX: Final = "unix"
_SCHEMES: Final = ("tcp", UNIX, "http", "https")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_THIS_MACHINE: Final = "127.0.0.1"  # however it is written

MOST_PLACES: Final = 100
"""Different addresses of one announcement, at most."""

Check = Callable[[str], object]
"""The rules of the transport of an address: raises InvalidSetting for one that nobody could call."""


def _nothing_more(address: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Announcer:
    """A connected peer. `application` and `node` are its own words, `proven` the name that it has proved.

    `host` is the address that the connection comes from; empty for a process of this machine. `names` are those in its
    checked certificate.
    """

    application: str
    node: int
    proven: str | None = None
    host: str = ""
    names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name under which its offers are known."""
        return self.application if self.proven is None else self.proven


def accepted(
    settings: Settings,
    service: str,
    announcer: Announcer,
    listings: Sequence[Listing],
    *,
    machine: str = "",
    hosts: Collection[str] = (),
    check: Check = _nothing_more,
) -> list[Listing]:
    """Return listings as they are known at this service: under the name of the peer, at addresses that it may name.

    `machine` is this one, on which a peer is that comes from nowhere else, and `hosts` are its names. Raises
    InvalidMessage for a name or a service that it may not announce, and for a service without an address that is left.
    """
    name = announcer.name
    _refuse_unreadable(name)
    if name.casefold() == service.casefold():
        raise InvalidMessage(
            f"{shown(name)} is the name of this service, whose nodes are known from its database; "
            "give the peer another name"
        )
    if announcer.proven is None and name.casefold() in {each.casefold() for each in settings.peers}:
        raise InvalidMessage(f"{shown(name)} is the name of a peer, and not proved; use its secret or its certificate")
    addresses = {address for listing in listings for address in listing.addresses}
    if len(addresses) > MOST_PLACES:
        raise InvalidMessage(f"more than {MOST_PLACES} different addresses are announced; announce fewer")
    refusals = {address: _refusal_of_address(settings, announcer, address, hosts, check) for address in addresses}
    seen: set[str] = set()
    for listing in listings:
        offered = shown(listing.offer.service)
        if (listing.application, listing.node) != (announcer.application, announcer.node):
            whose = f"{shown(listing.application)} node {listing.node}"
            raise InvalidMessage(
                f"{offered} is announced for {whose}, another process; announce only your own services"
            )
        if listing.offer.service in seen:
            raise InvalidMessage(f"{offered} is announced twice; announce each service once")
        seen.add(listing.offer.service)
        if not peers.may_offer(settings, announcer.proven, listing.offer.service):
            raise InvalidMessage(f"{name} may not offer {offered}: see offers and types in peers")
    return [
        replace(
            each,
            application=name,
            addresses=_allowed(each, refusals),
            machine=each.machine if announcer.host else machine,
        )
        for each in listings
    ]


def _refuse_unreadable(name: str) -> None:
    """Refuse a name that people would take for another one, or for a line of a log."""
    if not name or not name.isprintable() or name != name.strip():
        raise InvalidMessage(
            f"{shown(name)!r} is no name of a service; give one of printable characters, without spaces around it"
        )


def _allowed(listing: Listing, refusals: Mapping[str, str]) -> list[str]:
    reasons = {address: refusals[address] for address in listing.addresses}
    if all(reasons.values()):
        why = next(iter(reasons.values()), "no address is announced; give one that reaches the provider")
        raise InvalidMessage(f"{shown(listing.offer.service)}: {why}")
    return [address for address, reason in reasons.items() if not reason]


def announced(listing: Listing, own_host: str) -> Listing:
    """Return a listing with the addresses that make sense to a peer. `own_host` is this end of the connection to it;
    empty when both are on one machine.
    """
    return replace(listing, addresses=_seen_from(listing.addresses, own_host))


def learned(listing: Listing, host: str, check: Check = _nothing_more) -> Listing:
    """Return a listing with the addresses that can be called from here. `host` is that of the peer which has told it;
    empty when both are on one machine.
    """
    return replace(listing, addresses=_seen_from(listing.addresses, host, check))


def place_of(address: str, hosts: Collection[str] = ()) -> str:
    """Return an address as it is compared: without options, and with one name for this machine, whose names are
    `hosts`. Raises InvalidSetting for text that is none.
    """
    parts = _split(address)
    if parts.scheme == UNIX:
        return f"{UNIX}://{posixpath.normpath('/' + unquote(parts.path).lstrip('/'))}"
    host = (parts.hostname or "").removesuffix(".")
    if is_local(address) or host in hosts:
        host = _THIS_MACHINE
    elif (ip := _ip(host)) is not None:
        host = str(ip)
    port = parts.port if parts.port is not None else _DEFAULT_PORTS.get(parts.scheme)
    return f"{parts.scheme}://{host}:{port}{normal_escapes(parts.path).rstrip('/')}"


def is_local(address: str) -> bool:
    """Tell whether an address is another place on each machine. Raises InvalidSetting for text that is none."""
    return _is_local(_split(address))


def _seen_from(addresses: Sequence[str], host: str, check: Check = _nothing_more) -> list[str]:
    """Return the addresses that work where `host` is the machine that they are on; empty: this one."""
    seen: list[str] = []
    for address in addresses:
        try:
            parts = _split(address)
            check(address)
        except InvalidSetting:
            continue
        if _is_any(parts.hostname):
            shown_host = host or ("::1" if ":" in str(parts.hostname) else "127.0.0.1")
            seen.append(_at(parts, shown_host))
        elif not host or not _is_local(parts):
            seen.append(address)
    return seen


def _refusal_of_address(
    settings: Settings, announcer: Announcer, address: str, hosts: Collection[str], check: Check
) -> str:
    try:
        parts = _split(address)
        check(address)
    except InvalidSetting as error:
        return shown(str(error))
    text, owner = shown(address), peers.peer_at(settings, address)
    if owner not in ("", announcer.name):
        return f"{text} is an address of {owner}"
    known = settings.peers.get(announcer.proven) if announcer.proven is not None else None
    if (
        known is not None
        and any(not normal_scheme(each).startswith("rabbitmq:") for each in known.at)
        and parts.scheme != UNIX
    ):
        return "" if owner else f"{text} is below no address of {announcer.name}; add it to its at in peers"
    if not announcer.host:
        if _is_local(parts) or parts.hostname in hosts:
            return ""
        return f"{text} is not on this machine, from which it is announced; add it to at of the peer in peers"
    if _is_local(parts):
        return f"{text} is on the machine of each caller; announce an address that reaches the provider"
    if _is_same(parts.hostname, announcer.host) or parts.hostname in announcer.names:
        return ""
    return f"{text} is elsewhere than its provider, at {announcer.host}; add it to at of the peer in peers"


def _split(address: str) -> SplitResult:
    """Split an address that can be called. Raises InvalidSetting."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        raise InvalidSetting(f"{shown(address)} is no address; give one such as tcp://orders:2302") from None
    whole = (
        address.isprintable()
        and parts.scheme in _SCHEMES
        and "@" not in parts.netloc
        and not parts.fragment
        and "*" not in address
    )
    if parts.scheme == UNIX:
        whole = whole and not parts.netloc and not parts.query and parts.path.startswith("/")
    else:
        whole = whole and is_whole(parts) and is_host(parts.hostname or "") and port != 0
        whole = whole and (port is not None or parts.scheme in _DEFAULT_PORTS)
        whole = whole and (parts.scheme != "tcp" or parts.path in ("", "/"))
    if not whole:
        raise InvalidSetting(f"{shown(address)} is no address that can be called; give one such as tcp://orders:2302")
    return parts


def _at(parts: SplitResult, host: str) -> str:
    netloc = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=netloc if parts.port is None else f"{netloc}:{parts.port}").geturl()


def _is_local(parts: SplitResult) -> bool:
    host = (parts.hostname or "").removesuffix(".")
    if parts.scheme == UNIX or host == "localhost" or _is_any(host):
        return True
    ip = _ip(host)
    return ip is not None and ip.is_loopback


def _is_any(host: str | None) -> bool:
    ip = _ip(host)
    return ip is not None and ip.is_unspecified


def _is_same(one: str | None, other: str) -> bool:
    return one == other or (_ip(one) is not None and _ip(one) == _ip(other))


def _ip(host: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip
