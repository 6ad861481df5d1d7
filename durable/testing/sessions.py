"""The sessions of a bus in memory: the test's own, or ones that have no database.

A session without a database is SQLAlchemy's all the same: it begins, commits, rolls back and has savepoints, so the
outbox follows it as it follows any other. Only what needs a connection raises. What a session factory makes that is
no session, such as a Mock, stands in for the data of one: statements go to it, and commits reach both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, SessionTransaction

from durable.errors import WiringError
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.outbox.outbox import Dispatcher, Outbox
from durable.outbox.scope import Scope
from durable.outbox.sessions import Sessions
from durable.outbox.unit_of_work import enlist
from durable.settings import Settings
from durable.storage.outbox import Key, Sent

SessionFactory = Callable[[], Any]
S = TypeVar("S", Session, AsyncSession)

_OF_THE_STAND_IN: Final = {
    "add",
    "add_all",
    "connection",
    "delete",
    "execute",
    "get",
    "get_one",
    "merge",
    "query",
    "refresh",
    "scalar",
    "scalars",
    "stream",
    "stream_scalars",
}
_WHERE_IT_HAS_THEM: Final = {
    "bulk_insert_mappings",
    "bulk_save_objects",
    "bulk_update_mappings",
    "delete_all",
    "deleted",
    "dirty",
    "expire",
    "expire_all",
    "expunge",
    "flush",
    "is_modified",
    "merge_all",
    "new",
}


class MemoryOutbox(Outbox):
    """An outbox that writes no rows. `when_committed` is called once, by the commit that follows.

    Where the session has a connection, that one's COMMIT counts here too. Only a session that joined a transaction in
    the mode for tests that roll back ("create_savepoint") commits for itself: nothing else would ever be committed.
    """

    when_committed: Callable[[], None] | None = None

    def store(self) -> None:
        with own_flushes(self.session):
            super().store()

    def insert(self, connection: Connection | None, sent: Sequence[Sent]) -> set[Key]:
        return set()  # they are given to the dispatcher when the session has committed

    def _connect(self) -> Connection | None:
        return self._connection  # there may be no database

    def check_commit(self) -> None:
        """Raise WiringError while a handler runs: durable commits its session."""
        self._check_commit()

    def session_committed(self) -> None:
        super().session_committed()
        if self._is_joined and self.session.join_transaction_mode == "create_savepoint":
            self._hand_over(self._pending.take())
        if self.when_committed is not None:
            finish, self.when_committed = self.when_committed, None
            finish()

    def _commit_without_connection(self) -> None:
        self._check_commit()
        if root := self.session.get_transaction():
            self._store(None, [entry for entry in self._pending.since(root) if not entry.is_stored], owned=False)
            self._hand_over(self._pending.forget(root))

    def transaction_ended(self, transaction: SessionTransaction) -> None:
        super().transaction_ended(transaction)
        if transaction.parent is None:
            self.when_committed = None


class _NoDatabase(Session):
    def get_bind(self, *_: Any, **__: Any) -> Any:
        raise WiringError(
            "the session has no database: give InMemoryBus a session_factory=, such as an async_sessionmaker "
            "(sync_session_factory= for sync handlers)"
        )


class _StandsIn:
    """Session that passes its data operations, and all other attributes, on to a stand-in."""

    _stand_in: Any
    _check_commit: Callable[[], None]
    _is_own_flush = False

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_THE_STAND_IN:
            return getattr(object.__getattribute__(self, "_stand_in"), name)
        own = super().__getattribute__(name)
        if name in _WHERE_IT_HAS_THEM and not self._is_own_flush:
            return getattr(object.__getattribute__(self, "_stand_in"), name, own)
        return own

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stand_in, name)


@contextmanager
def own_flushes(session: Session) -> Iterator[None]:
    """Keep flushes that durable makes from a stand-in: a test counts those of the application."""
    if not isinstance(session, _StandsIn):
        yield
        return
    session._is_own_flush = True
    try:
        yield
    finally:
        session._is_own_flush = False


class _AsyncStandIn(_StandsIn, AsyncSession):
    def __init__(self, stand_in: Any) -> None:
        self._stand_in = stand_in
        super().__init__(sync_session_class=_NoDatabase)

    def in_transaction(self) -> bool:
        return True  # who knows what the stand-in was told

    async def commit(self) -> None:
        self._check_commit()  # what is refused must not reach the data
        await _finished(self._stand_in.commit())
        await super().commit()

    async def rollback(self) -> None:
        await _finished(self._stand_in.rollback())
        await super().rollback()

    async def close(self) -> None:
        await _finished(self._stand_in.close())
        await super().close()


class _SyncStandIn(_StandsIn, _NoDatabase):
    def __init__(self, stand_in: Any) -> None:
        self._stand_in = stand_in
        super().__init__()

    def commit(self) -> None:
        self._check_commit()
        self._stand_in.commit()
        super().commit()

    def rollback(self) -> None:
        self._stand_in.rollback()
        super().rollback()

    def close(self) -> None:
        self._stand_in.close()
        super().close()


class MemorySessions(Sessions):
    """Makes the sessions of units of work and handlers; their outboxes keep everything in memory."""

    def __init__(
        self,
        settings: Settings,
        envelope_factory: EnvelopeFactory,
        dispatcher: Dispatcher,
        scope: Scope,
        factory: SessionFactory | None,
        sync_factory: SessionFactory | None,
    ) -> None:
        super().__init__(settings, envelope_factory, dispatcher, scope)
        self._factory = factory
        self._sync_factory = sync_factory

    def open(self, longest: timedelta | None = None) -> AsyncSession:
        if self._factory is None:
            return AsyncSession(sync_session_class=_NoDatabase, close_resets_only=False)
        made = self._factory()
        if _is_a(Session, made):
            raise WiringError("session_factory makes sync sessions: give it to InMemoryBus as sync_session_factory=")
        return self._checked(made if _is_a(AsyncSession, made) else _AsyncStandIn(made))

    def open_sync(self, longest: timedelta | None = None) -> Session:
        if self._sync_factory is None:
            return _NoDatabase(close_resets_only=False)
        made = self._sync_factory()
        if _is_a(AsyncSession, made):
            raise WiringError("sync_session_factory makes async sessions: give it to InMemoryBus as session_factory=")
        return self._checked(made if _is_a(Session, made) else _SyncStandIn(made))

    def _checked(self, session: S) -> S:
        if isinstance(session, _StandsIn):
            session._check_commit = self.outbox(session).check_commit
        return session

    def outbox(self, session: Session | AsyncSession) -> MemoryOutbox:
        made = enlist(session, self._settings.db_schema, self._envelope_factory, self._dispatcher, MemoryOutbox)
        assert isinstance(made, MemoryOutbox)
        return made


def _is_a(cls: type, made: object) -> bool:
    """Tell whether a value is of a class by its true type: a Mock(spec=Session) claims to be a Session."""
    return issubclass(type(made), cls)


async def _finished(result: Any) -> None:
    """A stand-in's methods may be coroutine functions, or not."""
    if inspect.isawaitable(result):
        await result
