"""The application's sessions: opened for each unit of work and each attempt, each with its outbox."""

from __future__ import annotations

import threading

from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from durable.composing import Composer
from durable.outbox import Dispatcher, Outbox
from durable.settings import Settings
from durable.statistics import PoolStatistics
from durable.storage.database import (
    AGENTS_LONGEST_IDLE,
    async_url,
    close_left_behind,
    end_idle_transactions,
    pool_statistics,
    sync_url,
)
from durable.unit_of_work import Scope, enlist


class Sessions:
    """Makes sessions over the application's database. Engines are made when first used.

    A session that was closed cannot be used again: nobody would close, or commit, what it does then.
    """

    def __init__(
        self,
        settings: Settings,
        composer: Composer,
        dispatcher: Dispatcher,
        scope: Scope,
        *,
        engine: AsyncEngine | None = None,
        engine_sync: Engine | None = None,
    ) -> None:
        self.scope = scope
        self._settings = settings
        self._composer = composer
        self._dispatcher = dispatcher
        self._given = engine, engine_sync
        self._made: AsyncEngine | None = None
        self._made_sync: Engine | None = None
        self._making = threading.Lock()  # sync handlers and endpoints ask for it from several threads at once

    def _prepare(self, engine: Engine) -> None:
        """A handler may do other things within its transaction for as long as it may run."""
        end_idle_transactions(engine, self._settings.handler_timeout + AGENTS_LONGEST_IDLE)
        close_left_behind(engine)

    @property
    def engine(self) -> AsyncEngine:
        if self._given[0] is not None:
            return self._given[0]
        with self._making:
            if self._made is None:
                url, size = async_url(self._settings), self._settings.pool_size
                self._made = create_async_engine(url, pool_size=size, max_overflow=0)
                self._prepare(self._made.sync_engine)
            return self._made

    @property
    def engine_sync(self) -> Engine:
        if self._given[1] is not None:
            return self._given[1]
        with self._making:
            if self._made_sync is None:
                url, size = sync_url(self._settings), self._settings.pool_size
                self._made_sync = create_engine(url, pool_size=size, max_overflow=0)
                self._prepare(self._made_sync)
            return self._made_sync

    def open(self) -> AsyncSession:
        return AsyncSession(self.engine, expire_on_commit=False, close_resets_only=False)

    def open_sync(self) -> Session:
        return Session(self.engine_sync, expire_on_commit=False, close_resets_only=False)

    def outbox(self, session: Session | AsyncSession) -> Outbox:
        """The outbox of this session, made when it is first asked for."""
        return enlist(session, self._settings.db_schema, self._composer, self._dispatcher)

    def pools(self) -> dict[str, PoolStatistics]:
        """Of the engines that there are: one that was not used yet has none."""
        engines = {"async": self._given[0] or self._made, "sync": self._given[1] or self._made_sync}
        return {name: pool_statistics(engine) for name, engine in engines.items() if engine is not None}

    async def close(self) -> None:
        """Close the engines that were made here; those that were given belong to the application."""
        if self._made is not None:
            await self._made.dispose()
        if self._made_sync is not None:
            self._made_sync.dispose()
