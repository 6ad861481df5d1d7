"""The registry of a process: writes what its node offers, and reads what the others do.

    an offer or a singleton changes  --> write, then notify the nodes       at most ten times a second
    a notification, or heartbeat     --> read                               as often
    heartbeat                        --> lengthen the leases, and tell how busy the services are: one statement

While the database is away, what is known stays known; when it is back, for one lease more, in which the nodes can
lengthen theirs. A process that offers nothing, and never calls a provider by
choice, asks the database for nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from functools import partial
from typing import Final

from sqlalchemy.exc import DBAPIError

from durable.calls import stored_listings
from durable.calls.grace import Grace
from durable.calls.registry import Registry
from durable.envelope import ANY_NODE, NodeId
from durable.errors import InvalidMessage, StorageUnavailable, said
from durable.recovery import offering
from durable.recovery.troubles import Troubles
from durable.settings import Settings
from durable.storage import registry as storage
from durable.storage.database import Database
from durable.tasks.cancelling import raise_if_cancelled
from durable.tasks.waiting import is_set_within
from durable.telemetry import log
from durable.transports.frames import Listing, without_loads

_GATHERING: Final = 0.1  # seconds in which changes gather
LONGEST_LEAVING: Final = 2.0  # seconds; after that the rows go with the node
_SWEEP_EVERY: Final = 10  # heartbeats
_WRITING: Final = "own offers"
_READING: Final = "the registry"
_SWEEPING: Final = "elapsed offers"
_MOST_SWEPT: Final = 1_000


class Registering:
    """Keeps the registry and the database alike. `own` returns the listings of this process."""

    def __init__(
        self,
        database: Callable[[], Database],
        registry: Registry,
        own: Callable[[], Sequence[Listing]],
        settings: Settings,
    ) -> None:
        self.woken = asyncio.Event()
        self._database = database
        self._registry = registry
        self._own = own
        self._interval = settings.heartbeat_interval.total_seconds()
        self._lease = settings.heartbeat_stale
        self._node = ANY_NODE
        self._written: Sequence[Listing] | None = ()
        """What the rows say, but for how busy the services are. None: unknown, as a write has begun whose commit is not
        known of."""
        self._rows = 0
        self._methods: stored_listings.Methods = {}
        self._unreadable: Set[bytes] = frozenset()
        self._renewed_at = 0.0
        self._rounds = 0
        self._troubles = Troubles(often=[_WRITING, _READING])
        self._read_at = time.monotonic()
        self._was_away = False
        self._grace: Grace[tuple[str, Listing]] = Grace(
            self._lease.total_seconds(), lambda row: row[1], outlasts_telling=True
        )

    async def join(self, node: NodeId) -> None:
        """Write what this node offers; when that fails, run() does it later.

        A node follows another after an outage, in which others may have lost their nodes as well.
        """
        self._was_away |= self._node != ANY_NODE
        self._node, self._written = node, ()
        self._registry.tell()  # the process has another node id
        await self._look()

    async def run(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set, and `woken` after it: what is on its way is written before this returns.

        Without join() before, or after leave(), nothing is written.
        """
        while not stopping.is_set():
            self.woken.clear()
            await self._look()
            await asyncio.sleep(_GATHERING)
            await is_set_within(self.woken, self._interval)

    async def leave(self) -> None:
        """Remove what the node offers, before it stops to answer. From then on run() reads, and writes nothing."""
        node, self._node = self._node, ANY_NODE
        if not self._may_be_written:
            return
        try:
            async with asyncio.timeout(LONGEST_LEAVING):
                await self._database().transaction(storage.remove, storage.source_of(node))
                await self._database().transaction(storage.tell)
        except (StorageUnavailable, TimeoutError, DBAPIError, InvalidMessage) as error:
            raise_if_cancelled(error)
            log.warning("offers of node %d stay until they are swept: %s", node, said(error))
        self._written = ()

    async def read(self) -> None:
        """Read the registry of the database. Raises StorageUnavailable."""
        offers, found = await self._database().transaction(storage.read, self._methods.keys())
        read = stored_listings.methods_of(found)
        if unreadable := found.keys() - read.keys() - self._unreadable:
            services = sorted({each.offer.service for each in offers if each.offer.digest in unreadable})
            log.warning("offers in the registry are unreadable here, and left out: %s", ", ".join(services))
        self._unreadable = found.keys() - read.keys()
        known = {**self._methods, **read}
        self._methods = {each.offer.digest: known[each.offer.digest] for each in offers if each.offer.digest in known}
        now = time.monotonic()
        if self._was_away or now - self._read_at > self._lease.total_seconds() / 2:
            self._grace.begin(self._registry.stored, now)
        self._was_away, self._read_at = False, now
        self._registry.store(self._grace.merged(stored_listings.listings_of(offers, self._methods), now))

    @property
    def _may_be_written(self) -> bool:
        return self._written is None or bool(self._written)

    async def _look(self) -> None:
        """Write and read, whatever becomes of the other."""
        own = self._own() if self._node != ANY_NODE else ()
        if own or self._may_be_written:
            await self._surviving(_WRITING, partial(self._write, own))
        if own or self._registry.is_used:
            await self._surviving(_READING, self.read)
            await self._surviving(_SWEEPING, self._sweep)
        self._registry.looks += 1

    async def _write(self, own: Sequence[Listing]) -> None:
        source, now = storage.source_of(self._node), time.monotonic()
        still = without_loads(own)
        if still == self._written:
            if now - self._renewed_at < self._interval:
                return
            loads = stored_listings.loads_of(own)
            renewed = await self._database().transaction(storage.renew, source, loads, lease=self._lease)
            self._renewed_at = now
            if renewed == self._rows:
                return
        self._written = None
        self._rows = await offering.write(self._database(), source, own, lease=self._lease, node=self._node)
        self._written, self._renewed_at = still, now
        await self._database().transaction(storage.tell)

    async def _sweep(self) -> None:
        self._rounds += 1
        if self._rounds % _SWEEP_EVERY:
            return
        if swept := await self._database().transaction(storage.sweep, _MOST_SWEPT):
            log.info("offers are swept, because nobody has lengthened their leases: %d", len(swept))
            await self._database().transaction(storage.tell)

    async def _surviving(self, name: str, story: Callable[[], Awaitable[None]]) -> None:
        try:
            await story()
        except BaseException as error:
            raise_if_cancelled(error)
            self._was_away = True
            self._troubles.meet(name, error)
        else:
            self._troubles.overcome(name)
