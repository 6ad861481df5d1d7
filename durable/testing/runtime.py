"""What a bus works on while it is in memory, in place of the runtime that it makes for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from durable.bus import Bus
from durable.clock import Clock
from durable.envelope import ANY_NODE, Envelope, NodeId
from durable.errors import WiringError
from durable.runtime import Runtime
from durable.storage.database import Database
from durable.storage.outbox import Sent
from durable.testing.sessions import MemorySessions, SessionFactory


class MemoryRuntime(Runtime):
    """Has sessions and a clock, and no node: `async with bus`, in the application's lifespan perhaps, starts nothing.

    `when_committed` is given what each commit has sent.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        *,
        session_factory: SessionFactory | None,
        sync_session_factory: SessionFactory | None,
        when_committed: Callable[[Sequence[Envelope]], None],
    ) -> None:
        scope = bus.runtime.sessions.scope
        super().__init__(bus.application, bus.settings, scope, clock=clock)
        self.sessions = MemorySessions(bus.settings, self.composer, self, scope, session_factory, sync_session_factory)
        self._when_committed = when_committed

    @property
    def database(self) -> Database:
        raise WiringError("this bus is in memory: it has no database")

    async def check(self) -> None:
        """The wiring was checked as it was declared."""

    async def start(self) -> None:
        pass

    async def start_storing(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def reserve(self, envelopes: Sequence[Envelope]) -> list[NodeId]:
        return [ANY_NODE] * len(envelopes)

    def committed(self, sent: Sequence[Sent]) -> None:
        self._when_committed([envelope for envelope, _, _ in sent])

    def abandoned(self, sent: Sequence[Sent]) -> None:
        pass
