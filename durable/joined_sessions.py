"""Sessions that join one transaction, so that all they do can be undone together: what a bus works on in a rehearsal.

engine's connection: BEGIN
    session of the handler          SAVEPOINT ... ROLLBACK TO
    session of a unit of work       SAVEPOINT ... RELEASE       its commit: what it sends is looked at, not stored
ROLLBACK
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from durable.bus import Bus
from durable.errors import WiringError
from durable.outbox import Outbox
from durable.runtime import Runtime
from durable.sessions import Sessions
from durable.storage.database import translated
from durable.storage.outbox import Key, Sent
from durable.unit_of_work import enlist

_OURS = "durable.rehearsal"
_OPTIONS: dict[str, Any] = {
    "join_transaction_mode": "create_savepoint",
    "expire_on_commit": False,
    "close_resets_only": False,
}


class _ObservedOutbox(Outbox):
    """Its messages are looked at instead of stored."""

    sent: list[Sent]

    def insert(self, connection: Connection | None, sent: Sequence[Sent]) -> set[Key]:
        self.sent += sent
        return set()


class JoinedSessions(Sessions):
    """Sessions that are all part of one transaction: their commits only end savepoints of it."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.settings, runtime.composer, runtime, runtime.sessions.scope)
        self.sent: list[Sent] = []
        self._runtime = runtime
        self._real = runtime.sessions
        self._schema = runtime.settings.db_schema
        self._connection: AsyncConnection | Connection | None = None

    @asynccontextmanager
    async def rolled_back(self, *, is_async: bool) -> AsyncIterator[None]:
        """The transaction. Raises StorageUnavailable."""
        self.sent = []
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
                connection_sync = self._real.engine_sync.connect()
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

    def open(self) -> AsyncSession:
        if not isinstance(self._connection, AsyncConnection):
            raise WiringError("a sync handler cannot open an AsyncSession in a rehearsal: it could not be undone")
        session = AsyncSession(self._connection, **_OPTIONS)
        session.sync_session.info[_OURS] = True
        return session

    def open_sync(self) -> Session:
        if not isinstance(self._connection, Connection):
            raise WiringError("an async handler cannot open a Session in a rehearsal: it could not be undone")
        session = Session(self._connection, **_OPTIONS)
        session.info[_OURS] = True
        return session

    def outbox(self, session: Session | AsyncSession) -> Outbox:
        sync_session = session.sync_session if isinstance(session, AsyncSession) else session
        if _OURS not in sync_session.info:
            raise WiringError("a rehearsal cannot undo what a session of the application's own commits")
        outbox = enlist(session, self._schema, self._composer, self._runtime, _ObservedOutbox)
        assert isinstance(outbox, _ObservedOutbox)
        outbox.sent = self.sent
        return outbox


class RehearsalRuntime(Runtime):
    """Has these sessions, and no node."""

    def __init__(self, bus: Bus, sessions: Sessions) -> None:
        super().__init__(bus.application, bus.settings, sessions.scope)
        self.sessions = sessions
