"""The calls of a process: the services that it offers, the providers that it knows, and its connections to them.

own offers  --registering--> rows of the database <--registering--  the other nodes of the service
Hub         <--announce()--  peers that connect here, for the other nodes by --announcing--> rows
Connections --connect()-->   the directories of other services
Registry    all that is known of these;   Providers chooses from it;   Links calls
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from durable.application.application import Application
from durable.calls.choice import Origin
from durable.calls.connections import Connections
from durable.calls.hub import Hub
from durable.calls.links import Links
from durable.calls.places import reachable, this_machine
from durable.calls.providers import CALLED, Provider, Providers
from durable.calls.registry import Registry
from durable.envelope import ANY_NODE, NodeId
from durable.errors import StorageUnavailable
from durable.node import Node
from durable.recovery.announcing import Announcing
from durable.recovery.registering import Registering
from durable.settings import Settings
from durable.storage.database import Database
from durable.tasks.crew import cancel_once
from durable.telemetry import log
from durable.transports.base import Transport
from durable.transports.frames import MAX_ADDRESSES, Listing


class Calls:
    """Parts of a process that call services, and let others find those that it offers."""

    def __init__(
        self,
        application: Application,
        settings: Settings,
        *,
        database: Callable[[], Database],
        node: Callable[[], Node | None],
        transport_of: Callable[[str], Transport],
    ) -> None:
        service = application.service
        self.is_open = False
        self.links = Links(transport_of, idle=settings.address_idle)
        self.registry = Registry(self.listings)
        self.providers = Providers(
            self.registry, self._origin, links=lambda: self.open_links, provider=lambda: application.offers
        )
        self.registering = Registering(database, self.registry, self.listings, settings)
        self.announcing = Announcing(database, settings)
        self.hub = Hub(
            self.registry,
            settings,
            service,
            machine=this_machine(),
            own_addresses=self._addresses,
            store=self.announcing,
        )
        self.connections = Connections(self.registry, transport_of, settings, service, own=self.listings)
        self.tasks: list[asyncio.Task[None]] = []
        self._application = application
        self._settings = settings
        self._node = node
        self._end_watching: Callable[[], None] | None = None

    @property
    def open_links(self) -> Links | None:
        """Return the connections for calls; None while the bus does not run."""
        return self.links if self.is_open and self.links.is_open else None

    @property
    def node_id(self) -> NodeId:
        node = self._node()
        return node.node_id if node is not None else ANY_NODE

    def listings(self) -> Sequence[Listing]:
        """Return what this process offers, as others see it."""
        offers, host = self._application.offers, self._settings.call_host
        addresses = [reachable(each, host) for each in self._addresses() if each.startswith(CALLED)]
        return [
            Listing(
                each.contract.offer,
                self._application.service,
                self.node_id,
                addresses[:MAX_ADDRESSES],
                each.since,
                offers.load,
                each.is_singleton,
                offers.singletons.known_epoch(each.contract.name) if each.is_singleton else 0,
                this_machine(),
            )
            for each in offers.offered
        ]

    async def look_up(self, service: str) -> list[Provider]:
        """Return the providers of a service: as the database knows them, or as they were known before its outage."""
        self.registry.use()
        if self.registry.ask is not None:
            try:
                await self.registering.read()
            except StorageUnavailable as error:
                log.warning("providers of %s are those that were known before: %s", service, error)
        return self.providers.of(service)

    def problems(self) -> Sequence[str]:
        """List the services that this application has called in vain, and that still have no known provider."""
        known = {each.offer.service for each in self.registry.listings()}
        return [
            f"service {name}: its last call found no provider: start one, or see durable-agent services"
            for name in self._application.offers.telemetry.unprovided()
            if name not in known
        ]

    def _addresses(self) -> Sequence[str]:
        """Return the addresses at which this process listens."""
        node = self._node()
        return [each.address for each in node.listeners] if node is not None else []

    def _origin(self) -> Origin:
        offered = frozenset(each.contract.name for each in self._application.offers.offered)
        return Origin(self._application.service, self.node_id, this_machine(), offered)

    # ------------------------------------------------------------------ while the bus runs

    def open(self) -> None:
        """Let changes of what is offered here, and held, reach the registry; the latter come from another thread."""
        offers, loop = self._application.offers, asyncio.get_running_loop()

        def changed() -> None:
            self.registry.tell()
            self.registering.woken.set()

        def changed_elsewhere() -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(changed)

        self.is_open = True
        for address in self._application.connected:
            self.registry.expect(address)
        self.registry.ask = self.registering.woken.set
        offers.singletons.on_change = changed_elsewhere
        self._end_watching = offers.watch(changed)
        self.tasks.append(asyncio.create_task(self.announcing.run(), name="announcements"))

    def read_without_node(self) -> None:
        """Keep the registry up to date: a node does it otherwise."""
        self.tasks.append(asyncio.create_task(self.registering.run(asyncio.Event()), name="registry"))

    def connect(self) -> None:
        """Connect to the directories of other services."""
        for address in self._application.connected:
            self.connections.open(address)

    async def drain(self, deadline: float) -> None:
        """Finish the calls that run here, until this time of the event loop. They know what their node has known."""
        self.registry.ask = None
        await self._application.offers.drain(deadline - asyncio.get_running_loop().time())

    async def end_tasks(self, within: float) -> None:
        """Remove what was announced here."""
        await cancel_once(self.tasks, within=within)

    def close(self) -> None:
        self.is_open = False
        if self._end_watching is not None:
            self._end_watching()
            self._end_watching = self.registry.ask = None
