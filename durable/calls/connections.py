"""Connections to the directories of other services, each by one address: opened again for as long as it is declared.

connect() --> connecting --> connected, and its directory known --lost--> connecting again, after a pause
                  '--lost for longer than the lease: forgotten--'
connected again --> what was known before is kept for a lease: a hub that was restarted learns it anew
disconnect() --> forgotten at once
the bus stops --> left, and known to the end of its calls
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, Protocol

from durable.calls.grace import Grace
from durable.calls.hub import common_name
from durable.calls.registry import Registry
from durable.errors import InvalidSetting, TransportError
from durable.settings import Settings
from durable.tasks.cancelling import raise_if_cancelled
from durable.tasks.crew import cancel_once
from durable.telemetry import log
from durable.transports.base import Spoke, Transport
from durable.transports.frames import Listing

MOST: Final = 100
"""Addresses that a process connects to, at most."""


class _Connector(Protocol):
    """Connections to one address, one at a time."""

    async def run(self, spoke: Spoke) -> NoReturn: ...


class Connections:
    """Connections of one process. `own` returns what it offers, and `transport_of` the transport of an address."""

    def __init__(
        self,
        registry: Registry,
        transport_of: Callable[[str], Transport],
        settings: Settings,
        service: str,
        *,
        own: Callable[[], Sequence[Listing]],
    ) -> None:
        self._registry = registry
        self._transport_of = transport_of
        self._settings = settings
        self._name = common_name(settings, service)
        self._own = own
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_open = True

    def check(self, address: str) -> None:
        """Raise InvalidSetting for an address that cannot be connected to."""
        self._make(address)

    def open(self, address: str) -> None:
        """Connect, and stay connected. Call it in the event loop."""
        if self._is_open and address not in self._tasks:
            spoke = _Spoke(self._registry, address, self._name, self._settings, self._own)
            keeping = _keep(self._make(address), spoke, self._settings)
            self._registry.expect(address)
            self._tasks[address] = asyncio.create_task(keeping, name=f"directory of {address}")

    async def close(self, *addresses: str, within: float) -> None:
        """Disconnect from these, and forget what they have told."""
        tasks = [task for address in addresses if (task := self._tasks.pop(address, None)) is not None]
        try:
            await cancel_once(tasks, within=within)  # they say goodbye
        finally:
            for address in addresses:
                self._registry.forget(address)

    async def close_all(self, within: float) -> None:
        """Disconnect from all, for good. What they have told stays known: calls of this process may still run."""
        self._is_open = False
        self._registry.keep()
        await self.close(*self._tasks, within=within)

    def cancel(self, address: str) -> None:
        """Disconnect without waiting for the connection to be closed."""
        if (task := self._tasks.pop(address, None)) is not None:
            task.cancel()
        self._registry.forget(address)

    def _make(self, address: str) -> _Connector:
        make = getattr(self._transport_of(address), "spoke", None)
        if make is None:
            raise InvalidSetting(f"{address}: has no directory to connect to; give a tcp:// or unix:// address")
        connector: _Connector = make(address)
        return connector


class _Spoke:
    """A `durable.transports.base.Spoke`: what is told and learned at one address."""

    def __init__(
        self,
        registry: Registry,
        address: str,
        name: str,
        settings: Settings,
        own: Callable[[], Sequence[Listing]],
    ) -> None:
        self.name = name
        self.address = address
        self.lease = settings.call_lease.total_seconds()
        self.listings = own
        self.watch = registry.watch
        self.has_learned = False
        self._registry = registry
        self._forgetting: asyncio.TimerHandle | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._grace: Grace[Listing] = Grace(self.lease, lambda listing: listing)
        self._told: Sequence[Listing] = ()

    def learn(self, listings: Sequence[Listing]) -> None:
        loop = asyncio.get_running_loop()
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
            self._grace.begin(self._registry.learned(self.address), loop.time())
            if self._settling is not None:
                self._settling.cancel()
            self._settling = loop.call_later(self.lease, self._settle)
        self.has_learned = True
        self._told = listings
        self._registry.learn(self.address, self._grace.merged(listings, loop.time()))

    def lose(self) -> None:
        """Forget what was learned, unless it is told again within the lease. Nothing is expected in a moment."""
        self._registry.expect_no_more(self.address)
        if self._forgetting is None:
            self._forgetting = asyncio.get_running_loop().call_later(self.lease, self._forget)

    def close(self) -> None:
        for timer in (self._forgetting, self._settling):
            if timer is not None:
                timer.cancel()

    def _settle(self) -> None:
        """Forget what was kept and is not told again, unless the connection is lost meanwhile."""
        if self._forgetting is None:
            self._registry.learn(self.address, self._grace.merged(self._told, asyncio.get_running_loop().time()))

    def _forget(self) -> None:
        log.warning("directory of %s is forgotten: the connection is lost for longer than its lease", self.address)
        self._registry.forget(self.address)


async def _keep(connector: _Connector, spoke: _Spoke, settings: Settings) -> None:
    """Connect again and again, until the task is cancelled."""
    first = settings.reconnect_pause.total_seconds()
    longest = settings.reconnect_pause_longest.total_seconds()
    pause, said = first, ""
    try:
        while True:
            spoke.has_learned = False
            try:
                await connector.run(spoke)
            except BaseException as error:  # the loop's top: it ends when it is cancelled, and never else
                raise_if_cancelled(error)
                if not isinstance(error, TransportError):
                    log.exception("internal error in the connection to %s; will retry", spoke.address)
                elif str(error) != said:
                    log.warning("directory of %s is lost: %s", spoke.address, error)
                said = str(error)
            spoke.lose()
            if spoke.has_learned:
                pause, said = first, ""
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(longest, pause * 2)
    finally:
        spoke.close()
