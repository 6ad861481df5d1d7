"""Announcements of the peers that are connected to this process, in the database, for the other nodes of the service.

    put, drop      --> write or remove the rows of the source, then notify the nodes
    now and then   --> lengthen the leases of all, and tell how busy they are

The rows of a process that was killed go when their leases are over; those of a peer that has gone go at once, or with
their lease while the database is away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from durable.calls import stored_listings
from durable.errors import InvalidMessage, StorageUnavailable
from durable.recovery import offering
from durable.recovery.troubles import Troubles
from durable.settings import Settings
from durable.storage import registry as storage
from durable.storage.database import Database
from durable.storage.rows import storable
from durable.tasks.cancelling import raise_if_cancelled
from durable.tasks.waiting import is_set_within
from durable.telemetry import log
from durable.transports.frames import Listing, without_loads

_RENEWALS: Final = 4  # within a lease
_GATHERING: Final = 0.1  # seconds in which changes gather


class Announcing:
    """A `durable.calls.hub.Store`."""

    def __init__(self, database: Callable[[], Database], settings: Settings) -> None:
        self._database = database
        self._lease = settings.heartbeat_stale
        self._pause = self._lease.total_seconds() / _RENEWALS
        self._wanted: dict[str, Sequence[Listing]] = {}
        self._written: dict[str, Sequence[Listing]] = {}
        """What the rows say, but for how busy they are."""
        self._changed: dict[str, None] = {}
        self._is_told = True
        """Do the other nodes know of all that was written?"""
        self._renewed_at = 0.0
        self._rows: dict[str, int] = {}
        self._woken = asyncio.Event()
        self._troubles = Troubles(often=["announcements"])

    def put(self, source: str, listings: Sequence[Listing]) -> None:
        source = storable(source)
        self._wanted[source] = listings
        if without_loads(listings) != self._written.get(source):
            self._change(source)

    def drop(self, source: str) -> None:
        source = storable(source)
        self._wanted.pop(source, None)
        self._change(source)

    async def run(self) -> None:
        """Work until cancelled; then remove what is left, once."""
        try:
            while True:
                self._woken.clear()
                await self._surviving()
                await asyncio.sleep(_GATHERING)
                await is_set_within(self._woken, self._pause if self._has_more_to_do else None)
        finally:
            self._changed = dict.fromkeys([*self._changed, *self._wanted])
            self._wanted = {}
            await self._surviving()

    @property
    def _has_more_to_do(self) -> bool:
        return bool(self._wanted or self._changed or not self._is_told)

    def _change(self, source: str) -> None:
        self._changed[source] = None
        self._woken.set()

    async def _surviving(self) -> None:
        try:
            await self._look()
        except BaseException as error:
            raise_if_cancelled(error)
            self._troubles.meet("announcements", error)
        else:
            self._troubles.overcome("announcements")

    async def _look(self) -> None:
        """Write the changes from before this look: however often a peer announces, the look comes to its end."""
        failures = await self._for_each(list(self._changed), self._write)
        if not self._is_told:
            await self._database().transaction(storage.tell)
            self._is_told = True
        if time.monotonic() - self._renewed_at >= self._pause:
            self._renewed_at = time.monotonic()
            failures += await self._for_each(list(self._wanted), self._renew)
        if failures:
            raise failures[0]

    async def _for_each(self, sources: Sequence[str], story: Callable[[str], Awaitable[None]]) -> list[Exception]:
        """Do this for each source, and return the errors. An outage is raised at once: the others would meet it."""
        failures = list[Exception]()
        for source in sources:
            try:
                await story(source)
            except StorageUnavailable:
                raise
            except Exception as error:
                # Not raise_if_cancelled: the last look runs in a cancelled task, and has to remove the other sources.
                # A cancellation in a look comes as CancelledError, as transaction() keeps it.
                failures.append(error)
        return failures

    async def _renew(self, source: str) -> None:
        if (listings := self._wanted.get(source)) is None:
            return
        loads = stored_listings.loads_of(listings)
        renewed = await self._database().transaction(storage.renew, source, loads, lease=self._lease)
        if renewed != self._rows.get(source) and source in self._wanted:
            self._change(source)  # they were swept, because this process stood still

    async def _write(self, source: str) -> None:
        listings = self._wanted.get(source)
        self._written.pop(source, None)
        if listings:
            try:
                self._rows[source] = await offering.write(self._database(), source, listings, lease=self._lease)
            except InvalidMessage as error:
                self._rows[source] = 0
                log.warning("announcement is known to this process alone, as the database refuses it: %s", error)
            self._written[source] = without_loads(listings)
        else:
            self._rows.pop(source, None)
            await self._database().transaction(storage.remove, source)
        self._is_told = False
        if self._wanted.get(source) is listings:
            self._changed.pop(source, None)
