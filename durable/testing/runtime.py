"""Runtime of a bus in memory, in place of the one that it makes for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from durable.bus import Bus
from durable.calls.links import Links
from durable.calls.places import LocalCaller
from durable.clock import SystemClock
from durable.envelope import Envelope
from durable.errors import ConnectionFailed
from durable.outcomes import Outcome
from durable.runtime import Runtime
from durable.storage.database import Database
from durable.testing.database import MemoryDatabase
from durable.testing.dispatching import MemoryDispatcher
from durable.testing.mailbox import Mailbox
from durable.testing.schedules import MemorySchedules
from durable.testing.sessions import MemorySessions, SessionFactory
from durable.transports.base import Caller, Receiver


class MemoryReceiver:
    """`Receiver` of `bus.asgi()`: arrivals wait in the mailbox, as if a peer in memory had sent them."""

    def __init__(self, room: int, mailbox: Mailbox, receive: Callable[[str, Envelope], Outcome]) -> None:
        self._room = room
        self._mailbox = mailbox
        self._receive = receive

    async def receive(self, endpoint: str, batch: Sequence[Envelope]) -> list[Outcome]:
        return [self._receive(endpoint, envelope) for envelope in batch]

    async def reject(self, endpoint: str, raw: bytes, reason: str, headers: Mapping[str, str] | None = None) -> None:
        self._mailbox.history.reject(endpoint, raw, reason, headers or {})

    async def ready(self) -> bool:
        return True

    def credit(self) -> int:
        return self._room


class MemoryLinks(Links):
    """Connections to the buses in memory that are connected, by their addresses; `peers` may change."""

    def __init__(self, links: Links, peers: Mapping[str, Bus]) -> None:
        super().__init__(links.transport_of)
        self._peers = peers

    async def to(self, at: str) -> Caller:
        if at not in self._peers:
            raise ConnectionFailed(f"{at}: no bus in memory is connected there: see InMemoryBus.connect()")
        return LocalCaller(self._peers[at].application.offers)


class MemoryRuntime(Runtime):
    """Runtime with sessions and a clock, and no node: `async with bus`, such as in a lifespan, starts no process.

    `dispatcher` is told of commits; `receive` stores what arrives at an endpoint.
    """

    def __init__(
        self,
        bus: Bus,
        mailbox: Mailbox,
        schedules: MemorySchedules,
        dispatcher: MemoryDispatcher,
        *,
        session_factory: SessionFactory | None,
        sync_session_factory: SessionFactory | None,
        receive: Callable[[str, Envelope], Outcome],
    ) -> None:
        scope = bus.runtime.sessions.scope
        super().__init__(bus.application, bus.settings, scope, clock=mailbox.clock)
        self.dispatcher = dispatcher
        self.sessions = MemorySessions(
            bus.settings, self.envelope_factory, dispatcher, scope, session_factory, sync_session_factory
        )
        self._in_memory = MemoryDatabase(bus.settings, mailbox, schedules)
        self._receiver = MemoryReceiver(bus.settings.buffer_size, mailbox, receive)
        self._peers: dict[str, Bus] = {}
        self._unlearn: dict[str, Callable[[], None]] = {}
        self._end_watching: Callable[[], None] | None = None
        self.calls.links = MemoryLinks(self.calls.links, self._peers)
        self.calls.is_open = True

    @property
    def receiver(self) -> Receiver:
        return self._receiver

    @property
    def database(self) -> Database:
        return self._in_memory

    async def check(self) -> None:
        """Check the bus as before a start, but without the database."""
        self.application.check(self.envelope_factory)
        self.application.check_retention(self.settings.dedupe_window)

    def claim(self) -> None:
        """Run in any event loop: nothing here belongs to one."""

    async def start(self) -> None:
        await self.check()
        self.application.warn()
        self.offer_in_memory()

    def offer_in_memory(self) -> None:
        """Hold every singleton, and tell of changes: there is one process."""
        offers = self.application.offers
        offers.singletons.everything_is_held = True
        if self._end_watching is None:
            offers.use(self.clock)
            self._end_watching = offers.watch(self.calls.registry.tell)

    def offer_no_longer(self) -> None:
        """Leave what is offered as it was."""
        offers = self.application.offers
        offers.singletons.everything_is_held = False
        if self._end_watching is not None:
            self._end_watching()
            self._end_watching = None
            offers.use(SystemClock())
        for uri in list(self._peers):
            self.disconnect(uri)

    def connect(self, uri: str, other: Bus) -> None:
        """Call what the other bus offers at this address."""
        self.disconnect(uri)
        self._peers[uri] = other
        self._unlearn[uri] = other.application.offers.watch(lambda: self._learn(uri, other))
        self._learn(uri, other)

    def disconnect(self, uri: str) -> None:
        if self._peers.pop(uri, None) is not None:
            self._unlearn.pop(uri)()
            self.calls.registry.forget(uri)

    def _learn(self, uri: str, other: Bus) -> None:
        listings = [replace(listing, addresses=[uri]) for listing in other.runtime.calls.listings()]
        self.calls.registry.learn(uri, listings)

    async def start_storing(self) -> None:
        await self.check()

    async def stop(self) -> None:
        pass
