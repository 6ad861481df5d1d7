"""The application's sessions: opened for each unit of work and each attempt, each with its outbox."""

from __future__ import annotations

from functools import cached_property

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from durable.composing import Composer
from durable.settings import Settings
from durable.storage.database import async_url, sync_engine
from durable.unit_of_work import Dispatcher, Outbox, Scope, enlist


class Sessions:
    """Makes sessions over the application's database. Engines are made when first used."""

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

    @cached_property
    def engine(self) -> AsyncEngine:
        given = self._given[0]
        return given or create_async_engine(
            async_url(self._settings), pool_size=self._settings.pool_size, max_overflow=0, pool_pre_ping=False
        )

    @cached_property
    def engine_sync(self) -> Engine:
        return self._given[1] or sync_engine(self._settings, pool_size=self._settings.pool_size, max_overflow=0)

    def open(self) -> AsyncSession:
        return AsyncSession(self.engine, expire_on_commit=False)

    def open_sync(self) -> Session:
        return Session(self.engine_sync, expire_on_commit=False)

    def outbox(self, session: Session | AsyncSession) -> Outbox:
        """The outbox of this session, made when it is first asked for."""
        return enlist(session, self._settings.db_schema, self._composer, self._dispatcher)

    async def close(self) -> None:
        """Close the engines that were made here; those that were given belong to the application."""
        if "engine" in self.__dict__ and self._given[0] is None:
            await self.engine.dispose()
        if "engine_sync" in self.__dict__ and self._given[1] is None:
            self.engine_sync.dispose()
