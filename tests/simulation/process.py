"""A process of a service: one node after another, by the real Runtime and Life, until it is killed or stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from durable.bus import Bus
from durable.errors import StorageUnavailable
from durable.process.starting import once_it_answers
from durable.runtime import Runtime
from durable.settings import Settings
from tests.simulation.database import SimulatedDatabase
from tests.simulation.loop import CURRENT, Scheduled, State
from tests.simulation.server import Connection, Server

if TYPE_CHECKING:
    from tests.simulation.membership import SimulatedMembership
    from tests.simulation.world import World

IDLE_SECONDS: Final = 5.0  # after which the server ends a transaction of an agent that says nothing
IDLE_SESSION_SECONDS: Final = 10.0  # the same of a handler or a unit of work: its timeout, and 5 s


class SimulatedClock:
    """The clocks of one process: its wall clock may be off."""

    def __init__(self, server: Server, offset: timedelta) -> None:
        self._server = server
        self._offset = offset

    def now(self) -> datetime:
        return self._server.now() + self._offset

    def monotonic(self) -> float:
        return self._server.loop.time()


class _NoWatchdog:
    """The watchdog is a thread, and watches a loop that stands: not part of the simulation."""

    is_bound = False

    def watch(self) -> None: ...
    def hear(self) -> None: ...
    def bind(self, seconds: float, reason: str) -> None: ...
    def end(self) -> None: ...


class Process(Scheduled):
    """A process in its slot; the next one in the slot is another."""

    def __init__(self, world: World, service: str, slot: int, offset: timedelta) -> None:
        super().__init__()
        self.world = world
        self.service = service
        self.slot = slot
        self.server: Server = world.servers[service]
        self.settings: Settings = world.settings
        self.offset = offset
        self.outside: Context = world.outside
        self.context = Context()
        self.context.run(CURRENT.set, self)
        self.place = "boot"
        self.membership: SimulatedMembership | None = None
        self.is_ready = False
        self.is_stopping = False
        self.bus: Bus
        self.runtime: Runtime

    def __str__(self) -> str:
        return f"{self.service}{self.slot}"

    def at(self, place: str) -> None:
        """Note what it does; faults are told of with their place."""
        self.place = place
        self.world.note(f"{self} {place}")

    async def connect(self) -> Connection:
        return await self.server.connect(self)

    # ------------------------------------------------------------------ its life

    def boot(self) -> None:
        self.world.loop.start(self._main(), self.context.copy(), f"process {self}")

    async def _main(self) -> None:
        self.bus = self.world.workload.make_bus(self)
        clock = SimulatedClock(self.server, self.offset)
        runtime = Runtime(self.bus.application, self.settings, self.bus._scope, clock=clock, engine=self.world.engine)
        self.bus.runtime = self.runtime = runtime
        runtime._database = SimulatedDatabase(self.settings, self.connect)
        runtime.life._watchdog = _NoWatchdog()  # type: ignore[assignment]
        runtime.check_wiring()
        runtime._waker.start(runtime.database)
        try:
            await once_it_answers(runtime.life.start, within=self.settings.start_timeout)
            self.is_ready = True
            await runtime.life.ended()
        except StorageUnavailable:
            pass  # its database was away for too long: it ends, and is started again
        except Exception as error:
            self.world.violation(f"process {self} ended by itself: {error!r}")
        if not self.is_stopping:
            self.world.gone(self)

    async def stop(self) -> None:
        """Stop in good order, and look at what is left."""
        self.is_stopping, self.is_ready = True, False
        node, outages = self.runtime.node_id, self.world.outages  # no node: what its former one had is left to others
        member, is_calm = self.membership, not self.world.is_troubled
        await self.runtime.life.stop()
        await self.runtime._waker.stop()
        is_lost = member is not None and member.lost.is_set()  # while it stopped: its rows are left to others, too
        is_calm = is_calm and not self.world.is_troubled and outages == self.world.outages and self.server.is_up
        if node and is_calm and not is_lost:
            self.world.checks.left(self, node)
        self.world.gone(self)

    # ------------------------------------------------------------------ faults

    def kill(self, noticed_after: float) -> None:
        """End it at once. The server notices after this time, and frees its locks then."""
        self.state, self.is_ready = State.DEAD, False
        self.kept = []
        self.server.drop(self, noticed_after)
        if (member := self.membership) is not None:
            self.server.loop.call_later(noticed_after, member.dropped, context=self.outside)

    def freeze(self, seconds: float, *, loses_lock: bool) -> None:
        """Stop it for a time, in which its transactions, and perhaps its lock, are lost."""
        if self.state is not State.RUNNING:
            return
        self.state = State.FROZEN
        loop = self.server.loop
        loop.call_later(seconds, self._thaw, context=self.outside)
        for connection in list(self.server.connections.values()):
            if connection.process is self:
                idle = IDLE_SESSION_SECONDS if connection.is_session else IDLE_SECONDS
                loop.call_later(idle, self._end_if_idle, connection, context=self.outside)
        if loses_lock and (member := self.membership) is not None:
            loop.call_later(seconds / 2, member.dropped, context=self.outside)

    def _end_if_idle(self, connection: Connection) -> None:
        if self.state is State.FROZEN and not connection.is_committing:
            connection.kill()

    def _thaw(self) -> None:
        if self.state is State.FROZEN:
            self.world.loop.resume(self)

    def call(self, callback: Callable[..., object], *args: Any, delay: float = 0.0) -> None:
        """Call a function in this process."""
        self.server.loop.call_later(delay, callback, *args, context=self.context)


def current() -> Process:
    """The process in whose context this runs."""
    process = CURRENT.get()
    assert isinstance(process, Process)
    return process


async def bounded(task: asyncio.Task[Any], process: Process, seconds: float) -> None:
    """Wait for a task of a process, which may die meanwhile."""
    loop = process.server.loop
    deadline = loop.time() + seconds
    while not task.done() and loop.time() < deadline and process.state is not State.DEAD:  # noqa: ASYNC110  it may die
        await asyncio.sleep(0.05)
