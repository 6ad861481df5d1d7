"""Sessions that join one transaction, so that all they do can be undone together: what a bus works on in a rehearsal.

engine's connection: BEGIN
    session of the handler          SAVEPOINT ... ROLLBACK TO
    session of a unit of work       SAVEPOINT ... RELEASE       its commit: what it sends is looked at, not stored
    bus.pause(), cancel() ...       SAVEPOINT ... RELEASE       done, and told
ROLLBACK
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from uuid import UUID
from weakref import WeakSet

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from durable.bus import Bus
from durable.envelope import Envelope
from durable.errors import WiringError
from durable.outbox.outbox import Outbox
from durable.outbox.sessions import Sessions
from durable.outbox.unit_of_work import enlist
from durable.requests.receipts import Receipt
from durable.requests.watch import Watch
from durable.runtime import Runtime
from durable.settings import Settings
from durable.storage import circuits, delayed, schedules
from durable.storage.database import Database
from durable.storage.outages import translated
from durable.storage.outbox import Key, Sent

P = ParamSpec("P")
T = TypeVar("T")

_OPTIONS: dict[str, Any] = {
    "join_transaction_mode": "create_savepoint",
    "expire_on_commit": False,
    "close_resets_only": False,
}

_TOLD: Final[Mapping[Callable[..., Any], str]] = {
    circuits.pause_at_least: "pause {0} {1}",
    delayed.cancel_message: "cancel message {0}",
    delayed.run_message_now: "run message {0} now",
    delayed.reschedule_message: "move message {0} to {at}",
    schedules.ask: "run schedule {0} now",
    schedules.reschedule: "move schedule {0} to {at}",
}
"""The description of each call of the bus by a handler."""

_TOLD_OF_EACH: Final[Mapping[Callable[..., Any], str]] = {
    circuits.pause_each: "pause {0} {1}",
    circuits.resume_each: "resume {0} {1}",
}
"""The description of calls for several targets, for each of them."""


class _ObservedOutbox(Outbox):
    """Outbox whose messages are listed instead of stored."""

    sent: list[Sent]

    def insert(self, connection: Connection | None, sent: Sequence[Sent]) -> set[Key]:
        self.sent += sent
        return set()


class JoinedSessions(Sessions):
    """Sessions that are all part of one transaction: their commits only end savepoints of it."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.settings, runtime.envelope_factory, runtime.dispatcher, runtime.sessions.scope)
        self.sent: list[Sent] = []
        self.done: list[str] = []
        """Other changes: by `bus.pause()`, `ctx.circuit.open()` and the like."""
        self._real = runtime.sessions
        self._schema = runtime.settings.db_schema
        self._connection: AsyncConnection | Connection | None = None
        self._opened = WeakSet[Session]()
        self._in_turn = asyncio.Lock()

    @asynccontextmanager
    async def rolled_back(self, *, is_async: bool) -> AsyncIterator[None]:
        """The transaction. Raises StorageUnavailable."""
        self.sent, self.done = [], []
        if is_async:
            with translated():
                connection = await self._real.engine.connect()
            async with aclosing(connection):
                outer = await connection.begin()
                with self._joining(connection):
                    yield
                await outer.rollback()
        else:
            with translated():
                connection_sync = self._real.sync_engine.connect()
            with connection_sync:
                outer_sync = connection_sync.begin()
                with self._joining(connection_sync):
                    yield
                outer_sync.rollback()

    @contextmanager
    def _joining(self, connection: AsyncConnection | Connection) -> Iterator[None]:
        self._connection = connection
        try:
            yield
        finally:
            self._connection = None

    def open(self, longest: timedelta | None = None) -> AsyncSession:
        if not isinstance(self._connection, AsyncConnection):
            raise WiringError("rehearsal: a sync handler cannot open an AsyncSession, which could not be undone")
        session = AsyncSession(self._connection, **_OPTIONS)
        self._opened.add(session.sync_session)
        return session

    def open_sync(self, longest: timedelta | None = None) -> Session:
        if not isinstance(self._connection, Connection):
            raise WiringError("rehearsal: an async handler cannot open a Session, which could not be undone")
        session = Session(self._connection, **_OPTIONS)
        self._opened.add(session)
        return session

    def outbox(self, session: Session | AsyncSession) -> Outbox:
        sync_session = session.sync_session if isinstance(session, AsyncSession) else session
        if sync_session not in self._opened:
            raise WiringError("rehearsal: cannot undo commits of a session that the bus has not opened")
        outbox = enlist(session, self._schema, self._envelope_factory, self._dispatcher, _ObservedOutbox)
        assert isinstance(outbox, _ObservedOutbox)
        outbox.sent = self.sent
        return outbox

    async def join(self, work: Callable[[Connection], T]) -> T:
        """Run a function in the transaction, in its own savepoint; raises WiringError where there is none."""
        match self._connection:
            case AsyncConnection() as connection:
                async with self._in_turn, connection.begin_nested():
                    return await connection.run_sync(work)
            case Connection() as connection_sync:
                with connection_sync.begin_nested():
                    return work(connection_sync)
            case None:
                raise WiringError("rehearsal: no handler runs now, so the change would not be undone")


class JoinedDatabase(Database):
    """Runs storage functions in the transaction of a rehearsal, and keeps what they did."""

    def __init__(self, settings: Settings, sessions: JoinedSessions) -> None:
        self.schema = settings.db_schema
        self._sessions = sessions

    async def transaction(
        self, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        with translated(self.schema):
            result = await self._sessions.join(lambda conn: work(conn, self.schema, *args, **kwargs))
        if work in _TOLD:
            self._sessions.done.append(_TOLD[work].format(*args, **kwargs))
        elif work in _TOLD_OF_EACH:
            named: Any = args[0]
            self._sessions.done += [_TOLD_OF_EACH[work].format(*each) for each in named]
        return result

    async def transaction_with_retry(
        self, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self.transaction(work, *args, **kwargs)


class _WatchInTurn(Watch):
    """Watch whose looks are over when a caller goes on: they work on the connection of the handler."""

    async def wait(self, message_id: UUID, patience: timedelta, *, at: str | None = None) -> Receipt:
        try:
            return await super().wait(message_id, patience, at=at)
        finally:
            await self.settle()

    async def answer(self, request_id: UUID, patience: timedelta, *, from_here: bool = False) -> Envelope:
        try:
            return await super().answer(request_id, patience, from_here=from_here)
        finally:
            await self.settle()


class RehearsalRuntime(Runtime):
    """Runtime of a rehearsal: these sessions, a database that is rolled back with them, and no node."""

    def __init__(self, bus: Bus, sessions: JoinedSessions) -> None:
        super().__init__(bus.application, bus.settings, sessions.scope)
        self.sessions = sessions
        self._joined = JoinedDatabase(bus.settings, sessions)
        self.watch = _WatchInTurn(lambda: self.database, bus.settings)

    @property
    def database(self) -> Database:
        return self._joined

    def claim(self) -> None:
        """Leave it to start() to refuse."""

    async def start(self) -> None:
        raise WiringError("rehearsal: a node would handle messages for good; use another bus")

    async def start_storing(self) -> None:
        raise WiringError("rehearsal: received messages would be stored for good; use another bus")

    async def stop(self) -> None:
        """Stop nothing: nothing was started."""
