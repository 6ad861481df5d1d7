"""Hub: the directory that connected peers are told of, and what they have announced.

    own process, own database, announced here ---> told to every connected peer that may call it
    learned from other hubs --------------------> told to nobody: there are no loops

An announcement is known here at once, and to the other nodes of the service through the database. It is forgotten with
the connection that has made it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import uuid4

from msgspec.structs import replace

from durable.calls.registry import Registry
from durable.calls.taken_names import Places, Taken, by_process, places_of
from durable.errors import InvalidMessage
from durable.redaction import shown
from durable.settings import Settings
from durable.telemetry import log
from durable.transports import peers
from durable.transports.announcements import Announcer, accepted
from durable.transports.frames import MAX_LISTINGS, Listing
from durable.transports.http import address as http
from durable.transports.tcp import address as tcp
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
    places: Places

    @property
    def index(self) -> tuple[str, int, Places, Sequence[Listing]]:
        return self.announcer.name, self.announcer.node, self.places, self.listings


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
        self._announced_count = self._announced_bytes = self._sources = 0
        self._taken = Taken()  # by those
        self._stored: Sequence[tuple[str, Listing]] = ()
        self._taken_elsewhere = Taken()  # at the other nodes, and by them
        self._id = uuid4().hex
        self._hosts = frozenset(name.lower() for name in (platform.node(), settings.call_host) if name)

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
        known = accepted(
            self._settings,
            self._service,
            announcer,
            listings,
            machine=self._machine,
            hosts=self._hosts,
            check=_check,
        )
        places = places_of((address for each in known for address in each.addresses), self._hosts)
        before = self._announced.get(connection)
        self._take_out(connection)
        try:
            self._refuse_too_much(known, size_bytes)
            self._refuse_taken(announcer, places, known)
        except InvalidMessage:
            if before is not None:
                self._take_in(connection, before)
            raise
        if before is None:
            self._sources += 1
        source = before.source if before is not None else f"{announcer.name} {self._id}.{self._sources}"
        self._take_in(connection, _Announced(source, announcer, known, size_bytes, places))
        self._registry.announce(source, known)
        if self._store is not None:
            self._store.put(source, known)
        if before is None:
            log.info("peer %s node %d announces %d services", shown(announcer.name), announcer.node, len(known))

    def end(self, connection: object) -> None:
        """Forget what this connection has announced."""
        ended = self._take_out(connection)
        if ended is None:
            return
        if self._store is not None:
            self._store.drop(ended.source)
        self._registry.forget(ended.source)

    def _take_in(self, connection: object, announced: _Announced) -> None:
        self._announced[connection] = announced
        self._announced_count += len(announced.listings)
        self._announced_bytes += announced.size_bytes
        self._taken.add(*announced.index)

    def _take_out(self, connection: object) -> _Announced | None:
        announced = self._announced.pop(connection, None)
        if announced is not None:
            self._announced_count -= len(announced.listings)
            self._announced_bytes -= announced.size_bytes
            self._taken.take_out(*announced.index)
        return announced

    def _refuse_too_much(self, listings: Sequence[Listing], size_bytes: int) -> None:
        if self._announced_count + len(listings) > MAX_LISTINGS:
            raise InvalidMessage(f"more than {MAX_LISTINGS:,} services are announced here; withdraw some")
        if self._announced_bytes + size_bytes > self._settings.buffer_bytes:
            raise InvalidMessage("the announcements here take more than buffer_bytes; raise it there, or offer less")

    def _refuse_taken(self, announcer: Announcer, places: Places, listings: Sequence[Listing]) -> None:
        """Refuse the name, the address and the singleton of another provider, unless it is the same one again."""
        if taken := places & places_of(self._own_addresses(), self._hosts):
            raise InvalidMessage(f"{shown(min(taken))} is an address of this service; announce another")
        name, node = announcer.name, announcer.node
        own = Taken()
        own.add(self._service, 0, frozenset(), self._registry.own())
        if announcer.proven is None and (
            self._taken.is_elsewhere(name, node, places) or self._elsewhere().is_apart(name, node, places)
        ):
            raise InvalidMessage(
                f"{shown(name)} node {node} is announced at other addresses already; "
                "end that process, or give the two services different names"
            )
        for known in (self._taken, self._elsewhere(), own):
            if (found := known.place_of_another(name, places)) is not None:
                place, owner = map(shown, found)
                raise InvalidMessage(f"{place} is announced by {owner} already; announce another address")
            if (found := known.singleton_of_another(name, listings)) is not None:
                single, owner = map(shown, found)
                raise InvalidMessage(f"{single} is offered by {owner}: a singleton has one owner")

    def _elsewhere(self) -> Taken:
        """Return what is taken by the rows of the database that are not written here."""
        stored = self._registry.stored
        if stored is not self._stored:
            self._stored, self._taken_elsewhere = stored, Taken()
            rows = [each for source, each in stored if not source.rpartition(" ")[2].startswith(self._id)]
            for (name, node, machine), listings in by_process(rows).items():
                addresses = (address for each in listings for address in each.addresses)
                places = places_of(addresses, self._hosts, is_here=machine == self._machine)
                self._taken_elsewhere.add(name, node, places, listings)
        return self._taken_elsewhere


def common_name(settings: Settings, service: str) -> str:
    """Return the name of this process for people."""
    return (settings.common_name or f"{platform.node()} {service}")[:_LONGEST_NAME]


def _check(address: str) -> None:
    """Raise InvalidSetting for an address that no caller could use."""
    scheme = address.partition(":")[0]
    if scheme in tcp.SCHEMES:
        tcp.parse_destination(address)
    elif scheme in http.SCHEMES:
        http.parse_destination(address)
