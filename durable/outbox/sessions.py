"""The application's sessions: opened for each unit of work and each attempt, each with its outbox."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from durable.errors import WiringError
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.outbox.outbox import Dispatcher, Outbox
from durable.outbox.scope import Scope
from durable.outbox.unit_of_work import enlist
from durable.settings import Settings
from durable.statistics import PoolStatistics
from durable.storage import loops
from durable.storage.connection_names import ConnectionName, of_service
from durable.storage.database import async_url, pool_statistics, sync_url
from durable.storage.engines import LONGEST, Limits, is_in_autocommit, make_async_engine, make_engine
from durable.storage.left_in_use import watch
from durable.storage.sharing import refuse_shared, renew_in_children

_AUTOCOMMIT: Final = (
    "Bus({name}=...) is in AUTOCOMMIT: a handler's effects would stay when it fails, and be there twice after the next "
    "attempt; give it an engine with another isolation_level"
)


class Sessions:
    """Makes sessions over the application's database. Engines are made when first used.

    A session that was closed cannot be used again: nobody would close, or commit, what it does then.
    """

    def __init__(
        self,
        settings: Settings,
        envelope_factory: EnvelopeFactory,
        dispatcher: Dispatcher,
        scope: Scope,
        *,
        engine: AsyncEngine | None = None,
        sync_engine: Engine | None = None,
    ) -> None:
        self.scope = scope
        self._settings = settings
        self._envelope_factory = envelope_factory
        self._dispatcher = dispatcher
        self.given = engine
        self.given_sync = sync_engine
        if engine is not None:
            loops.guard(engine)
        if sync_engine is not None:
            renew_in_children(sync_engine)
            watch(sync_engine)
        self._longest = max(settings.handler_timeout, settings.unit_of_work_timeout)
        self._limits = Limits.of(self._longest)
        self._pool: dict[str, Any] = {
            "pool_size": settings.pool_size,
            "max_overflow": 0,
            "pool_use_lifo": True,
            "pool_timeout": settings.pool_timeout.total_seconds(),
        }
        self._made: AsyncEngine | None = None
        self._made_sync: Engine | None = None
        self._making = threading.Lock()  # sync handlers and endpoints ask for it from several threads at once

    def check(self) -> None:
        """Raise WiringError for an engine without transactions, or whose pool shares its connections: handlers need
        transactions of their own.
        """
        given = {"engine": None if self.given is None else self.given.sync_engine, "sync_engine": self.given_sync}
        for name, engine in given.items():
            if engine is None:
                continue
            refuse_shared(engine.pool)
            if is_in_autocommit(engine):
                raise WiringError(_AUTOCOMMIT.format(name=name))

    @property
    def engine_in_use(self) -> AsyncEngine | None:
        """The async engine; None for one that was not made yet."""
        return self.given or self._made

    @property
    def engine(self) -> AsyncEngine:
        if self.given is not None:
            return self.given
        with self._making:
            if self._made is None:
                url, name = async_url(self._settings), self._name("async")
                self._made = make_async_engine(url, self._settings, self._limits, name=name, **self._pool)
            return self._made

    @property
    def sync_engine(self) -> Engine:
        if self.given_sync is not None:
            return self.given_sync
        with self._making:
            if self._made_sync is None:
                url, name = sync_url(self._settings), self._name("sync")
                self._made_sync = make_engine(url, self._settings, self._limits, name=name, **self._pool)
            return self._made_sync

    def _name(self, pool: str) -> ConnectionName:
        return of_service(self._envelope_factory.service, pool)

    def open(self, longest: timedelta | None = None) -> AsyncSession:
        """A session whose transactions may do other things for so long, and whose statements may run for so long.

        Without a time, as `handler_timeout` and `unit_of_work_timeout` say. The engines that were given keep limits of
        their own. Raises WiringError in an event loop other than that in which sessions were opened first.
        """
        engine = self.engine
        loops.enter(engine)
        if self._is_longer(longest) and self.given is None:
            engine = engine.execution_options(**{LONGEST: longest})
        return AsyncSession(engine, expire_on_commit=False, close_resets_only=False)

    def open_sync(self, longest: timedelta | None = None) -> Session:
        """Open a Session; `longest` as in open()."""
        engine = self.sync_engine
        if self._is_longer(longest) and self.given_sync is None:
            engine = engine.execution_options(**{LONGEST: longest})
        return Session(engine, expire_on_commit=False, close_resets_only=False)

    def _is_longer(self, longest: timedelta | None) -> bool:
        """Only then are limits set for a transaction, which costs it a statement."""
        return longest is not None and longest > self._longest

    def outbox(self, session: Session | AsyncSession) -> Outbox:
        """The outbox of this session, made when it is first asked for."""
        return enlist(session, self._settings.db_schema, self._envelope_factory, self._dispatcher)

    def pools(self) -> dict[str, PoolStatistics]:
        """Return the pool statistics of the engines in use; an engine that was not used yet has none."""
        engines = {"async": self.engine_in_use, "sync": self.given_sync or self._made_sync}
        return {name: pool_statistics(engine) for name, engine in engines.items() if engine is not None}

    async def close(self) -> None:
        """Close the engines that were made here; those that were given belong to the application."""
        if self._made_sync is not None:
            self._made_sync.dispose()
        if self._made is not None:
            await loops.close(self._made)
