"""Hub: the directory that connected peers are told of, and what they have announced.

    own process, own database, announced here ---> told to every connected peer that may call it
    learned from other hubs --------------------> told to nobody: there are no loops

An announcement is known here at once, and to the other nodes of the service through the database. It is forgotten with
the connection that has made it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import uuid4

from msgspec.structs import replace

from durable.calls.registry import Registry
from durable.errors import InvalidMessage, InvalidSetting
from durable.redaction import shown
from durable.settings import Settings
from durable.telemetry import log
from durable.transports import peers
from durable.transports.announcements import Announcer, accepted, place_of
from durable.transports.frames import MAX_LISTINGS, Listing
from durable.transports.watchdog import Bounds

_LONGEST_NAME: Final = 200


class Store(Protocol):
    """Announcements in the database, behind what the hub knows. Nothing here waits."""

    def put(self, source: str, listings: Sequence[Listing]) -> None: ...

    def drop(self, source: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Announced:
    source: str
    announcer: Announcer
    listings: Sequence[Listing]
    size_bytes: int


class Hub:
    """A `durable.transports.base.Directory`. `own_addresses` are those at which this process listens."""

    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        service: str,
        *,
        machine: str = "",
        own_addresses: Callable[[], Sequence[str]] = tuple,
        store: Store | None = None,
    ) -> None:
        self.name = common_name(settings, service)
        self._registry = registry
        self._settings = settings
        self._service = service
        self._machine = machine
        self._own_addresses = own_addresses
        self._store = store
        self._announced: dict[object, _Announced] = {}

    @property
    def bounds(self) -> Bounds:
        settings = self._settings
        return Bounds(settings.call_lease_shortest.total_seconds(), settings.call_lease_longest.total_seconds())

    def listings(self, peer: str | None) -> Sequence[Listing]:
        """Return the providers that this peer may call, each with the methods that it may call."""
        told = ((each, peers.seen(self._settings, peer, each.offer)) for each in self._registry.local())
        return [replace(each, offer=offer) for each, offer in told if offer is not None]

    def watch(self, told: Callable[[], None]) -> Callable[[], None]:
        return self._registry.watch(told)

    def announce(self, connection: object, announcer: Announcer, listings: Sequence[Listing], size_bytes: int) -> None:
        """Know these as all that this connection offers. Raises InvalidMessage, and changes nothing then."""
        hosts = {name.lower() for name in (platform.node(), self._settings.call_host) if name}
        known = accepted(self._settings, self._service, announcer, listings, machine=self._machine, hosts=hosts)
        others = [each for key, each in self._announced.items() if key is not connection]
        self._refuse_too_much(others, known, size_bytes)
        self._refuse_taken(others, announcer, known)
        before = self._announced.get(connection)
        source = before.source if before is not None else f"{announcer.name} {uuid4().hex}"
        self._announced[connection] = _Announced(source, announcer, known, size_bytes)
        self._registry.announce(source, known)
        if self._store is not None:
            self._store.put(source, known)
        if before is None:
            log.info("peer %s node %d announces %d services", shown(announcer.name), announcer.node, len(known))

    def end(self, connection: object) -> None:
        """Forget what this connection has announced."""
        ended = self._announced.pop(connection, None)
        if ended is None:
            return
        if self._store is not None:
            self._store.drop(ended.source)
        self._registry.forget(ended.source)

    def _refuse_too_much(self, others: Sequence[_Announced], listings: Sequence[Listing], size_bytes: int) -> None:
        if sum(len(each.listings) for each in others) + len(listings) > MAX_LISTINGS:
            raise InvalidMessage(f"more than {MAX_LISTINGS:,} services are announced here; withdraw some")
        if sum(each.size_bytes for each in others) + size_bytes > self._settings.buffer_bytes:
            raise InvalidMessage("the announcements here take more than buffer_bytes; raise it there, or offer less")

    def _refuse_taken(self, others: Sequence[_Announced], announcer: Announcer, listings: Sequence[Listing]) -> None:
        """Refuse the name, the address and the singleton of another provider, unless it is the same one again."""
        addresses = {place_of(address) for listing in listings for address in listing.addresses}
        if taken := addresses & _places(self._own_addresses()):
            raise InvalidMessage(f"{shown(min(taken))} is an address of this service; announce another")
        for other in others:
            places = _places(address for listing in other.listings for address in listing.addresses)
            if other.announcer.name != announcer.name:
                if taken := addresses & places:
                    owner = shown(other.announcer.name)
                    raise InvalidMessage(
                        f"{shown(min(taken))} is announced by {owner} already; announce another address"
                    )
            elif other.announcer.node == announcer.node and announcer.proven is None and addresses != places:
                raise InvalidMessage(
                    f"{shown(announcer.name)} node {announcer.node} is announced at other addresses already; "
                    "end that process, or give the two services different names"
                )
        single = {each.offer.service for each in listings if each.is_singleton}
        for known in self._registry.local():
            named = known.offer.service in single or (
                known.is_singleton and any(known.offer.service == each.offer.service for each in listings)
            )
            if named and known.application != announcer.name:
                owner = shown(known.application)
                raise InvalidMessage(f"{shown(known.offer.service)} is offered by {owner}: a singleton has one owner")


def common_name(settings: Settings, service: str) -> str:
    """Return the name of this process for people."""
    return (settings.common_name or f"{platform.node()} {service}")[:_LONGEST_NAME]


def _places(addresses: Iterable[str]) -> set[str]:
    places: set[str] = set()
    for address in addresses:
        with suppress(InvalidSetting):  # such as rabbitmq://
            places.add(place_of(address))
    return places
