"""Runtime of a bus in memory, in place of the one that it makes for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from durable.bus import Bus
from durable.envelope import ANY_NODE, Envelope, NodeId
from durable.outbox.transactions import Ending
from durable.outcomes import Outcome
from durable.runtime import Runtime
from durable.storage.database import Database
from durable.storage.outbox import Sent
from durable.testing.database import MemoryDatabase
from durable.testing.mailbox import Mailbox
from durable.testing.schedules import MemorySchedules
from durable.testing.sessions import MemorySessions, SessionFactory
from durable.transports.base import Receiver


class MemoryReceiver:
    """`Receiver` of `bus.asgi()`: arrivals wait in the mailbox, as if a peer in memory had sent them."""

    def __init__(self, room: int, mailbox: Mailbox, receive: Callable[[str, Envelope], Outcome]) -> None:
        self._room = room
        self._mailbox = mailbox
        self._receive = receive

    async def receive(self, endpoint: str, batch: Sequence[Envelope]) -> list[Outcome]:
        return [self._receive(endpoint, envelope) for envelope in batch]

    async def reject(self, endpoint: str, raw: bytes, reason: str, headers: Mapping[str, str] | None = None) -> None:
        self._mailbox.reject(endpoint, raw, reason, headers or {})

    async def ready(self) -> bool:
        return True

    def credit(self) -> int:
        return self._room


class MemoryRuntime(Runtime):
    """Runtime with sessions and a clock, and no node: `async with bus`, such as in a lifespan, starts no process.

    `when_committed` is given what each commit has sent; `receive` stores what arrives at an endpoint.
    """

    def __init__(
        self,
        bus: Bus,
        mailbox: Mailbox,
        schedules: MemorySchedules,
        *,
        session_factory: SessionFactory | None,
        sync_session_factory: SessionFactory | None,
        when_committed: Callable[[Sequence[Envelope]], None],
        receive: Callable[[str, Envelope], Outcome],
    ) -> None:
        scope = bus.runtime.sessions.scope
        super().__init__(bus.application, bus.settings, scope, clock=mailbox.clock)
        self.sessions = MemorySessions(
            bus.settings, self.envelope_factory, self, scope, session_factory, sync_session_factory
        )
        self._in_memory = MemoryDatabase(bus.settings, mailbox, schedules)
        self._when_committed = when_committed
        self._endings: list[tuple[Ending, Sequence[Sent]]] = []
        self._receiver = MemoryReceiver(bus.settings.buffer_size, mailbox, receive)

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

    async def start(self) -> None:
        await self.check()
        self.application.warn()

    async def start_storing(self) -> None:
        await self.check()

    async def stop(self) -> None:
        pass

    def reserve(self, envelopes: Sequence[Envelope]) -> list[NodeId]:
        return [ANY_NODE] * len(envelopes)

    def committed(self, sent: Sequence[Sent]) -> None:
        self._when_committed([envelope for envelope, _, _, _ in sent])

    def committing(self, ending: Ending, sent: Sequence[Sent]) -> None:
        self._endings.append((ending, sent))

    def settle_commits(self) -> None:
        """Take over commits of connections whose sessions could not tell of them."""
        over = [each for each in self._endings if each[0].is_over]
        self._endings = [each for each in self._endings if not each[0].is_over]
        for ending, sent in over:
            if not ending.has_failed:
                self.committed(sent)

    def abandoned(self, sent: Sequence[Sent]) -> None:
        pass
